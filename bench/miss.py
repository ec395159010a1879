"""`python -m bench.miss`: what a read costs that finds its chunk absent, when the source answers at once: from the reader's system call
through the kernel, the miss queue, the fetcher (Python), verification and the cache, back to the reader.

The source is a layer in memory behind the fetcher's own interface, so no network and no disk is in it. Chunks of 4 KiB show the
hand-over, chunks of 256 KiB (the default) what a reader waits for: most of it is decompression, SHA-256 and the write. One reader, then 64
at once; CPU per miss is that of the serving process. """

from __future__ import annotations

READER = """
import json, os, sys, threading, time
path, chunk, readers, reads = sys.argv[1], *map(int, sys.argv[2:])
fd = os.open(path, os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
times = [[] for _ in range(readers)]
def read(number):
    for i in range(reads // readers):
        begin = time.perf_counter()
        assert len(os.pread(fd, 4096, (i * readers + number) * chunk)) == 4096
        times[number].append(time.perf_counter() - begin)
threads = [threading.Thread(target=read, args=(number,)) for number in range(readers)]
begin = time.perf_counter()
[thread.start() for thread in threads]; [thread.join() for thread in threads]
print(json.dumps({"wall": time.perf_counter() - begin, "times": sum(times, [])}))
"""


class Memory:
    """A source that has everything and answers at once."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob

    async def read(self, digest: str, offset: int, size: int) -> bytes:
        return self._blob[offset : offset + size]

    async def close(self) -> None:
        return
