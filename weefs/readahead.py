"""How far to read ahead of a sequential reader: a pure decision, apart from the fetching.

The kernel asks for at most its own readahead window beyond the reader, so a large file read from its beginning would
wait for one round trip per chunk. A miss that follows on one before it is a sequential reader; the window ahead of it
doubles with each further one. Only chunks that lie inside a large file (they are full: `raw_size` is the layer's chunk
size) begin or continue a run: what follows the last chunk of a file, or a gather of small files, is some other file,
which nobody may want. """

from __future__ import annotations

from collections import OrderedDict

import attrs

from weefs.core import ChunkIndex, LayerSlot, Miss

RUN = 4
"""Misses in a row that make a sequential reader. Loading a library touches two or three neighbouring chunks by chance:
with 2 here, a large import fetched 11 % more bytes in as many requests; with 4 it is 3 %."""
FIRST_WINDOW = 2
"""Chunks ahead of the last of them."""


@attrs.define
class ReadAhead:
    """Remembers where runs would go on: at most `max_runs` of them, the oldest forgotten first."""

    max_window: int = 8
    max_runs: int = 1024
    _runs: OrderedDict[tuple[LayerSlot, ChunkIndex], tuple[int, int]] = attrs.field(factory=OrderedDict, init=False)

    def forget(self, layer: LayerSlot) -> None:
        """Its slot will be another layer's."""
        for run in [run for run in self._runs if run[0] == layer]:
            del self._runs[run]

    def observe(self, miss: Miss, chunk_size: int) -> range:
        """The chunks to claim behind this miss of a layer with that chunk size; empty for the first of a run."""
        length, window = self._runs.pop((miss.layer, miss.chunk), (0, 0))
        if miss.raw_size < chunk_size:
            return range(0)
        if length >= RUN - 1:
            window = min(self.max_window, 2 * window or FIRST_WINDOW)
        begin = miss.chunk + 1
        end = begin + window
        self._runs[miss.layer, ChunkIndex(end)] = (length + 1, window)
        while len(self._runs) > self.max_runs:
            self._runs.popitem(last=False)
        return range(begin, end)
