"""The sources of layers (registries, local layouts), each opened once for all of its layers and closed with the last of them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import attrs

from registry import Connections, Credentials, RangeReader, Unreachable, open_ranges
from weefs.core import Core
from weefs.fetch import LayerSource
from weefs.link import Link
from weefs.profiles import ARTIFACT_TYPE as PROFILE_TYPE
from weefs.profiles import MAX_DOCUMENT_BYTES
from weefs.protocol import Layer
from weefs.traffic import LayerTraffic, source_kind

AHEAD_WITHIN_S = 10.0
"""For a request that nobody waits for, and at most a third of what a chunk has: a reader may come to wait for it."""


@attrs.define
class _Source:
    reader: RangeReader
    users: int = 0
    link: Link = attrs.field(factory=Link)
    attached: dict[str, asyncio.Task[bytes | None]] = attrs.field(factory=dict)
    """Documents of profiles that are or were asked for, by the group beside which they are."""

    async def close(self) -> None:
        for asking in self.attached.values():
            asking.cancel()
        if self.attached:
            await asyncio.wait(self.attached.values())
        await self.reader.close()


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


class Sources:
    """Of one core, by the names that manifests and plans have for them. Each is counted by those who use it."""

    def __init__(
        self, core: Core, credentials: Credentials | None, connections: Connections, lock: Callable[[str], asyncio.Lock]
    ) -> None:
        """`connections` are closed with this."""
        self._core = core
        self._credentials = credentials
        self._connections = connections
        self._lock = lock
        self._open: dict[str, _Source] = {}

    def names(self) -> set[str]:
        """Of those that are in use."""
        return {*self._open}

    async def reader(self, name: str) -> RangeReader:
        """To be given back with release(). RegistryError."""
        async with self._lock(f"source {name}"):
            if name not in self._open:
                self._open[name] = _Source(await open_ranges(name, credentials=self._credentials, connections=self._connections))
            self._open[name].users += 1
            return self._open[name].reader

    async def release(self, name: str) -> None:
        released = self._open[name]
        released.users -= 1
        if released.users == 0:
            del self._open[name]
            await released.close()

    async def of_layer(self, layer: Layer) -> LayerSource:
        """The source as a layer's own, to be given back with release(layer.source). RegistryError."""
        await self.reader(layer.source)
        return self._of_layer(layer)

    def of_layer_later(self, layer: Layer) -> LayerSource:
        """The same, opened when something is fetched: errors are those of the fetch."""
        late = _LateRanges(layer.source, self._credentials, self._connections)
        self._open.setdefault(layer.source, _Source(late)).users += 1
        return self._of_layer(layer)

    def _of_layer(self, layer: Layer) -> LayerSource:
        source = self._open[layer.source]
        traffic = LayerTraffic(also=functools.partial(self._core.count_traffic, source_kind(layer.source)))
        return LayerSource(source.reader, layer.digest, traffic, source.link, source_kind(layer.source))

    def published_profile(self, source: str, group: str) -> asyncio.Task[bytes | None]:
        """Begins to look for the document beside a group of a source in use: once for a group, as long as that is."""
        attached = self._open[source].attached
        if group not in attached or attached[group].cancelled():
            asking = self._open[source].reader.attached(group, PROFILE_TYPE, MAX_DOCUMENT_BYTES)
            attached[group] = task = asyncio.create_task(_within(asking, AHEAD_WITHIN_S))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever wants it hears of it, or nobody does
        return attached[group]

    async def close(self) -> None:
        for source in self._open.values():
            await source.close()
        self._open.clear()
        await self._connections.close()


async def _within(asking: Coroutine[Any, Any, bytes | None], seconds: float) -> bytes | None:
    """Unreachable, after that time."""
    try:
        async with asyncio.timeout(seconds):
            return await asking
    except TimeoutError:
        raise Unreachable(f"no answer within {seconds:g} s") from None
