"""Which ranges to ask for, given the chunks that are missing: a pure decision, apart from the fetching.

Chunks lie back to back in the blob in the order of the stream, so neighbouring misses are one range. A gap is not
fetched for the sake of a larger range where somebody waits: every byte that nobody asked for is what this system exists to save. What
is fetched ahead in large numbers may bridge small ones (`coalesce_near`).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from weefs.core import LayerSlot, Miss

MAX_RANGE_BYTES = 4 << 20
"""Of one request: large enough that its overhead does not matter, small enough that its first reader waits not long."""


@attrs.frozen
class Range:
    """Chunks of one layer's blob, by offset, to be fetched with one request."""

    layer: LayerSlot
    misses: tuple[Miss, ...]

    @property
    def offset(self) -> int:
        """Blob offset, bytes."""
        return self.misses[0].blob_offset

    @property
    def size(self) -> int:
        """Bytes."""
        return self.misses[-1].blob_offset + self.misses[-1].stored_size - self.offset


def coalesce(misses: Sequence[Miss], max_range_bytes: int = MAX_RANGE_BYTES) -> list[Range]:
    """Groups misses into ranges, those that contain the earliest misses first; a miss that occurs twice counts once.

    A chunk larger than the bound is a range by itself.
    """
    return coalesce_near(misses, 0, max_range_bytes)


def coalesce_near(misses: Sequence[Miss], gap_bytes: int, max_range_bytes: int = MAX_RANGE_BYTES) -> list[Range]:
    """The same, where up to `gap_bytes` of other chunks may lie between two misses of a range."""
    order = {(miss.layer, miss.chunk): number for number, miss in reversed(list(enumerate(misses)))}
    unique = {(miss.layer, miss.chunk): miss for miss in misses}
    ranges: list[list[Miss]] = []
    for miss in sorted(unique.values(), key=lambda m: (m.layer, m.blob_offset)):
        current = ranges[-1] if ranges else None
        if (
            current
            and current[0].layer == miss.layer
            and 0 <= miss.blob_offset - current[-1].blob_offset - current[-1].stored_size <= gap_bytes
            and miss.blob_offset + miss.stored_size - current[0].blob_offset <= max_range_bytes
        ):
            current.append(miss)
        else:
            ranges.append([miss])
    ranges.sort(key=lambda group: min(order[(miss.layer, miss.chunk)] for miss in group))
    return [Range(group[0].layer, tuple(group)) for group in ranges]
