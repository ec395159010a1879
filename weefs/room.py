"""The bound of a node's cache: how much it may hold, and whose chunks go when that is reached.

One clock for all layers, whether a plan has them or not: its hand goes from layer to layer in the order of their digests, which is no
order at all, and within each over its chunks (csrc/evict.c). What was read since it last came by stays for another round. A layer that is
not served and of which the hand has found nothing twice goes altogether. Pinned layers it passes over.

There are three limits. Above `high` chunks are evicted, in the background, down to `low`. At `capacity` nothing more is written: readers
are answered from memory until there is room. Nothing of this fails a read."""

from __future__ import annotations

import asyncio
import bisect
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attrs

from weefs.cachedir import CacheDirectory, list_layers, opened
from weefs.core import Core, CoreError, LayerSlot, Swept, sweep_files
from weefs.fetch import in_thread
from weefs.log import say, say_traceback
from weefs.protocol import RemovedLayer

LOOKED_AT_S = 5.0
"""How often the filesystem is asked how much is free: others use it, too."""
LOOKED_THROUGH_S = 60.0
"""How often the whole cache is, whose size is otherwise counted: somebody may have deleted something."""


@attrs.frozen
class CacheBound:
    """What the cache may take, bytes: at most `size_bytes` (None: any), and never so much that its filesystem has less than
    `free_min_bytes` left.
    """

    size_bytes: int | None = None
    free_min_bytes: int = 1 << 30
    high_share: float = 0.98
    low_share: float = 0.95


@attrs.frozen
class Usage:
    """Bytes. `idle`: of layers that are not served, of TOCs, maps and images; `used` has these and the chunks of served layers."""

    used: int
    idle: int
    capacity: int


@attrs.frozen
class Reserved:
    """Bytes: what there was room for, with what could be removed; what was used, and the capacity."""

    available: int
    used: int
    capacity: int


