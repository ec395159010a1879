"""The fill: what nobody has asked for is fetched while nobody waits (docs/fill.md).

What to do next is decided by `Filler.next_step`, which looks and changes nothing outside; `run` does it. It is asked again whenever
something changes: a reader comes or is served, a request of the fill ends, a plan comes or goes, a time is reached.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import attrs

from weefs.coalesce import MAX_RANGE_BYTES
from weefs.core import Core, LayerSlot, Miss
from weefs.demand import Demand
from weefs.fetch import Ahead
from weefs.link import Link

Mode = Literal["off", "idle", "eager"]
MODES: tuple[Mode, ...] = ("off", "idle", "eager")
LONGEST_RANGE_S = 1.0
"""Whoever comes to want a chunk waits for the range that it is in."""
LEAST_RANGE_BYTES = 64 << 10
ROOM_LOOKED_AT_S = 5.0
"""As often as the room is measured."""
NO_ROOM = "the cache is nearly full"
ELSEWHERE_PAUSE_S = 1.0
"""Others fetch what a layer lacks: look again."""


@attrs.frozen
class FillPolicy:
    """Times in seconds, sizes in bytes."""

    mode: Mode = "idle"
    rate: int | None = None
    """Bytes a second; None: no bound."""
    idle_s: float = 2.0
    requests_at_once: int = 2
    wanted_share: float = 0.25
    """Of a layer's bytes: whose readers wanted so much want most of it."""
    wanted_requests_at_once: int = 16
    range_bytes: int = MAX_RANGE_BYTES
    near_demand_bytes: int = 1 << 20
    """Of a range, while a reader waited within the last `idle_s`."""
    within_s: float = 10.0
    """Of one request."""
    first_pause_s: float = 1.0
    longest_pause_s: float = 300.0


@attrs.define
class Bucket:
    """A rate: spending beyond what has come in makes a debt, and nothing is spent until it is paid."""

    rate: float
    """A second."""
    _balance: float = 0.0
    _at_s: float | None = None

    def free_at_s(self, now_s: float) -> float:
        """When something may be spent."""
        self._earn(now_s)
        return now_s + max(0.0, -self._balance / self.rate)

    def spend(self, amount: float, now_s: float) -> None:
        self._earn(now_s)
        self._balance -= amount

    def _earn(self, now_s: float) -> None:
        if self._at_s is not None:  # what is not spent within a second is lost
            self._balance = min(self.rate, self._balance + (now_s - self._at_s) * self.rate)
        self._at_s = now_s


class AheadFetcher(Protocol):
    """Whoever fetches claimed chunks."""

    async def fetch_ahead(self, claimed: Sequence[Miss], *, within_s: float, gap_bytes: int = 0) -> Ahead:
        """As Fetcher.fetch_ahead()."""
        ...

    def link(self, layer: LayerSlot) -> Link:
        """What the layer's source costs."""
        ...


@attrs.define(eq=False)
class FilledLayer:
    """A layer that a plan has. `since`: from which chunk on it is looked at next."""

    slot: LayerSlot
    since: int = 0
    full: bool = False
    active: int = 0
    outstanding: int = 0
    """Raw bytes of what is on its way."""
    filled_bytes: int = 0
    failures: int = 0
    paused_until_s: float = -float("inf")
    failure: str = ""
    state: str = "waiting"
    reason: str = ""


@attrs.frozen
class Plan:
    """Its layers, the topmost first."""

    layers: tuple[FilledLayer, ...]
    added_s: float


@attrs.frozen
class Begin:
    """A request for up to `size` bytes of a layer."""

    layer: FilledLayer
    size: int


@attrs.frozen
class Wait:
    """Nothing is to be done before this time, or a change."""

    until_s: float


