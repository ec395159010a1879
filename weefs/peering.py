"""The peers of a node: between the miss queue and the registry, at stop 6 of a read's path. docs/peers.md is the whole picture.

What is wanted is cut along groups of chunks, which do not wait for each other. Each piece is asked of its places one after the other; when
one is slow, the next is asked as well and the first to answer wins. What comes is verified by the core. What does not come within a bounded
time is left to the layer's own source: no read fails because of a peer.

Bounds: requests to one peer at once, for each rank apart: who serves a request of rank n asks only lower ranks for it, so a node that
waits for a place waits for requests that need none of those places.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import attrs

from weefs import placement
from weefs.buffers import Buffers
from weefs.coalesce import Range
from weefs.core import Core, CoreError, DamagedError, Miss
from weefs.fetch import PUBLISHED_HERE_BYTES, CacheRoom, Outcome, in_thread
from weefs.lending import Lender, Lending
from weefs.log import say
from weefs.members import Members, sources_of
from weefs.peerclient import Elsewhere, PeerClient, PeerFailed
from weefs.peerconfig import PeersConfig, check, may_open, own_name, read_token, source_host, split_address, tls_contexts
from weefs.peerhealth import Answers, PeerHealth
from weefs.peerserver import MAX_RANGE_BYTES, PeerServer
from weefs.protocol import Layer

PEERS_S = 2.0
"""That peers get before the registry is asked; of the deadline, a third at most."""
AT_ONCE_S = 0.1
"""For the first byte from those who must not wait for anything before they answer."""
TOC_S = 2.0
"""That each place gets to send a TOC; it may be large, and nobody waits for it who is in the middle of something."""
STALLED_S = 0.2
"""Between two pieces of an answer: then the next place is asked as well."""
REQUESTS_PER_PEER = 8
REFERRALS = 48
"""Nodes that one is sent to by others, for one piece, at most. When a thousand want it in the same moment, some are sent on by more than a
dozen before one has time for them; the time that peers get is the bound that matters.
"""
LISTEN_AGAIN_S = 1.0
MAX_KNOWN_OWNERS = 8192
"""Groups whose owners are remembered."""


@attrs.define(eq=False)
class _Try:
    """A place that is being asked, and whoever it refers to. Times of the loop: since when the one that is `asking` has the question, and
    when the last bytes of its answer came.
    """

    peer: str
    first: bool
    at_once: bool
    """It answers without waiting for anything, or something is wrong."""
    asking: str = ""
    asked_s: float | None = None
    heard_s: float | None = None


@attrs.frozen
class _Brought:
    """Bytes of a piece, and who sent them."""

    peer: str
    body: memoryview


@attrs.define
class _Counted:
    """Since this process began."""

    hedges: int = 0
    lies: int = 0
    received_bytes: int = 0


def pieces_of(wanted: Iterable[Miss], max_bytes: int = MAX_RANGE_BYTES) -> list[tuple[Miss, ...]]:
    """Consecutive chunks of one group each, that lie in `max_bytes` of the stream."""
    pieces: list[list[Miss]] = []
    for miss in sorted(wanted, key=lambda miss: miss.chunk):
        last = pieces[-1] if pieces else None
        if (
            last
            and last[-1].chunk + 1 == miss.chunk
            and placement.group_of(last[0].chunk) == placement.group_of(miss.chunk)
            and miss.stream_offset + miss.raw_size - last[0].stream_offset <= max_bytes
        ):
            last.append(miss)
        else:
            pieces.append([miss])
    return [tuple(piece) for piece in pieces]


def _any_heard(running: dict[asyncio.Task[_Brought | None], _Try]) -> bool:
    return any(tried.heard_s is not None for tried in running.values())


def _digest_of(data: memoryview) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Peering:
    """Of one data plane; implements `fetch.Neighbours`. `run` must be running. On one event loop."""

    def __init__(self, config: PeersConfig, core: Core, room: CacheRoom, lender: Lender) -> None:
        """PeersRefused: the settings do not go together, or a file of theirs cannot be used."""
        check(config)
        self._core = core
        self._room = room
        self._lender = lender
        self.name = own_name(config)
        self._listen = split_address(config.listen)
        token = read_token(config)
        tls = tls_contexts(config)
        self._client = PeerClient(self.name, token, tls[1] if tls else None)
        self._buffers = Buffers()
        self.lending = Lending(
            core,
            lender,
            lambda source, used: may_open(source, config.sources, {host for one in used if (host := source_host(one))}, token is not None),
        )
        self._health: dict[str, PeerHealth] = {}
        self.members = Members(config.members, sources_of(config, self.name), self._left)
        self.server = PeerServer(
            self.name,
            self.lending,
            token=token,
            tls=tls[0] if tls else None,
            members=lambda: self.members.names,
            on_sent=self._sent,
        )
        self._owners_among: frozenset[str] = frozenset()
        self._known_owners: dict[tuple[str, int], list[str]] = {}
        self._answers = Answers()
        self._places: WeakValueDictionary[tuple[str, int], asyncio.Semaphore] = WeakValueDictionary()
        self.counted = _Counted()
        self.listening = asyncio.Event()

    async def run(self) -> None:
        """Serves, and follows the members, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._serve())
            tasks.create_task(self.members.run())
            tasks.create_task(self.lending.run())

    async def _serve(self) -> None:
        """The address may be a predecessor's for a moment."""
        said = False
        while not self.listening.is_set():
            try:
                await self.server.start(*self._listen)
                self.listening.set()
            except OSError as error:
                if not said:
                    say(f"peers: cannot listen on {self._listen[0]}:{self._listen[1]}, and try on: {error}")
                said = True
                await asyncio.sleep(LISTEN_AGAIN_S)

    async def close(self) -> None:
        await self.server.close()
        await self._client.close()
        await self.lending.close()

    # ---- what is thought of peers ----

    def _of(self, peer: str) -> PeerHealth:
        return self._health.setdefault(peer, PeerHealth())

    def _sent(self, peer: str, size: int) -> None:
        if peer in self.members.names:
            self._of(peer).sent_bytes += size

    def _left(self, left: frozenset[str]) -> None:
        """One that lied stays remembered: it may come back."""
        now_s = asyncio.get_running_loop().time()
        for peer in left:
            if peer in self._health and self._health[peer].state(now_s) != "left_out":
                del self._health[peer]

    def _lied(self, peer: str, what: str) -> None:
        say(f"peers: {peer} sent bytes without their digest for {what}, and is left out for an hour")
        self.counted.lies += 1
        self._of(peer).lied(asyncio.get_running_loop().time())

    def statistics(self) -> dict[str, Any]:
        """Bytes, seconds; counters of this process."""
        now_s = asyncio.get_running_loop().time()
        members = []
        for peer in sorted(self.members.names - {self.name}):
            health = self._health.get(peer) or PeerHealth()
            members.append(
                {
                    "address": peer,
                    "state": health.state(now_s),
                    "rtt_p50_s": health.rtt_s(0.5),
                    "rtt_p95_s": health.rtt_s(0.95),
                    "received_bytes": health.received_bytes,
                    "sent_bytes": health.sent_bytes,
                    "lies": health.lies,
                }
            )
        return {
            "name": self.name,
            "listening": self.listening.is_set(),
            "is_member": self.name in self.members.names,
            "members": members,
            "served_bytes": self.server.served.bytes,
            "received_bytes": self.counted.received_bytes,
            "hedges": self.counted.hedges,
            "lies": self.counted.lies,
            "lent_layers": self.lending.kept,
        }

    # ---- a layer's metadata ----

    async def toc(self, layer: Layer) -> memoryview | None:
        """The raw TOC of a layer whose manifest says its digest, from a peer; None: it must come from the layer's source."""
        if layer.toc_digest is None:
            return None
        ranked = self._owners(layer.digest, placement.TOC_GROUP)
        loop = asyncio.get_running_loop()
        behind = placement.behind(self.name, ranked)
        for place in [*placement.places_to_ask(self.name, ranked, layer.digest, placement.TOC_GROUP), *behind]:
            if not self._of(place).may_ask(loop.time()):
                continue
            try:
                async with asyncio.timeout(TOC_S):
                    toc = await self._toc_from(place, layer, wait=place not in behind)
            except TimeoutError:
                self._of(place).failed(loop.time())
                continue
            if toc is not None:
                return toc
        return None

    async def _toc_from(self, place: str, layer: Layer, *, wait: bool) -> memoryview | None:
        """From it, or those that it refers to. Without `wait`, only if it has it."""
        loop = asyncio.get_running_loop()
        known, to_ask = {self.name}, [place]
        while to_ask and len(known) <= REFERRALS:
            peer = to_ask.pop(0)
            if peer in known:  # it was named twice
                continue
            known.add(peer)
            described = None if peer != place or not wait or source_host(layer.source) is None else layer
            begin_s = loop.time()
            self._core.count_traffic("peer", metadata_requests=1)
            try:
                answer = await self._client.ask_toc(peer, layer.digest, described, wait=wait)
            except PeerFailed:
                self._of(peer).failed(loop.time())
                continue
            self._of(peer).answered(loop.time() - begin_s)
            self._of(peer).finished()
            if isinstance(answer, Elsewhere):
                further = [holder for holder in answer.holders if holder in self.members.names and holder not in known]
                to_ask = [*further, *to_ask]
            elif await in_thread(_digest_of, answer) == layer.toc_digest:
                self._core.count_traffic("peer", metadata_bytes=len(answer), fetch_s=loop.time() - begin_s)
                self.counted.received_bytes += len(answer)
                self._of(peer).received_bytes += len(answer)
                return answer
            else:
                self._lied(peer, f"the TOC of {layer.digest}")
        return None

    # ---- taking ----

    def cut(self, wanted: Range) -> list[Range]:
        """`fetch.Neighbours`. By groups: who waits for chunks of one group must not keep others waiting for those of another, or nodes
        could wait for each other in a circle after all.
        """
        return [Range(wanted.layer, piece) for piece in pieces_of(wanted.misses)]

    async def take(self, wanted: Range, digest: str, deadline: float) -> list[Miss]:
        """`fetch.Neighbours`. Cancelled, it has published what came until then."""
        layer = self._lender.describe(digest)
        if layer is None or not self.members.names - {self.name}:
            return [*wanted.misses]
        now_s = asyncio.get_running_loop().time()
        until = now_s + min(PEERS_S, max(0.0, deadline - now_s) / 3)
        return await self._take_piece(wanted.misses, layer, until)

    def _owners(self, digest: str, group: int) -> list[str]:
        """Remembered as long as the members are the same: among 10,000, they take some milliseconds to find."""
        if self._owners_among is not self.members.names:
            self._owners_among = self.members.names
            self._known_owners.clear()
        known = self._known_owners.get((digest, group))
        if known is None:
            known = self._known_owners[digest, group] = placement.owners(self._owners_among, digest, group)
            if len(self._known_owners) > MAX_KNOWN_OWNERS:
                del self._known_owners[next(iter(self._known_owners))]
        return known

    async def _take_piece(self, piece: Sequence[Miss], layer: Layer, until: float) -> list[Miss]:
        """What is left of it."""
        group = placement.group_of(piece[0].chunk)
        ranked = self._owners(layer.digest, group)
        before, behind = placement.places_to_ask(self.name, ranked, layer.digest, group), placement.behind(self.name, ranked)
        left = [*piece]
        for places, at_once in ((deque(before), False), (deque(behind), True)):
            while left and places:
                part, *others = pieces_of(left)
                brought = await self._race(part, layer, places, ranked, until, at_once=at_once)
                if brought is None:
                    break
                unpublished = await self._publish(part, brought, layer.digest)
                self._buffers.give_back(brought.body)
                left = [*unpublished, *(miss for other in others for miss in other)]
                if not unpublished:
                    continue
                if self._of(brought.peer).state(asyncio.get_running_loop().time()) != "left_out":
                    return left  # there is no room for them: the fetcher makes some
        return left

    async def _race(
        self, piece: Sequence[Miss], layer: Layer, places: deque[str], ranked: Sequence[str], until: float, *, at_once: bool
    ) -> _Brought | None:
        """Asks `places`, from which those are taken that brought nothing, until one brings the piece, or the time is over. `at_once`: they
        must not wait for anything, so all are asked together, and none of them that says nothing for a moment is waited for.
        """
        heard_by = asyncio.get_running_loop().time() + (AT_ONCE_S if at_once else PEERS_S)
        running: dict[asyncio.Task[_Brought | None], _Try] = {}
        queue = deque(places)
        winner: _Try | None = None
        try:
            while True:
                if not running and not self._ask_next(queue, running, piece, layer, ranked, until, at_once=at_once):
                    return None
                while at_once and self._ask_next(queue, running, piece, layer, ranked, until, at_once=at_once):
                    continue
                patience_s = self._patience_s(running, queue, until, heard_by)
                done, _ = await asyncio.wait(running, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    if asyncio.get_running_loop().time() >= (until if _any_heard(running) else min(until, heard_by)):
                        return None
                    if self._slow(running) and self._ask_next(queue, running, piece, layer, ranked, until, at_once=at_once):
                        self.counted.hedges += 1
                for task in done:
                    tried = running.pop(task)
                    if (brought := task.result()) is not None:
                        winner = tried
                        return brought
                    if tried.peer in places:
                        places.remove(tried.peer)
        finally:
            self._end(running, winner, until)
            if running:
                await asyncio.wait(running)

    def _ask_next(
        self,
        queue: deque[str],
        running: dict[asyncio.Task[_Brought | None], _Try],
        piece: Sequence[Miss],
        layer: Layer,
        ranked: Sequence[str],
        until: float,
        *,
        at_once: bool,
    ) -> bool:
        """Whether there was one left that may be asked."""
        now_s = asyncio.get_running_loop().time()
        while queue and now_s < until:
            peer = queue.popleft()
            if self._of(peer).may_ask(now_s):
                tried = _Try(peer, not running, at_once)
                running[asyncio.create_task(self._try(tried, piece, layer, ranked))] = tried
                return True
        return False

    def _patience_s(self, running: dict[asyncio.Task[_Brought | None], _Try], queue: deque[str], until: float, heard_by: float) -> float:
        """How long to wait for an answer before something else is done."""
        now_s = asyncio.get_running_loop().time()
        left_s = max(0.0, (until if _any_heard(running) else min(until, heard_by)) - now_s)
        if not queue:
            return left_s
        return min(left_s, max(0.001, max(self._slow_at_s(tried) for tried in running.values()) - now_s))

    def _slow(self, running: dict[asyncio.Task[_Brought | None], _Try]) -> bool:
        """All that are asked have been silent for too long, and none just waits for its place."""
        now_s = asyncio.get_running_loop().time()
        return all(tried.asked_s is not None and self._slow_at_s(tried) <= now_s for tried in running.values())

    def _slow_at_s(self, tried: _Try) -> float:
        """When it has been silent for too long, if it stays so. One that waits for its place has not been asked yet."""
        if tried.heard_s is not None:
            return tried.heard_s + STALLED_S
        return (asyncio.get_running_loop().time() if tried.asked_s is None else tried.asked_s) + self._answers.hedge_s

    def _end(self, running: dict[asyncio.Task[_Brought | None], _Try], winner: _Try | None, until: float) -> None:
        """Of those that are still being asked."""
        now_s = asyncio.get_running_loop().time()
        for task, tried in running.items():
            task.cancel()
            health = self._of(tried.asking or tried.peer)
            stalls = tried.heard_s is not None and now_s - tried.heard_s >= STALLED_S
            if tried.asked_s is not None and (stalls or now_s >= until):
                health.failed(now_s)
            elif tried.asked_s is not None and tried.heard_s is None and (winner is not None or tried.at_once) and tried.first:
                health.lost(now_s)
            else:
                health.gave_up()

    async def _try(self, tried: _Try, piece: Sequence[Miss], layer: Layer, ranked: Sequence[str]) -> _Brought | None:
        """One place, and those that it refers to; these are asked for what they have and nothing more. So is one that ranks behind this
        node, which must not wait for it.
        """
        known: set[str] = {self.name}
        to_ask = [tried.peer]
        while to_ask and len(known) <= REFERRALS:
            peer = to_ask.pop(0)
            if peer in known:  # it was named twice
                continue
            known.add(peer)
            referred = peer != tried.peer
            if referred and not self._of(peer).may_ask(asyncio.get_running_loop().time()):
                continue
            described = None if referred or tried.at_once or source_host(layer.source) is None else layer
            rank = placement.OWNERS if referred or tried.at_once else ranked.index(peer)
            answer = await self._ask(tried, peer, piece, layer, described, rank)
            if isinstance(answer, _Brought):
                return answer
            further = [holder for holder in answer if holder in self.members.names and holder not in known]
            to_ask = [*further, *to_ask]
        return None

    async def _ask(
        self, tried: _Try, peer: str, piece: Sequence[Miss], layer: Layer, description: Layer | None, rank: int
    ) -> _Brought | tuple[str, ...]:
        """What it brought, or who may have it."""
        offset = piece[0].stream_offset
        size = piece[-1].stream_offset + piece[-1].raw_size - offset
        place = self._places.setdefault((peer, rank), asyncio.Semaphore(REQUESTS_PER_PEER))
        loop = asyncio.get_running_loop()
        health = self._of(peer)
        async with place:
            begin_s = loop.time()
            tried.asking, tried.asked_s, tried.heard_s = peer, begin_s, None

            def heard() -> None:
                if tried.heard_s is None:
                    health.answered(loop.time() - begin_s)
                    self._answers.add(loop.time() - begin_s)
                tried.heard_s = loop.time()

            body = self._buffers.take(size)
            self._core.count_traffic("peer", requests=1)
            try:
                elsewhere = await self._client.ask(peer, layer.digest, offset, body, description, heard, wait=not tried.at_once)
            except PeerFailed:
                health.failed(loop.time())
                return ()
        health.finished()
        if elsewhere is not None:
            self._buffers.give_back(body)
            return elsewhere.holders
        self._core.count_traffic("peer", bytes=size, fetch_s=loop.time() - begin_s)
        self.counted.received_bytes += size
        health.received_bytes += size
        return _Brought(peer, body)

    async def _publish(self, piece: Sequence[Miss], brought: _Brought, digest: str) -> list[Miss]:
        """What could not be: the bytes were others, or there is no room."""
        if len(brought.body) <= PUBLISHED_HERE_BYTES:
            published = self._publish_now(piece, brought.body)
        else:
            published = await in_thread(self._publish_now, piece, brought.body)
        self._core.count_traffic("peer", misses=len(piece) - len(published.damaged) - len(published.unplaced))
        if published.damaged:
            self._lied(brought.peer, f"chunk {published.damaged[0].chunk} of {digest}")
        if published.unwritten:
            self._room.lacking()
        else:
            self._room.published()
        return [*published.damaged, *published.unplaced]

    def _publish_now(self, piece: Sequence[Miss], body: memoryview) -> Outcome:
        published = Outcome()
        for miss in piece:
            at = miss.stream_offset - piece[0].stream_offset
            try:
                published.unwritten |= not self._core.publish_raw(miss.layer, miss.chunk, body[at : at + miss.raw_size])
            except DamagedError:
                published.damaged.append(miss)
            except CoreError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                    say(f"chunk {miss.chunk} cannot be published: {error}")
                published.unplaced.append(miss)
        return published
