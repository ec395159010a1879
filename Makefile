# Two commands do everything: `make demo` and `make test`. Both install what they need, as root, on Debian 12+ or Ubuntu 24.04+.
SHELL := /bin/bash
PYTHON ?= /usr/bin/python3
VENV := build/venv
BIN := $(VENV)/bin
C_SOURCES := $(wildcard csrc/*.c csrc/*.h)
C_CORE := toc plan cache evict digests read seen miss session stats super objects tree erofs fuse xattr mount publish weefs
WARNINGS := -std=gnu11 -O2 -Wall -Wextra -Werror
FUZZ_SECONDS ?= 600

.PHONY: setup demo test test-asan test-tsan lint fuzz docs clean
.DELETE_ON_ERROR:

setup: build/.built

build/.system: tools/bootstrap.sh
	@mkdir -p build
	tools/bootstrap.sh
	@touch $@

build/.venv: build/.system pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip 'setuptools>=77' 'cffi>=1.16'
	$(BIN)/pip install --quiet --no-build-isolation --editable '.[dev]'
	@touch $@

build/.built: build/.venv setup.py weefs/core_build.py $(C_SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

demo: setup
	$(BIN)/python -m tools.demo $(DEMO_ARGS)

test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The filesystem suite on a C core built with AddressSanitizer and UBSan, or ThreadSanitizer; a report fails it. Of another part:
# SANITIZED="tests/test_weefs_removal.py -x".
test-asan: setup
	tools/sanitize.sh asan $(SANITIZED)

test-tsan: setup
	tools/sanitize.sh tsan $(SANITIZED)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	@mkdir -p build/lint
	for name in $(C_CORE); do cc $(WARNINGS) -D_GNU_SOURCE -fanalyzer -c csrc/$$name.c -o build/lint/$$name.o || exit 1; done
	cc $(WARNINGS) -static -fanalyzer -o build/lint/init csrc/init.c
	shellcheck tools/*.sh .ci/run

# The C validator, then the request loop, under ASan and UBSan, each for FUZZ_SECONDS. The corpora are kept; a crash stops it with status 1.
FUZZ := clang -g -O1 -std=gnu11 -D_GNU_SOURCE -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -Ibuild/fuzz
FUZZ_ARGS := -max_total_time=$(FUZZ_SECONDS) -timeout=10 -print_final_stats=1 -artifact_prefix=build/fuzz/

build/fuzz/built: build/.built $(C_SOURCES) tools/fuzz_corpus.py
	$(BIN)/python -m tools.fuzz_corpus build/fuzz
	$(FUZZ) -o build/fuzz/fuzz_toc csrc/fuzz_toc.c $(addprefix csrc/,toc.c plan.c super.c session.c miss.c objects.c tree.c erofs.c)
	$(FUZZ) -o build/fuzz/fuzz_fuse csrc/fuzz_fuse.c $(C_CORE:%=csrc/%.c) -lzstd -lcrypto -lpthread
	@touch $@

fuzz: setup build/fuzz/built
	build/fuzz/fuzz_toc $(FUZZ_ARGS) -max_len=65536 build/fuzz/toc
	build/fuzz/fuzz_fuse $(FUZZ_ARGS) -max_len=4096 build/fuzz/fuse

# What is generated: docs/api.md, docs/errors.md and docs/metrics.md from the types, and what is shipped for monitoring.
docs: setup
	$(BIN)/python -m tools.apidoc > docs/api.md
	$(BIN)/python -m tools.apidoc errors > docs/errors.md
	$(BIN)/python -m tools.apidoc metrics > docs/metrics.md
	$(BIN)/python -m tools.dashboard grafana > deploy/grafana/weenv-node.json
	$(BIN)/python -m tools.dashboard alerts > deploy/prometheus/weenv.rules.yml

clean:
	rm -rf build *.egg-info weefs/_core*.so weefs/_core.c envlet/weenv-init
