"""`python -m bench.eviction`: a cache that is smaller than what is read through it.

Files of 256 KiB chunks in several layers, one environment over all of them, and a trace of reads with hot places that move, a long tail,
and scans. Every read is compared with the original. Shown: whether the bound was held on the disk, and the hit rate beside what other
policies would have had on the same trace with as many chunks: LRU, FIFO, and Belady's, which knows the future and which none can beat. A
chunk that was read ahead counts as fetched, not as a hit; how many reads did not wait is shown apart.

With `--seconds`, reads go on until then instead of `--reads`."""

from __future__ import annotations

import argparse
import heapq
import itertools
import mmap
import os
import random
import tempfile
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import attrs

from bench.served import push, served_node
from tools.output import parse_size, print_table, size

CHUNK = 256 << 10
FILE_BYTES = 128 << 20
PLACE = 16
"""Chunks that are hot together."""

Chunk = int


def choose(chunks: int, seed: int) -> Iterator[Chunk]:
    """Chunks to read, without an end: four of five reads in a hot place, by Zipf's law; hot places move; the rest are scans."""
    random_ = random.Random(seed)
    places = list(range(chunks // PLACE))
    random_.shuffle(places)
    weights = list(itertools.accumulate(1 / (rank + 1) ** 0.9 for rank in range(len(places))))
    for number in itertools.count():
        if number % 2000 == 1999:  # another tenth of them is hot now
            moved = random_.sample(range(len(places)), len(places) // 10)
            values = [places[i] for i in moved]
            random_.shuffle(values)
            for i, value in zip(moved, values, strict=True):
                places[i] = value
        if random_.random() < 0.02:
            begin = random_.randrange(chunks - 40)
            yield from range(begin, begin + random_.randrange(8, 40))
        else:
            (place,) = random_.choices(places, cum_weights=weights)
            yield place * PLACE + random_.randrange(PLACE)


# what other policies would have had


def oldest_out(trace: Sequence[Chunk], room: int, *, used: bool) -> int:
    """Hits. Evicts what was fetched first, or with `used` what was not used for longest."""
    kept: OrderedDict[Chunk, None] = OrderedDict()
    hits = 0
    for chunk in trace:
        if chunk in kept:
            hits += 1
            if used:
                kept.move_to_end(chunk)
            continue
        kept[chunk] = None
        if len(kept) > room:
            kept.popitem(last=False)
    return hits


def belady(trace: Sequence[Chunk], room: int) -> int:
    """Evicts what is wanted again last; may also not keep what it has just read."""
    uses: dict[Chunk, list[int]] = defaultdict(list)
    for at in range(len(trace) - 1, -1, -1):
        uses[trace[at]].append(at)
    kept: dict[Chunk, int] = {}
    latest: list[tuple[int, Chunk]] = []
    hits = 0
    for chunk in trace:
        uses[chunk].pop()
        following = uses[chunk][-1] if uses[chunk] else len(trace)
        hits += chunk in kept
        kept[chunk] = following
        heapq.heappush(latest, (-following, chunk))
        while len(kept) > room:
            at, victim = heapq.heappop(latest)
            if kept.get(victim) == -at:
                del kept[victim]
    return hits


POLICIES: dict[str, Callable[[Sequence[Chunk], int], int]] = {
    "LRU": partial(oldest_out, used=True),
    "FIFO": partial(oldest_out, used=False),
    "Belady (optimum)": belady,
}


# reading


@attrs.define
class Watch:
    """Looks at the disk until it is stopped: the most that the cache took."""

    directory: Path
    highest: int = 0
    _stop: threading.Event = attrs.field(factory=threading.Event, init=False)

    def run(self) -> None:
        while not self._stop.wait(0.05):
            taken = 0
            for path in self.directory.rglob("*"):
                try:
                    taken += path.lstat().st_blocks * 512
                except FileNotFoundError:
                    continue
            self.highest = max(self.highest, taken)

    def stop(self) -> None:
        self._stop.set()


def make_files(root: Path, layers: int, files: int) -> None:
    for number in range(layers):
        (root / f"layer{number}").mkdir(parents=True)
        for file in range(files):
            path = root / f"layer{number}" / f"file{number}-{file}"
            with path.open("wb") as opened:
                for _ in range(FILE_BYTES >> 20):
                    opened.write(os.urandom(1 << 20))


def read_all(sources: Sequence[Path], shown: Sequence[Path], chunks: Iterator[Chunk], going_on: Callable[[int], bool]) -> list[Chunk]:
    """The chunks in the order in which they were read. An AssertionError if one was wrong."""
    per_file = FILE_BYTES // CHUNK
    originals = [os.open(path, os.O_RDONLY) for path in sources]
    mounted = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in shown]
    buffer = mmap.mmap(-1, CHUNK)
    trace = []
    for chunk in chunks:
        if not going_on(len(trace)):
            break
        file, offset = chunk // per_file, chunk % per_file * CHUNK
        assert os.preadv(mounted[file], [buffer], offset) == CHUNK
        assert buffer[:] == os.pread(originals[file], CHUNK, offset), f"{shown[file]} at {offset}"
        trace.append(chunk)
    for fd in [*originals, *mounted]:
        os.close(fd)
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-size", type=parse_size, default=2 << 30, metavar="SIZE")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--files", type=int, default=8, help=f"of {size(FILE_BYTES)} each, in each layer")
    parser.add_argument("--reads", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, help="instead of --reads")
    parser.add_argument("--scratch", type=Path, default=Path("build/bench/eviction"))
    arguments = parser.parse_args()
    scratch = arguments.scratch.absolute()
    root = scratch / f"{arguments.layers}x{arguments.files}"
    if not root.exists():
        make_files(root.with_suffix(".new"), arguments.layers, arguments.files)
        root.with_suffix(".new").rename(root)
    references = [push(scratch, f"{root.name}-{number}", root / f"layer{number}") for number in range(arguments.layers)]
    names = [(f"layer{number}", f"file{number}-{file}") for number in range(arguments.layers) for file in range(arguments.files)]
    chunks = len(names) * FILE_BYTES // CHUNK
    with (
        tempfile.TemporaryDirectory(prefix="weenv-bench-", dir=scratch) as work,
        served_node(Path(work), "merged", f"cache_size = {arguments.cache_size}\n") as node,
    ):
        environment = node.create(*references)
        seen_from_here = Path(f"/proc/{node.process.pid}/root") / node.root(environment).relative_to("/")
        watch = Watch(node.directory / "state/cache")
        watcher = threading.Thread(target=watch.run)
        watcher.start()
        begin_s = time.monotonic()
        until_s = begin_s + (arguments.seconds or 0)

        def going_on(reads: int) -> bool:
            return time.monotonic() < until_s if arguments.seconds else reads < arguments.reads

        try:
            sources = [root / layer / file for layer, file in names]
            trace = read_all(sources, [seen_from_here / file for _, file in names], choose(chunks, 1), going_on)
        finally:
            watch.stop()
            watcher.join()
        took_s = time.monotonic() - begin_s
        plane = node.data_plane()
    waited = sum(source["misses"] for source in plane["sources"].values())
    fetched = waited + sum(source["ahead"] for source in plane["sources"].values())
    room = (arguments.cache_size - plane["cache"]["idle_bytes"]) // CHUNK
    print(f"{len(trace)} reads of {size(CHUNK)} in {took_s:.0f} s, each compared; {len(set(trace))} different chunks of {chunks}")
    held = f"{100 * watch.highest / arguments.cache_size:.1f} % of its bound"
    print(f"the cache took {size(watch.highest)} at most, {held}; {size(plane['fuse']['evicted_bytes'])} evicted")
    print(f"{plane['fuse']['chunks_unwritten']} chunks not kept for want of room; {plane['fuse']['reads_failed']} reads failed")
    best = belady(trace, room)
    hits = {"weefs": len(trace) - fetched} | {name: policy(trace, room) for name, policy in POLICIES.items()}
    rows = [(name, f"{100 * n / len(trace):.1f} %", f"{n / best:.3f}") for name, n in hits.items()]
    rows.append(("(weefs, reads that did not wait)", f"{100 * (len(trace) - waited) / len(trace):.1f} %", ""))
    print_table(("POLICY", "HITS", "OF THE OPTIMUM"), rows)
    if watch.highest > arguments.cache_size:
        raise SystemExit("the bound was not held")


if __name__ == "__main__":
    main()
