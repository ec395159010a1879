"""Asking a peer for bytes of a layer: the HTTP of docs/peers.md, from the asker's side. What is believed of it is decided elsewhere."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Callable, Mapping

import attrs
import msgspec

from weefs.peerconfig import split_address
from weefs.peerhttp import BodyFor, Head, OnBytes, PeerHttp, ProtocolError
from weefs.protocol import Layer

MAX_TOC_BYTES = 256 << 20
"""Larger ones come from the registry."""
MAX_REFUSAL_BYTES = 16 << 10
REFUSALS = (403, 404, 503)
"""By a peer that is well and cannot help."""

PEER_HEADER = "Weenv-Peer"
LAYER_HEADER = "Weenv-Layer"
WAIT_HEADER = "Weenv-Wait"
"""`no`: the answer must not wait for anything."""


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
    """Asks peers; made and closed on one event loop."""

    def __init__(self, name: str, token: str | None, tls: ssl.SSLContext | None) -> None:
        self._scheme = "http" if tls is None else "https"
        headers = {PEER_HEADER: name} if token is None else {PEER_HEADER: name, "Authorization": f"Bearer {token}"}
        self._http = PeerHttp(headers, tls)

    async def close(self) -> None:
        await self._http.close()

    async def ask(
        self, peer: str, digest: str, offset: int, into: memoryview, layer: Layer | None, on_bytes: Callable[[], None], *, wait: bool = True
    ) -> Elsewhere | None:
        """Fills `into` with the bytes at `offset` of the layer's stream, or says where else they may be. `layer`: for the peer to fetch
        them if it lacks them; None: only if it has them; without `wait`, now. `on_bytes`: whenever some of an answer came. PeerFailed.
        """
        wanted = f"{offset}-{offset + len(into) - 1}"

        def body_for(head: Head) -> memoryview:
            received = head.headers.get("content-range", "")
            if head.status != 206:
                return _refusal_for(head)
            if not received.startswith(f"bytes {wanted}/") or head.length != len(into):
                raise ProtocolError(f"expected bytes {wanted}, received {head.length} bytes as {received!r}")
            return into

        headers = {"Range": f"bytes={wanted}"} | _waiting(wait)
        answer = await self._get(peer, f"/v1/layers/{digest}/stream", layer, headers, body_for, on_bytes)
        return answer if isinstance(answer, Elsewhere) else None

    async def ask_toc(self, peer: str, digest: str, layer: Layer | None, *, wait: bool = True) -> memoryview | Elsewhere:
        """The layer's raw TOC, or where else it may be. `layer` and `wait` as for ask(). PeerFailed."""

        def body_for(head: Head) -> memoryview:
            if head.status != 200:
                return _refusal_for(head)
            if head.length > MAX_TOC_BYTES:
                raise ProtocolError(f"expected at most {MAX_TOC_BYTES} bytes, received {head.length}")
            return memoryview(bytearray(head.length))

        return await self._get(peer, f"/v1/layers/{digest}/toc", layer, _waiting(wait), body_for, lambda: None)

    async def _get(
        self, peer: str, path: str, layer: Layer | None, headers: Mapping[str, str], body_for: BodyFor, on_bytes: OnBytes
    ) -> memoryview | Elsewhere:
        described = {} if layer is None else {LAYER_HEADER: encode_layer(layer)}
        url = f"{self._scheme}://{peer}{path}"
        try:
            head, body = await self._http.get(*split_address(peer), path, {**headers, **described}, body_for, on_bytes)
            return body if head.status in (200, 206) else Elsewhere(tuple(msgspec.json.decode(body, type=Refusal).holders))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise PeerFailed(f"{url}: expected a refusal in JSON: {error}") from error
        except (ProtocolError, OSError, UnicodeError) as error:  # UnicodeError: of a name that no host can have
            raise PeerFailed(f"{url}: {type(error).__name__}: {error}") from error


def _waiting(wait: bool) -> dict[str, str]:
    return {} if wait else {WAIT_HEADER: "no"}


def _refusal_for(head: Head) -> memoryview:
    """Memory for why not."""
    if head.status not in REFUSALS or head.length > MAX_REFUSAL_BYTES:
        raise ProtocolError(f"expected what was asked for, or one of {REFUSALS}, received {head.status} with {head.length} bytes")
    return memoryview(bytearray(head.length))