def disk_bytes(path: Path) -> int:
    """What a file takes on disk; 0 if it is not there."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


class Room:
    """Keeps one cache within its bound while `run` runs."""

    def __init__(
        self,
        core: Core,
        cache: CacheDirectory,
        bound: CacheBound,
        served: Callable[[str], LayerSlot | None],
        lock: Callable[[str], asyncio.Lock],
        on_removed: Callable[[str], None] = lambda digest: None,
    ) -> None:
        """`served`: the slot of a layer, by its digest, if it has one. `lock`: whoever has that of a layer sees to it that it is neither
        opened nor closed meanwhile. `on_removed`: a layer has left the cache.
        """
        self._on_removed = on_removed
        self._core = core
        self._cache = cache
        self._bound = bound
        self._served = served
        self._lock = lock
        self._wanted = asyncio.Event()
        self._turning = asyncio.Lock()
        self._hand = ""
        self._found_empty: set[str] = set()
        self._idle = 0
        self._images = 0
        self._pinned = 0
        self._capacity = sys.maxsize
        self._changes = 0
        self._look_through_s = -float("inf")
        self.removed_layers = 0

    # ---- how much there is ----

    async def measure(self) -> Usage:
        """Looks at every file of the cache, and tells the core its limit."""
        while True:
            changes = self._changes
            served = {digest for digest in self._cache.digests() if self._served(digest) is not None}
            idle = await in_thread(self._look_through, served)
            if changes == self._changes:
                break
        self._idle, self._images, self._pinned = idle
        self._look_through_s = time.monotonic() + LOOKED_THROUGH_S
        return self._look()

    def _look_through(self, served: set[str]) -> tuple[int, int, int]:
        """Bytes of what is not served, of images, and of pinned layers."""
        pinned = 0
        idle = sum(disk_bytes(path) for path in (self._cache.path / "profiles").glob("*"))
        for digest in self._cache.digests():
            directory = self._cache.directory(digest)
            names = ("toc", "map", "layer.json") if digest in served else ("toc", "map", "layer.json", "data")
            idle += sum(disk_bytes(directory / name) for name in names)
            if (directory / "pinned").exists():
                pinned += sum(disk_bytes(directory / name) for name in ("toc", "map", "layer.json", "data"))
        return idle, sum(disk_bytes(path) for path in (self._cache.path / "erofs").glob("*")), pinned

    def _look(self) -> Usage:
        """At what the filesystem has left."""
        found = os.statvfs(self._cache.path)
        used = self._unused + self._core.cache_used
        capacity = max(0, used + found.f_bavail * found.f_frsize - self._bound.free_min_bytes)
        if self._bound.size_bytes is not None:
            capacity = min(capacity, self._bound.size_bytes)
        self._capacity = capacity
        self._set_limit()
        return self.usage

    def _set_limit(self) -> None:
        self._core.limit_cache(max(0, self._capacity - self._unused))

    @property
    def _unused(self) -> int:
        """Bytes that are no chunks of served layers."""
        return self._idle + self._images

    def images_take(self, size: int) -> None:
        """So many bytes, all images of metadata together."""
        self._images = size
        self._set_limit()

    def idle_changes(self, size: int) -> None:
        """This many bytes are of layers that are not served now, or (negative) are not any more. Said before the core gives them up and
        after it has them, so that nobody takes them for free room meanwhile.
        """
        self._changes += 1
        self._idle += size
        self._set_limit()

    @property
    def usage(self) -> Usage:
        """As last measured."""
        return Usage(self._unused + self._core.cache_used, self._unused, self._capacity)

    def has_room(self, size: int) -> bool:
        """Whether so many bytes more, that nobody has asked for, leave it below the mark down to which is evicted."""
        usage = self.usage
        return usage.used + size < usage.capacity * self._bound.low_share

    def statistics(self) -> dict[str, int | str]:
        """`path`: of the cache. Bytes as last measured; counters since the start."""
        usage = self.usage
        return {
            "path": str(self._cache.path),
            "used_bytes": usage.used,
            "idle_bytes": usage.idle,
            "capacity_bytes": usage.capacity,
            "pinned_bytes": self._pinned,
            "removed_layers": self.removed_layers,
        }

    # ---- making room ----

    async def run(self) -> None:
        """Evicts until cancelled."""
        while True:
            try:
                usage = self._look() if time.monotonic() < self._look_through_s else await self.measure()
                if usage.used > usage.capacity * self._bound.high_share:
                    await self.shrink(int(usage.capacity * self._bound.low_share))
            except OSError as error:
                say(f"cache: cannot make room: {error}")
            except Exception:  # a bug of ours costs room, not the node
                say_traceback()
            self._wanted.clear()
            try:
                async with asyncio.timeout(LOOKED_AT_S):
                    await self._wanted.wait()
            except TimeoutError:
                continue

    def published(self) -> None:
        """Something was written: is it time to evict?"""
        if self._unused + self._core.cache_used > self._capacity * self._bound.high_share:
            self._wanted.set()

    def lacking(self) -> None:
        """Something could not be written."""
        self._wanted.set()

    async def make(self, size: int) -> None:
        """Sees to it that this many bytes can be written, if that can be. OSError."""
        usage = self._look()
        if usage.used + size > usage.capacity:
            await self.shrink(min(usage.capacity - size, int(usage.capacity * self._bound.low_share)))

    def lost_count(self) -> None:
        """Something was undone halfway: the cache is looked through again."""
        self._look_through_s = -float("inf")
        self._wanted.set()

    async def shrink(self, target: int) -> int:
        """Evicts until at most `target` bytes are used, or nothing more can be; what was freed, bytes. OSError."""
        freed = 0
        async with self._turning:
            digests = self._cache.digests()
            at = bisect.bisect_left(digests, self._hand)
            fruitless = 0
            while (excess := self._unused + self._core.cache_used - target) > 0 and fruitless <= 2 * len(digests) and digests:
                digest = digests[at % len(digests)]
                swept = await self._sweep(digest, excess)
                freed += swept.freed
                fruitless = 0 if swept.freed else fruitless + 1
                if swept.at_end:
                    at += 1
            self._hand = digests[at % len(digests)] if digests else ""
        self._core.count_evicted(freed)
        return freed

    async def _sweep(self, digest: str, goal: int) -> Swept:
        directory = self._cache.directory(digest)
        lock = self._lock(digest)
        if lock.locked():  # it is being opened or closed, by somebody who may be waiting for this room
            return Swept(0, at_end=True)
        async with lock:
            if not directory.exists() or (directory / "pinned").exists():
                return Swept(0, at_end=True)
            slot = self._served(digest)
            if slot is not None:
                self._found_empty.discard(digest)
                return await in_thread(self._core.sweep, slot, goal)
            return await self._sweep_idle(digest, directory, goal)

    async def _sweep_idle(self, digest: str, directory: Path, goal: int) -> Swept:
        before = sum(disk_bytes(directory / name) for name in ("data", "map"))
        try:
            swept = await in_thread(_sweep_directory, directory, goal)
        except (CoreError, FileNotFoundError) as error:
            say(f"cache: {directory.name} is of no use any more: {error}")
            return await self._remove(digest, directory)
        if swept.at_end and swept.freed == 0 and disk_bytes(directory / "data") == 0:
            if digest in self._found_empty:
                return await self._remove(digest, directory)
            self._found_empty.add(digest)
        else:
            self._found_empty.discard(digest)
        self.idle_changes(sum(disk_bytes(directory / name) for name in ("data", "map")) - before)
        return swept

    async def reserve(self, size: int) -> Reserved:
        """Sees to it that so many bytes more stay below the mark down to which is evicted: removes layers that are neither served nor
        pinned, the longest unused first; none, if that would not do. OSError.
        """
        usage = await self.measure()
        most = int(usage.capacity * self._bound.low_share)
        available = most - usage.used
        if size > available:
            removable = await self.collect(max(0, most - size), dry_run=True)
            available += sum(layer.disk_bytes for layer in removable)
            if size <= available:
                await self.collect(max(0, most - size), dry_run=False)
        return Reserved(max(0, available), usage.used, usage.capacity)

    async def collect(self, target: int, *, dry_run: bool) -> list[RemovedLayer]:
        """Removes whole layers that are neither served nor pinned, the longest unused first, until at most `target` bytes are used; which.
        OSError.
        """
        left = (await self.measure()).used
        removed = []
        for layer in sorted(await in_thread(lambda: [*list_layers(self._cache.path)]), key=lambda layer: layer.used_s):
            digest = layer.record.digest
            if left <= target:
                break
            lock = self._lock(digest)
            if lock.locked():
                continue
            async with lock:
                if layer.pinned or self._served(digest) is not None:
                    continue
                if not dry_run:
                    await self._remove(digest, layer.path)
            left -= layer.disk_bytes
            removed.append(
                RemovedLayer(digest=digest, source=layer.record.source, disk_bytes=layer.disk_bytes, used_unix_s=layer.used_s)
            )
        return removed

    async def _remove(self, digest: str, directory: Path) -> Swept:
        size = await in_thread(_remove_directory, directory)
        self._found_empty.discard(digest)
        self.removed_layers += 1
        self._on_removed(digest)
        self.idle_changes(-size)
        return Swept(size, at_end=True)


async def collect(cache: CacheDirectory, target: int, *, dry_run: bool) -> list[RemovedLayer]:
    """Room.collect() of a cache that nobody serves from."""
    core = Core()
    locks: dict[str, asyncio.Lock] = {}
    try:
        room = Room(core, cache, CacheBound(), lambda digest: None, lambda digest: locks.setdefault(digest, asyncio.Lock()))
        return await room.collect(target, dry_run=dry_run)
    finally:
        core.close()


def _sweep_directory(directory: Path, goal: int) -> Swept:
    with opened(directory) as files:
        return sweep_files(files, goal)


def _remove_directory(directory: Path) -> int:
    """The bytes that are free now."""
    size = sum(disk_bytes(path) for path in directory.iterdir())
    shutil.rmtree(directory)
    return size
