"""`python -m bench.hostile`: what the largest and the meanest archives cost `weenv layer convert`: wall time, peak memory, bytes per entry.

The archives are written to a directory that is removed afterwards; every layer is looked at before its figures count.
"""

from __future__ import annotations

import argparse
import gzip
import multiprocessing
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from attrs import frozen

from bench.measure import WEENV, Run, run
from layerformat import Entry, Kind, Layer, TarWriter
from tools.output import print_table, size

_PIECE_BYTES = 64 << 20
_BOMB_BYTES = 160 * _PIECE_BYTES


@frozen
class Archive:
    """An archive that `write` writes; `check` asserts that a layer is what it says, from its name and its inodes' count."""

    name: str
    entries: int
    write: Callable[[Path], None]
    check: Callable[[Layer], None]


def of_entries(entries: Iterator[Entry]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with path.open("wb") as file, TarWriter(file) as writer:
            for entry in entries:
                writer.add(entry)

    return write


def tree(count: int) -> Iterator[Entry]:
    """Empty files, a hundred to a directory."""
    for number in range(count):
        yield Entry(path=tree_path(number), kind=Kind.REGULAR, mtime_ns=number * 10**9)


def tree_path(number: int) -> bytes:
    return b"usr/lib/python3/package-%d/module_%d.py" % (number // 100, number)


def flat(count: int) -> Iterator[Entry]:
    """Empty files in one directory."""
    return (Entry(path=b"d/%d" % number, kind=Kind.REGULAR) for number in range(count))


def names(count: int) -> Iterator[Entry]:
    """Names of one file."""
    yield Entry(path=b"0", kind=Kind.REGULAR)
    for number in range(1, count):
        yield Entry(path=b"%d" % number, kind=Kind.HARD_LINK, target=b"0")


def write_bomb(path: Path) -> None:
    """One file of zeros, its gzip in members of 64 MiB."""
    entry = tarfile.TarInfo("f")
    entry.size = _BOMB_BYTES
    piece = gzip.compress(bytes(_PIECE_BYTES), 1)
    with path.open("wb") as file:
        file.write(gzip.compress(entry.tobuf(tarfile.GNU_FORMAT)))
        for _ in range(_BOMB_BYTES // _PIECE_BYTES):
            file.write(piece)
        file.write(gzip.compress(bytes(1024)))


def write_members(path: Path) -> None:
    """An archive of one file, its gzip in members of 100 bytes."""
    whole = path.with_suffix(".whole")
    with whole.open("wb") as file, TarWriter(file) as writer:
        writer.add(Entry(path=b"f", kind=Kind.REGULAR, size=10_000_000), [b"data" * 2_500_000])
    with whole.open("rb") as source, path.open("wb") as file:
        while piece := source.read(100):
            file.write(gzip.compress(piece, 1))


def archives(count: int) -> list[Archive]:
    def check_tree(layer: Layer) -> None:
        assert len(layer.toc.inodes) == count + -(-count // 100) + 4
        for number in range(0, count, 9_999):
            found = layer.lookup(tree_path(number))
            assert found is not None
            assert layer.inode(found).mtime_s == number
        assert layer.lookup(tree_path(count)) is None

    def check_flat(layer: Layer) -> None:
        directory = layer.lookup(b"d")
        assert directory is not None
        assert layer.inode(directory).records == count // 2
        assert layer.lookup(b"d/%d" % (count // 2 - 1)) is not None

    def check_names(layer: Layer) -> None:
        assert len(layer.toc.inodes) == 2
        assert layer.inode(1).nlink == count

    def check_bomb(layer: Layer) -> None:
        found = layer.lookup(b"f")
        assert found is not None
        assert layer.inode(found).size == _BOMB_BYTES
        assert layer.read(found, _BOMB_BYTES - 10, 10) == bytes(10)

    def check_members(layer: Layer) -> None:
        found = layer.lookup(b"f")
        assert found is not None
        assert layer.read(found, 0, 10_000_000) == b"data" * 2_500_000

    return [
        Archive(f"{count:,} files", count, of_entries(tree(count)), check_tree),
        Archive(f"{count // 2:,} files in one directory", count // 2, of_entries(flat(count // 2)), check_flat),
        Archive(f"{count:,} names of one file", count, of_entries(names(count)), check_names),
        Archive("10 GiB of zeros, gzip", 1, write_bomb, check_bomb),
        Archive("100,000 gzip members", 1, write_members, check_members),
    ]


def check(archive: Archive, layer: Path) -> None:
    with Layer.open(layer) as opened:
        archive.check(opened)


def measured(archive: Archive, directory: Path) -> tuple[Run, int]:
    """A conversion, and the size of the layer in bytes."""
    source, layer = directory / "source", directory / "layer"
    archive.write(source)
    ran = run([WEENV, "layer", "convert", source, layer])
    # In a process of its own: `run` tells the peak of the larger of the command and the process that started it.
    checker = multiprocessing.get_context("fork").Process(target=check, args=(archive, layer))
    checker.start()
    checker.join()
    if checker.exitcode != 0:
        raise SystemExit(f"{archive.name}: the layer is not what the archive says")
    return ran, layer.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000, help="of the largest archives (default: 1000000)")
    arguments = parser.parse_args()
    idle = run([sys.executable, "-c", "import tools.cli"], subprocess.DEVNULL).peak_bytes
    rows = []
    for archive in archives(arguments.entries):
        with tempfile.TemporaryDirectory(prefix="weenv-hostile-") as directory:
            ran, stored = measured(archive, Path(directory))
        each = f"{(ran.peak_bytes - idle) / archive.entries:.0f}" if archive.entries > 1 else ""
        rows.append([archive.name, f"{ran.wall_s:.1f}", size(ran.peak_bytes), each, size(stored)])
    print_table(["archive", "wall, s", "peak memory", "bytes per entry", "layer"], rows)


if __name__ == "__main__":
    main()
