# Two commands do everything: `make demo` and `make test`. Both install what they need, as root, on Debian 12+ or Ubuntu 24.04+.
SHELL := /bin/bash
PYTHON ?= /usr/bin/python3
VENV := build/venv
BIN := $(VENV)/bin
C_SOURCES := $(wildcard csrc/*.c csrc/*.h)
C_CORE := toc plan cache read miss session stats super objects tree erofs fuse mount weefs
WARNINGS := -std=gnu11 -O2 -Wall -Wextra -Werror
FUZZ_SECONDS ?= 600

.PHONY: setup demo test lint fuzz docs clean
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

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	@mkdir -p build/lint
	for name in $(C_CORE); do cc $(WARNINGS) -D_GNU_SOURCE -fanalyzer -c csrc/$$name.c -o build/lint/$$name.o || exit 1; done
	cc $(WARNINGS) -static -fanalyzer -o build/lint/init csrc/init.c
	shellcheck tools/*.sh .ci/run

# The C validator under ASan and UBSan; the corpus is kept, crashes stop it with status 1.
fuzz: setup
	$(BIN)/python -m tools.fuzz_corpus build/fuzz/corpus
	clang -g -O1 -std=gnu11 -D_GNU_SOURCE -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -o build/fuzz/fuzz_toc \
		csrc/fuzz_toc.c csrc/toc.c csrc/plan.c csrc/super.c csrc/objects.c csrc/tree.c csrc/erofs.c
	build/fuzz/fuzz_toc -max_total_time=$(FUZZ_SECONDS) -max_len=65536 -timeout=10 -print_final_stats=1 \
		-artifact_prefix=build/fuzz/ build/fuzz/corpus

# What is generated from the types: docs/api.md, docs/errors.md and docs/metrics.md.
docs: setup
	$(BIN)/python -m tools.apidoc > docs/api.md
	$(BIN)/python -m tools.apidoc errors > docs/errors.md
	$(BIN)/python -m tools.apidoc metrics > docs/metrics.md

clean:
	rm -rf build *.egg-info weefs/_core*.so weefs/_core.c envlet/weenv-init
