"""Fetching what a profile names, before anybody asks: which ranges, and when (docs/fill.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import attrs

from weefs.coalesce import Range, coalesce_near
from weefs.core import ChunkIndex, Core, LayerSlot, Miss
from weefs.demand import Demand
from weefs.fill import AheadFetcher
from weefs.link import Link

REQUESTS_AT_ONCE = 8
"""Ranges of 4 MiB: with a round trip of 20 ms, two of them fill 1 Gb/s, and eight 10 Gb/s."""
MAX_GAP_BYTES = 256 << 10
"""Whatever a round trip is worth: in a cache that is full, something else goes for what nobody reads."""
MAX_GAP_SHARE = 1 / 8
"""Of the bytes that are wanted, in all."""


def plan_ranges(wanted: Sequence[Miss], link: Link) -> list[Range]:
    """The ranges for these chunks of one layer, those first that have the earliest. Gaps are as wide as a round trip is worth, unless they
    would be too much together.
    """
    gap = min(MAX_GAP_BYTES, link.bytes_per_round_trip)
    bytes_wanted = sum(miss.stored_size for miss in wanted)
    while True:
        ranges = coalesce_near(wanted, gap)
        if gap == 0 or sum(one.size for one in ranges) <= bytes_wanted * (1 + MAX_GAP_SHARE):
            return ranges
        gap //= 2


@attrs.define(eq=False)
class Prefetch:
    """Of one layer, from its opening to its end: what is named, and what was fetched of it."""

    slot: LayerSlot
    ended: bool = False
    fetched: dict[ChunkIndex, Miss] = attrs.field(factory=dict)


class Prefetcher:
    """Of one core; everything on its event loop."""

    def __init__(self, core: Core, fetcher: AheadFetcher, demand: Demand, within_s: float) -> None:
        """`within_s`: for one request."""
        self._core = core
        self._fetcher = fetcher
        self._demand = demand
        self._within_s = within_s
        self._planned: asyncio.Queue[tuple[Prefetch, Range]] = asyncio.Queue()
        self._places = asyncio.Semaphore(REQUESTS_AT_ONCE)
        self._changed = asyncio.Event()
        self.fetched_bytes = 0
        demand.listen(self._changed.set)

    def begin(self, slot: LayerSlot, chunks: Sequence[ChunkIndex]) -> Prefetch:
        """Fetches these chunks, in about their order, unless they are present by then."""
        prefetch = Prefetch(slot)
        for wanted in plan_ranges([self._core.describe(slot, chunk) for chunk in chunks], self._fetcher.link(slot)):
            self._planned.put_nowait((prefetch, wanted))
        return prefetch

    @property
    def planned(self) -> int:
        """Ranges that were not begun yet."""
        return self._planned.qsize()

    async def run(self) -> None:
        """Fetches until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                prefetch, wanted = await self._planned.get()
                await self._places.acquire()
                while self._demand.queued:
                    self._changed.clear()
                    await self._changed.wait()
                claimed = [] if prefetch.ended else self._claim(wanted)
                if claimed:
                    tasks.create_task(self._fetch(prefetch, claimed))
                else:
                    self._places.release()

    def _claim(self, wanted: Range) -> list[Miss]:
        """What is absent of a range, gaps included. Only now: until its range begins, a reader fetches a chunk for itself."""
        first, last = wanted.misses[0].chunk, wanted.misses[-1].chunk
        claims = (self._core.claim(wanted.layer, ChunkIndex(chunk)) for chunk in range(first, last + 1))
        named = {miss.chunk for miss in wanted.misses}
        claimed = [miss for miss in claims if miss is not None]
        if named.isdisjoint(miss.chunk for miss in claimed):  # only gaps are left
            for miss in claimed:
                self._core.unclaim(miss.layer, miss.chunk)
            return []
        return claimed

    async def _fetch(self, prefetch: Prefetch, claimed: list[Miss]) -> None:
        try:
            ahead = await self._fetcher.fetch_ahead(claimed, within_s=self._within_s, gap_bytes=MAX_GAP_BYTES)
        finally:
            self._places.release()
        prefetch.fetched.update((miss.chunk, miss) for miss in ahead.arrived)
        self.fetched_bytes += sum(miss.stored_size for miss in ahead.arrived)
