"""What was fetched for what: bytes of contents by kind of source and by cause, since this process began."""

from __future__ import annotations

import threading
from typing import Literal, get_args

import attrs

from weefs.traffic import SOURCES

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
