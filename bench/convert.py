"""`python -m bench.convert [ROOT]`: throughput, memory and size of `weenv layer convert` on a tar.gz, beside gzip and zstd of
the same bytes in the same run; the size of layers of small files; and where a conversion's CPU time goes.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.measure import WEENV, Run, median_wall, run, side_by_side
from bench.real_root import make_real_root
from layerformat import LayerTree, encode, open_source
from layerformat.chunker import Chunker
from tools.demo import groups
from tools.output import print_table, size

PURE_PACKAGES = ("django", "sympy", "networkx", "ansible", "ansible_collections", "transformers")
"""Of the root's Python environment: those that are small files and little else."""
REFERENCE = "gzip -dc | zstd -3 -T2"


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shell(command: str) -> Callable[[], Run]:
    """CPU time and peak are the largest process's: only the wall time of a pipe means something."""
    return lambda: run(["sh", "-c", command])


def pack(root: Path, tar: Path, *names: str) -> Path:
    """`tar` of a directory, made once; returns its gzip."""
    compressed = tar.with_suffix(".tar.gz")
    if not compressed.exists():
        subprocess.run(["tar", "--sort=name", "--format=pax", "--xattrs", "-C", root, "-cf", tar, *(names or (".",))], check=True)
        subprocess.run(f"gzip -6 < {tar} > {compressed}.partial && mv {compressed}.partial {compressed}", shell=True, check=True)
    return compressed


def throughput(tar: Path, compressed: Path, runs: int) -> bool:
    """Prints the table; False when -j 1 and -j 2 differ."""
    layers = {jobs: tar.with_name(f"j{jobs}.weenv") for jobs in (1, 2)}
    commands = {
        **{
            f"convert -j {jobs}": (lambda jobs=jobs: run([WEENV, "layer", "convert", "-j", str(jobs), compressed, layers[jobs]]))
            for jobs in layers
        },
        REFERENCE: shell(f"gzip -dc {compressed} | zstd -q -3 -T2 > {tar}.zst"),
        "gzip -dc": shell(f"gzip -dc {compressed} > /dev/null"),
    }
    results = side_by_side(commands, runs)
    bytes_in = tar.stat().st_size
    rows = []
    for name, measured in results.items():
        ratios = [other.wall_s / one.wall_s for one, other in zip(measured, results[REFERENCE], strict=True)]
        peak = size(max(one.peak_bytes for one in measured)) if name.startswith("convert") else ""
        rows.append([name, f"{bytes_in / median_wall(measured) / 1e6:.0f} MB/s", f"{statistics.median(ratios):.2f}", peak])
    print_table(["command", "of the tar", "speed, median ratio", "peak memory"], rows)
    same = digest(layers[1]) == digest(layers[2])
    print(f"-j 1 and -j 2: {'identical' if same else 'DIFFERENT'} bytes")
    return same


def layer_size(name: str, tar: Path, compressed: Path) -> list[str]:
    layer = tar.with_suffix(".weenv")
    run([WEENV, "layer", "convert", compressed, layer])
    zstd = int(subprocess.run(f"zstd -q -3 -c {tar} | wc -c", shell=True, check=True, capture_output=True).stdout)
    stored, gzip = layer.stat().st_size, compressed.stat().st_size
    return [name, size(tar.stat().st_size), size(stored), f"{stored / zstd:.3f}", f"{stored / gzip:.3f}"]


class _Discard:
    """A sink of chunks that keeps nothing."""

    def __init__(self) -> None:
        self.count = 0

    def put(self, stream_offset: int, raw: bytes | bytearray, *, large: bool) -> int:
        self.count += 1
        return self.count - 1

    def digests(self, first: int, count: int) -> list[bytes]:
        return []


def stages(compressed: Path) -> Iterator[tuple[str, float]]:
    """CPU seconds, each of everything up to this stage."""

    def cpu(work: Callable[[], None]) -> float:
        begin = time.process_time()
        work()
        return time.process_time() - begin

    def decompress() -> None:
        with open_source(compressed) as source:
            for _ in source.entries():
                pass

    def apply() -> None:
        tree = LayerTree()
        with open_source(compressed) as source:
            for entry, _ in source.entries():
                tree.apply(entry)

    def chunk() -> None:
        tree, chunker = LayerTree(), Chunker(256 * 1024, _Discard())
        with open_source(compressed) as source:
            for entry, data in source.entries():
                node = tree.apply(entry)
                if node is not None:
                    chunker.add(node, data, entry.data_size)
        chunker.finish()

    def whole() -> None:
        with open_source(compressed) as source, open("/dev/null", "wb") as file:
            encode(source.entries(), file)

    yield "decompress and read the tar", cpu(decompress)
    yield "the tree", cpu(apply)
    yield "find equal files, gather, cut", cpu(chunk)
    yield "compress, hash, write the TOC", cpu(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, nargs="?", default=Path("build/bench/root"))
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    root = groups.made_once(arguments.root.absolute(), make_real_root)
    tar, small = root.with_suffix(".tar"), root.with_name("site-packages.tar")
    compressed = pack(root, tar)
    packages = root / "usr/local/lib" / f"python{groups.python_of(root)}" / "dist-packages"
    small_compressed = pack(packages, small, *PURE_PACKAGES)
    same = throughput(tar, compressed, arguments.runs)
    print()
    rows = [layer_size("the root", tar, compressed), layer_size("small files", small, small_compressed)]
    print_table(["", "tar", "layer", "of zstd -3", "of gzip -6"], rows)
    print()
    before = 0.0
    for name, total in stages(compressed):
        print(f"{name:32} {total - before:6.2f} s of CPU")
        before = total
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
