"""`python -m bench.equal [ROOT]`: a large root, mounted lazily from a registry, equals its source: every entry and byte."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.lazy import lazy_mount, registry
from bench.measure import WEENV
from bench.real_root import make_real_root
from tools.demo import groups
from tools.output import size


def entries(root: Path) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Every path below `root` with all that stat(2), readlink(2), listxattr(2) and read(2) say of it."""
    names: dict[tuple[int, int], str] = {}
    pending = [""]
    while pending:
        path = pending.pop()
        full = f"{root}/{path}"
        status = os.lstat(full)
        kind = stat.S_IFMT(status.st_mode)
        content: object = None
        if kind == stat.S_IFDIR:
            pending += sorted((f"{path}/{name}" if path else name for name in os.listdir(full)), reverse=True)
        elif kind == stat.S_IFREG:
            with open(full, "rb") as file:
                content = (status.st_size, hashlib.file_digest(file, "sha256").digest())
        elif kind == stat.S_IFLNK:
            content = os.readlink(full)
        first = names.setdefault((status.st_dev, status.st_ino), path) if kind != stat.S_IFDIR else path
        listed = sorted(os.listxattr(full, follow_symlinks=False))
        xattrs = tuple((name, os.getxattr(full, name, follow_symlinks=False)) for name in listed)
        attributes = (status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_nlink, status.st_rdev)
        yield path, (attributes, first, content, xattrs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, nargs="?", default=Path("build/bench/root"))
    root = groups.made_once(parser.parse_args().root.absolute(), make_real_root)
    scratch = Path(tempfile.mkdtemp(prefix="weenv-bench-", dir=root.parent))
    try:
        (scratch / "registry").mkdir()
        with registry(scratch / "registry") as host:
            push = [WEENV, "group", "push", f"{host}/bench/root:1", "--rootfs", root]
            reference = subprocess.run(push, check=True, capture_output=True, text=True).stdout.strip()
            expected = dict(entries(root))
            begin = time.perf_counter()
            with lazy_mount(reference, scratch) as (mounted, _times, output):
                shown = dict(entries(mounted))
            seconds = time.perf_counter() - begin
        different = sorted(path for path in expected.keys() | shown.keys() if expected.get(path) != shown.get(path))
        (layer,) = json.loads(output[0])["layers"].values()
        print(f"{len(expected)} entries, {size(layer['content_bytes'])} of files, {size(layer['bytes'])} fetched, {seconds:.1f} s")
        print(f"different: {len(different)} {different[:10]}")
        if different:
            raise SystemExit(1)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
