"""Thousands of nodes that start one plan within seconds, simulated: the decisions are those of weefs/placement.py and weefs/crowd.py, and
the network is a model.

A node asks for its pieces in the order in which a real task did (start_trace.py), some at once, as weefs does; it sends one piece after the
other at the rate of its link, and the registry sends to everybody at once. The registry's bytes are compressed, those of peers are not.
Time-outs and hedges are not modelled: what is shown is who sends how much."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import attrs

from weefs.core import Miss
from weefs.crowd import Crowd, bits_of
from weefs.peering import REFERRALS
from weefs.placement import before, group_of, owners, places_to_ask

LAYER = f"sha256:{'5' * 64}"
REGISTRY_RTT_S = 0.02
PEER_RTT_S = 0.001

Piece = tuple[int, int]
"""A group, and bits of chunks in it."""
Process = Generator["float | Signal", None, None]


class Signal:
    """Something that processes wait for."""

    def __init__(self) -> None:
        self.waiting: list[Process] = []


class Clock:
    """Runs processes: each yields how long it sleeps, seconds, or the signal that it waits for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Process]] = []
        self._numbers = itertools.count()

    def start(self, process: Process, after_s: float = 0.0) -> None:
        heapq.heappush(self._due, (self.now_s + after_s, next(self._numbers), process))

    def fire(self, signal: Signal) -> None:
        waiting, signal.waiting = signal.waiting, []
        for process in waiting:
            self.start(process)

    def run(self) -> None:
        while self._due:
            self.now_s, _, process = heapq.heappop(self._due)
            for wanted in process:
                if isinstance(wanted, Signal):
                    wanted.waiting.append(process)
                else:
                    self.start(process, wanted)
                break


@attrs.define(eq=False)
class SimulatedNode:
    """What one node has, sends and waits for."""

    name: str
    crowd: Crowd = attrs.field(default=attrs.Factory(lambda self: Crowd(self.name), takes_self=True))
    present: Counter[int] = attrs.field(factory=Counter)
    """Bits by group."""
    flights: dict[Piece, Signal] = attrs.field(factory=dict)
    arrivals: dict[int, Signal] = attrs.field(factory=dict)
    link_free_s: float = 0.0
    sent_bytes: int = 0
    served: int = 0
    refused: int = 0
    asked: int = 0
    begun_s: float = 0.0
    done_s: float = 0.0

    def has(self, piece: Piece) -> bool:
        group, bits = piece
        return self.present[group] & bits == bits


@attrs.frozen
class Size:
    """Of a piece, bytes."""

    stored: int
    raw: int


@attrs.define
class Outcome:
    """Bytes, seconds, requests. `plan_bytes`: that one node alone gets from the registry; `raw_bytes`: the same, not compressed."""

    nodes: int
    pieces: int
    plan_bytes: int
    raw_bytes: int
    registry_bytes: int
    registry_times: Counter[int]
    """How often a piece was sent, by how many pieces."""
    sent: list[int]
    took_s: list[float]
    asks: int
    refusals: int


