"""How a layer is opened and served: its TOC in the cache, its files in the core, its source with the fetcher; and how it ends.

Layers are counted by their plans, and by whatever else needs them open. One that nobody has stays until the kernel holds no file of it and
no reader waits: an open file is read on. When it is wanted again before, it is taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from weefs.cachedir import LENT_MARK, CacheDirectory, opened, verify_directory
from weefs.copies import Copies
from weefs.core import ChunkIndex, Core, CoreError, DamagedError, LayerSlot, Place
from weefs.errors import LayerRefused
from weefs.fetch import Fetcher, LayerSource, in_thread
from weefs.images import layer_name
from weefs.journal import Journal, LayerAdded, LayerClosed
from weefs.log import say
from weefs.protocol import Layer, VerifiedLayer
from weefs.recording import Recorder
from weefs.room import Room
from weefs.sources import Sources
from weefs.toc import Tocs
from weefs.traffic import LayerTraffic


@attrs.define(eq=False)
class Served:
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


class Layers:
    """The layers of one core that are open, by their digests."""

    def __init__(
        self,
        core: Core,
        cache: CacheDirectory,
        journal: Journal,
        sources: Sources,
        tocs: Tocs,
        fetcher: Fetcher,
        room: Room,
        copies: Copies,
        recorder: Recorder | None,
        lock: Callable[[str], asyncio.Lock],
    ) -> None:
        """`lock`: by name; that of `layer <digest>` is held while one is opened or closed."""
        self._core = core
        self._cache = cache
        self._journal = journal
        self._sources = sources
        self._tocs = tocs
        self._fetcher = fetcher
        self._room = room
        self._copies = copies
        self._recorder = recorder
        self._lock = lock
        self._open: dict[str, Served] = {}
        self._by_slot: dict[LayerSlot, Served] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.damaged_chunks = 0
        """That verify() found, since this process began."""

    def __getitem__(self, digest: str) -> Served:
        return self._open[digest]

    def __iter__(self) -> Iterator[Served]:
        return iter([*self._open.values()])

    def get(self, digest: str) -> Served | None:
        return self._open.get(digest)

    def at(self, slot: LayerSlot) -> Served:
        return self._by_slot[slot]

    async def closed(self) -> None:
        """What is being closed is."""
        if self._closing:
            await asyncio.wait(self._closing)

    # ---- by whom they are used ----

    async def take(self, layers: Sequence[Layer]) -> list[Served]:
        """One for each, counted as used; all or none. Errors: the registry's, LayerRefused, CoreError, OSError."""
        taken: dict[str, Served] = {}

        async def take(layer: Layer) -> None:
            async with self._lock(f"layer {layer.digest}"):
                served = self._open.get(layer.digest) or self._add(await self._serve(layer))
                await self._take_lent(layer, served)
                served.users += 1
                taken[layer.digest] = served

        try:
            async with asyncio.TaskGroup() as tasks:
                for layer in {layer.digest: layer for layer in layers}.values():
                    tasks.create_task(take(layer))
        except BaseException:
            self.give_back(taken.values())
            raise
        # Each is counted once for the plan, however often it is in it.
        return [taken[layer.digest] for layer in layers]

    async def borrow(self, digest: str, layer: Layer | None) -> Served | None:
        """An open layer, counted as used, for a peer; one that is not is opened from its description, if there is one."""
        async with self._lock(f"layer {digest}"):
            served = self._open.get(digest)
            if served is None and layer is not None:
                served = self._add(await self._serve(layer, lent=True))
            if served is not None:
                served.users += 1
            return served

    def give_back(self, layers: Iterable[Served]) -> None:
        """As they were taken: one that is there several times was counted once."""
        for served in dict.fromkeys(layers):
            served.users -= 1
        self.close_idle()

    async def end_runs(self, layers: Iterable[Served]) -> None:
        """Of a plan that goes: of those that no other plan has."""
        if self._recorder is not None:
            for served in dict.fromkeys(layers):
                if served.users == 1:
                    await self._recorder.unused(served.slot)

    def _add(self, served: Served) -> Served:
        self._open[served.layer.digest] = self._by_slot[served.slot] = served
        return served

    async def _take_lent(self, layer: Layer, served: Served) -> None:
        """For a plan: from now on it is read here."""
        await self._check_lent(layer, served)
        if served.lent and self._recorder is not None:
            profile = await self._recorder.load(layer.digest)
            self._recorder.opened(served.slot, layer.digest, profile, cold=True, published=self._look_for_profile(layer))
        served.lent = False

    async def _check_lent(self, layer: Layer, served: Served) -> None:
        """A layer that was opened as a peer described it is used for a plan if its manifest, or its own source, names the same TOC: all
        digests of chunks are in that.
        """
        mark = self._cache.directory(layer.digest) / LENT_MARK
        if not mark.exists():
            return
        toc_digest = layer.toc_digest
        if toc_digest is None:
            source = await self._sources.of_layer(layer)
            try:
                toc_digest = await self._tocs.named(layer, source)
            finally:
                await self._sources.release(layer.source)
        if toc_digest != served.toc_digest:
            received = f"a peer that asked for it described it with {served.toc_digest}"
            raise LayerRefused(f"layer {layer.digest}: expected the TOC {toc_digest}, {received}; remove it with `weenv cache gc`")
        mark.unlink(missing_ok=True)

    # ---- opening ----

    async def _serve(self, layer: Layer, *, lent: bool = False) -> Served:
        source = await self._sources.of_layer(layer)
        try:
            published = None if lent else self._look_for_profile(layer)
            place = self._core.reserve_layer()
            try:
                served = await self._open_layer(layer, source, place, lent=lent)
                profile = await self._recorder.load(layer.digest) if self._recorder is not None and not lent else None
                self._journal.append(LayerAdded(slot=place.slot, generation=place.generation, layer=layer))
            except BaseException:
                self._forget(place)
                raise
        except BaseException:
            await self._sources.release(layer.source)
            raise
        if self._recorder is not None and not lent:
            self._recorder.opened(served.slot, layer.digest, profile, cold=True, published=published)
        served.lent = lent
        return served

    async def restore(self, line: LayerAdded) -> None:
        """As a predecessor had it; its source is opened later. Errors: as take(), if it is not in the cache any more."""
        served = self._add(await self._open_layer(line.layer, self._sources.of_layer_later(line.layer), line.place))
        if self._recorder is not None:
            self._recorder.opened(served.slot, line.layer.digest, await self._recorder.load(line.layer.digest), cold=False)

    async def _open_layer(self, layer: Layer, source: LayerSource, place: Place, *, lent: bool = False) -> Served:
        record = await asyncio.to_thread(self._cache.find, layer.digest)
        if record is None:
            record = await self._tocs.fetch(layer, source, lent=lent)
        self._cache.used(layer.digest)
        with opened(self._cache.directory(layer.digest)) as files:
            try:
                await in_thread(self._core.add_layer, files, name=layer_name(record.toc_digest), place=place)
            except CoreError as error:
                raise LayerRefused(f"layer {layer.digest}: {error.strerror}") from error
        self._room.idle_changes(-self._core.layer_info(LayerSlot(place.slot)).room)
        self._fetcher.add_source(LayerSlot(place.slot), source)
        self._copies.add(layer.digest)
        return Served(layer, place, source.traffic, record.toc_digest)

    def _forget(self, place: Place) -> None:
        """Undoes as much of _open_layer() as was done."""
        slot = LayerSlot(place.slot)
        with contextlib.suppress(CoreError, KeyError):
            self._fetcher.remove_source(slot)
        with contextlib.suppress(CoreError):
            self._core.close_layer(slot)
        self._core.release_layer(place)
        self._room.lost_count()

    def _look_for_profile(self, layer: Layer) -> asyncio.Task[bytes | None] | None:
        """Begins to, where it may be of use: while the layer's TOC is fetched."""
        if self._recorder is None or layer.group is None or self._recorder.has(layer.digest):
            return None
        return self._sources.published_profile(layer.source, layer.group)

    # ---- closing ----

    def close_idle(self) -> None:
        """Begins to close what no plan, reader and open file keeps."""
        for slot in self._core.idle_layers():
            served = self._by_slot.get(slot)
            if served is not None and served.users == 0 and not served.closing:
                served.closing = True
                task = asyncio.create_task(self._close(served))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def _close(self, served: Served) -> None:
        async with self._lock(f"layer {served.layer.digest}"):
            if self._recorder is not None and not served.users:
                await self._recorder.unused(served.slot)
            room = self._core.layer_info(served.slot).room
            self._room.idle_changes(room)
            closed = False
            try:
                closed = not served.users and await in_thread(self._core.close_layer, served.slot)
            finally:
                served.closing = False
                if not closed:
                    self._room.idle_changes(-room)
            if not closed:
                return
            del self._open[served.layer.digest], self._by_slot[served.slot]
            if self._recorder is not None:
                self._recorder.closed(served.slot)
            self._fetcher.remove_source(served.slot)
            try:
                self._journal.append(LayerClosed(slot=served.place.slot, generation=served.place.generation))
            except OSError as error:
                say(f"journal: {error}")  # a successor closes it once more
            self._core.release_layer(served.place)
            await self._sources.release(served.layer.source)

    # ---- verifying ----

    async def verify(self, digest: str) -> VerifiedLayer:
        """Compares the chunks of a layer in the cache, open or not, with their digests; damaged ones are dropped. CoreError, OSError."""
        served = self._open.get(digest)
        if served is None:
            async with self._lock(f"layer {digest}"):  # nobody opens it meanwhile
                if digest not in self._open:
                    good, damaged = await in_thread(verify_directory, self._cache.directory(digest))
                    self.damaged_chunks += damaged
                    return VerifiedLayer(digest=digest, good=good, damaged=damaged)
                served = self._open[digest]
        served.users += 1
        try:
            good, damaged = await in_thread(self._verify_served, served.slot)
        finally:
            self.give_back([served])
        self.damaged_chunks += damaged
        return VerifiedLayer(digest=digest, good=good, damaged=damaged)

    def _verify_served(self, slot: LayerSlot) -> tuple[int, int]:
        good = damaged = 0
        for chunk in range(self._core.layer_info(slot).chunks):
            try:
                good += self._core.check_chunk(slot, ChunkIndex(chunk))
            except DamagedError:
                damaged += 1
        return good, damaged
