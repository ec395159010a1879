"""GET /metrics over HTTP, for Prometheus: one small server in the daemon, when the configuration has an address for it.

It shows figures and takes nothing. Whoever can connect can read it, so the address should be one that only the monitoring reaches.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import h11
import trio

from envlet import errors
from envlet.errors import EnvletError
from envlet.metrics import CONTENT_TYPE

log = logging.getLogger("envlet")

CONNECTIONS_MAX = 16
"""At once; further ones wait."""
IDLE_S = 120.0
"""A connection on which nothing was asked for so long is closed; scrapers ask every minute or oftener."""
_RECEIVE_BYTES = 4096

Render = Callable[[], Awaitable[bytes]]


async def listen(host: str, port: int) -> list[trio.SocketListener]:
    """Raises EnvletError if the address cannot be had."""
    try:
        return await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise EnvletError(
            errors.EXISTS, f"metrics_listen: expected an address of this machine that is free, received {host}:{port}: {error.strerror}"
        ) from error


async def serve(listeners: list[trio.SocketListener], render: Render) -> None:
    """Until cancelled. `render`: the metrics as text, asked for by each request."""
    limit = trio.CapacityLimiter(CONNECTIONS_MAX)

    async def converse(stream: trio.SocketStream) -> None:
        try:
            async with limit, stream:
                await _Conversation(stream, render).run()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, h11.RemoteProtocolError):
            pass  # who asked is gone, does not read, or speaks something else
        except Exception:  # a defect costs this connection, not the node
            log.exception("a connection for metrics was given up")

    await trio.serve_listeners(converse, listeners)


class _Conversation:
    """The requests of one connection, one after the other."""

    def __init__(self, stream: trio.SocketStream, render: Render) -> None:
        self._stream = stream
        self._render = render
        self._http = h11.Connection(h11.SERVER)

    async def run(self) -> None:
        while True:
            request = await self._receive()
            if request is None:
                return
            await self._answer(request)
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()

    async def _receive(self) -> h11.Request | None:
        """A whole request; its body, which none should have, is not kept. None: the other side has gone or takes too long."""
        request: h11.Request | None = None
        with trio.move_on_after(IDLE_S):
            while True:
                match self._http.next_event():
                    case h11.NEED_DATA:
                        self._http.receive_data(await self._stream.receive_some(_RECEIVE_BYTES))
                    case h11.Request() as received:
                        request = received
                    case h11.EndOfMessage():
                        return request
                    case h11.ConnectionClosed():
                        return None
                    case h11.PAUSED:
                        return None
        return None

    async def _answer(self, request: h11.Request) -> None:
        status, kind, body = 200, CONTENT_TYPE, b""
        if request.target.partition(b"?")[0] != b"/metrics":
            status, kind, body = 404, "text/plain", b"there is /metrics and nothing else\n"
        elif request.method not in (b"GET", b"HEAD"):
            status, kind, body = 405, "text/plain", b"expected GET or HEAD\n"
        else:
            body = await self._render()
        headers = [("Content-Type", kind), ("Content-Length", str(len(body)))] + ([("Allow", "GET, HEAD")] if status == 405 else [])
        sent = self._http.send(h11.Response(status_code=status, headers=headers)) or b""
        if request.method != b"HEAD":
            sent += self._http.send(h11.Data(data=body)) or b""
        sent += self._http.send(h11.EndOfMessage()) or b""
        with trio.fail_after(IDLE_S):
            await self._stream.send_all(sent)
