"""`python -m bench.erofs`: what an image of metadata costs to make: seconds and bytes for a layer and for a whole plan, beside mkfs.erofs.

The tree is made here: directories of 50 files, one in ten with an attribute, one in twenty a symlink. mkfs.erofs is given the same tree
with empty files, because it would write contents and not what we write instead of them.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.measure import run
from layerformat import Data, Entry, Kind, decode_footer, encode, restore_toc
from tools.output import duration, print_table, size
from weefs import core
from weefs.cachedir import opened

FILES_PER_DIRECTORY = 50
MTIME_NS = 1_700_000_000_000_000_000


def entries(count: int) -> Iterator[tuple[Entry, Data]]:
    """About `count` entries, of them all files small."""
    made = 0
    for number in range(count):
        if made >= count:
            return
        folder = b"usr/lib/package%d/module%d" % (number // 20, number)
        yield Entry(path=folder, kind=Kind.DIRECTORY, mode=0o755, mtime_ns=MTIME_NS), io.BytesIO()
        for index in range(FILES_PER_DIRECTORY):
            path = folder + b"/some_source_file_%d.py" % index
            if index % 20 == 0:
                yield Entry(path=path, kind=Kind.SYMLINK, mode=0o777, target=b"../other/some_source_file.py"), io.BytesIO()
                continue
            xattrs = {b"user.comment": b"checked"} if index % 10 == 1 else {}
            yield Entry(path=path, kind=Kind.REGULAR, mode=0o644, size=8, mtime_ns=MTIME_NS, xattrs=xattrs), io.BytesIO(b"contents")
        made += FILES_PER_DIRECTORY + 1


def timed(runs: int, write: Callable[[int], core.ImageInfo], path: Path) -> tuple[float, core.ImageInfo]:
    """The median of the wall times, seconds."""
    walls = []
    for _ in range(runs):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        begin = time.perf_counter()
        info = write(fd)
        walls.append(time.perf_counter() - begin)
        os.close(fd)
    return statistics.median(walls), info


def whole_plan(toc: bytes, name: str, scratch: Path, runs: int) -> tuple[float, core.ImageInfo]:
    filesystem = core.Core()
    (scratch / "toc").write_bytes(toc)
    with opened(scratch) as files:
        slot, _info = filesystem.add_plan("plan", [filesystem.add_layer(files, name=name)])
    result = timed(runs, lambda fd: filesystem.write_plan_image(slot, name, fd), scratch / "plan.erofs")
    filesystem.close()
    return result


def mkfs(count: int, scratch: Path, runs: int) -> tuple[float, int]:
    tree, image = scratch / "tree", scratch / "mkfs.erofs"
    for entry, _data in entries(count):
        path = tree / os.fsdecode(entry.path)
        if entry.kind is Kind.DIRECTORY:
            path.mkdir(parents=True)
        elif entry.kind is Kind.SYMLINK:
            path.symlink_to(os.fsdecode(entry.target))
        else:
            path.touch()
            for key, value in entry.xattrs.items():
                os.setxattr(path, key, value)
    return statistics.median(run(["mkfs.erofs", "-Enoinline_data", image, tree]).wall_s for _ in range(runs)), image.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    blob = io.BytesIO()
    encode(entries(arguments.entries), blob)
    data = blob.getvalue()
    footer = decode_footer(data[-80:], blob_size=len(data))
    toc = restore_toc(data[footer.toc_offset : footer.toc_offset + footer.toc_stored_size], footer.toc_raw_size)
    name = hashlib.sha256(toc).hexdigest()[:32]
    scratch = Path(tempfile.mkdtemp(prefix="weenv-bench-"))
    try:
        layer_s, info = timed(arguments.runs, lambda fd: core.write_layer_image(toc, name, fd), scratch / "layer.erofs")
        plan_s, plan = whole_plan(toc, name, scratch, arguments.runs)
        mkfs_s, mkfs_bytes = mkfs(arguments.entries, scratch, arguments.runs)
        rows = [
            (what, duration(wall_s), size(total), f"{total / info.names:.0f}")
            for what, wall_s, total in (
                ("layer", layer_s, info.size),
                ("whole plan", plan_s, plan.size),
                ("mkfs.erofs, files empty", mkfs_s, mkfs_bytes),
                ("(the TOC itself)", 0.0, len(toc)),
            )
        ]
        print(f"{info.names} names, {info.inodes} inodes, median of {arguments.runs}\n")
        print_table(("IMAGE", "MEDIAN", "SIZE", "BYTES/ENTRY"), rows)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
