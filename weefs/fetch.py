"""Fetching what readers wait for: stop 6 of a read's path, between the miss queue and the registry.

One task takes misses from the core when its eventfd says so, and starts a task per range, a bounded number at once. A
range is tried until it arrives or its deadline passes: a registry that is away for a moment costs time, not an episode.
What arrives goes to the core (decompression, SHA-256 and the write): in a worker thread when there are others to wait for meanwhile,
since these release the interpreter lock; at once when there are none, or it is little, since the way to a thread and back takes 0.2 ms. A
chunk that does not have its digest is asked for once more by itself, then given up: the registry's copy is damaged, and
no number of tries mends that.

A chunk that is given up is not remembered as absent: its readers get EIO and are reported as faults, and the next
reader asks again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, Protocol, TypeVar

import attrs

from registry import RangeReader, RegistryError, Unreachable
from weefs.buffers import Buffers
from weefs.causes import Cause, CauseCounts
from weefs.coalesce import Range, coalesce, coalesce_near
from weefs.core import ChunkIndex, Core, CoreError, CoreFault, DamagedError, LayerSlot, Miss
from weefs.demand import Demand
from weefs.link import Link
from weefs.log import say, say_traceback
from weefs.readahead import ReadAhead
from weefs.traffic import LayerTraffic

PUBLISHED_HERE_BYTES = 32 << 10
"""So little is decompressed and verified faster than handed to a thread (bench/miss.py)."""

NO_ROOM_PAUSE_S = 0.01

P = ParamSpec("P")
T = TypeVar("T")


@attrs.frozen
class FetchPolicy:
    """Bounds of fetching. Times in seconds."""

    requests_at_once: int = 16
    deadline_s: float = 30.0
    """From the first request for a chunk to giving it up. Waiting for a place among `requests_at_once` does not count:
    a registry that is slow and works must not fail an episode."""
    read_ahead_chunks: int = 8
    """Ahead of a sequential reader, at most; 0: never."""
    first_delay_s: float = 0.05
    longest_delay_s: float = 2.0

    def delay_s(self, attempt: int) -> float:
        """To wait after attempt number `attempt` (from 1), seconds.

        Exponential, with jitter, so that a returning registry is not met by everybody at once.
        """
        longest_s = min(self.longest_delay_s, self.first_delay_s * 2.0 ** min(attempt - 1, 32))
        return longest_s * random.uniform(0.5, 1.0)


@attrs.frozen
class LayerSource:
    """Where the chunks of a layer come from."""

    reader: RangeReader
    digest: str
    traffic: LayerTraffic
    link: Link = attrs.field(factory=Link)
    kind: str = "registry"
    """One of weefs.traffic.SOURCES."""


async def read_patiently(
    source: LayerSource, offset: int, size: int, *, deadline: float, policy: FetchPolicy, metadata: bool = False
) -> bytes:
    """As read_into_patiently(), into memory of its own."""
    data = bytearray(size)
    await read_into_patiently(source, offset, memoryview(data), deadline=deadline, policy=policy, metadata=metadata)
    return bytes(data)


async def read_into_patiently(
    source: LayerSource, offset: int, into: memoryview, *, deadline: float, policy: FetchPolicy, metadata: bool = False
) -> None:
    """A range of a layer's blob, asked for until `deadline` (the loop's time, seconds) as long as that may help.

    Counted in the source's traffic. RegistryError: what the last one ended with; then, and cancelled, `into` may be written to for a while.
    """
    loop = asyncio.get_running_loop()
    attempt = 0
    before = ""
    while True:
        attempt += 1
        source.traffic.asked(metadata=metadata)
        begin_s = loop.time()
        try:
            async with asyncio.timeout_at(deadline):
                await source.reader.read_into(source.digest, offset, into)
            source.traffic.arrived(len(into), loop.time() - begin_s, metadata=metadata)
            source.link.observe(len(into), loop.time() - begin_s)
            return
        except TimeoutError:
            where = f"{len(into)} bytes at {offset} of {source.digest}"
            raise Unreachable(f"{where}: expected an answer within {policy.deadline_s:g} s, received none{before}") from None
        except Unreachable as error:
            before = f"; the time before: {error}"
            delay_s = max(policy.delay_s(attempt), error.retry_after_s or 0.0)
            if loop.time() + delay_s >= deadline:
                raise
        source.traffic.retried()
        await asyncio.sleep(delay_s)


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, but a cancellation waits for the thread: it uses the core, which may be closed next."""
    task = asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


