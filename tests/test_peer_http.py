"""The client of peers against servers of raw bytes: however an answer looks and wherever it is cut, it is taken whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from weefs.buffers import POOLED_BYTES, Buffers
from weefs.peerhttp import MAX_HEAD_BYTES, Head, PeerHttp, ProtocolError

BODY = bytes(range(256)) * 300
HEAD = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {len(BODY)}\r\nContent-Range: bytes 0-9/*\r\n\r\n".encode()
ANSWER = HEAD + BODY


class Server:
    """Answers the n-th request of all with the pieces that `answers(n)` names; after an empty one it closes the connection."""

    def __init__(self, answers: Callable[[int], list[bytes]]) -> None:
        self._answers = answers
        self.connections = 0
        self.requests: list[bytes] = []
        self.left = asyncio.Event()
        self.port = 0

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                for piece in self._answers(len(self.requests) - 1):
                    if not piece:
                        writer.close()
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        self.left.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=1 << 20)
        self.port = server.sockets[0].getsockname()[1]
        yield self
        server.close()


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[PeerHttp]:
    http = PeerHttp({"Weenv-Peer": "me:1"}, None)
    try:
        yield http
    finally:
        await http.close()


async def get(http: PeerHttp, server: Server, *, within_s: float = 60.0) -> tuple[Head, bytes]:
    async with asyncio.timeout(within_s):
        head, body = await http.get("127.0.0.1", server.port, "/x", {"Range": "bytes=0-9"}, lambda head: memoryview(bytearray(head.length)))
        return head, bytes(body)


def test_an_answer_is_the_same_wherever_it_is_cut_into_pieces() -> None:
    cuts = [*range(1, len(HEAD) + 3), len(ANSWER) - 1, len(ANSWER)]

    def pieces(n: int) -> list[bytes]:
        return [piece for piece in (ANSWER[: cuts[n]], ANSWER[cuts[n] :]) if piece]

    async def run() -> None:
        async with Server(pieces).running() as server, client() as http:
            for _ in cuts:
                head, body = await get(http, server)
                assert (head.status, head.headers["content-range"], body) == (206, "bytes 0-9/*", BODY)
            assert server.connections == 1  # it is kept
            asked = ["GET /x HTTP/1.1", f"Host: 127.0.0.1:{server.port}", "Weenv-Peer: me:1", "Range: bytes=0-9", "", ""]
            assert server.requests[0].decode().split("\r\n") == asked

    asyncio.run(run())


@pytest.mark.parametrize("end", [1, 20, len(HEAD) - 1, len(HEAD), len(HEAD) + 1, len(ANSWER) - 1])
def test_an_answer_that_ends_early_is_none(end: int) -> None:
    async def run() -> None:
        async with Server(lambda _: [ANSWER[:end], b""]).running() as server, client() as http:
            with pytest.raises(ConnectionError):
                await get(http, server)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 206 Partial Content\r\nContent-Length: 3\r\n\r\nfour", "more"),
        (b"HTTP/1.1 206 Partial Content\r\n\r\n", "says its length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "says its length"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "head of an answer"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "head of an answer"),
        (b"HTTP/1.1 206 x\r\nX: " + b"y" * MAX_HEAD_BYTES, "at most"),
        (b"HTTP/1.1 two hundred\r\n\r\n", "head of an answer"),
    ],
    ids=["longer", "no_length", "chunked", "other_protocol", "continue", "long_head", "no_status"],
)
def test_what_is_no_answer_is_refused_and_its_connection_closed(answer: bytes, said: str) -> None:
    async def run() -> None:
        async with Server(lambda n: [answer] if n == 0 else [ANSWER]).running() as server, client() as http:
            with pytest.raises(ProtocolError, match=said):
                await get(http, server)
            assert (await get(http, server))[1] == BODY
            assert server.connections == 2

    asyncio.run(run())


def test_a_kept_connection_that_the_peer_has_closed_costs_nothing() -> None:
    async def run() -> None:
        async with Server(lambda n: [b""] if n == 1 else [ANSWER]).running() as server, client() as http:
            for _ in range(2):
                assert (await get(http, server))[1] == BODY
            assert (server.connections, len(server.requests)) == (2, 3)

    asyncio.run(run())


def test_what_comes_when_nothing_was_asked_for_ends_the_connection() -> None:
    async def run() -> None:
        async with Server(lambda n: [ANSWER, b"x"] if n == 0 else [ANSWER]).running() as server, client() as http:
            assert (await get(http, server))[1] == BODY
            await server.left.wait()
            assert (await get(http, server))[1] == BODY
            assert server.connections == 2

    asyncio.run(run())


def test_a_request_that_is_cancelled_writes_nowhere_any_more() -> None:
    into = bytearray(len(BODY))

    async def run() -> None:
        async with Server(lambda n: [ANSWER[:-1]] if n == 0 else [ANSWER]).running() as server, client() as http:
            some = asyncio.Event()
            asking = asyncio.create_task(http.get("127.0.0.1", server.port, "/x", {}, lambda _: memoryview(into), some.set))
            await some.wait()
            asking.cancel()
            await asyncio.wait([asking])
            into[:] = bytes(len(BODY))
            assert (await get(http, server))[1] == BODY
            assert server.connections == 2
            assert not any(into)

    asyncio.run(run())


def test_closing_ends_what_is_under_way() -> None:
    async def run() -> None:
        async with Server(lambda _: [HEAD]).running() as server, client() as http:
            some = asyncio.Event()
            asking = asyncio.create_task(
                http.get("127.0.0.1", server.port, "/x", {}, lambda head: memoryview(bytearray(head.length)), some.set)
            )
            await some.wait()
            await http.close()
            with pytest.raises(OSError, match="closed"):
                await asking

    asyncio.run(run())


def test_an_error_of_the_caller_is_the_callers() -> None:
    def body_for(_head: Head) -> memoryview:
        raise ProtocolError("not that")

    async def run() -> None:
        async with Server(lambda _: [ANSWER]).running() as server, client() as http:
            with pytest.raises(ProtocolError, match="not that"):
                await http.get("127.0.0.1", server.port, "/x", {}, body_for)

    asyncio.run(run())


def test_memory_is_used_again() -> None:
    async def run() -> None:
        buffers = Buffers()
        first = buffers.take(POOLED_BYTES)
        memory = first.obj
        buffers.give_back(first)
        assert buffers.take(POOLED_BYTES - 5).obj is memory
        assert buffers.take(POOLED_BYTES).obj is not memory
        small = buffers.take(10)
        buffers.give_back(small)
        assert buffers.take(10).obj is not small.obj

    asyncio.run(run())
