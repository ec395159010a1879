"""The data plane of one mount: stop 0 of a read's path, what is there to be read.

Layers and plans by digest, their metadata fetched, their misses served.

Used in two places: by `weefs.service` for a node, and by `weenv mount` for one plan in its own process.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import attrs
import zstandard

from layerformat import FormatError, decode_footer, restore_toc
from registry import Credentials, RangeReader, open_ranges
from weefs.cachedir import CacheDirectory, LayerRecord, boot_id
from weefs.core import Core, CoreError, LayerSlot, PlanInfo, PlanSlot, check_toc
from weefs.core import CoreFault as CoreFault
from weefs.errors import LayerRefused, WeefsError
from weefs.fetch import Fetcher, FetchPolicy, LayerSource, LayerTraffic, in_thread, read_patiently
from weefs.protocol import FaultEvent, Layer, Plan

FOOTER_SIZE = 80
MAX_TOC_BYTES = (4 << 30) - 1
SLOWEST_BYTES_PER_S = 128 << 10
"""What a TOC's deadline allows for: it may be large, and a slow link is no failure."""


@attrs.frozen
class _TocPlace:
    offset: int
    size: int
    raw_size: int | None
    digest: str


@attrs.define
class _Served:
    layer: Layer
    slot: LayerSlot
    traffic: LayerTraffic


def plan_id(layers: Sequence[Layer]) -> str:
    """A plan is its ordered list of layers: equal plans have one directory."""
    return hashlib.sha256("\n".join(layer.digest for layer in layers).encode()).hexdigest()[:32]


