"""`python -m bench.data`: reading a large file whose chunks are all in the node's cache: sequentially and at random (64 KiB), with 1 and
8 readers, in an environment (merged and kernel view) and in an overlay on ext4.

The kernel's caches are dropped before each run. Then how much page cache one read of the whole file leaves.

Figures are medians of `--runs` rounds, side by side; ratios are of throughput, ext4 = 1."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs

from bench.measure import drop_caches
from bench.served import ServedNode, overlay_on, push, served_node
from tools.demo import groups
from tools.output import print_table, size

FILE_BYTES = 1 << 30
READ_BYTES = 64 << 10
RANDOM_READS = 4096
"""Of all readers together."""

READER = """
import os, random, sys
path, kind, reader, readers, reads, size = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
fd = os.open(path, os.O_RDONLY)
if kind == "sequential":
    share = size // readers
    for at in range(reader * share, (reader + 1) * share, 1 << 20):
        assert len(os.pread(fd, 1 << 20, at)) == 1 << 20
else:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    choose = random.Random(reader)
    for _ in range(reads // readers):
        assert len(os.pread(fd, 65536, choose.randrange(size >> 16) << 16)) == 65536
"""


@attrs.frozen
class Way:
    """A file to read, in the namespace of a node."""

    name: str
    node: ServedNode
    path: Path

    def read(self, kind: str, readers: int) -> float:
        """Seconds until all readers have read their share."""
        script = " & ".join(
            f"{sys.executable} -c '{READER}' {self.path} {kind} {reader} {readers} {RANDOM_READS} {FILE_BYTES}" for reader in range(readers)
        )
        return self.node.run("bash", "-c", f"{script} & wait").wall_s


def make_large(root: Path) -> None:
    with (root / "large").open("wb") as file:
        for _ in range(FILE_BYTES >> 20):
            file.write(os.urandom(1 << 20))


@contextlib.contextmanager
def all_ways(root: Path, scratch: Path) -> Iterator[list[Way]]:
    reference = push(scratch, "large", root)
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weenv-bench-", dir=scratch)))
        nodes = {view: stack.enter_context(served_node(work, view)) for view in ("merged", "kernel")}
        ext4 = stack.enter_context(overlay_on(nodes["merged"], root, work))
        ways = [Way("ext4", nodes["merged"], ext4 / "large")]
        for view, node in nodes.items():
            ways.append(Way(view, node, node.root(node.create(reference)) / "large"))
            ways[-1].read("sequential", 1)
        yield ways


def cached_bytes() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["Cached"].split()[0]) << 10


def measure(ways: list[Way], runs: int) -> None:
    rows = []
    for kind in ("sequential", "random"):
        for readers in (1, 8):
            times: dict[str, list[float]] = {way.name: [] for way in ways}
            for _ in range(runs):
                for way in ways:
                    drop_caches()
                    times[way.name].append(way.read(kind, readers))
            amount = FILE_BYTES if kind == "sequential" else RANDOM_READS * READ_BYTES
            cells = [f"{amount / statistics.median(times[way.name]) / 1e6:.0f} MB/s" for way in ways]
            ratios = [statistics.median(e / m for e, m in zip(times["ext4"], times[way.name], strict=True)) for way in ways]
            rows.append((f"{kind}, {readers}", cells[0], *(f"{c} {r:.2f}" for c, r in zip(cells[1:], ratios[1:], strict=True))))
    print_table(("COLD", "EXT4", *(f"{way.name.upper()} (x ext4)" for way in ways[1:])), rows)


def measure_memory(ways: list[Way]) -> None:
    rows = []
    for way in ways:
        drop_caches()
        before = cached_bytes()
        way.read("sequential", 1)
        rows.append((way.name, size(cached_bytes() - before)))
    print_table((f"PAGE CACHE AFTER READING {size(FILE_BYTES)}", ""), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, nargs="?", default=Path("build/bench/large"))
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    root = groups.made_once(arguments.root.absolute(), make_large)
    scratch = root.parent / "data"
    scratch.mkdir(exist_ok=True)
    with all_ways(root, scratch) as ways:
        measure(ways, arguments.runs)
        measure_memory(ways)


if __name__ == "__main__":
    main()
