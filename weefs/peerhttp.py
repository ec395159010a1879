"""HTTP/1.1 to peers whose bodies arrive where they are to be: recv(2) into the buffer that is verified from, and no copy between.

A client library hands out pieces of its own, which costs two more copies and fresh memory for each: as much as SHA-256. This one knows
GET, and answers that say their length, and nothing else of HTTP; heads are parsed by the standard library.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import ssl
from collections.abc import Callable, Mapping
from typing import TypeAlias

import attrs

MAX_HEAD_BYTES = 16 << 10
MAX_IDLE = 16
"""Connections to one peer that are kept for later."""
IDLE_S = 30.0
"""That they are kept: less than the other side does."""
CONNECT_S = 1.0


class ProtocolError(Exception):
    """The peer's answer is none that this client takes."""


@attrs.frozen
class Head:
    """Of an answer. `headers`: names in lower case."""

    status: int
    headers: Mapping[str, str]
    length: int
    keeps: bool


BodyFor: TypeAlias = Callable[[Head], memoryview]
OnBytes: TypeAlias = Callable[[], None]


@attrs.define(eq=False)
class _Asked:
    """The request under way. `head`: None until it is there; then the first `at` bytes of `body` are, too."""

    body_for: BodyFor
    on_bytes: OnBytes
    whole: asyncio.Future[None]
    head: Head | None = None
    body: memoryview = attrs.field(factory=lambda: memoryview(b""))
    at: int = 0


class _HeadFile:
    """What http.client takes for a socket."""

    def __init__(self, head: bytes) -> None:
        self._head = head

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._head)


def parse_head(head: bytes) -> Head:
    """ProtocolError."""
    response = http.client.HTTPResponse(_HeadFile(head))  # type: ignore[arg-type]
    try:
        response.begin()
    except (http.client.HTTPException, ValueError) as error:
        raise ProtocolError(f"expected the head of an answer, received {head[:80]!r}: {error}") from error
    if response.length is None:
        raise ProtocolError(f"expected an answer that says its length, received {response.status} without one")
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Head(response.status, headers, response.length, not response.will_close)


