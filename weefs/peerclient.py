"""Asking a peer for bytes of a layer: the HTTP of docs/peers.md, from the asker's side. What is believed of it is decided elsewhere."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Callable

import aiohttp
import attrs
import msgspec

from weefs.protocol import Layer

CONNECTIONS = 1024
"""Of all peers together; those of one are bounded by who asks."""
CONNECT_S = 1.0
IDLE_S = 30.0
MAX_TOC_BYTES = 256 << 20
"""Larger ones come from the registry."""
MAX_REFUSAL_BYTES = 16 << 10
REFUSALS = (403, 404, 503)
"""By a peer that is well and cannot help."""
READ_BUFFER_BYTES = 1 << 20

PEER_HEADER = "Weenv-Peer"
LAYER_HEADER = "Weenv-Layer"


class PeerFailed(Exception):
    """It did not answer, or not as docs/peers.md says."""


class Refusal(msgspec.Struct, kw_only=True):
    """The body of an answer that is none."""

    reason: str = "absent"
    holders: list[str] = []


@attrs.frozen
class Elsewhere:
    """It does not have it; `holders` may."""

    holders: tuple[str, ...]


def encode_layer(layer: Layer) -> str:
    """As a header's value."""
    return base64.urlsafe_b64encode(msgspec.json.encode(layer)).decode()


def decode_layer(text: str) -> Layer:
    """ValueError, msgspec.MsgspecError."""
    return msgspec.json.decode(base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True), type=Layer)


class PeerClient:
    """Connections to peers; made and closed on one event loop."""

    def __init__(self, name: str, token: str | None, tls: ssl.SSLContext | None) -> None:
        self._scheme = "http" if tls is None else "https"
        self._headers = {PEER_HEADER: name, "Accept-Encoding": "identity"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONNECTIONS, keepalive_timeout=IDLE_S, ssl=True if tls is None else tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=READ_BUFFER_BYTES,
        )

    async def close(self) -> None:
        await self._session.close()

    async def ask(
        self, peer: str, digest: str, offset: int, size: int, layer: Layer | None, on_first_byte: Callable[[], None]
    ) -> bytes | bytearray | Elsewhere:
        """Exactly `size` bytes at `offset` of the layer's stream, or where else they may be. `layer`: for the peer to fetch them if it
        lacks them; None: only if it has them. PeerFailed.
        """
        url = f"{self._scheme}://{peer}/v1/layers/{digest}/stream"
        headers = self._headers_for(layer) | {"Range": f"bytes={offset}-{offset + size - 1}"}
        try:
            async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                if response.status in (206, *REFUSALS):
                    on_first_byte()
                if response.status in REFUSALS:
                    return await _refusal(response)
                return await _body(response, offset, size)
        except (aiohttp.ClientError, OSError) as error:
            raise PeerFailed(f"{url}: {type(error).__name__}: {error}") from error

    async def ask_toc(self, peer: str, digest: str, layer: Layer | None) -> bytes | bytearray | Elsewhere:
        """The layer's raw TOC, or where else it may be. `layer` as for ask(). PeerFailed."""
        url = f"{self._scheme}://{peer}/v1/layers/{digest}/toc"
        try:
            async with self._session.get(url, headers=self._headers_for(layer), allow_redirects=False) as response:
                if response.status in REFUSALS:
                    return await _refusal(response)
                if response.status != 200 or response.content_length is None or response.content_length > MAX_TOC_BYTES:
                    received = f"received {response.status} with {response.content_length} bytes"
                    raise PeerFailed(f"{url}: expected 200 with at most {MAX_TOC_BYTES} bytes, {received}")
                return await _exactly(response, response.content_length)
        except (aiohttp.ClientError, OSError) as error:
            raise PeerFailed(f"{url}: {type(error).__name__}: {error}") from error

    def _headers_for(self, layer: Layer | None) -> dict[str, str]:
        return self._headers if layer is None else self._headers | {LAYER_HEADER: encode_layer(layer)}


async def _refusal(response: aiohttp.ClientResponse) -> Elsewhere:
    body = await response.content.read(MAX_REFUSAL_BYTES)
    try:
        return Elsewhere(tuple(msgspec.json.decode(body, type=Refusal).holders))
    except msgspec.MsgspecError as error:
        raise PeerFailed(f"{response.url}: expected a refusal in JSON with {response.status}: {error}") from error


async def _body(response: aiohttp.ClientResponse, offset: int, size: int) -> bytearray:
    if response.status != 206:
        raise PeerFailed(f"{response.url}: expected 206 or 404, received {response.status}")
    content_range = response.headers.get("Content-Range", "")
    if not content_range.startswith(f"bytes {offset}-{offset + size - 1}/") or response.content_length != size:
        received = f"received {response.content_length} bytes as {content_range!r}"
        raise PeerFailed(f"{response.url}: expected bytes {offset} to {offset + size - 1}, {received}")
    return await _exactly(response, size)


async def _exactly(response: aiohttp.ClientResponse, size: int) -> bytearray:
    """A body of a length that is said."""
    body = bytearray(size)
    at = 0
    async for piece in response.content.iter_any():
        body[at : at + len(piece)] = piece
        at += len(piece)
    if at != size:
        raise PeerFailed(f"{response.url}: expected {size} bytes, received {at}")
    return body