class Simulation:
    """One start of a plan by many."""

    def __init__(
        self, nodes: int, plan: Mapping[Piece, Size], *, at_once: int, within_s: float, link_bytes_s: float, seed: int
    ) -> None:
        """`plan`: in the order in which each node asks, for `at_once` pieces at once."""
        self.clock = Clock()
        self.nodes = {name: SimulatedNode(name) for name in (f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}:9465" for i in range(nodes))}
        self.plan = plan
        self.at_once = at_once
        self.within_s = within_s
        self.link_bytes_s = link_bytes_s
        self.random = random.Random(seed)
        self.from_registry: Counter[Piece] = Counter()
        self.owners: dict[int, list[str]] = {}

    def run(self) -> Outcome:
        for node in self.nodes.values():
            self.clock.start(self._start(node), self.random.uniform(0, self.within_s))
        self.clock.run()
        nodes = self.nodes.values()
        return Outcome(
            nodes=len(nodes),
            pieces=len(self.plan),
            plan_bytes=sum(each.stored for each in self.plan.values()),
            raw_bytes=sum(each.raw for each in self.plan.values()),
            registry_bytes=sum(self.plan[piece].stored * n for piece, n in self.from_registry.items()),
            registry_times=Counter(self.from_registry.values()),
            sent=sorted(node.sent_bytes for node in nodes),
            took_s=sorted(node.done_s - node.begun_s for node in nodes),
            asks=sum(node.asked for node in nodes),
            refusals=sum(node.refused for node in nodes),
        )

    def _start(self, node: SimulatedNode) -> Process:
        node.begun_s = self.clock.now_s
        todo = deque(self.plan)
        left = [len(todo)]
        done = Signal()

        def worker() -> Process:
            while todo:
                yield from self._fetch(node, todo.popleft())
                left[0] -= 1
            if not left[0]:
                self.clock.fire(done)

        for _ in range(self.at_once):
            self.clock.start(worker())
        while left[0]:
            yield done
        node.done_s = self.clock.now_s

    def _ranked(self, group: int) -> list[str]:
        if group not in self.owners:
            self.owners[group] = owners(self.nodes, LAYER, group)
        return self.owners[group]

    def _fetch(self, node: SimulatedNode, piece: Piece) -> Process:
        """Single flight; afterwards it has it."""
        if node.has(piece):
            return
        if flight := node.flights.get(piece):
            yield flight
            return
        flight = node.flights[piece] = Signal()
        if not (yield from self._from_peers(node, piece)):
            self.from_registry[piece] += 1
            yield REGISTRY_RTT_S + self.plan[piece].stored / self.link_bytes_s
        node.present[piece[0]] |= piece[1]
        del node.flights[piece]
        self.clock.fire(flight)

    def _from_peers(self, node: SimulatedNode, piece: Piece) -> Generator[float | Signal, None, bool]:
        for place in places_to_ask(node.name, self._ranked(piece[0]), LAYER, piece[0]):
            known, to_ask = {node.name}, [place]
            while to_ask and len(known) <= REFERRALS:
                name = to_ask.pop(0)
                known.add(name)
                node.asked += 1
                yield PEER_RTT_S
                holders = yield from self._answer(self.nodes[name], node.name, piece, described=name == place)
                if holders is None:
                    return True
                to_ask = [*(holder for holder in holders if holder not in known and holder not in to_ask), *to_ask]
        return False

    def _answer(
        self, peer: SimulatedNode, asker: str, piece: Piece, *, described: bool
    ) -> Generator[float | Signal, None, tuple[str, ...] | None]:
        """None: it was sent. As PeerServer does."""
        group, bits = piece
        while not (admitted := peer.crowd.admit(LAYER, group, bits, asker, self.clock.now_s)).send:
            if admitted.holders:
                peer.refused += 1
                return admitted.holders
            yield peer.arrivals.setdefault(group, Signal())
        if not peer.has(piece) and described and before(peer.name, asker, LAYER, group):
            yield from self._fetch(peer, piece)
        sent = peer.has(piece)
        if sent:
            begin_s = max(self.clock.now_s, peer.link_free_s)
            peer.link_free_s = begin_s + self.plan[piece].raw / self.link_bytes_s
            peer.sent_bytes += self.plan[piece].raw
            peer.served += 1
            yield peer.link_free_s - self.clock.now_s
        (peer.crowd.sent if sent else peer.crowd.failed)(LAYER, group, bits, asker, self.clock.now_s)
        if arrival := peer.arrivals.pop(group, None):
            self.clock.fire(arrival)
        if not sent:
            peer.refused += 1
        return None if sent else ()


def plan_of(pieces: Sequence[Sequence[Miss]]) -> dict[Piece, Size]:
    """Each of chunks of one group."""
    plan = {}
    for piece in pieces:
        group = group_of(piece[0].chunk)
        bits = bits_of(range(piece[0].chunk, piece[-1].chunk + 1), group)
        plan[group, bits] = Size(sum(miss.stored_size for miss in piece), sum(miss.raw_size for miss in piece))
    return plan


def membership_bytes_s(nodes: int, read: Callable[[int], float], every_s: float) -> float:
    """Of all nodes together, when each reads so many bytes in such intervals."""
    return nodes * read(nodes) / every_s


def quantile(ordered: Sequence[Any], share: float) -> Any:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
