"""What a source costs: how long a round trip to it takes and how many bytes come in a second, from the requests that are made anyway.

Small answers tell the round trip, large ones the bandwidth. Of round trips the least of the last few is taken, since everything that
disturbs one makes it longer; of bandwidths, the most.
"""

from __future__ import annotations

from collections import deque

import attrs

SMALL_BYTES = 64 << 10
"""At 1 Gb/s, half a millisecond of an answer's time."""
LARGE_BYTES = 256 << 10
REMEMBERED = 16
ASSUMED_ROUND_TRIP_S = 0.02
"""Before anything is known: a registry in the same region."""
ASSUMED_BYTES_PER_S = 50e6


@attrs.define
class Link:
    """Of one source, to all its layers."""

    _round_trips_s: deque[float] = attrs.field(factory=lambda: deque(maxlen=REMEMBERED))
    _rates: deque[float] = attrs.field(factory=lambda: deque(maxlen=REMEMBERED))

    def observe(self, size: int, took_s: float) -> None:
        """A request that brought this many bytes."""
        if size <= SMALL_BYTES:
            self._round_trips_s.append(took_s)
        if size >= LARGE_BYTES:
            self._rates.append(size / max(took_s - self.round_trip_s / 2, took_s / 2, 1e-6))

    @property
    def round_trip_s(self) -> float:
        return min(self._round_trips_s, default=ASSUMED_ROUND_TRIP_S)

    @property
    def bytes_per_s(self) -> float:
        return max(self._rates, default=ASSUMED_BYTES_PER_S)

    @property
    def bytes_per_round_trip(self) -> int:
        """What could have come while a request was on its way: more than this is not fetched to save one."""
        return int(self.round_trip_s * self.bytes_per_s)