class _Connection(asyncio.BufferedProtocol):
    """One request at a time: idle -> head -> body -> idle; lost from anywhere."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(MAX_HEAD_BYTES)
        self._filled = 0
        self._asked: _Asked | None = None
        self._lost: Exception | None = None
        self.idle_since_s = 0.0

    @property
    def is_open(self) -> bool:
        return self._lost is None and self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, request: bytes, body_for: BodyFor, on_bytes: OnBytes) -> tuple[Head, memoryview]:
        """OSError, ProtocolError, and what `body_for` raises; then, and cancelled, the connection is of no use any more."""
        if self._lost is not None or self._transport is None:
            raise self._lost or ConnectionResetError("the connection is closed")
        self._filled = 0
        self._asked = asked = _Asked(body_for, on_bytes, asyncio.get_running_loop().create_future())
        self._transport.write(request)
        await asked.whole
        assert asked.head is not None
        return asked.head, asked.body

    # ---- asyncio.BufferedProtocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._asked is None:  # nothing is expected but the end
            return memoryview(self._buffer)
        if self._asked.head is not None:
            return self._asked.body[self._asked.at :]
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._asked is None:
                raise ProtocolError("expected nothing that was not asked for, received some")
            if self._asked.head is not None:
                self._asked.at += nbytes
            else:
                self._filled += nbytes
                self._take_head(self._asked)
            self._asked.on_bytes()
            if self._asked.head is not None and self._asked.at == len(self._asked.body):
                self._end(None)
        except Exception as error:  # it is who asked that must know
            self._end(error)

    def _take_head(self, asked: _Asked) -> None:
        """If it is whole; and what came with it of the body."""
        end = self._buffer.find(b"\r\n\r\n", 0, self._filled) + 4
        if end < 4:
            if self._filled == len(self._buffer):
                raise ProtocolError(f"expected a head of at most {MAX_HEAD_BYTES} bytes, received a longer one")
            return
        head = parse_head(bytes(self._buffer[:end]))
        early = self._filled - end
        if early > head.length:
            raise ProtocolError(f"expected {head.length} bytes, received more")
        asked.body = asked.body_for(head)
        asked.body[:early] = self._buffer[end : self._filled]
        asked.at, asked.head = early, head

    def _end(self, error: Exception | None) -> None:
        asked, self._asked = self._asked, None
        if error is not None:
            self._lost = error
            self.abort()
        if asked is None or asked.whole.done():
            return
        if error is None:
            asked.whole.set_result(None)
        else:
            asked.whole.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(self._lost or (exc if isinstance(exc, OSError) else ConnectionResetError("the peer closed the connection")))


class PeerHttp:
    """Connections to peers, kept for `IDLE_S`; made and closed on one event loop."""

    def __init__(self, headers: Mapping[str, str], tls: ssl.SSLContext | None) -> None:
        """`headers`: of every request; ASCII, and without control characters."""
        self._tls = tls
        self._headers = dict(headers)
        self._idle: dict[tuple[str, int], list[_Connection]] = {}
        self._used: set[_Connection] = set()
        self._sweeping: asyncio.TimerHandle | None = None

    async def close(self) -> None:
        """Requests that are being answered fail."""
        for connection in [*self._used, *(each for kept in self._idle.values() for each in kept)]:
            connection.abort()
        self._idle.clear()
        if self._sweeping is not None:
            self._sweeping.cancel()
        await asyncio.sleep(0)  # the transports close

    async def get(
        self, host: str, port: int, path: str, headers: Mapping[str, str], body_for: BodyFor, on_bytes: OnBytes = lambda: None
    ) -> tuple[Head, memoryview]:
        """The head of the answer and its whole body, which is where `body_for` said when the head had come: memory of `length` bytes, or an
        error of its own that ends the request. `on_bytes`: whenever some came. OSError, ProtocolError.
        """
        named = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"GET {path} HTTP/1.1", f"Host: {named}", *(f"{name}: {value}" for name, value in {**self._headers, **headers}.items())]
        request = ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")
        while True:
            connection, is_kept = await self._connection_to((host, port))
            whole = False
            try:
                head, body = await connection.ask(request, body_for, on_bytes)
                whole = head.keeps
                return head, body
            except ConnectionError:  # the peer may have closed a kept one just now
                if not is_kept:
                    raise
            finally:
                self._give_back((host, port), connection, keep=whole)

    async def _connection_to(self, place: tuple[str, int]) -> tuple[_Connection, bool]:
        """One, and whether it was used before."""
        kept = self._idle.get(place, [])
        while kept:
            connection = kept.pop()
            if connection.is_open:
                self._used.add(connection)
                return connection, True
        async with asyncio.timeout(CONNECT_S):
            _, connection = await asyncio.get_running_loop().create_connection(_Connection, *place, ssl=self._tls)
        self._used.add(connection)
        return connection, False

    def _give_back(self, place: tuple[str, int], connection: _Connection, *, keep: bool) -> None:
        self._used.discard(connection)
        kept = self._idle.setdefault(place, [])
        if not keep or not connection.is_open or len(kept) >= MAX_IDLE:
            connection.abort()
            return
        connection.idle_since_s = asyncio.get_running_loop().time()
        kept.append(connection)
        if self._sweeping is None:
            self._sweep_later()

    def _sweep_later(self) -> None:
        self._sweeping = asyncio.get_running_loop().call_later(IDLE_S / 2, self._sweep)

    def _sweep(self) -> None:
        """Closes those that have been idle for long."""
        before_s = asyncio.get_running_loop().time() - IDLE_S
        for place, kept in [*self._idle.items()]:
            for connection in kept:
                if connection.idle_since_s <= before_s:
                    connection.abort()
            self._idle[place] = [each for each in kept if each.is_open]
            if not self._idle[place]:
                del self._idle[place]
        self._sweeping = None
        if self._idle:
            self._sweep_later()
