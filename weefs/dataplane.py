"""The data plane of one mount: stop 0 of a read's path, what is there to be read.

Layers and plans by digest, their metadata fetched, their misses served.

Used in two places: by `weefs.service` for a node, and by `weenv mount` for one plan in its own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import attrs
import msgspec
import zstandard

from layerformat import FormatError, decode_footer, restore_toc
from registry import Connections, Credentials, RangeReader, Unreachable, open_ranges
from weefs.cachedir import LENT_MARK, CacheDirectory, LayerRecord, list_layers, opened, verify_directory
from weefs.copies import Copies
from weefs.core import ChunkIndex, Core, CoreError, DamagedError, LayerSlot, Place, PlanInfo, PlanSlot, check_toc
from weefs.core import CoreFault as CoreFault
from weefs.doctor import check_cache, check_descriptors, check_sources
from weefs.errors import LayerRefused, WeefsError
from weefs.fetch import Fetcher, FetchPolicy, LayerSource, in_thread, read_patiently
from weefs.fill import Filler, FillPolicy
from weefs.images import Images, layer_name
from weefs.journal import Journal, LayerAdded, LayerClosed, PlanAdded, PlanRemoved
from weefs.lending import Borrowed
from weefs.link import Link
from weefs.log import say
from weefs.peerconfig import PeersConfig
from weefs.prefetch import REQUESTS_AT_ONCE as PREFETCHES_AT_ONCE
from weefs.prefetch import Prefetcher
from weefs.profiles import ARTIFACT_TYPE as PROFILE_TYPE
from weefs.profiles import MAX_DOCUMENT_BYTES, ProfileStore
from weefs.protocol import Check, FaultEvent, Layer, Plan, VerifiedLayer
from weefs.recording import NO_PROFILES, Recorder
from weefs.room import CacheBound, Room
from weefs.traffic import LayerTraffic, source_kind

if TYPE_CHECKING:
    from weefs.peering import Peering

FOOTER_SIZE = 80
MAX_TOC_BYTES = (4 << 30) - 1
SHORTEST_TIMEOUT_S = 1.0
"""To connect, and between two pieces of an answer: a machine under load is no stall."""
SLOWEST_BYTES_PER_S = 128 << 10
"""What a TOC's deadline allows for: it may be large, and a slow link is no failure."""
AHEAD_WITHIN_S = 10.0
"""For a request that nobody waits for, and at most a third of what a chunk has: a reader may come to wait for it."""

NO_PEERS: dict[str, Any] = {"members": [], "served_bytes": 0, "received_bytes": 0, "hedges": 0, "lies": 0}


@attrs.frozen
class _TocPlace:
    offset: int
    size: int
    raw_size: int | None
    digest: str


@attrs.define(eq=False)
class _Served:
    """A layer that the core has. `users`: plans that have it or are about to."""

    layer: Layer
    place: Place
    traffic: LayerTraffic
    toc_digest: str
    users: int = 0
    closing: bool = False
    lent: bool = False
    """It was opened for a peer, and no plan has had it yet."""

    @property
    def slot(self) -> LayerSlot:
        return LayerSlot(self.place.slot)


@attrs.frozen
class _ServedPlan:
    place: Place
    info: PlanInfo
    layers: list[_Served]


@attrs.define
class _Reader:
    reader: RangeReader
    users: int = 0
    link: Link = attrs.field(factory=Link)
    attached: dict[str, asyncio.Task[bytes | None]] = attrs.field(factory=dict)
    """Documents of profiles that are or were asked for, by the group beside which they are."""


