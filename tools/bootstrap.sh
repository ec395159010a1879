#!/bin/bash
# Installs the system packages that building, testing and the demo need. Does nothing when they are there.
set -euo pipefail

packages=(
    gcc libc6-dev make pkg-config python3 python3-dev python3-venv libzstd-dev libssl-dev libfuse3-dev
    crun runc git mmdebstrap                                     # the demo
    umoci skopeo docker-registry apache2-utils attr tar zstd gzip strace busybox-static erofs-utils   # the tests
    etcd-server openssl iproute2                                 # the tests of peers
    clang shellcheck                                             # lint and fuzzing
)
# The cgroup version 2 tests boot a machine of this architecture; they say so where there is none.
[ "$(dpkg --print-architecture)" = amd64 ] && packages+=(qemu-system-x86)
# The fuzzer's runtime is a package of its own, named after clang's version.
runtime=$(apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-\([0-9]*\)$/libclang-rt-\1-dev/p' | head -n 1)
[ -n "$runtime" ] && packages+=("$runtime")

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then exit 0; fi
if [ "$(id -u)" -ne 0 ]; then
    echo "bootstrap: missing packages: ${missing[*]}; run this as root, or install them" >&2
    exit 1
fi
echo "bootstrap: installing ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# libclang-rt is only known after the first update.
runtime=$(apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-\([0-9]*\)$/libclang-rt-\1-dev/p' | head -n 1)
[ -n "$runtime" ] && missing+=("$runtime")
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
