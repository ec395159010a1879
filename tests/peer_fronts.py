"""Peers that fail: a front is the address at which a node is a member. It passes requests on to the node, or fails in its own way."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable

import aiohttp
import attrs
from aiohttp import web

from weefs.peerclient import PEER_HEADER

SLOW_BYTES_PER_S = 8 << 10
TOKEN = "the-token-of-all-these-nodes"


@attrs.frozen
class Right:
    """What the node answered."""

    status: int
    headers: dict[str, str]
    body: bytes


@attrs.define(eq=False)
class Front:
    """In the event loop of the nodes. `fail` answers in the node's place while it is set, or returns None to let a request through."""

    address: str
    node: str
    tls: ssl.SSLContext | None = None
    fail: Fail | None = None
    token: str | None = None
    """Shown to the node instead of the asker's."""
    passed: Counter[str] = attrs.field(factory=Counter)
    """Ranges that the node sent, by the asker's name."""
    _runner: web.ServerRunner | None = None

    async def start(self) -> None:
        self._runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=0.1)
        await self._runner.setup()
        host, _, port = self.address.rpartition(":")
        await web.TCPSite(self._runner, host, int(port), ssl_context=self.tls).start()

    async def stop(self) -> None:
        """Nobody listens afterwards, and connections are closed."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.fail is not None:
            answer = await self.fail(self, request)
            if answer is not None:
                return answer
        right = await self.ask(request)
        self.passed[request.headers.get(PEER_HEADER, "")] += right.status == 206
        return web.Response(status=right.status, headers=right.headers, body=right.body)

    async def ask(self, request: web.BaseRequest) -> Right:
        """The node."""
        headers = {name: value for name, value in request.headers.items() if name not in ("Host", "Connection")}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        async with aiohttp.ClientSession() as session, session.get(f"http://{self.node}{request.path}", headers=headers) as answer:
            kept = {name: answer.headers[name] for name in ("Content-Range", "Content-Type") if name in answer.headers}
            return Right(answer.status, kept, await answer.read())


Fail = Callable[[Front, web.BaseRequest], Awaitable[web.StreamResponse | None]]


def of_contents(fail: Fail) -> Fail:
    """TOCs are passed on."""

    async def of_contents_only(front: Front, request: web.BaseRequest) -> web.StreamResponse | None:
        return None if request.path.endswith("/toc") else await fail(front, request)

    return of_contents_only


def status(code: int, body: bytes = b'{"reason": "as the test wants", "holders": []}') -> Fail:
    async def fail(front: Front, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=code, body=body)

    return fail


async def abort(front: Front, request: web.BaseRequest) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def no_http(front: Front, request: web.BaseRequest) -> web.StreamResponse:
    assert isinstance(request.transport, asyncio.Transport)
    request.transport.write(b"\x00\xff" * 512)
    request.transport.close()
    return web.Response()


async def stall(front: Front, request: web.BaseRequest) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def _begun(front: Front, request: web.BaseRequest) -> tuple[web.StreamResponse, bytes]:
    """The head of the right answer was sent; its body."""
    right = await front.ask(request)
    response = web.StreamResponse(status=right.status, headers=right.headers)
    response.content_length = len(right.body)
    await response.prepare(request)
    return response, right.body


async def stall_midway(front: Front, request: web.BaseRequest) -> web.StreamResponse:
    response, body = await _begun(front, request)
    await response.write(body[: len(body) // 2])
    await asyncio.Event().wait()
    raise AssertionError


async def slow(front: Front, request: web.BaseRequest) -> web.StreamResponse:
    response, body = await _begun(front, request)
    for at in range(0, len(body), SLOW_BYTES_PER_S // 8):
        await response.write(body[at : at + SLOW_BYTES_PER_S // 8])
        await asyncio.sleep(1 / 8)
    return response


def cut(without: Callable[[bytes], int]) -> Fail:
    """So many bytes are not sent."""

    async def fail(front: Front, request: web.BaseRequest) -> web.StreamResponse:
        response, body = await _begun(front, request)
        await response.write(body[: len(body) - without(body)])
        assert request.transport is not None
        request.transport.close()
        return response

    return fail


def _range(request: web.BaseRequest) -> tuple[int, int]:
    begin, _, last = request.headers["Range"].removeprefix("bytes=").partition("-")
    return int(begin), int(last)


async def other_range(front: Front, request: web.BaseRequest) -> web.StreamResponse:
    """It says so."""
    right = await front.ask(request)
    begin, last = _range(request)
    return web.Response(status=206, headers={"Content-Range": f"bytes {begin + 4096}-{last + 4096}/*"}, body=right.body)


async def shorter(front: Front, request: web.BaseRequest) -> web.StreamResponse:
    """A body that is whole for HTTP, and not what its range says."""
    right = await front.ask(request)
    return web.Response(status=206, headers=right.headers, body=right.body[:-7])


async def shifted(front: Front, request: web.BaseRequest) -> web.StreamResponse:
    """Bytes of the layer, but of another place."""
    right = await front.ask(request)
    return web.Response(status=right.status, headers=right.headers, body=right.body[7:] + right.body[:7])


async def damaged(front: Front, request: web.BaseRequest) -> web.StreamResponse:
    """One bit of each page."""
    right = await front.ask(request)
    body = bytearray(right.body)
    for at in range(0, len(body), 4096):
        body[at] ^= 1
    return web.Response(status=right.status, headers=right.headers, body=bytes(body))


async def wrong_toc(front: Front, request: web.BaseRequest) -> web.StreamResponse | None:
    return await damaged(front, request) if request.path.endswith("/toc") else None


def refers_to(*holders: str) -> Fail:
    names = ", ".join(f'"{holder}"' for holder in holders)
    return status(404, f'{{"reason": "crowded", "holders": [{names}]}}'.encode())


def unless_from(names: set[str], fail: Fail) -> Fail:
    """A partition: nothing gets through but what these nodes ask."""

    async def apart(front: Front, request: web.BaseRequest) -> web.StreamResponse | None:
        return None if request.headers.get(PEER_HEADER) in names else await fail(front, request)

    return apart