class CacheRoom(Protocol):
    """Whoever keeps the cache within its bound."""

    def published(self) -> None:
        """A chunk was written."""
        ...

    def lacking(self) -> None:
        """A chunk could not be written; its readers were answered."""
        ...

    async def make(self, size: int) -> None:
        """Frees this many bytes, if that can be. OSError."""
        ...


class LocalCopies(Protocol):
    """Layers in this cache that have chunks in common."""

    def may_have(self, miss: Miss, digest: str) -> bool:
        """Whether another layer than `digest`, whose chunk it is, has one like it."""
        ...

    def take(self, miss: Miss, digest: str) -> bool:
        """Publishes it from there, if it is there. Blocks."""
        ...


class Neighbours(Protocol):
    """Other nodes, which may have what is wanted."""

    def cut(self, wanted: Range) -> list[Range]:
        """Into pieces that must not wait for each other."""
        ...

    async def take(self, wanted: Range, digest: str, deadline: float) -> list[Miss]:
        """Publishes what they have of such a piece, and returns the chunks that must come from the layer's own source. `digest`: the
        layer's; `deadline`: of the chunks (the loop's time, seconds), of which it uses a part.
        """
        ...


class Boundless:
    """A cache without a bound."""

    def published(self) -> None:
        return None

    def lacking(self) -> None:
        return None

    async def make(self, size: int) -> None:
        return None


@attrs.define
class Outcome:
    """Of publishing a range: chunks that did not have their digest; chunks for which there was no room anywhere; whether there was none
    in the cache for another one.
    """

    damaged: list[Miss] = attrs.field(factory=list)
    unplaced: list[Miss] = attrs.field(factory=list)
    unwritten: bool = False


@attrs.frozen
class Ahead:
    """What became of chunks that were fetched for nobody: those that arrived, and why the rest did not (empty: there is none)."""

    arrived: list[Miss]
    failure: str
    error: RegistryError | None = None
    """Whose sentence that is, if it is a registry's."""


