"""What is wrong between a node and its peers, found by asking them as the node does: the checks of `weenv node doctor`.

Each is asked, with this node's token and certificate, for a chunk that this node has, and for no more than it has itself: so its bytes can
be compared, and that it has none is an answer, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import http.client
import ipaddress
import os
import random
import socket
import ssl
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import msgspec

from weefs.core import ChunkIndex, Core, LayerSlot
from weefs.peerconfig import PeersConfig, PeersRefused, read_token, split_address, tls_contexts
from weefs.protocol import Check

CHECKED_MAX = 16
"""Of many members, so many by chance."""
ANSWER_S = 5.0
"""For connecting, and for each piece of an answer."""
LONGEST_S = 15.0
"""For all of it."""
SLOW_S = 1.0
"""For a chunk; a node waits two seconds for all its peers."""
CLOCK_S = 60.0
"""Clocks that differ by more make certificates expired, or not valid yet."""
LOOKED_AT = 64
"""Chunks of a layer, to find one that is there."""
SAMPLES = 3
NO_LAYER = "sha256:" + "0" * 64
"""Asked for when this node has nothing either."""
MAX_BODY_BYTES = 16 << 20
MAX_REASON = 200
"""Of what a peer says, so much is shown."""


@attrs.frozen
class Sample:
    """Bytes of a layer's stream that this node has."""

    digest: str
    offset: int
    data: bytes


@attrs.frozen
class _Answer:
    status: int
    body: bytes
    date: str | None


class _Wrong(Exception):
    """What is wrong, and what to do."""


# ---- what this node has ----


def samples(core: Core, layers: Iterable[tuple[str, LayerSlot, Path]]) -> list[Sample]:
    """A chunk of each of the first layers that have one: digest, slot, data file. Blocks."""
    found = []
    for digest, slot, data in layers:
        with contextlib.suppress(OSError):  # of the core, too: it is closed, or evicted, or held by too many
            if (sample := _sample(core, digest, slot, data)) is not None:
                found.append(sample)
        if len(found) == SAMPLES:
            break
    return found


def _sample(core: Core, digest: str, slot: LayerSlot, data: Path) -> Sample | None:
    likely = [*core.first_touches(slot, 0)[:LOOKED_AT], *range(min(LOOKED_AT, core.layer_info(slot).chunks))]
    for chunk in likely:
        hold = core.hold(slot, range(chunk, chunk + 1))
        if hold is None:
            continue
        known = core.describe(slot, ChunkIndex(chunk))
        try:
            with data.open("rb") as file:
                read = os.pread(file.fileno(), known.raw_size, known.stream_offset)
        finally:
            is_whole = core.unhold(slot, hold)
        if is_whole and len(read) == known.raw_size:
            return Sample(digest, known.stream_offset, read)
    return None


# ---- the members as such ----


def check_membership(config: PeersConfig, name: str, members: Collection[str], *, listening: bool) -> Check:
    """Whether others can know and reach this node, and it them."""
    others = sorted({*members} - {name})
    wrong = ""
    if not listening:
        wrong = f"cannot listen on {config.listen}; is the address another process's? The log says why"
    elif not others:
        wrong = "nobody else is a member; peers, peers_dns or peers_etcd says who is"
    elif elsewhere := [member for member in others if not _is_loopback(member)]:
        if _is_loopback(config.listen):
            wrong = f"listens on loopback only ({config.listen}), and {elsewhere[0]} is elsewhere; set peers_listen to what that can reach"
        elif _is_loopback(name):
            wrong = f"its name is {name}, which for {elsewhere[0]} is another machine: set peers_name to what others reach it by"
    if not wrong and name not in members:
        wrong = f"{name} is not among the {len(members)} members, so nobody asks it; is peers_name what the others call it?"
    return Check(name="peers", ok=not wrong, detail=wrong or f"{name} is one of {len(members)} members, listens on {config.listen}")


def _is_loopback(address: str) -> bool:
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# ---- each of them ----


async def check_members(config: PeersConfig, name: str, known: Sequence[dict[str, Any]], having: Sequence[Sample]) -> list[Check]:
    """A request to each, at once. `known`: what peering's statistics say of them."""
    chosen = known if len(known) <= CHECKED_MAX else random.sample([*known], CHECKED_MAX)
    try:
        token, tls = await asyncio.to_thread(lambda: (read_token(config), tls_contexts(config)))
    except PeersRefused as error:
        return [Check(name="peers' files", ok=False, detail=f"{error}; the process that serves has them as they were when it began")]
    ask = _Asker(name, token, tls[1] if tls else None, having)
    loop = asyncio.get_running_loop()
    threads = ThreadPoolExecutor(CHECKED_MAX)

    async def check(member: dict[str, Any]) -> Check:
        try:
            async with asyncio.timeout(LONGEST_S):
                return await loop.run_in_executor(threads, ask.check, member)
        except TimeoutError:
            ask.give_up(_address(member))
            return Check(name=f"peer {_address(member)}", ok=False, detail=f"not done within {LONGEST_S:g} s", took_s=LONGEST_S)

    try:
        checks = await asyncio.gather(*(check(one) for one in sorted(chosen, key=_address)))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    left_out = len(known) - len(chosen)
    if left_out:
        checks.append(Check(name="further peers", ok=True, detail=f"{left_out} of {len(known)} were not asked"))
    return checks


def _address(member: dict[str, Any]) -> str:
    return str(member["address"])


