#!/bin/bash
# Runs the filesystem suite on a C core built with a sanitizer: `tools/sanitize.sh asan|tsan [arguments of pytest]`. Status 0: all tests
# passed and nothing was reported, by any process. The product is left alone: sources are copied to build/<kind>/tree and built there.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:?expected asan or tsan}
shift
case $kind in
asan) flags=("-fsanitize=address,undefined" -fno-sanitize-recover=undefined -fno-omit-frame-pointer) runtime=libasan.so ;;
tsan) flags=(-fsanitize=thread -fno-omit-frame-pointer) runtime=libtsan.so ;;
*) echo "sanitize.sh: expected asan or tsan, received '$kind'" >&2; exit 2 ;;
esac
[ $# -gt 0 ] || set -- tests/test_weefs_*.py tests/test_cache_room.py tests/test_peers.py tests/test_peer_outages.py \
    tests/test_fill.py tests/test_profiles.py tests/test_warming.py \
    tests/test_node_recovery.py tests/test_node_metrics.py tests/test_envlet_views.py tests/test_envlet_dataplane.py

root=$PWD/build/$kind
tree=$root/tree
reports=$root/reports
rm -rf "$root"
mkdir -p "$tree/build" "$root/bin" "$reports"
cp -r csrc weefs envlet registry layerformat tools tests bench docs setup.py pyproject.toml README.md "$tree"
find "$tree" \( -name '*.so' -o -name '_core.c' -o -name __pycache__ \) -prune -exec rm -rf {} +
python=$PWD/build/venv/bin/python
runtime=$(gcc -print-file-name=$runtime)

(cd "$tree" && CC=gcc CFLAGS="-g -O1 ${flags[*]}" LDFLAGS="${flags[*]}" "$python" setup.py --quiet build_ext --inplace)

# A data plane ends without waiting for its FUSE threads, on purpose: no leak.
# And it dies of a file that is cut off under its mapping, which a test waits for: SIGBUS is the kernel's to report.
# All Python processes of the suite, and nothing that they start, have the runtime: see tools/sanitizer/sitecustomize.py.
export SANITIZED_PYTHON=$root/bin/python
cat >"$SANITIZED_PYTHON" <<END
#!/bin/sh
export LD_PRELOAD=$runtime PYTHONPATH=$tree:$tree/tools/sanitizer
export ASAN_OPTIONS=detect_leaks=0:handle_sigbus=0:allocator_may_return_null=1:quarantine_size_mb=16:log_path=$reports/asan
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1:log_path=$reports/ubsan
export TSAN_OPTIONS=ignore_noninstrumented_modules=1:die_after_fork=0:report_thread_leaks=0:second_deadlock_stack=1:history_size=4:log_path=$reports/tsan
exec setarch -R $python "\$@"
END
printf '#!/bin/sh\nexec %s -c "import sys; from tools.cli import main; sys.exit(main())" "$@"\n' "$SANITIZED_PYTHON" >"$root/bin/weenv"
chmod 755 "$root/bin/python" "$root/bin/weenv"

# The check of the check: a defect that is there must be reported.
gcc -g -O0 "${flags[@]}" -shared -fPIC -pthread -o "$root/defect.so" tools/sanitizer/defect.c
(cd "$tree" && "$SANITIZED_PYTHON" -c "import ctypes; ctypes.CDLL('$root/defect.so').defect()") >/dev/null 2>&1 || true
if [ -z "$(find "$reports" -type f -size +0)" ]; then
    echo "sanitize.sh: a defect made on purpose was not reported: this build finds nothing" >&2
    exit 1
fi
find "$reports" -type f -delete

status=0
(cd "$tree" && "$SANITIZED_PYTHON" -m pytest -q -p no:cacheprovider -o timeout=1200 "$@") || status=$?
found=$(find "$reports" -type f -size +0)
if [ -n "$found" ]; then
    for report in $found; do
        echo "--- $report"
        head -n 60 "$report"
    done
fi
count=$(printf '%s' "$found" | grep -c . || true)
echo "$kind: pytest ended with status $status; processes that reported something: $count"
[ "$status" -eq 0 ] && [ "$count" -eq 0 ]