class Fetcher:
    """Serves the miss queue of one core.

    Owner: whoever runs `run`; it ends by cancellation, and then gives up what it had taken.
    """

    def __init__(
        self,
        core: Core,
        policy: FetchPolicy,
        on_faults: Callable[[list[CoreFault]], None],
        on_idle: Callable[[], None],
        room: CacheRoom | None = None,
        copies: LocalCopies | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        """`on_faults` reports them: then their readers are answered. `on_idle`: a layer may have become idle. `neighbours`: asked before
        a layer's own source.
        """
        self._neighbours = neighbours
        self._tasks: asyncio.TaskGroup | None = None
        self._awaited: dict[tuple[LayerSlot, ChunkIndex], asyncio.Future[None]] = {}
        self._copies = copies
        self._core = core
        self._policy = policy
        self._on_faults = on_faults
        self._on_idle = on_idle
        self._room = room or Boundless()
        self._suspects: set[LayerSlot] = set()
        self._sources: dict[LayerSlot, LayerSource] = {}
        self._slots = asyncio.Semaphore(policy.requests_at_once)
        self._at_work = 0
        self._at_work_for_nobody = 0
        self.demand = Demand()
        self.causes = CauseCounts()
        self.damaged_chunks = 0
        """In the cache, of before the machine went down: since this process began."""
        self._ahead = ReadAhead(max_window=policy.read_ahead_chunks)
        self._chunk_sizes: dict[LayerSlot, int] = {}
        self._chunks: dict[LayerSlot, int] = {}
        self._buffers = Buffers()
        self._reasons: dict[tuple[LayerSlot, ChunkIndex], str] = {}

    def add_source(self, layer: LayerSlot, source: LayerSource) -> None:
        """Must precede any plan with that layer."""
        self._sources[layer] = source
        info = self._core.layer_info(layer)
        self._chunk_sizes[layer], self._chunks[layer] = info.chunk_size, info.chunks
        if info.suspect_chunks:
            self._suspects.add(layer)

    def remove_source(self, layer: LayerSlot) -> None:
        """Of a layer that is closed: nothing is fetched for it any more."""
        del self._sources[layer], self._chunk_sizes[layer], self._chunks[layer]
        self._ahead.forget(layer)
        self.demand.forget(layer)
        self._suspects.discard(layer)
        for known in [known for known in self._reasons if known[0] == layer]:
            del self._reasons[known]

    def reason(self, fault: CoreFault) -> str:
        """Why a chunk was given up, for people."""
        unreadable = f"chunk {fault.chunk} is in the cache and cannot be read from it: {os.strerror(fault.error)}"
        return self._reasons.get((fault.layer, fault.chunk), unreadable)

    def why(self, layer: LayerSlot, chunk: ChunkIndex) -> str:
        """A chunk was given up, for people."""
        return self._reasons.get((layer, chunk), "it was given up")

    def is_present(self, layer: LayerSlot, chunk: ChunkIndex) -> bool:
        """In the cache. False also while so much of the layer is held that it cannot be seen."""
        try:
            return self._is_present(layer, chunk)
        except CoreError as error:
            if error.errno == errno.EBUSY:
                return False
            raise

    async def run(self) -> None:
        """Takes misses until cancelled."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        fd = self._core.miss_fd
        loop.add_reader(fd, ready.set)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                while True:
                    await ready.wait()
                    ready.clear()
                    _drain(fd)
                    while misses := self._core.take_misses():
                        self._begin_near_or_far(misses, tasks)
                    self._report_faults()
                    self._on_idle()
        finally:
            self._tasks = None
            loop.remove_reader(fd)
            self._report_faults()  # of what was given up in the end

    def _begin_near_or_far(self, misses: list[Miss], tasks: asyncio.TaskGroup, *, read_ahead: bool = True) -> None:
        near: list[Miss] = []
        far: list[Miss] = []
        for miss in misses:
            (near if self._may_be_near(miss) else far).append(miss)
        if near:
            tasks.create_task(self._from_disk(near, tasks, read_ahead=read_ahead))
        self._begin(far, tasks, read_ahead=read_ahead)

    async def bring(self, layer: LayerSlot, chunks: Iterable[ChunkIndex], *, claim: bool = True) -> None:
        """Fetches those that are absent and nothing ahead of them; returns when each of them is present or was given up. Cancelled, it
        stops waiting and nothing else. Nothing happens unless `run` runs. Without `claim`, waits for what others wait for; forever, if
        nobody does. CoreError: too much of the layer is held to see what is present; what was claimed until then is fetched.
        """
        claimed: list[Miss] = []
        awaited: list[asyncio.Future[None]] = []
        if self._tasks is None:
            return
        try:
            for chunk in chunks:
                if claim and (miss := self._core.claim(layer, chunk)):
                    claimed.append(miss)
                elif self._is_present(layer, chunk):
                    continue
                awaited.append(self._awaited.setdefault((layer, chunk), asyncio.get_running_loop().create_future()))
        finally:  # also when so much is held that the others cannot be seen: readers may wait for what was claimed
            self._begin_near_or_far(claimed, self._tasks, read_ahead=False)
        if awaited:
            await asyncio.wait(awaited)

    def _not_arrived(self, misses: Iterable[Miss]) -> list[Miss]:
        """Those that are still to be published or given up. A layer whose last chunk arrived may be gone."""
        try:
            return [miss for miss in misses if self._core.claim(miss.layer, miss.chunk) or not self.is_present(miss.layer, miss.chunk)]
        except CoreError:
            return []

    def _is_present(self, layer: LayerSlot, chunk: ChunkIndex) -> bool:
        hold = self._core.hold(layer, range(chunk, chunk + 1))
        return hold is not None and self._core.unhold(layer, hold)

    def _settled(self, misses: Iterable[Miss]) -> None:
        """Those who wait for them by bring() look again."""
        for miss in misses:
            if awaited := self._awaited.pop((miss.layer, miss.chunk), None):
                awaited.set_result(None)

    def _begin(self, misses: list[Miss], tasks: asyncio.TaskGroup, *, read_ahead: bool) -> None:
        """What is read ahead travels apart: nobody waits for more bytes than it asked for."""
        for chunks, ahead in ((misses, False), (self._claim_ahead(misses) if read_ahead else [], True)):
            for wanted in coalesce(chunks):
                for piece in [wanted] if self._neighbours is None else self._neighbours.cut(wanted):
                    tasks.create_task(self._ask_around(piece, ahead, tasks))

    async def _ask_around(self, wanted: Range, ahead: bool, tasks: asyncio.TaskGroup) -> None:
        """Neighbours first: with no place among `requests_at_once`, since a node that waits for another one here must not keep a third from
        what it fetches itself.
        """
        ranges = [wanted]
        cause: Cause = "read_ahead" if ahead else "miss"
        if self._neighbours is not None:
            deadline = asyncio.get_running_loop().time() + self._policy.deadline_s
            try:
                left = await self._neighbours.take(wanted, self._sources[wanted.layer].digest, deadline)
            except Exception:  # a bug of ours costs a transfer, not a reader
                say_traceback()
                left = self._not_arrived(wanted.misses)
            except asyncio.CancelledError:
                self._give_up(wanted.layer, self._not_arrived(wanted.misses), errno.EIO, "the data plane is stopping")
                raise
            absent = {miss.chunk for miss in left}
            came = [miss for miss in wanted.misses if miss.chunk not in absent]
            self.causes.add("peer", cause, sum(miss.raw_size for miss in came))
            self._settled(came)
            ranges = coalesce(left)
        for each in ranges:
            self._sources[wanted.layer].traffic.wanted(len(each.misses), ahead=ahead)
        for each in ranges[1:]:
            tasks.create_task(self._fetch_or_fail(each, cause))
        if ranges:
            await self._fetch_or_fail(ranges[0], cause)

    def _may_be_near(self, miss: Miss) -> bool:
        if miss.layer in self._suspects:
            return True
        return self._copies is not None and self._copies.may_have(miss, self._sources[miss.layer].digest)

    async def _from_disk(self, misses: list[Miss], tasks: asyncio.TaskGroup, *, read_ahead: bool) -> None:
        """Chunks that may be in the cache: since before the machine went down, or in another layer. Those that are not are fetched."""
        try:
            absent = await in_thread(self._from_disk_now, misses, "miss")
        except Exception:  # a bug of ours costs a transfer, not a reader
            say_traceback()
            absent = misses
        except asyncio.CancelledError:
            for miss in misses:
                self._give_up(miss.layer, [miss], errno.EIO, "the data plane is stopping")
            raise
        self._settled(miss for miss in misses if miss not in absent)
        self._begin(absent, tasks, read_ahead=read_ahead)

    def _from_disk_now(self, misses: list[Miss], cause: Cause) -> list[Miss]:
        absent = []
        for miss in misses:
            digest = self._sources[miss.layer].digest
            try:
                if self._core.check_chunk(miss.layer, miss.chunk):
                    continue
            except CoreError as error:
                self.damaged_chunks += isinstance(error, DamagedError)
                say(f"chunk {miss.chunk} of {digest}, of before the machine went down: {error.strerror}")
            begin_s = time.monotonic()
            if self._copies is not None and self._copies.take(miss, digest):
                self._core.count_traffic("copy", misses=1, requests=1, bytes=miss.raw_size, fetch_s=time.monotonic() - begin_s)
                self.causes.add("copy", cause, miss.raw_size)
                continue
            absent.append(miss)
        return absent

    def _report_faults(self) -> None:
        """First said, then answered: meanwhile the reader is a process that can be looked at."""
        while faults := self._core.take_faults():
            self._on_faults(faults)
            self._core.answer_faults(faults[-1].number)

    def _claim_ahead(self, misses: Iterable[Miss]) -> list[Miss]:
        """Chunks that sequential readers will want next; none while requests wait for a place."""
        if not self._policy.read_ahead_chunks or self._slots.locked():
            return []
        claimed = []
        for miss in misses:
            for chunk in self._ahead.observe(miss, self._chunk_sizes[miss.layer]):
                if chunk < self._chunks[miss.layer] and (ahead := self._core.claim(miss.layer, ChunkIndex(chunk))):
                    claimed.append(ahead)
        return claimed

    async def _fetch_or_fail(self, wanted: Range, cause: Cause) -> None:
        """Whatever happens, each of the chunks is published or failed: a reader must never wait for nobody."""
        unsettled = {miss.chunk: miss for miss in wanted.misses}
        try:
            with self.demand.of(wanted.layer) as place:
                async with self._slots:
                    place.taken()
                    self._at_work += 1
                    try:
                        deadline = asyncio.get_running_loop().time() + self._policy.deadline_s
                        await self._fetch(wanted, deadline, unsettled, cause)
                    finally:
                        self._at_work -= 1
        except RegistryError as error:
            self._give_up(wanted.layer, unsettled.values(), errno.EIO, str(error))
        except Exception as error:  # a bug of ours costs these chunks, not the node
            say_traceback()
            self._give_up(wanted.layer, unsettled.values(), errno.EIO, f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            self._give_up(wanted.layer, unsettled.values(), errno.EIO, "the data plane is stopping")
            raise
        finally:
            self._settled(wanted.misses)

    async def fetch_ahead(self, claimed: Sequence[Miss], *, within_s: float, cause: Cause, gap_bytes: int = 0) -> Ahead:
        """Fetches chunks of one layer that the caller has claimed, outside of the places of demand; those that are neither on the disk nor
        arrive in time are given back: readers that wait for them by now have them fetched as anything that they wait for.

        `gap_bytes`: so much between two of them may be transferred for nothing.
        """
        layer = claimed[0].layer
        unsettled = {miss.chunk: miss for miss in claimed}
        deadline = asyncio.get_running_loop().time() + within_s
        failure, refusal = "", None
        self._at_work += 1
        self._at_work_for_nobody += 1
        try:
            near = [miss for miss in claimed if self._may_be_near(miss)]
            if near:
                absent = {miss.chunk for miss in await in_thread(self._from_disk_now, near, cause)}
                for miss in near:
                    if miss.chunk not in absent:
                        del unsettled[miss.chunk]
            await self._take_from_neighbours(unsettled, self._sources[layer].digest, deadline, cause)
            for wanted in coalesce_near([*unsettled.values()], gap_bytes):
                self._sources[layer].traffic.wanted(len(wanted.misses), ahead=True)
                await self._fetch(wanted, deadline, unsettled, cause)
        except RegistryError as error:
            failure, refusal = str(error), error
        except Exception as error:  # a bug of ours costs these chunks, not the node
            say_traceback()
            failure = f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            for chunk in unsettled:
                self._reasons[(layer, chunk)] = "the data plane is stopping"
                self._core.fail(layer, chunk, errno.EIO)
            unsettled.clear()
            raise
        finally:
            self._at_work -= 1
            self._at_work_for_nobody -= 1
            for miss in unsettled.values():
                self._core.unclaim(miss.layer, miss.chunk)
            self._settled(claimed)
        lost = [*unsettled, *(miss.chunk for miss in claimed if (layer, miss.chunk) in self._reasons)]
        return Ahead([miss for miss in claimed if miss.chunk not in lost], failure, refusal)

    async def _take_from_neighbours(self, unsettled: dict[ChunkIndex, Miss], digest: str, deadline: float, cause: Cause) -> None:
        """What they have is settled. A neighbour that is slow with one piece keeps none of the others waiting."""
        if self._neighbours is None:
            return

        async def take(neighbours: Neighbours, piece: Range) -> None:
            try:
                misses = await neighbours.take(piece, digest, deadline)
            except Exception:  # a bug of ours costs a transfer
                say_traceback()
                misses = self._not_arrived(piece.misses)
            left = {miss.chunk for miss in misses}
            for miss in piece.misses:
                if miss.chunk not in left:
                    self.causes.add("peer", cause, miss.raw_size)
                    del unsettled[miss.chunk]

        async with asyncio.TaskGroup() as tasks:
            for wanted in coalesce([*unsettled.values()]):
                for piece in self._neighbours.cut(wanted):
                    tasks.create_task(take(self._neighbours, piece))

    def link(self, layer: LayerSlot) -> Link:
        """What the layer's source costs."""
        return self._sources[layer].link

    async def _fetch(self, wanted: Range, deadline: float, unsettled: dict[ChunkIndex, Miss], cause: Cause) -> None:
        for miss in await self._fetch_once(wanted, deadline, unsettled, cause):
            if await self._fetch_once(Range(wanted.layer, (miss,)), deadline, unsettled, cause):
                source = self._sources[wanted.layer]
                reason = f"chunk {miss.chunk} of {source.digest} is damaged: received twice without its digest"
                self._give_up(wanted.layer, [miss], errno.EBADMSG, reason)
                del unsettled[miss.chunk]

    async def _fetch_once(self, wanted: Range, deadline: float, unsettled: dict[ChunkIndex, Miss], cause: Cause) -> list[Miss]:
        """A range, tried until the deadline; the chunks of it that arrived without their digest. RegistryError: the last one's."""
        source = self._sources[wanted.layer]
        stored = self._buffers.take(wanted.size)
        await read_into_patiently(source, wanted.offset, stored, deadline=deadline, policy=self._policy)
        self.causes.add(source.kind, cause, wanted.size)
        damaged = await self._publish(wanted, stored, unsettled, deadline)
        self._buffers.give_back(stored)
        return damaged

    async def _publish(self, wanted: Range, stored: memoryview, unsettled: dict[ChunkIndex, Miss], deadline: float) -> list[Miss]:
        """Hands each chunk of a range to the core; returns those that did not have their digest. When neither the cache nor memory has
        room for one, room is made, until the deadline.
        """
        loop = asyncio.get_running_loop()
        outcome = await self._publish_somewhere(wanted, wanted.misses, stored, unsettled)
        damaged = outcome.damaged
        while outcome.unplaced and loop.time() < deadline:
            try:
                await self._room.make(sum(miss.raw_size for miss in outcome.unplaced))
            except OSError as error:
                say(f"cache: cannot make room: {error}")
            await asyncio.sleep(NO_ROOM_PAUSE_S)  # readers that are answered from memory give it back
            outcome = await self._publish_somewhere(wanted, outcome.unplaced, stored, unsettled)
        self._give_up(wanted.layer, outcome.unplaced, errno.ENOSPC, "there is no room for it, neither in the cache nor in memory")
        for miss in outcome.unplaced:
            del unsettled[miss.chunk]
        return damaged

    async def _publish_somewhere(
        self, wanted: Range, misses: Sequence[Miss], stored: memoryview, unsettled: dict[ChunkIndex, Miss]
    ) -> Outcome:
        """Here or in a thread."""
        if (self._at_work == 1 and not self._at_work_for_nobody) or sum(miss.raw_size for miss in misses) <= PUBLISHED_HERE_BYTES:
            outcome = self._publish_now(wanted, misses, stored, unsettled)
        else:
            outcome = await in_thread(self._publish_now, wanted, misses, stored, unsettled)
        if outcome.unwritten:
            self._room.lacking()
        else:
            self._room.published()
        return outcome

    def _publish_now(self, wanted: Range, misses: Sequence[Miss], stored: memoryview, unsettled: dict[ChunkIndex, Miss]) -> Outcome:
        outcome = Outcome()
        for miss in misses:
            at = miss.blob_offset - wanted.offset
            try:
                outcome.unwritten |= not self._core.publish(miss.layer, miss.chunk, stored[at : at + miss.stored_size])
            except DamagedError:
                outcome.damaged.append(miss)
            except CoreError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                    outcome.unplaced.append(miss)
                    continue
                self._give_up(miss.layer, [miss], error.errno or errno.EIO, str(error))
                del unsettled[miss.chunk]
            else:
                del unsettled[miss.chunk]
                self._reasons.pop((miss.layer, miss.chunk), None)
        return outcome

    def _give_up(self, layer: LayerSlot, misses: Iterable[Miss], error: int, reason: str) -> None:
        source = self._sources[layer]
        for miss in list(misses):
            source.traffic.gave_up()
            self._reasons[(layer, miss.chunk)] = reason
            if len(self._reasons) > 1024:
                del self._reasons[next(iter(self._reasons))]
            self._core.fail(layer, miss.chunk, error)
            say(f"gave up chunk {miss.chunk} of {source.digest}: {reason}")


def _drain(fd: int) -> None:
    try:
        os.read(fd, 8)
    except BlockingIOError:
        return
