"""A plan's layers, open where they are published: metadata at once, contents by ranges when they are read.

Whoever will read many files says so first (`Plan.announce`): then neighbouring chunks that are wanted travel in one
request, and nothing that is not wanted does.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen

from layerformat import Layer
from registry.tocs import Ranges, open_group

if TYPE_CHECKING:
    from registry import Credentials, Group
    from weefs.merge import File

_MAX_REQUEST_BYTES = 4 << 20


class PlannedRanges(Ranges):
    """Ranges that are fetched together where they were announced together; the last answer is kept."""

    def __init__(self, credentials: Credentials | None) -> None:
        super().__init__(credentials)
        self._wanted: dict[str, list[tuple[int, int]]] = {}
        self._kept = ("", 0, b"")

    def expect(self, wanted: dict[str, list[tuple[int, int]]]) -> None:
        """Offset and end of what will be read of each blob, by digest, bytes."""
        self._wanted = {digest: _merged(ranges) for digest, ranges in wanted.items()}

    def read(self, source: str, digest: str, offset: int, size: int) -> bytes:
        kept, at, data = self._kept
        start = offset - at
        if kept != digest or not 0 <= start <= start + size <= len(data):
            data = super().read(source, digest, offset, max(size, self._announced(digest, offset)))
            self._kept = (digest, offset, data)
            start = 0
        return data[start : start + size]

    def _announced(self, digest: str, offset: int) -> int:
        """How many bytes from `offset` are wanted without a gap, as far as one request should go."""
        ranges = self._wanted.get(digest, [])
        index = bisect.bisect_right(ranges, offset, key=lambda pair: pair[0]) - 1
        return min(ranges[index][1] - offset, _MAX_REQUEST_BYTES) if index >= 0 else 0


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


@frozen
class Plan:
    """Open layers, base first; the first `below` of them are of the groups below the one that is checked."""

    layers: tuple[Layer, ...]
    digests: tuple[str, ...]
    below: int
    ranges: PlannedRanges = field(repr=False)

    def announce(self, files: Iterable[File]) -> None:
        """That the contents of these regular files will be read next, best in the order of `position`."""
        wanted: dict[str, list[tuple[int, int]]] = {}
        for file in files:
            wanted.setdefault(self.digests[file.layer], []).extend(_blob_ranges(self.layers[file.layer], file.number))
        self.ranges.expect(wanted)


def position(layer: Layer, number: int) -> int:
    """Where a regular file's data begins in the stream: reading in this order fetches no chunk twice."""
    segments = layer.toc.segments(number)
    return segments[0].stream_offset if segments else 0


def _blob_ranges(layer: Layer, number: int) -> Iterator[tuple[int, int]]:
    chunks = layer.toc.chunks
    for segment in layer.toc.segments(number):
        end = segment.stream_offset + segment.length
        index = max(0, bisect.bisect_right(chunks, segment.stream_offset, key=lambda chunk: chunk.stream_offset) - 1)
        while index < len(chunks) and chunks[index].stream_offset < end:
            yield chunks[index].blob_offset, chunks[index].blob_offset + chunks[index].stored_size
            index += 1


@contextlib.contextmanager
def open_plan(below: Sequence[Group], group: Group, credentials: Credentials | None) -> Iterator[Plan]:
    """Opens the layers of a plan; their metadata is fetched and checked whole. RegistryError and its kinds."""
    with PlannedRanges(credentials) as ranges:
        layers = [layer for part in (*below, group) for layer in open_group(ranges, part)]
        digests = [layer.digest for part in (*below, group) for layer in part.layers]
        yield Plan(tuple(layers), tuple(digests), sum(len(part.layers) for part in below), ranges)