class _LateRanges:
    """A layer's source that is opened when something is fetched from it: who takes over must serve first."""

    def __init__(self, source: str, credentials: Credentials | None, connections: Connections) -> None:
        self._source = source
        self._credentials = credentials
        self._connections = connections
        self._opened: RangeReader | None = None
        self._lock = asyncio.Lock()

    async def _reader(self) -> RangeReader:
        async with self._lock:
            if self._opened is None:
                self._opened = await open_ranges(self._source, credentials=self._credentials, connections=self._connections)
            return self._opened

    async def read(self, digest: str, offset: int, size: int) -> bytes:
        return await (await self._reader()).read(digest, offset, size)

    async def read_into(self, digest: str, offset: int, into: memoryview) -> None:
        await (await self._reader()).read_into(digest, offset, into)

    async def size(self, digest: str) -> int:
        return await (await self._reader()).size(digest)

    async def attached(self, digest: str, artifact_type: str, max_bytes: int) -> bytes | None:
        return await (await self._reader()).attached(digest, artifact_type, max_bytes)

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()


def plan_id(layers: Sequence[Layer]) -> str:
    """A plan is its ordered list of layers: equal plans have one directory."""
    return hashlib.sha256("\n".join(layer.digest for layer in layers).encode()).hexdigest()[:32]


@attrs.frozen
class _Lender:
    """What peering needs of a data plane."""

    _plane: DataPlane

    async def borrow(self, digest: str, layer: Layer | None) -> Borrowed | None:
        served = await self._plane._borrow(digest, layer)
        return None if served is None else Borrowed(served.slot, self._plane._cache.directory(digest) / "data", served.toc_digest, served)

    def give_back(self, borrowed: Borrowed) -> None:
        self._plane._give_back([borrowed.owner])

    def describe(self, digest: str) -> Layer | None:
        served = self._plane._layers.get(digest)
        return None if served is None else msgspec.structs.replace(served.layer, toc_digest=served.toc_digest)

    def sources(self) -> set[str]:
        return {*self._plane._readers}

    async def bring(self, slot: LayerSlot, chunks: list[ChunkIndex], *, claim: bool) -> None:
        await self._plane._fetcher.bring(slot, chunks, claim=claim)


