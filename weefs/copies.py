"""Chunks that another layer in the cache has: a new version of a group takes from the disk what it shares with an old one.

The core knows the digests of all chunks of all layers in the cache, served or not, and where in their data files they would be. Whether
one is there says its digest: what was evicted, or never fetched, is a hole, which is looked for first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

from weefs.cachedir import CacheDirectory
from weefs.core import Core, Miss
from weefs.fetch import in_thread
from weefs.log import say


class Copies:
    """Of one cache; its methods are called on the event loop, but for `take`."""

    def __init__(self, core: Core, cache: CacheDirectory) -> None:
        self._core = core
        self._cache = cache
        self._numbers: dict[str, int] = {}
        self._digests: dict[int, str] = {}
        self._last = 0
        self._added: asyncio.Queue[str] = asyncio.Queue()
        self._known: set[str] = set()

    @property
    def known(self) -> int:
        """How many layers."""
        return len(self._known)

    async def run(self) -> None:
        """Gets to know whatever is in the cache, and what is added to it, until cancelled: it reads every TOC, for which nobody waits."""
        for digest in self._cache.digests():
            await self._know(digest)
        while True:
            await self._know(await self._added.get())

    def add(self, digest: str) -> None:
        """A layer that is in the cache now."""
        self._added.put_nowait(digest)

    async def _know(self, digest: str) -> None:
        if digest in self._numbers:
            return
        self._last += 1
        number = self._last
        self._numbers[digest], self._digests[number] = number, digest
        try:
            await in_thread(self._read_toc, digest, number)
        except OSError as error:  # of the core, too: it is of no use, and whoever wants it finds out why
            say(f"cache: {digest}: {error}")
            self.forget(digest)
            return
        if self._numbers.get(digest) == number:
            self._known.add(digest)
        else:  # it has left meanwhile
            self._core.forget_layer(number)

    def _read_toc(self, digest: str, number: int) -> None:
        fd = os.open(self._cache.toc_path(digest), os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._core.know_layer(number, fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def forget(self, digest: str) -> None:
        """A layer that leaves the cache."""
        number = self._numbers.pop(digest, None)
        if number is not None:
            del self._digests[number]
            self._core.forget_layer(number)
            self._known.discard(digest)

    def may_have(self, miss: Miss, digest: str) -> bool:
        """Whether another layer than `digest`, whose chunk it is, has one of its digest."""
        return bool(self._core.find_copies(miss.layer, miss.chunk, self._numbers.get(digest, 0)))

    def take(self, miss: Miss, digest: str) -> bool:
        """Publishes the chunk from another layer's data, if it is there. Blocks."""
        for number, offset in self._core.find_copies(miss.layer, miss.chunk, self._numbers.get(digest, 0)):
            with contextlib.suppress(OSError, KeyError):  # KeyError: that layer has left meanwhile
                if self._publish(miss, self._cache.directory(self._digests[number]) / "data", offset):
                    return True
        return False

    def _publish(self, miss: Miss, data: os.PathLike[str], offset: int) -> bool:
        fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.lseek(fd, offset, os.SEEK_DATA) != offset:
                return False
            self._core.publish_copy(miss.layer, miss.chunk, fd, offset)
            return True
        finally:
            os.close(fd)
