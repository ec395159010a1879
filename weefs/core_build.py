"""Builds `weefs._core`, the cffi extension around the C core; declared by the marked region of csrc/weefs.h."""

import re
from pathlib import Path

from cffi import FFI

CSRC = Path(__file__).resolve().parent.parent / "csrc"
SOURCES = (
    "toc.c", "plan.c", "cache.c", "evict.c", "digests.c", "read.c", "seen.c", "miss.c", "session.c", "stats.c", "super.c", "objects.c",
    "tree.c", "erofs.c", "fuse.c", "xattr.c", "mount.c", "publish.c", "weefs.c",
)  # fmt: skip
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]


def declarations() -> str:
    """The text between the `cdef` marks of the public header, without comments and defines."""
    header = (CSRC / "weefs.h").read_text()
    region = header.split("/* cdef begin */", 1)[1].split("/* cdef end */", 1)[0]
    region = re.sub(r"/\*.*?\*/", "", region, flags=re.DOTALL)
    return re.sub(r"^#define.*$", "", region, flags=re.MULTILINE)


ffi = FFI()
ffi.cdef(declarations())
# setuptools wants sources relative to setup.py, which is where it runs.
ffi.set_source(
    "weefs._core",
    '#include "weefs.h"',
    sources=[f"csrc/{name}" for name in SOURCES],
    include_dirs=["csrc"],
    depends=["weefs/core_build.py", *(f"csrc/{path.name}" for path in CSRC.glob("*.h"))],
    extra_compile_args=FLAGS,
    libraries=["zstd", "crypto", "pthread"],
)
