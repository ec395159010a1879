"""`python -m bench.miss`: what a read costs that finds its chunk absent, when the source answers at once: from the reader's system call
through the kernel, the miss queue, the fetcher (Python), verification and the cache, back to the reader.

The source is a layer in memory behind the fetcher's own interface, so no network and no disk is in it. Chunks of 4 KiB show the
hand-over, chunks of 256 KiB (the default) what a reader waits for: most of it is decompression, SHA-256 and the write. One reader, then 64
at once; CPU per miss is that of the serving process. """

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs

from bench.measure import drop_caches
from envlet.syscalls import MNT_DETACH, umount
from layerformat import Entry, Kind, decode_footer, encode, restore_toc
from tools.output import print_table, size
from weefs import core
from weefs.cachedir import opened
from weefs.fetch import Fetcher, FetchPolicy, LayerSource, LayerTraffic

FOOTER_SIZE = 80
READER = """
import json, os, sys, threading, time
path, chunk, readers, reads, first = sys.argv[1], *map(int, sys.argv[2:])
fd = os.open(path, os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
times = [[] for _ in range(readers)]
def read(number):
    for i in range(reads // readers):
        at = (first + i * readers + number) * chunk
        begin = time.perf_counter()
        assert len(os.pread(fd, 4096, at)) == 4096
        times[number].append(time.perf_counter() - begin)
threads = [threading.Thread(target=read, args=(number,)) for number in range(readers)]
begin = time.perf_counter()
[thread.start() for thread in threads]; [thread.join() for thread in threads]
print(json.dumps({"wall": time.perf_counter() - begin, "times": sorted(sum(times, []))}))
"""


class Memory:
    """A source that has everything and answers at once."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob

    async def read(self, digest: str, offset: int, size: int) -> bytes:
        return self._blob[offset : offset + size]

    async def size(self, digest: str) -> int:
        return len(self._blob)

    async def close(self) -> None:
        return


@attrs.frozen
class Result:
    """Seconds: of one read in the middle and the 99th of a hundred; of the serving process for each miss. Misses a second."""

    p50_s: float
    p99_s: float
    cpu_s: float
    rate: float


def make_layer(chunk: int, chunks: int) -> bytes:
    """One file of that many chunks; half of its bytes are random, about as compressible as programs are."""
    data = b"".join(os.urandom(chunk // 2) + bytes(chunk // 2) for _ in range(chunks))
    blob = io.BytesIO()
    entry = Entry(path=b"file", kind=Kind.REGULAR, mode=0o644, size=len(data))
    encode([(entry, io.BytesIO(data))], blob, chunk_size=chunk, jobs=2)
    return blob.getvalue()


def add_layer(filesystem: core.Core, blob: bytes, directory: Path) -> core.LayerSlot:
    footer = decode_footer(blob[-FOOTER_SIZE:], blob_size=len(blob))
    toc = restore_toc(blob[footer.toc_offset : footer.toc_offset + footer.toc_stored_size], footer.toc_raw_size)
    (directory / "toc").write_bytes(toc)
    with opened(directory) as files:
        return filesystem.add_layer(files)


async def measure(path: Path, chunk: int, readers: int, reads: int, first: int) -> Result:
    begin = resource.getrusage(resource.RUSAGE_SELF)
    command = [sys.executable, "-c", READER, str(path), str(chunk), str(readers), str(reads), str(first)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    end = resource.getrusage(resource.RUSAGE_SELF)
    answer = json.loads(output)
    times = answer["times"]
    cpu_s = end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime
    return Result(times[len(times) // 2], times[len(times) * 99 // 100], cpu_s / len(times), len(times) / answer["wall"])


async def run(chunk: int, reads: int, runs: int, scratch: Path) -> dict[int, list[Result]]:
    """For 1 and 64 readers, `runs` results; each read finds a chunk absent."""
    blob = make_layer(chunk, reads * runs * 2)
    mountpoint = scratch / "mnt"
    mountpoint.mkdir()
    filesystem = core.Core()
    fetcher = Fetcher(filesystem, FetchPolicy(read_ahead_chunks=0), lambda faults: None, lambda: None)
    slot = add_layer(filesystem, blob, scratch)
    fetcher.add_source(slot, LayerSource(Memory(blob), "memory", LayerTraffic()))
    filesystem.add_plan("plan", [slot])
    descriptors = core.mount(mountpoint, source="weefs-bench", threads=4)
    results: dict[int, list[Result]] = {1: [], 64: []}
    try:
        filesystem.serve(descriptors)
        fetching = asyncio.create_task(fetcher.run())
        for number in range(runs):
            for i, readers in enumerate(results):
                results[readers].append(await measure(mountpoint / "plan/file", chunk, readers, reads, (2 * number + i) * reads))
        fetching.cancel()
        await asyncio.wait([fetching])
    finally:
        umount(str(mountpoint), MNT_DETACH)
        for fd in descriptors:
            os.close(fd)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    for chunk, reads in ((4 << 10, 4096), (256 << 10, 256)):
        with tempfile.TemporaryDirectory(prefix="weenv-bench-", dir="/var/tmp") as scratch:
            drop_caches()
            for readers, results in asyncio.run(run(chunk, reads, arguments.runs, Path(scratch))).items():
                medians = [statistics.median(getattr(one, name) for one in results) for name in ("p50_s", "p99_s", "cpu_s")]
                rate = statistics.median(one.rate for one in results)
                rows.append((f"{size(chunk)}, {readers} at once", *(f"{value * 1e6:.0f} us" for value in medians), f"{rate:.0f}/s"))
    print_table(("A MISS", "P50", "P99", "CPU", "MISSES"), rows)


if __name__ == "__main__":
    main()
