"""A layer's TOC: where it is in the blob, fetched from there or from peers, verified, and put into the cache."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

import attrs
import zstandard

from layerformat import FormatError, decode_footer, restore_toc
from weefs.cachedir import CacheDirectory, LayerRecord
from weefs.core import CoreError, check_toc
from weefs.errors import LayerRefused
from weefs.fetch import FetchPolicy, LayerSource, read_patiently
from weefs.protocol import Layer
from weefs.room import Room

if TYPE_CHECKING:
    from weefs.peering import Peering

FOOTER_SIZE = 80
MAX_TOC_BYTES = (4 << 30) - 1
SLOWEST_BYTES_PER_S = 128 << 10
"""What a TOC's deadline allows for: it may be large, and a slow link is no failure."""


@attrs.frozen
class TocPlace:
    """In the blob. `raw_size`: None if the manifest does not say."""

    offset: int
    size: int
    raw_size: int | None
    digest: str


class Tocs:
    """Of one cache."""

    def __init__(self, cache: CacheDirectory, policy: FetchPolicy, room: Room, peering: Peering | None) -> None:
        self._cache = cache
        self._policy = policy
        self._room = room
        self._peering = peering

    async def fetch(self, layer: Layer, source: LayerSource, *, lent: bool) -> LayerRecord:
        """Into the cache. Errors: the registry's, LayerRefused, OSError."""
        toc = await self._from_peers(layer)
        toc_digest = layer.toc_digest
        if toc is None or toc_digest is None:
            deadline = asyncio.get_running_loop().time() + self._policy.deadline_s
            place = await self._place(layer, source, deadline)
            deadline += place.size / SLOWEST_BYTES_PER_S
            stored = await self._read_metadata(source, place.offset, place.size, deadline)
            toc, toc_digest = await asyncio.to_thread(open_toc, layer.digest, stored, place), place.digest
        record = LayerRecord(
            digest=layer.digest,
            size_bytes=layer.size_bytes,
            source=layer.source,
            toc_digest=toc_digest,
            toc_size_bytes=len(toc),
            content_bytes=int.from_bytes(toc[48:56], "little"),
            chunks=int.from_bytes(toc[72 + 4 * 16 + 8 : 72 + 4 * 16 + 16], "little"),
        )
        await self._room.make(len(toc))
        await asyncio.to_thread(self._cache.create, record, toc, lent=lent)
        self._room.idle_changes(len(toc))
        return record

    async def _from_peers(self, layer: Layer) -> bytes | None:
        """With the digest that its manifest says. None: no peer has it."""
        toc = await self._peering.toc(layer) if self._peering is not None else None
        if toc is None:
            return None
        try:
            await asyncio.to_thread(check_toc, bytes(toc))
        except CoreError as error:
            raise LayerRefused(f"layer {layer.digest}: {error.strerror}") from error
        return bytes(toc)

    async def _read_metadata(self, source: LayerSource, offset: int, size: int, deadline: float) -> bytes:
        return await read_patiently(source, offset, size, deadline=deadline, policy=self._policy, metadata=True)

    async def named(self, layer: Layer, source: LayerSource) -> str:
        """The digest that the manifest says, or else the blob's footer. Errors: the registry's, LayerRefused."""
        if layer.toc_digest is not None:
            return layer.toc_digest
        deadline = asyncio.get_running_loop().time() + self._policy.deadline_s
        return (await self._place(layer, source, deadline)).digest

    async def _place(self, layer: Layer, source: LayerSource, deadline: float) -> TocPlace:
        """Where the manifest says the TOC is; without that, where the footer does."""
        if layer.toc_offset is not None and layer.toc_size_bytes is not None and layer.toc_digest is not None:
            return TocPlace(layer.toc_offset, layer.toc_size_bytes, layer.toc_raw_size_bytes, layer.toc_digest)
        if layer.size_bytes < FOOTER_SIZE:
            received = f"the manifest says {layer.size_bytes}"
            raise LayerRefused(f"layer {layer.digest}: expected at least {FOOTER_SIZE} bytes, {received}")
        footer_bytes = await self._read_metadata(source, layer.size_bytes - FOOTER_SIZE, FOOTER_SIZE, deadline)
        try:
            footer = decode_footer(footer_bytes, blob_size=layer.size_bytes)
        except FormatError as error:
            raise LayerRefused(f"layer {layer.digest}: {error}") from error
        digest = f"sha256:{footer.toc_sha256.hex()}"
        return TocPlace(footer.toc_offset, footer.toc_stored_size, footer.toc_raw_size, digest)


def open_toc(digest: str, stored: bytes, place: TocPlace) -> bytes:
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