class DataPlane:
    """Everything behind one mount.

    `run` must be running for reads to be answered and for unused layers to be closed; methods are called on its event loop.

    Layers are counted by their plans. One without a plan stays until the kernel holds no file of it and no reader waits: an open file
    is read on. When it is wanted again before, it is taken back.
    """

    def __init__(
        self,
        core: Core,
        cache: CacheDirectory,
        *,
        policy: FetchPolicy | None = None,
        bound: CacheBound | None = None,
        credentials: Credentials | None = None,
        on_fault: Callable[[FaultEvent], None] | None = None,
        journal: Journal | None = None,
        peers: PeersConfig | None = None,
        fill: FillPolicy | None = None,
        profiles: bool = False,
    ) -> None:
        """`on_fault` is called while the reader still waits: it gets its error afterwards. `fill`: what is fetched when nobody waits (None:
        nothing); `profiles`: whether what is read is recorded, and fetched the next time before anybody asks. PeersRefused.
        """
        self._core = core
        self._cache = cache
        self._credentials = credentials
        self._on_fault = on_fault
        self._policy = policy or FetchPolicy()
        self._journal = journal or Journal()
        self.room = Room(
            core, cache, bound or CacheBound(), self._slot_of, lambda digest: self._lock(f"layer {digest}"), self._forget_copies
        )
        self._copies = Copies(core, cache)
        self.peering = self._make_peering(peers) if peers is not None else None
        self._fetcher = Fetcher(core, self._policy, self._report, self._close_idle, self.room, self._copies, self.peering)
        self._readers: dict[str, _Reader] = {}
        demand, within_s = self._fetcher.demand, min(AHEAD_WITHIN_S, self._policy.deadline_s / 3)
        fill = attrs.evolve(fill or FillPolicy("off"), wanted_requests_at_once=self._policy.requests_at_once, within_s=within_s)
        self._filler = Filler(core, self._fetcher, demand, fill, lambda size: self.room.has_room(size))
        self._prefetcher = Prefetcher(core, self._fetcher, demand, within_s)
        self._recorder = Recorder(core, ProfileStore(cache.path), self._prefetcher) if profiles else None
        # What is fetched ahead has connections of its own: a reader never waits for one of them. And a request that stalls must leave time
        # for another one before the deadline.
        ahead = (PREFETCHES_AT_ONCE if profiles else 0) + (fill.wanted_requests_at_once if fill.mode != "off" else 0)
        timeout_s = max(SHORTEST_TIMEOUT_S, self._policy.deadline_s / 3)
        self._connections = Connections(per_host=self._policy.requests_at_once + ahead, timeout_s=timeout_s)
        self._layers: dict[str, _Served] = {}
        self._by_slot: dict[LayerSlot, _Served] = {}
        self._plans: dict[str, _ServedPlan] = {}
        self._images = Images(cache.path)
        self._plan_images: dict[str, list[Path]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self) -> None:
        """Fetches what readers wait for, and keeps the cache within its bound, until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.room.run())
            tasks.create_task(self._copies.run())
            tasks.create_task(self._fetcher.run())
            tasks.create_task(self._filler.run())
            tasks.create_task(self._prefetcher.run())
            if self._recorder is not None:
                tasks.create_task(self._recorder.run())
            if self.peering is not None:
                tasks.create_task(self.peering.run())

    def _make_peering(self, config: PeersConfig) -> Peering:
        from weefs.peering import Peering  # only where there are peers: its libraries take a quarter of a second to import

        return Peering(config, self._core, self.room, _Lender(self))

    def _forget_copies(self, digest: str) -> None:
        self._copies.forget(digest)

    def _slot_of(self, digest: str) -> LayerSlot | None:
        served = self._layers.get(digest)
        return served.slot if served else None

    async def close(self) -> None:
        if self.peering is not None:
            await self.peering.close()
        if self._closing:
            await asyncio.wait(self._closing)
        if self._recorder is not None:
            await self._recorder.close()
        for source in self._readers.values():
            for asking in source.attached.values():
                asking.cancel()
            if source.attached:
                await asyncio.wait(source.attached.values())
            await source.reader.close()
        self._readers.clear()
        await self._connections.close()

    def _lock(self, name: str) -> asyncio.Lock:
        """One for each name, as long as somebody holds it or waits for it."""
        return self._locks.setdefault(name, asyncio.Lock())

    # ---- plans ----

    async def add_plan(self, layers: Sequence[Layer], *, images: bool = False, stacked: bool = False) -> Plan:
        """Adds the layers, base first, and their plan; what is known already costs nothing. `images`: also its EROFS image, or those of its
        layers if they may be `stacked` and show the plan; where they cannot be made, there are none and `images_refused` says why.

        Errors: the registry's, LayerRefused, CoreError.
        """
        if not layers:
            raise WeefsError("plan: expected at least one layer, received none")
        name = plan_id(layers)
        async with self._lock(f"plan {name}"):
            if name not in self._plans:
                taken = await self._take_layers(layers)
                try:
                    self._plans[name] = await self._add_plan(name, taken)
                    self._filler.add_plan(name, [served.slot for served in taken])
                except BaseException:
                    self._give_back(taken)
                    raise
            paths, refused = await self._make_images(name, stacked) if images else ([], "")
            return msgspec.structs.replace(self._shown(name), images=[str(path) for path in paths], images_refused=refused)

    async def _add_plan(self, name: str, layers: list[_Served]) -> _ServedPlan:
        place = self._core.reserve_plan()
        slots = [served.slot for served in layers]
        line = PlanAdded(slot=place.slot, generation=place.generation, plan_id=name, layers=[*slots])
        try:
            self._journal.append(line)
            _slot, info = await in_thread(self._core.add_plan, name, slots, place=place)
        except BaseException:
            with contextlib.suppress(CoreError):  # when it was cancelled, it is there
                self._core.remove_plan(PlanSlot(place.slot))
            self._core.release_plan(place)
            self._say_removed(name, place)
            raise
        return _ServedPlan(place, info, layers)

    def _say_removed(self, name: str, place: Place) -> None:
        """Of a plan that nobody saw: without its line, a successor would show it, which costs and harms nothing."""
        with contextlib.suppress(OSError):
            self._journal.append(PlanRemoved(slot=place.slot, generation=place.generation, plan_id=name))
            self._journal.told(name)

    async def _make_images(self, name: str, stacked: bool) -> tuple[list[Path], str]:
        """The paths of the images, base first; or none, and why. Under the plan's lock."""
        plan = self._plans[name]
        digests = [served.toc_digest for served in plan.layers]
        try:
            if not stacked or plan.info.not_stackable or len(set(digests)) < len(digests):
                write = functools.partial(self._core.write_plan_image, PlanSlot(plan.place.slot))
                paths = [(await self._images.of_plan(name, write)).path]
            else:
                tocs = [self._cache.toc_path(served.layer.digest) for served in plan.layers]
                made = [self._images.of_layer(digest, toc) for digest, toc in zip(digests, tocs, strict=True)]
                paths = [image.path for image in await asyncio.gather(*made)]
        except OSError as error:  # of the core: what an image cannot hold; of the disk: what it has no room for
            return [], error.strerror or str(error)
        self._plan_images[name] = paths
        self.room.images_take(await asyncio.to_thread(self._images.shrink, {path for used in self._plan_images.values() for path in used}))
        return paths, ""

    async def remove_plan(self, name: str) -> None:
        """Its directory is gone; what is still open of it is stale, or an open file, which is read on. One that is not there
        is removed already: who asks a successor again does not know how far its predecessor came.
        """
        async with self._lock(f"plan {name}"):
            found = self._plans.get(name)
            if found is None:
                return
            place = found.place
            self._journal.append(PlanRemoved(slot=place.slot, generation=place.generation, plan_id=name))
            del self._plans[name]
            self._plan_images.pop(name, None)
            self._filler.remove_plan(name)
            try:
                await in_thread(self._core.remove_plan, PlanSlot(place.slot))
                self._journal.told(name)
                await self._end_runs(found.layers)
            finally:
                self._give_back(found.layers)

    async def _end_runs(self, layers: Iterable[_Served]) -> None:
        """Of layers that no other plan has."""
        if self._recorder is not None:
            for served in dict.fromkeys(layers):
                if served.users == 1:
                    await self._recorder.unused(served.slot)

    def _shown(self, name: str) -> Plan:
        info = self._plans[name].info
        return Plan(plan_id=name, entries=info.entries, content_bytes=info.content_size, xattrs=info.xattrs)

    def plans(self) -> list[Plan]:
        """What is served now."""
        return [self._shown(name) for name in self._plans]

    def show_as_root(self, name: str) -> None:
        """The plan becomes the mount's root directory itself; before serving begins."""
        self._core.set_root(PlanSlot(self._plans[name].place.slot))

    # ---- taking over ----

    async def restore(self) -> None:
        """Everything that the journal says, in its place; before serving begins.

        Errors: as add_plan(), for a layer that is not in the cache any more and cannot be had.
        """
        state = self._journal.state
        async with asyncio.TaskGroup() as tasks:
            for line in state.layers.values():
                tasks.create_task(self._restore_layer(line))
        for plan in state.plans.values():
            layers = [self._by_slot[LayerSlot(slot)] for slot in plan.layers]
            for served in layers:
                served.users += 1
            slots = [served.slot for served in layers]
            _slot, info = await in_thread(self._core.add_plan, plan.plan_id, slots, place=plan.place)
            self._plans[plan.plan_id] = _ServedPlan(plan.place, info, layers)
            self._filler.add_plan(plan.plan_id, slots)

    async def _restore_layer(self, line: LayerAdded) -> None:
        reader = self._readers.setdefault(line.layer.source, _Reader(_LateRanges(line.layer.source, self._credentials, self._connections)))
        reader.users += 1
        source = LayerSource(reader.reader, line.layer.digest, self._traffic(line.layer), reader.link)
        served = self._served(await self._open_layer(line.layer, source, line.place))
        if self._recorder is not None:
            self._recorder.opened(served.slot, line.layer.digest, await self._recorder.load(line.layer.digest), cold=False)

    async def finish_removals(self) -> None:
        """Of plans that the process before removed: the kernel may not have been told. After serving has begun."""
        for name in [*self._journal.state.leaving]:
            await in_thread(self._core.forget_name, name)
            self._journal.told(name)

    # ---- layers ----

    async def _borrow(self, digest: str, layer: Layer | None) -> _Served | None:
        """An open layer, counted as used, for a peer; one that is not is opened from its description, if there is one."""
        async with self._lock(f"layer {digest}"):
            served = self._layers.get(digest)
            if served is None and layer is not None:
                served = self._served(await self._serve_layer(layer, lent=True))
            if served is not None:
                served.users += 1
            return served

    async def _take_layers(self, layers: Sequence[Layer]) -> list[_Served]:
        """One for each, counted as used. All or none."""
        taken: dict[str, _Served] = {}

        async def take(layer: Layer) -> None:
            async with self._lock(f"layer {layer.digest}"):
                served = self._layers.get(layer.digest) or self._served(await self._serve_layer(layer))
                await self._take_lent(layer, served)
                served.users += 1
                taken[layer.digest] = served

        try:
            async with asyncio.TaskGroup() as tasks:
                for layer in {layer.digest: layer for layer in layers}.values():
                    tasks.create_task(take(layer))
        except BaseException:
            self._give_back(taken.values())
            raise
        # Each is counted once for the plan, however often it is in it.
        return [taken[layer.digest] for layer in layers]

    def _give_back(self, layers: Iterable[_Served]) -> None:
        for served in dict.fromkeys(layers):
            served.users -= 1
        self._close_idle()

    def _served(self, served: _Served) -> _Served:
        self._layers[served.layer.digest] = self._by_slot[served.slot] = served
        return served

    async def _check_lent(self, layer: Layer, served: _Served) -> None:
        """A layer that was opened as a peer described it is used for a plan if its manifest, or its own source, names the same TOC: all
        digests of chunks are in that.
        """
        mark = self._cache.directory(layer.digest) / LENT_MARK
        if not mark.exists():
            return
        toc_digest = layer.toc_digest
        if toc_digest is None:
            reader = await self._reader(layer.source)
            try:
                source = LayerSource(reader, layer.digest, self._traffic(layer))
                deadline = asyncio.get_running_loop().time() + self._policy.deadline_s
                toc_digest = (await self._toc_place(layer, source, deadline)).digest
            finally:
                await self._release_reader(layer.source)
        if toc_digest != served.toc_digest:
            received = f"a peer that asked for it described it with {served.toc_digest}"
            raise LayerRefused(f"layer {layer.digest}: expected the TOC {toc_digest}, {received}; remove it with `weenv cache gc`")
        mark.unlink(missing_ok=True)

    async def _serve_layer(self, layer: Layer, *, lent: bool = False) -> _Served:
        reader = await self._reader(layer.source)
        try:
            source = LayerSource(reader, layer.digest, self._traffic(layer), self._readers[layer.source].link)
            published = None if lent else self._look_for_profile(layer)
            place = self._core.reserve_layer()
            try:
                served = await self._open_layer(layer, source, place, lent=lent)
                profile = await self._recorder.load(layer.digest) if self._recorder is not None and not lent else None
                self._journal.append(LayerAdded(slot=place.slot, generation=place.generation, layer=layer))
            except BaseException:
                self._forget_layer(place)
                raise
        except BaseException:
            await self._release_reader(layer.source)
            raise
        if self._recorder is not None and not lent:
            self._recorder.opened(served.slot, layer.digest, profile, cold=True, published=published)
        served.lent = lent
        return served

    async def _take_lent(self, layer: Layer, served: _Served) -> None:
        """For a plan: from now on it is read here."""
        await self._check_lent(layer, served)
        if served.lent and self._recorder is not None:
            profile = await self._recorder.load(layer.digest)
            self._recorder.opened(served.slot, layer.digest, profile, cold=True, published=self._look_for_profile(layer))
        served.lent = False

    def _look_for_profile(self, layer: Layer) -> asyncio.Task[bytes | None] | None:
        """Begins to, where it may be of use: while the layer's TOC is fetched. Asked once for a group, as long as its source is in use."""
        if self._recorder is None or layer.group is None or self._recorder.has(layer.digest):
            return None
        reader = self._readers[layer.source]
        if layer.group not in reader.attached:
            asking = reader.reader.attached(layer.group, PROFILE_TYPE, MAX_DOCUMENT_BYTES)
            reader.attached[layer.group] = task = asyncio.create_task(_within(asking, AHEAD_WITHIN_S))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever wants it hears of it, or nobody does
        return reader.attached[layer.group]

    def _forget_layer(self, place: Place) -> None:
        """Undoes as much of _open_layer() as was done."""
        slot = LayerSlot(place.slot)
        with contextlib.suppress(CoreError, KeyError):
            self._fetcher.remove_source(slot)
        with contextlib.suppress(CoreError):
            self._core.close_layer(slot)
        self._core.release_layer(place)
        self.room.lost_count()

    async def _open_layer(self, layer: Layer, source: LayerSource, place: Place, *, lent: bool = False) -> _Served:
        record = await asyncio.to_thread(self._cache.find, layer.digest)
        if record is None:
            record = await self._fetch_toc(layer, source, lent=lent)
        self._cache.used(layer.digest)
        with opened(self._cache.directory(layer.digest)) as files:
            try:
                await in_thread(self._core.add_layer, files, name=layer_name(record.toc_digest), place=place)
            except CoreError as error:
                raise LayerRefused(f"layer {layer.digest}: {error.strerror}") from error
        self.room.idle_changes(-self._core.layer_info(LayerSlot(place.slot)).room)
        self._fetcher.add_source(LayerSlot(place.slot), source)
        self._copies.add(layer.digest)
        return _Served(layer, place, source.traffic, record.toc_digest)

    def _close_idle(self) -> None:
        """Begins to close what no plan, reader and open file keeps."""
        for slot in self._core.idle_layers():
            served = self._by_slot.get(slot)
            if served is not None and served.users == 0 and not served.closing:
                served.closing = True
                task = asyncio.create_task(self._close_layer(served))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def _close_layer(self, served: _Served) -> None:
        async with self._lock(f"layer {served.layer.digest}"):
            if self._recorder is not None and not served.users:
                await self._recorder.unused(served.slot)
            room = self._core.layer_info(served.slot).room
            self.room.idle_changes(room)
            closed = False
            try:
                closed = not served.users and await in_thread(self._core.close_layer, served.slot)
            finally:
                served.closing = False
                if not closed:
                    self.room.idle_changes(-room)
            if not closed:
                return
            del self._layers[served.layer.digest], self._by_slot[served.slot]
            if self._recorder is not None:
                self._recorder.closed(served.slot)
            self._fetcher.remove_source(served.slot)
            try:
                self._journal.append(LayerClosed(slot=served.place.slot, generation=served.place.generation))
            except OSError as error:
                say(f"journal: {error}")  # a successor closes it once more
            self._core.release_layer(served.place)
            await self._release_reader(served.layer.source)

    async def _fetch_toc(self, layer: Layer, source: LayerSource, *, lent: bool) -> LayerRecord:
        toc = await self._toc_from_peers(layer)
        toc_digest = layer.toc_digest
        if toc is None or toc_digest is None:
            deadline = asyncio.get_running_loop().time() + self._policy.deadline_s
            place = await self._toc_place(layer, source, deadline)
            deadline += place.size / SLOWEST_BYTES_PER_S
            stored = await self._read_metadata(source, place.offset, place.size, deadline)
            toc, toc_digest = await asyncio.to_thread(_open_toc, layer.digest, stored, place), place.digest
        record = LayerRecord(
            digest=layer.digest,
            size_bytes=layer.size_bytes,
            source=layer.source,
            toc_digest=toc_digest,
            toc_size_bytes=len(toc),
            content_bytes=int.from_bytes(toc[48:56], "little"),
            chunks=int.from_bytes(toc[72 + 4 * 16 + 8 : 72 + 4 * 16 + 16], "little"),
        )
        await self.room.make(len(toc))
        await asyncio.to_thread(self._cache.create, record, toc, lent=lent)
        self.room.idle_changes(len(toc))
        return record

    async def _toc_from_peers(self, layer: Layer) -> bytes | None:
        """With the digest that its manifest says. None: no peer has it."""
        toc = await self.peering.toc(layer) if self.peering is not None else None
        if toc is None:
            return None
        try:
            await asyncio.to_thread(check_toc, bytes(toc))
        except CoreError as error:
            raise LayerRefused(f"layer {layer.digest}: {error.strerror}") from error
        return bytes(toc)

    async def _read_metadata(self, source: LayerSource, offset: int, size: int, deadline: float) -> bytes:
        return await read_patiently(source, offset, size, deadline=deadline, policy=self._policy, metadata=True)

    def _traffic(self, layer: Layer) -> LayerTraffic:
        return LayerTraffic(also=functools.partial(self._core.count_traffic, source_kind(layer.source)))

    async def _toc_place(self, layer: Layer, source: LayerSource, deadline: float) -> _TocPlace:
        """Where the manifest says the TOC is; without that, where the footer does."""
        if layer.toc_offset is not None and layer.toc_size_bytes is not None and layer.toc_digest is not None:
            return _TocPlace(layer.toc_offset, layer.toc_size_bytes, layer.toc_raw_size_bytes, layer.toc_digest)
        if layer.size_bytes < FOOTER_SIZE:
            received = f"the manifest says {layer.size_bytes}"
            raise LayerRefused(f"layer {layer.digest}: expected at least {FOOTER_SIZE} bytes, {received}")
        footer_bytes = await self._read_metadata(source, layer.size_bytes - FOOTER_SIZE, FOOTER_SIZE, deadline)
        try:
            footer = decode_footer(footer_bytes, blob_size=layer.size_bytes)
        except FormatError as error:
            raise LayerRefused(f"layer {layer.digest}: {error}") from error
        digest = f"sha256:{footer.toc_sha256.hex()}"
        return _TocPlace(footer.toc_offset, footer.toc_stored_size, footer.toc_raw_size, digest)

    async def _reader(self, source: str) -> RangeReader:
        """Counted: to be given back with _release_reader()."""
        async with self._lock(f"source {source}"):
            if source not in self._readers:
                self._readers[source] = _Reader(await open_ranges(source, credentials=self._credentials, connections=self._connections))
            self._readers[source].users += 1
            return self._readers[source].reader

    async def _release_reader(self, source: str) -> None:
        released = self._readers[source]
        released.users -= 1
        if released.users == 0:
            del self._readers[source]
            for asking in released.attached.values():
                asking.cancel()
            if released.attached:
                await asyncio.wait(released.attached.values())
            await released.reader.close()

    async def verify(self, digest: str | None) -> list[VerifiedLayer]:
        """Compares the chunks in the cache with their digests, of one layer or of all; damaged ones are dropped. LayerRefused: it is no
        digest of a layer in the cache; CoreError, OSError.
        """
        known = self._cache.digests()
        if digest is not None and digest not in known:
            raise LayerRefused(f"layer {digest}: expected one that is in the cache; there is none of that digest")
        verified = []
        for each in known if digest is None else [digest]:
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                verified.append(await self._verify(each))
        return verified

    async def _verify(self, digest: str) -> VerifiedLayer:
        served = self._layers.get(digest)
        if served is None:
            async with self._lock(f"layer {digest}"):  # nobody opens it meanwhile
                if digest not in self._layers:
                    good, damaged = await in_thread(verify_directory, self._cache.directory(digest))
                    return VerifiedLayer(digest=digest, good=good, damaged=damaged)
                served = self._layers[digest]
        served.users += 1
        try:
            good, damaged = await in_thread(self._verify_served, served.slot)
        finally:
            self._give_back([served])
        return VerifiedLayer(digest=digest, good=good, damaged=damaged)

    def _verify_served(self, slot: LayerSlot) -> tuple[int, int]:
        good = damaged = 0
        for chunk in range(self._core.layer_info(slot).chunks):
            try:
                good += self._core.check_chunk(slot, ChunkIndex(chunk))
            except DamagedError:
                damaged += 1
        return good, damaged

    async def diagnose(self) -> list[Check]:
        """What `weenv node doctor` asks the data plane."""
        layers = await in_thread(lambda: [layer.record for layer in list_layers(self._cache.path)])
        sources = await check_sources(layers, self._reader, self._release_reader)
        return [check_cache(await self.room.measure()), check_descriptors(), *sources]

    # ---- reporting ----

    def _report(self, faults: list[CoreFault]) -> None:
        if self._on_fault is None:
            return
        for fault in faults:
            self._on_fault(
                FaultEvent(
                    number=fault.number,
                    pid=fault.pid,
                    cgroup=_cgroup_of(fault.pid),
                    layer=self._by_slot[fault.layer].layer.digest,
                    chunk=fault.chunk,
                    error=self._fetcher.reason(fault),
                )
            )

    def statistics(self) -> dict[str, Any]:
        """What docs/metrics.md says of `data_plane`: bytes, requests, seconds.

        Counters are of the mount, over all processes that served it; those of `layers`, by digest, of this process. Of these
        `present_bytes` and `stored_bytes` are blob bytes.
        """
        layers = {}
        for digest, served in self._layers.items():
            try:
                info = self._core.layer_info(served.slot)
            except CoreError:
                if not served.closing:
                    raise
                continue  # closed a moment ago
            layers[digest] = served.traffic.counted() | {
                "present_bytes": info.present_stored,
                "stored_bytes": info.blob_size,
                "present_content_bytes": info.present_raw,
                "content_bytes": info.content_size,
                "entries": info.dirents,
                "fill": self._filler.layer_statistics(served.slot),
            }
        images = self._images.statistics()
        return self._core.measurements() | {
            "fuse": self._core.statistics(),
            "plans": len(self._plans),
            "layers": layers,
            "images": images,
            "cache": self.room.statistics(),
            "fill": self._filler.statistics(),
            "profiles": self._recorder.statistics() if self._recorder is not None else NO_PROFILES,
            "layers_compared": self._copies.known,
            "peers": self.peering.statistics() if self.peering is not None else NO_PEERS,
            "descriptors": len(os.listdir("/proc/self/fd")) - 1,  # without that of the listing itself
            "journal_bytes": self._journal.size_bytes,
        }