class DataPlane:
    """Everything behind one mount.

    `run_fetcher` must be running for reads to be answered; methods are called on its event loop.
    """

    def __init__(
        self,
        core: Core,
        cache: CacheDirectory,
        *,
        policy: FetchPolicy | None = None,
        credentials: Credentials | None = None,
        on_fault: Callable[[FaultEvent], None] | None = None,
    ) -> None:
        self._core = core
        self._cache = cache
        self._credentials = credentials
        self._on_fault = on_fault
        self._policy = policy or FetchPolicy()
        self._fetcher = Fetcher(core, self._policy, self._report)
        self._readers: dict[str, RangeReader] = {}
        self._layers: dict[str, _Served] = {}
        self._by_slot: dict[LayerSlot, _Served] = {}
        self._plans: dict[str, tuple[PlanSlot, PlanInfo]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run_fetcher(self) -> None:
        await self._fetcher.run()

    async def close(self) -> None:
        for reader in self._readers.values():
            await reader.close()
        self._readers.clear()

    def _lock(self, name: str) -> asyncio.Lock:
        """One for each name, as long as somebody holds it or waits for it."""
        return self._locks.setdefault(name, asyncio.Lock())

    # ---- plans ----

    async def add_plan(self, layers: Sequence[Layer]) -> Plan:
        """Adds the layers, base first, and their plan; what is known already costs nothing.

        Errors: the registry's, LayerRefused, CoreError.
        """
        if not layers:
            raise WeefsError("plan: expected at least one layer, received none")
        name = plan_id(layers)
        async with self._lock(f"plan {name}"):
            if name not in self._plans:
                slots = await self._add_layers(layers)
                self._plans[name] = await in_thread(self._core.add_plan, name, slots)
        _slot, info = self._plans[name]
        return Plan(plan_id=name, entries=info.entries, content_bytes=info.content_size)

    async def remove_plan(self, name: str) -> None:
        """Nothing may use its directory any more. Unknown names are an error."""
        async with self._lock(f"plan {name}"):
            found = self._plans.pop(name, None)
            if found is None:
                raise WeefsError(f"plan {name}: not served here")
            await in_thread(self._core.remove_plan, found[0])

    def show_as_root(self, name: str) -> None:
        """The plan becomes the mount's root directory itself; before serving begins."""
        self._core.set_root(self._plans[name][0])

    # ---- layers ----

    async def _add_layers(self, layers: Sequence[Layer]) -> list[LayerSlot]:
        async with asyncio.TaskGroup() as tasks:
            added = [tasks.create_task(self._add_layer(layer)) for layer in dict.fromkeys(layers)]
        slots = {task.result().layer.digest: task.result().slot for task in added}
        return [slots[layer.digest] for layer in layers]

    async def _add_layer(self, layer: Layer) -> _Served:
        async with self._lock(f"layer {layer.digest}"):
            served = self._layers.get(layer.digest)
            if served is None:
                served = await self._serve_layer(layer)
                self._layers[layer.digest] = self._by_slot[served.slot] = served
            return served

    async def _serve_layer(self, layer: Layer) -> _Served:
        source = LayerSource(await self._reader(layer.source), layer.digest, LayerTraffic())
        record = await asyncio.to_thread(self._cache.find, layer.digest)
        if record is None:
            record = await self._fetch_toc(layer, source)
        fds = self._cache.open_files(layer.digest)
        try:
            slot = await in_thread(self._core.add_layer, fds[0], record.toc_size_bytes, fds[1], fds[2], boot_id())
        except CoreError as error:
            raise LayerRefused(f"layer {layer.digest}: {error.strerror}") from error
        finally:
            for fd in fds:
                os.close(fd)
        self._fetcher.add_source(slot, source)
        return _Served(layer, slot, source.traffic)

    async def _fetch_toc(self, layer: Layer, source: LayerSource) -> LayerRecord:
        deadline = asyncio.get_running_loop().time() + self._policy.deadline_s
        place = await self._toc_place(layer, source, deadline)
        deadline += place.size / SLOWEST_BYTES_PER_S
        stored = await self._read_metadata(source, place.offset, place.size, deadline)
        toc = await asyncio.to_thread(_open_toc, layer.digest, stored, place)
        record = LayerRecord(
            digest=layer.digest,
            size_bytes=layer.size_bytes,
            source=layer.source,
            toc_digest=place.digest,
            toc_size_bytes=len(toc),
            content_bytes=int.from_bytes(toc[48:56], "little"),
            chunks=int.from_bytes(toc[72 + 4 * 16 + 8 : 72 + 4 * 16 + 16], "little"),
        )
        await asyncio.to_thread(self._cache.create, record, toc)
        return record

    async def _read_metadata(self, source: LayerSource, offset: int, size: int, deadline: float) -> bytes:
        traffic = source.traffic

        def count() -> None:
            traffic.metadata_requests += 1

        stored = await read_patiently(source, offset, size, deadline=deadline, policy=self._policy, count=count)
        traffic.metadata_bytes += len(stored)
        return stored

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
        async with self._lock(f"source {source}"):
            if source not in self._readers:
                self._readers[source] = await open_ranges(source, credentials=self._credentials)
            return self._readers[source]

    # ---- reporting ----

    def _report(self, faults: list[CoreFault]) -> None:
        if self._on_fault is None:
            return
        for fault in faults:
            digest = self._by_slot[fault.layer].layer.digest
            reason = self._fetcher.reason(fault)
            self._on_fault(FaultEvent(pid=fault.pid, layer=digest, chunk=fault.chunk, error=reason))

    def statistics(self) -> dict[str, Any]:
        """Counters since the start, bytes and requests.

        `layers` by digest; of them `present_bytes` and `stored_bytes` in blob bytes.
        """
        layers = {}
        for digest, served in self._layers.items():
            info = self._core.layer_info(served.slot)
            layers[digest] = attrs.asdict(served.traffic) | {
                "present_bytes": info.present_stored,
                "stored_bytes": info.blob_size,
                "present_content_bytes": info.present_raw,
                "content_bytes": info.content_size,
                "entries": info.dirents,
            }
        return {"fuse": self._core.statistics(), "plans": len(self._plans), "layers": layers}


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
