"""Whether readers wait for a fetch: said by the fetcher, heard by whoever fetches what nobody waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs

from weefs.core import LayerSlot


@attrs.define
class Place:
    """Of one fetch among those of demand: wanted, then taken."""

    _demand: Demand
    _taken: bool = False

    def taken(self) -> None:
        """It has its place among the requests at once."""
        self._taken = True
        self._demand.queued -= 1
        self._demand.changed()


@attrs.define
class Demand:
    """Of one fetcher, on its event loop. Times are `clock`'s, seconds."""

    clock: Callable[[], float] = time.monotonic
    in_flight: int = 0
    """Fetches for readers, from being wanted to their end."""
    queued: int = 0
    """Of them, those that have no place among the requests at once yet."""
    _last_s: dict[LayerSlot, float] = attrs.field(factory=dict)
    _latest_s: float = -float("inf")
    _listeners: list[Callable[[], None]] = attrs.field(factory=list)

    def listen(self, call: Callable[[], None]) -> None:
        """Calls it at every change."""
        self._listeners.append(call)

    def changed(self) -> None:
        for call in self._listeners:
            call()

    @contextmanager
    def of(self, layer: LayerSlot) -> Iterator[Place]:
        """For as long as a fetch for readers of this layer lasts."""
        place = Place(self)
        self.in_flight += 1
        self.queued += 1
        self._note(layer)
        self.changed()
        try:
            yield place
        finally:
            self.in_flight -= 1
            self.queued -= not place._taken
            self._note(layer)
            self.changed()

    def _note(self, layer: LayerSlot) -> None:
        self._last_s[layer] = self._latest_s = self.clock()

    def last_s(self, layer: LayerSlot) -> float:
        """When a reader of the layer waited last; minus infinity: none did."""
        return self._last_s.get(layer, -float("inf"))

    @property
    def latest_s(self) -> float:
        """The same of any layer."""
        return self._latest_s

    def forget(self, layer: LayerSlot) -> None:
        """Its slot will be another layer's."""
        self._last_s.pop(layer, None)
