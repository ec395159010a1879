"""Published layers as `layerformat.Layer`s, read by ranges: metadata at once, chunks when they are asked for.

Synchronous, for commands that look at groups; a node's data plane has its own way (weefs/fetch.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self, cast

from layerformat import Footer, FormatError, Layer, open_toc
from registry.credentials import Credentials
from registry.errors import IntegrityError, Unreachable
from registry.group import Group
from registry.manifest import LayerDescriptor
from registry.ranges import RangeReader, open_ranges

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

ATTEMPTS = 4
FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 5.0


class Ranges:
    """Ranges of the blobs of any sources, one after the other; counts requests and bytes. A context manager."""

    def __init__(self, credentials: Credentials | None) -> None:
        self._credentials = credentials
        self._runner = asyncio.Runner()
        self._readers: dict[str, RangeReader] = {}
        self.requests = 0
        self.bytes = 0

    def read(self, source: str, digest: str, offset: int, size: int) -> bytes:
        """Exactly `size` bytes of a blob at `offset`; tried again a few times. RegistryError."""
        for attempt in range(1, ATTEMPTS):
            try:
                return self._read_once(source, digest, offset, size)
            except Unreachable as error:
                delay_s = error.retry_after_s or FIRST_DELAY_S * 2.0 ** (attempt - 1)
                time.sleep(min(LONGEST_DELAY_S, delay_s))
        return self._read_once(source, digest, offset, size)

    def _read_once(self, source: str, digest: str, offset: int, size: int) -> bytes:
        self.requests += 1
        data = self._runner.run(self._read(source, digest, offset, size))
        self.bytes += len(data)
        return data

    async def _read(self, source: str, digest: str, offset: int, size: int) -> bytes:
        if source not in self._readers:
            self._readers[source] = await open_ranges(source, credentials=self._credentials)
        return await self._readers[source].read(digest, offset, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.closing(self._runner):
            for reader in self._readers.values():
                self._runner.run(reader.close())


class BlobFile(io.RawIOBase):
    """A published blob as a seekable file: every read is a range."""

    def __init__(self, ranges: Ranges, source: str, digest: str, size_bytes: int) -> None:
        self._ranges = ranges
        self._source = source
        self._digest = digest
        self._size = size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._position = (0, self._position, self._size)[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._size - self._position))
        if wanted:
            view[:wanted] = self._ranges.read(self._source, self._digest, self._position, wanted)
            self._position += wanted
        return wanted


def open_layer(ranges: Ranges, source: str, descriptor: LayerDescriptor) -> Layer:
    """One layer, its TOC fetched and checked whole; it is usable as long as `ranges` is. IntegrityError."""
    file = cast(BinaryIO, BlobFile(ranges, source, descriptor.digest, descriptor.size_bytes))
    try:
        if descriptor.toc_digest is None:
            return Layer.open(file)
        assert descriptor.toc_offset is not None  # the four are set together
        assert descriptor.toc_size_bytes is not None
        assert descriptor.toc_raw_size_bytes is not None
        digest = bytes.fromhex(descriptor.toc_digest.removeprefix("sha256:"))
        footer = Footer(descriptor.toc_offset, descriptor.toc_size_bytes, descriptor.toc_raw_size_bytes, digest)
        stored = ranges.read(source, descriptor.digest, footer.toc_offset, footer.toc_stored_size)
        toc = open_toc(stored, raw_size=footer.toc_raw_size, digest=digest)
        if toc.header.chunks_end != footer.toc_offset:
            raise FormatError("header", None, f"chunks_end {footer.toc_offset}, where the TOC begins", toc.header.chunks_end)
        return Layer(file, toc, footer, source=descriptor.digest, owns_file=False)
    except FormatError as error:
        raise IntegrityError(f"layer {descriptor.digest} of {source}: {error}") from error


def open_group(ranges: Ranges, group: Group, opened: dict[str, Layer] | None = None) -> list[Layer]:
    """The layers of a group, base first; `opened` has by digest those that are open already, and gets the others.
    RegistryError."""
    opened = {} if opened is None else opened
    for layer in group.layers:
        if layer.digest not in opened:
            opened[layer.digest] = open_layer(ranges, group.source, layer)
    return [opened[layer.digest] for layer in group.layers]


def stored_chunks(layers: Sequence[Layer]) -> dict[bytes, int]:
    """The chunks of layers: stored size in bytes by SHA-256, each once."""
    return {chunk.sha256: chunk.stored_size for layer in layers for chunk in layer.toc.chunks}


@contextlib.contextmanager
def open_groups(groups: Sequence[Group], credentials: Credentials | None) -> Iterator[tuple[Ranges, list[list[Layer]]]]:
    """The layers of groups, base first, and what reads them; equal layers are one `Layer`. RegistryError."""
    with Ranges(credentials) as ranges:
        opened: dict[str, Layer] = {}
        yield ranges, [open_group(ranges, group, opened) for group in groups]
