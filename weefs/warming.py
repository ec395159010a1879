"""Warming: layers are brought into the cache before any environment wants them (`weenv cache prefetch`, docs/cache.md).

A job opens its layers as a plan would, without one, sees whether what is absent of them fits, and fetches it: behind readers that wait,
like all that is fetched for nobody. Jobs share what they have in common, since each chunk has one flight.

Whoever wants a job says so again and again (`progress`). One that is not asked for any more begins nothing new; what it has begun is
finished, for readers may have come to wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import attrs

from registry import IntegrityError, RegistryError, Unreachable
from weefs.cachedir import CacheDirectory
from weefs.coalesce import MAX_RANGE_BYTES, Range
from weefs.core import ChunkIndex, Core, LayerSlot, Miss
from weefs.demand import Demand
from weefs.errors import NoRoom, WeefsError
from weefs.failures import error_kind, first_cause, sentence
from weefs.fetch import Fetcher
from weefs.layers import Layers, Served
from weefs.log import say_traceback
from weefs.prefetch import MAX_GAP_BYTES, plan_ranges
from weefs.profiles import Profile, ProfileRefused, ProfileStore, published_profile, within_trust
from weefs.protocol import Layer, PrefetchedLayer, PrefetchProgress, PrefetchWhat
from weefs.room import Room
from weefs.sources import Sources

REQUESTS_AT_ONCE = 8
"""Of all jobs together."""
TRIES = 3
"""Of a range whose source does not answer; each has as long as anything that is fetched for nobody."""
PASSES = 4
"""Over a layer, of which something was lost again each time."""
ELSEWHERE_PAUSE_S = 0.1
"""What a layer still lacks is fetched for others: look again."""
ANSWER_S = 0.5
"""Progress is said at least so often."""
FORGOTTEN_S = 10.0
"""A job that nobody has asked for within this time."""


class NoProfile(WeefsError):
    """Only what profiles name was wanted, and nothing is known of any layer."""


# ---- what is wanted of a layer ----


@attrs.define(eq=False)
class _Whole:
    """All chunks."""

    core: Core
    slot: LayerSlot
    _since: int = 0

    @property
    def wanted_bytes(self) -> int:
        return self.core.layer_info(self.slot).stream_size

    def absent_chunks(self) -> int:
        info = self.core.layer_info(self.slot)
        return info.chunks - info.present_chunks

    def absent_bytes(self) -> int:
        """With what is between chunks in the stream, until the last is there."""
        info = self.core.layer_info(self.slot)
        return info.stream_size - info.present_raw if info.present_chunks < info.chunks else 0

    def room_bytes(self) -> int:
        """What it takes on the disk beyond what it takes now, suspect chunks included."""
        info = self.core.layer_info(self.slot)
        return max(0, info.stream_size - info.room) if info.present_chunks < info.chunks else 0

    def begin_pass(self) -> None:
        self._since = 0

    def claim(self) -> list[Miss] | None:
        """Some that are to be fetched now; None: the pass is over."""
        claimed = self.core.claim_run(self.slot, self._since, MAX_RANGE_BYTES)
        if not claimed:
            return None
        self._since = claimed[-1].chunk + 1
        return claimed


@attrs.define(eq=False)
class _Named:
    """Those of a profile, in its order."""

    core: Core
    fetcher: Fetcher
    slot: LayerSlot
    chunks: dict[ChunkIndex, Miss]
    _ranges: list[Range] = attrs.field(factory=list)

    @property
    def wanted_bytes(self) -> int:
        return sum(chunk.raw_size for chunk in self.chunks.values())

    def _absent(self) -> list[Miss]:
        return [chunk for chunk in self.chunks.values() if not self.fetcher.is_present(self.slot, chunk.chunk)]

    def absent_chunks(self) -> int:
        return len(self._absent())

    def absent_bytes(self) -> int:
        return sum(chunk.raw_size for chunk in self._absent())

    def room_bytes(self) -> int:
        """At most: some that are suspect may have theirs."""
        return self.absent_bytes()

    def begin_pass(self) -> None:
        absent = self._absent()
        self._ranges = plan_ranges(absent, self.fetcher.link(self.slot))[::-1] if absent else []

    def claim(self) -> list[Miss] | None:
        """As _Whole.claim(). Empty: others fetch these."""
        if not self._ranges:
            return None
        claims = (self.core.claim(self.slot, miss.chunk) for miss in self._ranges.pop().misses)
        return [miss for miss in claims if miss is not None]


@attrs.define(eq=False)
class _Part:
    """A layer of a job. `failure`: nothing more is fetched of it; `lost`: chunks of it that cannot be had, and why."""

    layer: Layer
    served: Served | None = None
    wanted: _Whole | _Named | None = None
    failure: BaseException | None = None
    lost: dict[ChunkIndex, str] = attrs.field(factory=dict)
    active: int = 0

    def absent_bytes(self) -> int:
        return 0 if self.wanted is None else self.wanted.absent_bytes()

    def shown(self) -> PrefetchedLayer:
        wanted = 0 if self.wanted is None else self.wanted.wanted_bytes
        error = self.failure
        if error is None and self.lost:
            chunk, reason = next(iter(self.lost.items()))
            error = IntegrityError(f"{len(self.lost)} chunks could not be had; chunk {chunk}: {reason}")
        return PrefetchedLayer(
            digest=self.layer.digest,
            source=self.layer.source,
            by="all" if isinstance(self.wanted, _Whole) else "profile",
            wanted_bytes=wanted,
            done_bytes=wanted - self.absent_bytes(),
            failure_kind=None if error is None else error_kind(error),
            failure="" if error is None else sentence(error),
        )


@attrs.define(eq=False)
class _Job:
    """`asked_s`: when it was asked for last. `shown`: how it ended."""

    what: PrefetchWhat
    parts: list[_Part]
    asked_s: float
    has_ended: asyncio.Event = attrs.field(factory=asyncio.Event)
    dropped: bool = False
    is_admitted: bool = False
    shown: PrefetchProgress | None = None

    def end(self) -> None:
        self.shown = self.progress(done=True)
        self.has_ended.set()

    def progress(self, *, done: bool = False) -> PrefetchProgress:
        """While its layers are open."""
        layers = [part.shown() for part in self.parts]
        return PrefetchProgress(
            done=done,
            wanted_bytes=sum(layer.wanted_bytes for layer in layers),
            done_bytes=sum(layer.done_bytes for layer in layers),
            layers=layers,
        )


class Warmer:
    """Of one data plane, on its event loop. Jobs begin while `run` runs."""

    def __init__(
        self,
        core: Core,
        cache: CacheDirectory,
        layers: Layers,
        sources: Sources,
        fetcher: Fetcher,
        room: Room,
        within_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`within_s`: for one try of a range."""
        self._core = core
        self._profiles = ProfileStore(cache.path)
        self._layers = layers
        self._sources = sources
        self._fetcher = fetcher
        self._demand: Demand = fetcher.demand
        self._room = room
        self._within_s = within_s
        self._clock = clock
        self._jobs: dict[str, _Job] = {}
        self._places = asyncio.Semaphore(REQUESTS_AT_ONCE)
        self._admitting = asyncio.Lock()
        self._changed = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._began = asyncio.Event()
        self._outstanding = 0
        self.fetched_bytes = 0
        self._demand.listen(self._changed.set)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._began.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._tasks = None

    # ---- what is asked ----

    async def progress(self, caller: str, layers: Sequence[Layer], what: PrefetchWhat) -> PrefetchProgress:
        """Begins the caller's job unless it runs, and says in a moment how far it is; at once when it is done, which ends it. What could
        not be had is said of each layer.
        """
        await self._began.wait()
        now_s = self._clock()
        for name in [name for name, job in self._jobs.items() if job.has_ended.is_set() and self._is_over(job)]:
            del self._jobs[name]
        job = self._jobs.get(caller)
        if job is None:
            unique = {layer.digest: layer for layer in layers}
            job = self._jobs[caller] = _Job(what, [_Part(layer) for layer in unique.values()], now_s)
            assert self._tasks is not None
            self._tasks.create_task(self._run(job))
        job.asked_s = now_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await job.has_ended.wait()
        if job.shown is None:
            return job.progress()
        self._jobs.pop(caller, None)
        return job.shown

    def drop(self, caller: str) -> None:
        """Nobody wants its job any more."""
        job = self._jobs.pop(caller, None)
        if job is not None:
            job.dropped = True
            self._changed.set()

    def _is_over(self, job: _Job) -> bool:
        return job.dropped or self._clock() - job.asked_s > FORGOTTEN_S

    def statistics(self) -> dict[str, int]:
        """Bytes of layers' streams: of the jobs that run now, but `fetched_bytes`, which are blobs' and since the process began."""
        running = [job.progress() for job in self._jobs.values() if not job.has_ended.is_set()]
        return {
            "jobs": len(running),
            "wanted_bytes": sum(job.wanted_bytes for job in running),
            "done_bytes": sum(job.done_bytes for job in running),
            "fetched_bytes": self.fetched_bytes,
        }

    # ---- a job ----

    async def _run(self, job: _Job) -> None:
        try:
            await self._do(job)
        except Exception as error:  # a bug of ours costs this job
            say_traceback()
            self._fail(job, first_cause(error))
        finally:
            for part in job.parts:
                await self._settled(part)
            job.end()
            self._layers.give_back([part.served for part in job.parts if part.served is not None])

    async def _do(self, job: _Job) -> None:
        await self._of_all(job.parts, lambda part: self._open(part, job.what))
        opened = [part for part in job.parts if part.wanted is not None]
        if job.what == "profile" and not opened and not any(part.failure for part in job.parts):
            self._fail(job, NoProfile("no layer has a profile, recorded or published; ask for all of them"))
        if self._is_over(job):
            return
        await self._admit(job)
        await self._of_all(opened, lambda part: self._bring(job, part))
        for part in opened:
            if part.failure is None and self._lacks(part):
                part.failure = NoRoom(f"cache: {part.absent_bytes()} bytes of it were evicted again; it is too small for what is used")

    async def _of_all(self, parts: Sequence[_Part], work: Callable[[_Part], Coroutine[Any, Any, None]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for part in parts:
                tasks.create_task(work(part))

    async def _settled(self, part: _Part) -> None:
        """Nothing of it is being fetched."""
        while part.active:
            self._changed.clear()
            await self._changed.wait()

    def _fail(self, job: _Job, error: BaseException) -> None:
        for part in job.parts:
            part.failure = part.failure or error

    async def _open(self, part: _Part, what: PrefetchWhat) -> None:
        """The layer, its TOC in the cache, and what is wanted of it."""
        try:
            (part.served,) = await self._layers.take([part.layer])
            slot = part.served.slot
            profile = None if what == "all" else await self._profile(part.layer, slot)
            if profile is not None:
                chunks = [ChunkIndex(chunk) for chunk in profile.chunks]
                part.wanted = _Named(self._core, self._fetcher, slot, {chunk: self._core.describe(slot, chunk) for chunk in chunks})
            elif what != "profile":
                part.wanted = _Whole(self._core, slot)
        except (RegistryError, WeefsError, OSError, BaseExceptionGroup) as error:
            part.failure = first_cause(error)

    async def _profile(self, layer: Layer, slot: LayerSlot) -> Profile | None:
        """What this node knows of a layer, or else what is published beside its group, as far as that is trusted."""
        info = self._core.layer_info(slot)
        known = await asyncio.to_thread(self._profiles.load, layer.digest)
        if known is not None and known.layer_chunks == info.chunks:
            return known
        if layer.group is None:
            return None
        try:
            await self._sources.reader(layer.source)
            try:
                data = await asyncio.shield(self._sources.published_profile(layer.source, layer.group))
            finally:
                await self._sources.release(layer.source)
            found = None if data is None else published_profile(data, layer.digest, info.chunks)
        except (RegistryError, ProfileRefused):  # it is as if there were none
            return None
        if found is None:
            return None
        sizes = {chunk: self._core.describe(slot, ChunkIndex(chunk)).raw_size for chunk in found.chunks}
        return within_trust(found, sizes, info.stream_size)

    async def _admit(self, job: _Job) -> None:
        """If all of it fits, with what other jobs are promised; else none of it is begun."""
        async with self._admitting:
            absent: dict[LayerSlot, int] = {}
            for each in {job, *(other for other in self._jobs.values() if other.is_admitted and other.shown is None)}:
                for part in each.parts:
                    if part.served is not None and part.wanted is not None:  # what several want of a layer counts once
                        absent[part.served.slot] = max(absent.get(part.served.slot, 0), part.wanted.room_bytes())
            needed = sum(absent.values())
            job.is_admitted = not any(part.wanted.room_bytes() for part in job.parts if part.wanted is not None)
            if job.is_admitted:
                return
            try:
                room = await self._room.reserve(needed)
            except OSError as error:
                self._fail(job, error)
                return
            if needed > room.available:
                self._fail(
                    job,
                    NoRoom(
                        f"cache: expected room for {needed} bytes, received {room.available}, without evicting what is in use or pinned: "
                        f"{room.used} of {room.capacity} are used"
                    ),
                )
                return
            job.is_admitted = True

    async def _bring(self, job: _Job, part: _Part) -> None:
        """Until nothing is absent, something failed, or nobody wants it any more."""
        assert part.wanted is not None
        passes = 0
        while part.failure is None and not self._is_over(job) and self._lacks(part):
            part.wanted.begin_pass()
            began = False
            while part.failure is None and not self._is_over(job):
                await self._places.acquire()
                while self._demand.queued and not self._is_over(job):
                    self._changed.clear()
                    await self._changed.wait()
                claimed = None if self._is_over(job) or part.failure is not None else part.wanted.claim()
                fetched = self._but_lost(part, claimed or [])
                if not fetched:
                    self._places.release()
                    if claimed is None:
                        break
                    continue
                began = True
                part.active += 1
                assert self._tasks is not None
                self._tasks.create_task(self._fetch(job, part, fetched))
            await self._settled(part)
            passes += began
            if passes >= PASSES:
                return
            if not began and self._lacks(part):
                await asyncio.sleep(ELSEWHERE_PAUSE_S)

    def _slot(self, part: _Part) -> LayerSlot:
        assert part.served is not None
        return part.served.slot

    def _lacks(self, part: _Part) -> bool:
        """Anything that may still come. Of what was lost, some may have come to others."""
        part.lost = {chunk: why for chunk, why in part.lost.items() if not self._fetcher.is_present(self._slot(part), chunk)}
        return part.wanted is not None and part.wanted.absent_chunks() > len(part.lost)

    def _but_lost(self, part: _Part, claimed: Sequence[Miss]) -> list[Miss]:
        """Gives back what was tried in vain."""
        for miss in claimed:
            if miss.chunk in part.lost:
                self._core.unclaim(miss.layer, miss.chunk)
        return [miss for miss in claimed if miss.chunk not in part.lost]

    async def _fetch(self, job: _Job, part: _Part, claimed: list[Miss]) -> None:
        try:
            for attempt in range(1, TRIES + 1):
                failure = await self._try(part, claimed)
                if failure is None:
                    return
                if not isinstance(failure, Unreachable) or attempt == TRIES:
                    part.failure = part.failure or failure
                if part.failure is not None or self._is_over(job):
                    return
                again = (self._core.claim(miss.layer, miss.chunk) for miss in claimed)
                claimed = [miss for miss in again if miss is not None]
                if not claimed:
                    return
        except Exception as error:  # a bug of ours costs this layer
            say_traceback()
            part.failure = part.failure or error
        finally:
            part.active -= 1
            self._places.release()
            self._changed.set()

    async def _try(self, part: _Part, claimed: Sequence[Miss]) -> BaseException | None:
        """Why not all came, if it may help to try again: those that did not are not claimed any more."""
        size = sum(miss.raw_size for miss in claimed)
        if isinstance(part.wanted, _Whole):
            size = min(size, part.wanted.room_bytes())  # suspect chunks have theirs
        if not self._room.has_room(self._outstanding + size):
            for miss in claimed:
                self._core.unclaim(miss.layer, miss.chunk)
            return NoRoom("cache: others have filled it meanwhile, and what is in use is not evicted")
        self._outstanding += size
        try:
            ahead = await self._fetcher.fetch_ahead(claimed, within_s=self._within_s, cause="prefetch", gap_bytes=MAX_GAP_BYTES)
        finally:
            self._outstanding -= size
        self.fetched_bytes += sum(miss.stored_size for miss in ahead.arrived)
        if ahead.failure:
            return ahead.error or WeefsError(ahead.failure)
        arrived = {miss.chunk for miss in ahead.arrived}
        part.lost |= {miss.chunk: self._fetcher.why(miss.layer, miss.chunk) for miss in claimed if miss.chunk not in arrived}
        return None
