"""What was fetched for what: bytes of contents by kind of source and by cause, since this process began."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import attrs

from weefs.core import LayerSlot, Miss
from weefs.link import Link
from weefs.traffic import SOURCES

if TYPE_CHECKING:
    from weefs.fetch import Ahead, Fetcher

Cause = Literal["miss", "read_ahead", "profile", "fill", "prefetch"]
"""A reader waits, or a peer; ahead of a sequential one; since a profile names it; so that all is there; since somebody asked for it."""
CAUSES: tuple[Cause, ...] = get_args(Cause)


@attrs.define
class CauseCounts:
    """Any thread may add. Bytes as they came: of a registry or a layout as they are stored there, of a copy or a peer uncompressed."""

    _bytes: dict[tuple[str, Cause], int] = attrs.field(
        factory=lambda: {(source, cause): 0 for source in SOURCES for cause in CAUSES}
    )
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def add(self, source: str, cause: Cause, size: int) -> None:
        """`source`: one of weefs.traffic.SOURCES."""
        with self._lock:
            self._bytes[source, cause] += size

    def counted(self) -> dict[str, dict[str, int]]:
        """By source and cause."""
        with self._lock:
            return {source: {cause: self._bytes[source, cause] for cause in CAUSES} for source in SOURCES}


@attrs.frozen
class AheadFor:
    """A fetcher's fetch_ahead() for one cause."""

    _fetcher: Fetcher
    _cause: Cause

    async def fetch_ahead(self, claimed: Sequence[Miss], *, within_s: float, gap_bytes: int = 0) -> Ahead:
        """As Fetcher.fetch_ahead()."""
        return await self._fetcher.fetch_ahead(claimed, within_s=within_s, cause=self._cause, gap_bytes=gap_bytes)

    def link(self, layer: LayerSlot) -> Link:
        """What the layer's source costs."""
        return self._fetcher.link(layer)
