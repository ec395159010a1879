"""The data plane of one mount: stop 0 of a read's path, what is there to be read.

Plans, whose layers weefs/layers.py opens and serves; what fetches, fills, records and keeps the cache within its bound, put together; the
answers to what a service is asked.

Used in two places: by `weefs.service` for a node, and by `weenv mount` for one plan in its own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import attrs
import msgspec

from registry import Connections, Credentials
from registry.preload import preload_ranges
from weefs.cachedir import CacheDirectory, list_layers
from weefs.causes import AheadFor
from weefs.copies import Copies
from weefs.core import ChunkIndex, Core, CoreError, LayerSlot, Place, PlanInfo, PlanSlot
from weefs.core import CoreFault as CoreFault
from weefs.doctor import check_cache, check_descriptors, check_sources
from weefs.errors import LayerRefused, WeefsError
from weefs.fetch import Fetcher, FetchPolicy, in_thread
from weefs.fill import Filler, FillPolicy
from weefs.images import Images
from weefs.journal import Journal, PlanAdded, PlanRemoved
from weefs.layers import Layers, Served
from weefs.lending import Borrowed
from weefs.peerconfig import PeersConfig
from weefs.prefetch import REQUESTS_AT_ONCE as PREFETCHES_AT_ONCE
from weefs.prefetch import Prefetcher
from weefs.profiles import ProfileStore
from weefs.protocol import Check, FaultEvent, Layer, Plan, VerifiedLayer
from weefs.recording import NO_PROFILES, Recorder
from weefs.room import CacheBound, Room
from weefs.sources import AHEAD_WITHIN_S, Sources
from weefs.toc import Tocs
from weefs.warming import REQUESTS_AT_ONCE as WARMING_AT_ONCE
from weefs.warming import Warmer

if TYPE_CHECKING:
    from weefs.peering import Peering

SHORTEST_TIMEOUT_S = 1.0
"""To connect, and between two pieces of an answer: a machine under load is no stall."""

NO_PEERS: dict[str, Any] = {"members": [], "served_bytes": 0, "received_bytes": 0, "hedges": 0, "lies": 0}


@attrs.frozen
class _ServedPlan:
    place: Place
    info: PlanInfo
    layers: list[Served]


def plan_id(layers: Sequence[Layer]) -> str:
    """A plan is its ordered list of layers: equal plans have one directory."""
    return hashlib.sha256("\n".join(layer.digest for layer in layers).encode()).hexdigest()[:32]


@attrs.frozen
class _Lender:
    """What peering needs of a data plane."""

    _plane: DataPlane

    async def borrow(self, digest: str, layer: Layer | None) -> Borrowed | None:
        served = await self._plane._layers.borrow(digest, layer)
        return None if served is None else Borrowed(served.slot, self._plane._cache.directory(digest) / "data", served.toc_digest, served)

    def give_back(self, borrowed: Borrowed) -> None:
        self._plane._layers.give_back([borrowed.owner])

    def describe(self, digest: str) -> Layer | None:
        served = self._plane._layers.get(digest)
        return None if served is None else msgspec.structs.replace(served.layer, toc_digest=served.toc_digest)

    def sources(self) -> set[str]:
        return self._plane._sources.names()

    async def bring(self, slot: LayerSlot, chunks: list[ChunkIndex], *, claim: bool) -> None:
        await self._plane._fetcher.bring(slot, chunks, claim=claim)


class DataPlane:
    """Everything behind one mount.

    `run` must be running for reads to be answered and for unused layers to be closed; methods are called on its event loop.
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
        self._on_fault = on_fault
        self._policy = policy or FetchPolicy()
        self._journal = journal or Journal()
        self.room = Room(
            core, cache, bound or CacheBound(), self._slot_of, lambda digest: self._lock(f"layer {digest}"), self._forget_copies
        )
        self._copies = Copies(core, cache)
        self._peers = peers
        self.peering = self._make_peering(peers) if peers is not None else None
        self._fetcher = Fetcher(core, self._policy, self._report, self._close_idle, self.room, self._copies, self.peering)
        demand, within_s = self._fetcher.demand, min(AHEAD_WITHIN_S, self._policy.deadline_s / 3)
        fill = attrs.evolve(fill or FillPolicy("off"), wanted_requests_at_once=self._policy.requests_at_once, within_s=within_s)
        self._filler = Filler(core, AheadFor(self._fetcher, "fill"), demand, fill, lambda size: self.room.has_room(size))
        self._prefetcher = Prefetcher(core, AheadFor(self._fetcher, "profile"), demand, within_s)
        self._recorder = Recorder(core, ProfileStore(cache.path), self._prefetcher) if profiles else None
        # What is fetched ahead has connections of its own: a reader never waits for one of them. And a request that stalls must leave time
        # for another one before the deadline.
        ahead = WARMING_AT_ONCE + (PREFETCHES_AT_ONCE if profiles else 0) + (fill.wanted_requests_at_once if fill.mode != "off" else 0)
        timeout_s = max(SHORTEST_TIMEOUT_S, self._policy.deadline_s / 3)
        connections = Connections(per_host=self._policy.requests_at_once + ahead, timeout_s=timeout_s)
        self._sources = Sources(core, credentials, connections, self._lock)
        tocs = Tocs(cache, self._policy, self.room, self.peering)
        self._layers = Layers(
            core, cache, self._journal, self._sources, tocs, self._fetcher, self.room, self._copies, self._recorder, self._lock
        )
        self.warmer = Warmer(core, cache, self._layers, self._sources, self._fetcher, self.room, within_s)
        self._plans: dict[str, _ServedPlan] = {}
        self._images = Images(cache.path)
        self._plan_images: dict[str, list[Path]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self) -> None:
        """Fetches what readers wait for, and keeps the cache within its bound, until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(in_thread(preload_ranges))
            tasks.create_task(self.room.run())
            tasks.create_task(self._copies.run())
            tasks.create_task(self._fetcher.run())
            tasks.create_task(self._filler.run())
            tasks.create_task(self._prefetcher.run())
            tasks.create_task(self.warmer.run())
            if self._recorder is not None:
                tasks.create_task(self._recorder.run())
            if self.peering is not None:
                tasks.create_task(self.peering.run())

    def _make_peering(self, config: PeersConfig) -> Peering:
        from weefs.peering import Peering  # only where there are peers: its libraries take a quarter of a second to import

        return Peering(config, self._core, self.room, _Lender(self))

    def _forget_copies(self, digest: str) -> None:
        self._copies.forget(digest)

    def _close_idle(self) -> None:
        self._layers.close_idle()

    def _slot_of(self, digest: str) -> LayerSlot | None:
        served = self._layers.get(digest)
        return served.slot if served else None

    async def close(self) -> None:
        if self.peering is not None:
            await self.peering.close()
        await self._layers.closed()
        if self._recorder is not None:
            await self._recorder.close()
        await self._sources.close()

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
                taken = await self._layers.take(layers)
                try:
                    self._plans[name] = await self._add_plan(name, taken)
                    self._filler.add_plan(name, [served.slot for served in taken])
                except BaseException:
                    self._layers.give_back(taken)
                    raise
            paths, refused = await self._make_images(name, stacked) if images else ([], "")
            return msgspec.structs.replace(self._shown(name), images=[str(path) for path in paths], images_refused=refused)

    async def _add_plan(self, name: str, layers: list[Served]) -> _ServedPlan:
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
                await self._layers.end_runs(found.layers)
            finally:
                self._layers.give_back(found.layers)

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
                tasks.create_task(self._layers.restore(line))
        for plan in state.plans.values():
            layers = [self._layers.at(LayerSlot(slot)) for slot in plan.layers]
            for served in layers:
                served.users += 1
            slots = [served.slot for served in layers]
            _slot, info = await in_thread(self._core.add_plan, plan.plan_id, slots, place=plan.place)
            self._plans[plan.plan_id] = _ServedPlan(plan.place, info, layers)
            self._filler.add_plan(plan.plan_id, slots)

    async def finish_removals(self) -> None:
        """Of plans that the process before removed: the kernel may not have been told. After serving has begun."""
        for name in [*self._journal.state.leaving]:
            await in_thread(self._core.forget_name, name)
            self._journal.told(name)

    # ---- answers to the service ----

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
                verified.append(await self._layers.verify(each))
        return verified

    async def diagnose(self) -> list[Check]:
        """What `weenv node doctor` asks the data plane."""
        layers = await in_thread(lambda: [layer.record for layer in list_layers(self._cache.path)])
        sources = await check_sources(layers, self._sources.reader, self._sources.release)
        return [check_cache(await self.room.measure()), check_descriptors(), *sources, *await self._diagnose_peers()]

    async def _diagnose_peers(self) -> list[Check]:
        if self.peering is None or self._peers is None:
            return []
        from weefs.doctor_peers import check_members, check_membership, samples  # only where there are peers

        served = [(one.layer.digest, one.slot, self._cache.directory(one.layer.digest) / "data") for one in self._layers]
        having = await in_thread(samples, self._core, served)
        name, members = self.peering.name, self.peering.members.names
        membership = check_membership(self._peers, name, members, listening=self.peering.listening.is_set())
        return [membership, *await check_members(self._peers, name, self.peering.statistics()["members"], having)]

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
                    layer=self._layers.at(fault.layer).layer.digest,
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
        for served in self._layers:
            try:
                info = self._core.layer_info(served.slot)
            except CoreError:
                if not served.closing:
                    raise
                continue  # closed a moment ago
            layers[served.layer.digest] = served.traffic.counted() | {
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
            "fetched_for": self._fetcher.causes.counted(),
            "damaged_chunks": self._fetcher.damaged_chunks + self._layers.damaged_chunks,
            "prefetches": self.warmer.statistics(),
            "profiles": self._recorder.statistics() if self._recorder is not None else NO_PROFILES,
            "layers_compared": self._copies.known,
            "peers": self.peering.statistics() if self.peering is not None else NO_PEERS,
            "descriptors": len(os.listdir("/proc/self/fd")) - 1,  # without that of the listing itself
            "journal_bytes": self._journal.size_bytes,
        }


def _cgroup_of(pid: int) -> str:
    """/proc/PID/cgroup; empty for the kernel itself and for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text() if pid else ""
    except OSError:
        return ""