class Filler:
    """Of one core; everything on its event loop. A layer is one of its own from its first plan's coming to its last one's going."""

    def __init__(
        self,
        core: Core,
        fetcher: AheadFetcher,
        demand: Demand,
        policy: FillPolicy,
        has_room: Callable[[int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`has_room`: whether the cache stays below its low mark with so many bytes more. `clock`: that of `demand`."""
        self._core = core
        self._fetcher = fetcher
        self._demand = demand
        self.policy = policy
        self._has_room = has_room
        self._clock = clock
        self._bucket = Bucket(policy.rate) if policy.rate else None
        self._plans: dict[str, Plan] = {}
        self._layers: dict[LayerSlot, FilledLayer] = {}
        self._changed = asyncio.Event()
        self.filled_bytes = 0
        demand.listen(self._changed.set)

    # ---- plans ----

    def add_plan(self, name: str, layers: Sequence[LayerSlot]) -> None:
        """`layers`: base first."""
        order = dict.fromkeys(reversed(layers))
        self._plans[name] = Plan(tuple(self._layers.setdefault(slot, FilledLayer(slot)) for slot in order), self._clock())
        self._changed.set()

    def remove_plan(self, name: str) -> None:
        """Nothing more is begun for layers that no other plan has. Before they can be closed."""
        if self._plans.pop(name, None) is None:
            return
        self._layers = {layer.slot: layer for plan in self._plans.values() for layer in plan.layers}
        self._changed.set()

    # ---- deciding ----

    def next_step(self, now_s: float) -> Begin | Wait:
        """What is to be done now. Says in each layer why it is not its turn."""
        for layer in self._layers.values():
            layer.state, layer.reason = self._standing(layer)
        if self.policy.mode == "off" or self._demand.in_flight or all(layer.full for layer in self._layers.values()):
            return Wait(float("inf"))
        if not self._has_room(self._outstanding):
            for layer in self._layers.values():
                if not layer.full:
                    layer.state, layer.reason = "stopped", NO_ROOM
            return Wait(now_s + ROOM_LOOKED_AT_S)
        until_s = float("inf")
        active = sum(layer.active for layer in self._layers.values())
        for layer, at_once, from_s in self._candidates():
            from_s = max(from_s, layer.paused_until_s)
            if from_s > now_s:
                until_s = min(until_s, from_s)
            elif active < at_once:
                if self._bucket is not None and (free_s := self._bucket.free_at_s(now_s)) > now_s:
                    return Wait(free_s)
                return Begin(layer, self._range_bytes(layer, now_s))
        return Wait(until_s)

    @property
    def _outstanding(self) -> int:
        """Raw bytes that are on their way."""
        return sum(layer.outstanding for layer in self._layers.values())

    def _standing(self, layer: FilledLayer) -> tuple[str, str]:
        if self.policy.mode == "off":
            return "off", ""
        if layer.full:
            return "full", ""
        if layer.active:
            return "filling", ""
        return ("stopped", layer.failure) if layer.failure else ("waiting", "")

    def _candidates(self) -> list[tuple[FilledLayer, int, float]]:
        """Layers that lack something, in their order: how many requests there may be at once for each, and from when on."""
        lacking = {layer.slot: layer for plan in self._plans.values() for layer in plan.layers if not layer.full}
        wanted = [layer for layer in lacking.values() if self._is_wanted(layer)]
        found = [(layer, self.policy.wanted_requests_at_once, -float("inf")) for layer in wanted]
        for plan in self._plans.values():
            quiet_s = max(plan.added_s, *(self._demand.last_s(layer.slot) for layer in plan.layers)) + self.policy.idle_s
            from_s = quiet_s if self.policy.mode == "idle" else -float("inf")
            found += [(layer, self.policy.requests_at_once, from_s) for layer in plan.layers if layer.slot in lacking]
        return found

    def _is_wanted(self, layer: FilledLayer) -> bool:
        info = self._core.layer_info(layer.slot)
        return 0 < info.stream_size * self.policy.wanted_share <= info.read_raw

    def _range_bytes(self, layer: FilledLayer, now_s: float) -> int:
        near = now_s - self._demand.latest_s < self.policy.idle_s
        size = float(self.policy.near_demand_bytes if near else self.policy.range_bytes)
        size = min(size, self._fetcher.link(layer.slot).bytes_per_s * LONGEST_RANGE_S, self.policy.rate or size)
        return max(LEAST_RANGE_BYTES, int(size))

    # ---- doing ----

    async def run(self) -> None:
        """Fills until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._changed.clear()
                now_s = self._clock()
                match self.next_step(now_s):
                    case Begin(layer, size):
                        self._begin(layer, size, now_s, tasks)
                    case Wait(until_s):
                        await self._wait(until_s - now_s)

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(None if seconds == float("inf") else seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    def _begin(self, layer: FilledLayer, size: int, now_s: float, tasks: asyncio.TaskGroup) -> None:
        claimed = self._core.claim_run(layer.slot, layer.since, size)
        if claimed and not self._has_room(self._outstanding + sum(miss.raw_size for miss in claimed)):
            for miss in claimed:
                self._core.unclaim(miss.layer, miss.chunk)
            layer.failure, layer.paused_until_s = NO_ROOM, now_s + ROOM_LOOKED_AT_S
        elif claimed:
            layer.since = claimed[-1].chunk + 1
            layer.active += 1
            layer.outstanding += sum(miss.raw_size for miss in claimed)
            if self._bucket is not None:
                self._bucket.spend(sum(miss.stored_size for miss in claimed), now_s)
            tasks.create_task(self._fill(layer, claimed))
        elif layer.since:
            layer.since = 0
        else:
            info = self._core.layer_info(layer.slot)
            layer.full = info.present_chunks == info.chunks
            layer.paused_until_s = now_s + ELSEWHERE_PAUSE_S

    async def _fill(self, layer: FilledLayer, claimed: list[Miss]) -> None:
        try:
            ahead = await self._fetcher.fetch_ahead(claimed, within_s=self.policy.within_s)
        finally:
            layer.active -= 1
            layer.outstanding -= sum(miss.raw_size for miss in claimed)
            self._changed.set()
        arrived = sum(miss.stored_size for miss in ahead.arrived)
        layer.filled_bytes += arrived
        self.filled_bytes += arrived
        layer.failure = ahead.failure
        if not ahead.failure and len(ahead.arrived) == len(claimed):
            layer.failures = 0
            return
        pause_s = min(self.policy.longest_pause_s, self.policy.first_pause_s * 2.0 ** min(layer.failures, 32))
        layer.failures += 1
        layer.paused_until_s = self._clock() + pause_s

    # ---- reporting ----

    def layer_statistics(self, slot: LayerSlot) -> dict[str, Any]:
        """`state`, `reason` if it is stopped, `filled_bytes` since its first plan came."""
        layer = self._layers.get(slot)
        if layer is None:
            return {"state": "off" if self.policy.mode == "off" else "stopped", "reason": "no plan has it", "filled_bytes": 0}
        state, reason = (layer.state, layer.reason) if layer.state == "stopped" else self._standing(layer)
        return {"state": state, "filled_bytes": layer.filled_bytes} | ({"reason": reason} if reason else {})

    def statistics(self) -> dict[str, Any]:
        """Bytes of blobs; `remaining_bytes` of the layers that plans have."""
        infos = [self._core.layer_info(slot) for slot in self._layers]
        return {
            "mode": self.policy.mode,
            "active": sum(layer.active for layer in self._layers.values()),
            "filled_bytes": self.filled_bytes,
            "remaining_bytes": sum(info.blob_size - info.present_stored for info in infos),
        }
