"""Memory for what arrives, used again: fresh memory costs as much as a copy."""

from __future__ import annotations

import asyncio

POOLED_BYTES = 4 << 20
"""Of a buffer that is used again: the largest range that is fetched at once."""
MIN_POOLED_BYTES = 256 << 10
MAX_POOLED = 8
KEPT_S = 5.0


class Buffers:
    """Memory for bodies, used again by the next of them; given up when nobody has wanted any for `KEPT_S`. On one event loop."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        self._giving_up: asyncio.TimerHandle | None = None

    def take(self, size: int) -> memoryview:
        """So many bytes, of any content."""
        if not MIN_POOLED_BYTES < size <= POOLED_BYTES:
            return memoryview(bytearray(size))
        return memoryview(self._free.pop() if self._free else bytearray(POOLED_BYTES))[:size]

    def give_back(self, view: memoryview) -> None:
        """Nobody uses it any more. It need not be given back."""
        if not isinstance(view.obj, bytearray) or len(view.obj) != POOLED_BYTES or len(self._free) == MAX_POOLED:
            return
        self._free.append(view.obj)
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._giving_up = asyncio.get_running_loop().call_later(KEPT_S, self._free.clear)
