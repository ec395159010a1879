"""Sending chunks to peers: the HTTP of docs/peers.md, from the owner's side.

Bodies go from the data file to the socket within the kernel. The last byte waits until it is sure that nothing was lost meanwhile: whoever
does not get it knows that it has nothing. Everything is bounded: connections, requests, ranges, headers, and how often one node sends the
same chunk (crowd.py).
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

import attrs
import msgspec
from aiohttp import web

from weefs.core import ChunkIndex, CoreError
from weefs.crowd import Crowd, bits_of
from weefs.errors import WeefsError
from weefs.lending import Lending, Lent, MayNotOpen
from weefs.log import say, say_traceback
from weefs.peerclient import LAYER_HEADER, PEER_HEADER, WAIT_HEADER, Refusal, decode_layer
from weefs.placement import TOC_GROUP, before, group_of
from weefs.protocol import Layer

MAX_RANGE_BYTES = 16 << 20
MAX_CONNECTIONS = 4096
MAX_REQUESTS = 1024
"""That are being answered."""
MAX_HEADER_BYTES = 8 << 10
IDLE_S = 60.0
PULL_S = 5.0
"""Longer than askers wait: what comes later is of use to the next."""
ARRIVAL_S = 0.1
"""For chunks that may be on their way to this node: whoever sent them may have referred others to it a moment ago."""
SEND_S = 30.0
"""For one answer: whoever takes longer keeps what it is sent from being evicted."""
MAX_SAID = 64
CROWD_WAIT_S = 1.0
"""For the first of a crowd to have a chunk, to whom the others are referred."""

_PATH = re.compile(r"/v1/layers/(sha256:[0-9a-f]{64})/(stream|toc)")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")


class _Refusing(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


@attrs.define
class Served:
    """Bytes sent, and requests by the status of their answers."""

    bytes: int = 0
    aborted: int = 0
    by_status: dict[int, int] = attrs.field(factory=dict)


class PeerServer:
    """Answers peers between start() and close()."""

    def __init__(
        self,
        name: str,
        shelf: Lending,
        *,
        token: str | None,
        tls: ssl.SSLContext | None,
        members: Callable[[], frozenset[str]],
        on_sent: Callable[[str, int], None],
    ) -> None:
        """`members`: of now. `on_sent`: to whom, how many bytes."""
        self._name = name
        self._shelf = shelf
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._tls = tls
        self._members = members
        self._on_sent = on_sent
        self._crowd = Crowd(name)
        self._arrivals: dict[tuple[str, int], asyncio.Event] = {}
        self._requests = 0
        self._said: set[str] = set()
        self._server = web.Server(
            self._answer, access_log=None, keepalive_timeout=IDLE_S, max_field_size=MAX_HEADER_BYTES, max_line_size=MAX_HEADER_BYTES,
            handler_cancellation=True,
        )  # fmt: skip
        self._listening: asyncio.Server | None = None
        self.served = Served()

    async def start(self, host: str, port: int) -> None:
        """OSError."""
        self._listening = await asyncio.get_running_loop().create_server(self._connected, host, port, ssl=self._tls, backlog=1024)

    @property
    def port(self) -> int:
        assert self._listening is not None
        return int(self._listening.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
        await self._server.shutdown(timeout=0.1)

    def _connected(self) -> asyncio.Protocol:
        return _Refusing() if len(self._server.connections) >= MAX_CONNECTIONS else self._server()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._requests >= MAX_REQUESTS:
            return self._refused(503, "too many requests")
        self._requests += 1
        try:
            return await self._checked(request)
        except WeefsError as error:
            self._say_once(f"peers: {error}")
            return self._refused(403 if isinstance(error, MayNotOpen) else 404, str(error))
        except ConnectionError:  # the peer is gone, or must be told so: nothing more can be said to it
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=499)
        except Exception:
            say_traceback()
            return self._refused(500, "a defect; the log of the node says more")
        finally:
            self._requests -= 1

    def _say_once(self, sentence: str) -> None:
        """Peers repeat what they ask."""
        if sentence not in self._said and len(self._said) < MAX_SAID:
            self._said.add(sentence)
            say(sentence)

    def _refused(self, status: int, reason: str, holders: tuple[str, ...] = ()) -> web.Response:
        self.served.by_status[status] = self.served.by_status.get(status, 0) + 1
        body = msgspec.json.encode(Refusal(reason=reason, holders=[*holders]))
        return web.Response(status=status, body=body, content_type="application/json")

    async def _checked(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._authorization is not None:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, self._authorization):
                return self._refused(401, "wrong token")
        if self._is_own(request):
            self._say_once(f"peers: asked by {self._name}, which is this node: it is a member by another name too, or another node has its")
        path = _PATH.fullmatch(request.path)
        if request.method != "GET" or path is None:
            return self._refused(400, "expected GET /v1/layers/DIGEST/stream or …/toc")
        digest = path[1]
        try:
            layer = decode_layer(request.headers[LAYER_HEADER]) if LAYER_HEADER in request.headers else None
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            return self._refused(400, f"{LAYER_HEADER}: {error}")
        if layer is not None and layer.digest != digest:
            return self._refused(400, f"{LAYER_HEADER}: expected {digest}, received {layer.digest}")
        if path[2] == "toc":
            return await self._answer_toc(request, digest, layer)
        wanted = _RANGE.fullmatch(request.headers.get("Range", ""))
        if wanted is None:
            return self._refused(400, "expected Range: bytes=A-B")
        offset, size = int(wanted[1]), int(wanted[2]) - int(wanted[1]) + 1
        if not 0 < size <= MAX_RANGE_BYTES:
            return self._refused(416, f"expected 1 to {MAX_RANGE_BYTES} bytes, received {size}")
        if _must_not_wait(request) and not self._shelf.is_open(digest):  # it may be about to be, by way of whoever asks
            return self._refused(404, "absent")
        lent = await self._lend(digest, layer)
        if lent is None:
            return self._refused(404, "absent")
        try:
            return await self._answer_stream(request, digest, lent, offset, size, described=layer is not None)
        finally:
            self._shelf.give_back(lent)

    async def _lend(self, digest: str, layer: Layer | None) -> Lent | None:
        try:
            async with asyncio.timeout(PULL_S):
                return await self._shelf.lend(digest, layer)
        except TimeoutError:
            return None

    async def _answer_stream(
        self, request: web.BaseRequest, digest: str, lent: Lent, offset: int, size: int, *, described: bool
    ) -> web.StreamResponse:
        try:
            chunks = self._shelf.chunks_at(lent, offset, size)
        except CoreError as error:
            return self._refused(416, error.strerror or "")
        if _must_not_wait(request) and not self._has(lent, chunks):
            return self._refused(404, "absent")
        group = group_of(chunks.start)
        pull = described and self._may_wait(request, digest, group)
        send = functools.partial(self._send, request, lent, chunks, offset, size, pull=pull)
        return await self._send_or_refer(request, digest, group, bits_of(chunks, group), send)

    async def _answer_toc(self, request: web.BaseRequest, digest: str, layer: Layer | None) -> web.StreamResponse:
        if _must_not_wait(request) and not self._shelf.is_open(digest):
            return self._refused(404, "absent")
        pull = layer is not None and self._may_wait(request, digest, TOC_GROUP)

        async def send() -> web.StreamResponse:
            lent = await self._lend(digest, layer) if pull or self._shelf.is_open(digest) else None
            if lent is None:
                return self._refused(404, "absent")
            try:
                return await self._send_toc(request, lent)
            finally:
                self._shelf.give_back(lent)

        return await self._send_or_refer(request, digest, TOC_GROUP, 1, send)

    async def _send_toc(self, request: web.BaseRequest, lent: Lent) -> web.StreamResponse:
        with lent.borrowed.data.with_name("toc").open("rb", buffering=0) as toc:
            size = os.fstat(toc.fileno()).st_size
            response = web.StreamResponse()
            response.content_type = "application/octet-stream"
            response.content_length = size
            await response.prepare(request)
            if request.transport is None or await _send_file(request.transport, toc, 0, size) != size:
                raise ConnectionResetError("the peer is gone, or the file is shorter")
            await response.write_eof()
        self._count_sent(request, 200, size)
        return response

    def _count_sent(self, request: web.BaseRequest, status: int, size: int) -> None:
        self.served.by_status[status] = self.served.by_status.get(status, 0) + 1
        self.served.bytes += size
        self._on_sent(request.headers.get(PEER_HEADER, ""), size)

    def _is_own(self, request: web.BaseRequest) -> bool:
        """Whoever asks has this node's name."""
        return request.headers.get(PEER_HEADER) == self._name

    def _may_wait(self, request: web.BaseRequest, digest: str, group: int) -> bool:
        """Whether the asker may wait until this node has it: one that ranks behind it, or is no member."""
        asker = request.headers.get(PEER_HEADER, "")
        return asker not in self._members() or before(self._name, asker, digest, group)

    async def _send_or_refer(
        self, request: web.BaseRequest, digest: str, group: int, bits: int, send: Callable[[], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        asker = request.headers.get(PEER_HEADER, "")
        if asker not in self._members():  # nobody can be referred to it
            return await send()
        loop = asyncio.get_running_loop()
        until = loop.time() + CROWD_WAIT_S
        while not (admitted := self._crowd.admit(digest, group, bits, asker, loop.time())).send:
            holders = tuple(holder for holder in admitted.holders if holder in self._members())
            if holders or loop.time() >= until:
                return self._refused(404, "crowded", holders)
            await self._somebody_has_it(digest, group, until)
        complete = False
        try:
            answer = await send()
            complete = answer.status in (200, 206)
            return answer
        finally:
            (self._crowd.sent if complete else self._crowd.failed)(digest, group, bits, asker, loop.time())
            if arrival := self._arrivals.pop((digest, group), None):
                arrival.set()

    async def _somebody_has_it(self, digest: str, group: int, until: float) -> None:
        """Or did not get it; or the time is over."""
        arrival = self._arrivals.setdefault((digest, group), asyncio.Event())
        try:
            async with asyncio.timeout_at(until):
                await arrival.wait()
        except TimeoutError:
            return

    def _has(self, lent: Lent, chunks: range) -> bool:
        try:
            hold = self._shelf.hold(lent, chunks)
        except CoreError:
            return False
        return hold is not None and self._shelf.unhold(lent, hold)

    async def _send(self, request: web.BaseRequest, lent: Lent, chunks: range, offset: int, size: int, *, pull: bool) -> web.StreamResponse:
        try:
            hold = self._shelf.hold(lent, chunks)
            if hold is None and not self._is_own(request):  # one that asks itself would wait for itself
                with suppress(TimeoutError):
                    async with asyncio.timeout(PULL_S if pull else ARRIVAL_S):
                        await self._shelf.bring(lent, [ChunkIndex(chunk) for chunk in chunks], claim=pull)
                hold = self._shelf.hold(lent, chunks)
        except CoreError as error:
            return self._refused(503, error.strerror or "")
        if hold is None:
            return self._refused(404, "absent")
        with self._held(lent, hold) as release:
            return await self._send_held(request, lent, offset, size, release)

    @contextmanager
    def _held(self, lent: Lent, hold: int) -> Iterator[Callable[[], bool]]:
        """Gives the hold back once, at the end if not before; whether all was there."""
        result: list[bool] = []

        def release() -> bool:
            if not result:
                result.append(self._shelf.unhold(lent, hold))
            return result[0]

        try:
            yield release
        finally:
            release()

    async def _send_held(
        self, request: web.BaseRequest, lent: Lent, offset: int, size: int, release: Callable[[], bool]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=206, headers={"Content-Range": f"bytes {offset}-{offset + size - 1}/*"})
        response.content_type = "application/octet-stream"
        response.content_length = size
        # A disk's reads begin now, side by side, and not page by page as the socket takes them.
        os.posix_fadvise(lent.data_fd, offset, size, os.POSIX_FADV_WILLNEED)
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the peer is gone")
        with os.fdopen(lent.data_fd, "rb", buffering=0, closefd=False) as data:
            sent = await _send_file(transport, data, offset, size - 1)
            last = os.pread(lent.data_fd, 1, offset + size - 1)
        if sent != size - 1 or len(last) != 1 or not release():
            self.served.aborted += 1
            transport.abort()
            raise ConnectionResetError("a chunk was lost while it was sent")
        await response.write(last)
        await response.write_eof()
        self._count_sent(request, 206, size)
        return response


def _must_not_wait(request: web.BaseRequest) -> bool:
    return request.headers.get(WAIT_HEADER) == "no"


async def _send_file(transport: asyncio.Transport, file: IO[bytes], offset: int, size: int) -> int:
    """How many bytes went out: fewer than `size` when the file is shorter; -1 when it took too long."""
    if size == 0:
        return 0
    try:
        async with asyncio.timeout(SEND_S):
            return await asyncio.get_running_loop().sendfile(transport, file, offset, size)
    except TimeoutError:
        return -1