async def _within(asking: Coroutine[Any, Any, bytes | None], seconds: float) -> bytes | None:
    """Unreachable, after that time."""
    try:
        async with asyncio.timeout(seconds):
            return await asking
    except TimeoutError:
        raise Unreachable(f"no answer within {seconds:g} s") from None


def _cgroup_of(pid: int) -> str:
    """/proc/PID/cgroup; empty for the kernel itself and for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text() if pid else ""
    except OSError:
        return ""


def _open_toc(digest: str, stored: bytes, place: _TocPlace) -> bytes:
    """In a thread: decompresses within bounds, turns it back from columns, compares the digest, validates."""
    try:
        # The decompressor believes the frame before it believes its bound.
        claimed_size = zstandard.frame_content_size(stored)
        raw_size = claimed_size if place.raw_size is None else place.raw_size
        if not 0 < raw_size <= MAX_TOC_BYTES or claimed_size not in (-1, raw_size):
            received = f"received one of {raw_size}, whose frame says {claimed_size}"
            raise LayerRefused(f"layer {digest}: expected a TOC of 1 to {MAX_TOC_BYTES} bytes, {received}")
        toc = restore_toc(stored, raw_size)
    except (zstandard.ZstdError, ValueError) as error:
        raise LayerRefused(f"layer {digest}: expected a TOC in one zstd frame: {error}") from error
    actual = f"sha256:{hashlib.sha256(toc).hexdigest()}"
    if actual != place.digest:
        raise LayerRefused(f"layer {digest}: expected a TOC with digest {place.digest}, received {actual}")
    try:
        check_toc(toc)
    except CoreError as error:
        raise LayerRefused(f"layer {digest}: {error.strerror}") from error
    return toc