@attrs.frozen
class _Asker:
    """Blocks; one thread for each call of check()."""

    name: str
    token: str | None
    tls: ssl.SSLContext | None
    having: Sequence[Sample]
    _connected: dict[str, http.client.HTTPConnection] = attrs.field(factory=dict, init=False)
    _given_up: set[str] = attrs.field(factory=set, init=False)

    def give_up(self, peer: str) -> None:
        """From any thread: ends the request that its own thread is in. One that sends a byte now and then would keep it for days."""
        self._given_up.add(peer)
        connection = self._connected.get(peer)
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def check(self, member: dict[str, Any]) -> Check:
        begin_s = time.monotonic()
        try:
            detail, took_s = self._ask_until_it_has(_address(member))
            if member["state"] == "left_out":
                lies = f"it sent wrong bytes {member['lies']} times lately, and is left out"
                raise _Wrong(f"{detail}; but {lies}: look at its disk and memory")
            if took_s > SLOW_S:
                raise _Wrong(f"slow: {took_s:.1f} s; {detail}")
            if member["state"] == "down":
                detail += "; it did not lately, and is asked again soon"
        except _Wrong as wrong:
            return Check(name=f"peer {_address(member)}", ok=False, detail=str(wrong), took_s=time.monotonic() - begin_s)
        return Check(name=f"peer {_address(member)}", ok=True, detail=detail, took_s=took_s)

    def _ask_until_it_has(self, peer: str) -> tuple[str, float]:
        """What it said, and how long that took. _Wrong."""
        asked: Sequence[Sample | None] = self.having or [None]
        for sample in asked:
            if peer in self._given_up:
                raise _Wrong("not done in time")
            begin_s = time.monotonic()
            answer = self._ask(peer, sample)
            took_s = time.monotonic() - begin_s
            _check_clock(answer.date)
            if _check_answer(answer, sample):
                size = len(answer.body)
                return f"{size} bytes of {sample.digest[:19] if sample else ''}: right", took_s
        return "answers; has none of what this node has" if self.having else "answers", took_s

    def _ask(self, peer: str, sample: Sample | None) -> _Answer:
        host, port = split_address(peer)
        digest, offset, size = (sample.digest, sample.offset, len(sample.data)) if sample else (NO_LAYER, 0, 1)
        headers = {"Range": f"bytes={offset}-{offset + size - 1}", "Weenv-Peer": self.name, "Accept-Encoding": "identity"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        if self.tls is not None:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(host, port, timeout=ANSWER_S, context=self.tls)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
        self._connected[peer] = connection
        try:
            connection.request("GET", f"/v1/layers/{digest}/stream", headers=headers)
            response = connection.getresponse()
            return _Answer(response.status, response.read(MAX_BODY_BYTES), response.headers.get("Date"))
        except (OSError, http.client.HTTPException) as error:
            raise _Wrong(self._what_failed(error)) from error
        finally:
            connection.close()

    def _what_failed(self, error: Exception) -> str:
        match error:
            case ssl.SSLCertVerificationError():
                reason = error.verify_message.rstrip(".")
                clocks = "; or the clock of one of you is wrong" if "expired" in reason or "not yet valid" in reason else ""
                return f"its certificate is refused: {reason}{clocks}. Expected one of peers_tls_ca with its address"
            case ssl.SSLError() if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
                return "expected TLS, received something else: it has no peers_tls_cert, or another program listens there"
            case ssl.SSLError():
                return f"TLS: {error.reason or error}: does it refuse this node's certificate? Both need one of the same peers_tls_ca"
            case socket.gaierror():
                return f"its name is not known here: {error.strerror}"
            case TimeoutError():
                return f"no answer within {ANSWER_S:g} s: a firewall, or it hangs"
            case ConnectionRefusedError():
                return "connection refused: nothing listens there; is the node running, and is that its peers_listen?"
            case ConnectionError() | http.client.HTTPException() if self.tls is None:
                return f"no answer that is HTTP ({type(error).__name__}): does it speak TLS? This node has no peers_tls_cert"
            case http.client.RemoteDisconnected() | ConnectionResetError():  # with TLS 1.3 the client is done before it is looked at
                return "it closed the connection: does it refuse this node's certificate? Both need one of the same peers_tls_ca"
            case OSError():
                return f"no connection: {error.strerror or error}"
            case _:
                return f"no answer that is HTTP: {type(error).__name__}: {error}"


def _check_clock(date: str | None) -> None:
    """_Wrong."""
    if date is None:
        return
    with contextlib.suppress(ValueError, TypeError, OverflowError, OSError):
        ahead_s = email.utils.parsedate_to_datetime(date).timestamp() - time.time()
        if abs(ahead_s) > CLOCK_S:
            raise _Wrong(f"its clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this node's; set both by NTP")


def _printable(reason: str) -> str:
    """What a peer says, for a terminal."""
    shown = reason[:MAX_REASON]
    return shown if shown.isprintable() else repr(shown)


def _check_answer(answer: _Answer, sample: Sample | None) -> bool:
    """Whether it sent the bytes, and not that it has none. _Wrong."""
    if answer.status == 401:
        raise _Wrong("it refuses the token; expected the same word in peers_token_file of both, and a restart after a change")
    if answer.status == 503:
        raise _Wrong("it has too many requests at once")
    if answer.status == 206 and sample is not None:
        if answer.body != sample.data:
            received = f"received {len(answer.body)} that are not these"
            raise _Wrong(f"it lies: expected {len(sample.data)} bytes at {sample.offset} of {sample.digest}, {received}; look at its disk")
        return True
    try:
        reason: Any = msgspec.json.decode(answer.body, type=dict[str, Any]).get("reason")
    except (msgspec.MsgspecError, RecursionError):
        reason = None
    if answer.status == 404 and isinstance(reason, str):
        return False
    said = f": {_printable(reason)}" if isinstance(reason, str) else ""
    raise _Wrong(f"expected 206 or 404 as in docs/peers.md, received {answer.status}{said}: another version, or another program")
