"""Ranges of a registry's blobs over HTTP.

A server that ignores the Range header, sends another range or a short body is caught here. There is one retry, with
fresh authentication, which goes to the registry's own origin only, and only a 401 from there is answered: what a
redirect leads to (the registry's storage, usually) gets neither header nor password.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import urljoin, urlsplit

import aiohttp

from registry import challenges
from registry.credentials import Credentials
from registry.errors import RegistryError, Unreachable, error_of_status

MAX_REDIRECTS = 5
MAX_WHOLE_BLOB_BYTES = 64 << 20
"""A server that answers a range with the whole blob is read up to here and no further: what lies before the range is
thrown away."""


class HttpRanges:
    """Ranges from a registry, over one bounded pool of connections."""

    def __init__(
        self,
        scheme: str,
        host: str,
        repository: str,
        credentials: Credentials | None,
        connections: int,
        timeout_s: float,
    ) -> None:
        self._origin = (scheme, host)
        self._host = host
        self._repository = repository
        self._base = f"{scheme}://{host}/v2/{repository}"
        self._credentials = credentials
        self._authorization: str | None = None
        self._authenticating = asyncio.Lock()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, limit_per_host=connections),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._session.close()

    async def read(self, digest: str, offset: int, size: int) -> bytes:
        if size == 0:
            return b""
        url = f"{self._base}/blobs/{digest}"
        headers = {"Range": f"bytes={offset}-{offset + size - 1}", "Accept-Encoding": "identity"}
        with _translated(url):
            async with await self._request("GET", url, headers) as response:
                return await _read_range(response, url, offset, size)

    async def size(self, digest: str) -> int:
        url = f"{self._base}/blobs/{digest}"
        with _translated(url):
            async with await self._request("HEAD", url, {"Accept-Encoding": "identity"}) as response:
                if response.content_length is None:
                    raise RegistryError(f"{url}: expected a Content-Length, received none")
                return response.content_length

    async def _request(self, method: str, url: str, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """A response of 2xx, after redirects and at most one round of authentication."""
        used = self._authorization
        response = await self._follow(method, url, headers, used)
        if response.status == 401 and self._is_ours(str(response.url)):
            offered = challenges.parse_challenges(response.headers.getall("WWW-Authenticate", []))
            response.release()
            await self._authenticate(offered, used)
            response = await self._follow(method, url, headers, self._authorization)
        if 200 <= response.status < 300:
            return response
        async with response:
            raise await _error_of(response, url)

    async def _follow(
        self, method: str, url: str, headers: Mapping[str, str], authorization: str | None
    ) -> aiohttp.ClientResponse:
        """Redirects by hand: the Authorization header is for the registry and not for the storage that it points to."""
        start = url
        for _ in range(MAX_REDIRECTS + 1):
            own = {"Authorization": authorization} if authorization and self._is_ours(url) else {}
            response = await self._session.request(method, url, headers={**headers, **own}, allow_redirects=False)
            if response.status not in (301, 302, 303, 307, 308):
                return response
            location = response.headers.get("Location", "")
            response.release()
            url = urljoin(url, location)
            if not location or urlsplit(url).scheme not in ("http", "https"):
                raise RegistryError(f"{start}: expected a redirect to http or https, received '{location}'")
        raise RegistryError(f"{start}: expected at most {MAX_REDIRECTS} redirects, received more")

    def _is_ours(self, url: str) -> bool:
        parts = urlsplit(url)
        return (parts.scheme, parts.netloc) == self._origin

    async def _authenticate(self, offered: list[challenges.Challenge], refused: str | None) -> None:
        """Gets a new Authorization value; those who wait here behind another one take what it got."""
        async with self._authenticating:
            if self._authorization != refused:
                return
            basic = None
            if self._credentials:
                basic = await asyncio.to_thread(self._credentials.basic, self._host, self._repository)
            chosen = challenges.answer(
                offered, host=self._host, repository=self._repository, basic=basic, refused=refused
            )
            if isinstance(chosen, challenges.Basic):
                self._authorization = chosen.value
            else:
                self._authorization = await self._fetch_token(chosen)

    async def _fetch_token(self, wanted: challenges.TokenRequest) -> str:
        realm = wanted.realm
        with _translated(realm):
            async with self._session.get(
                realm, params=wanted.query, headers=wanted.headers, allow_redirects=False
            ) as response:
                if response.status in (400, 401, 403):
                    raise challenges.refusal_of_token(realm, self._host, response.status)
                if response.status != 200:
                    raise await _error_of(response, realm)
                data = await _read_up_to(response, challenges.MAX_TOKEN_ANSWER_BYTES)
        return challenges.token_authorization(realm, data)


async def _read_range(response: aiohttp.ClientResponse, url: str, offset: int, size: int) -> bytes:
    if response.status != 206:
        return await _slice_whole(response, url, offset, size)
    received = response.headers.get("Content-Range", "none")
    if not re.fullmatch(rf"bytes {offset}-{offset + size - 1}/(\d+|\*)", received):
        raise Unreachable(f"{url}: expected bytes {offset}-{offset + size - 1}, received Content-Range {received}")
    data = await _read_up_to(response, size + 1)
    if len(data) != size:
        more = "more" if len(data) > size else str(len(data))
        raise Unreachable(f"{url}: expected {size} bytes at {offset}, received {more}")
    return data


async def _slice_whole(response: aiohttp.ClientResponse, url: str, offset: int, size: int) -> bytes:
    """The range out of an answer of the whole blob."""
    if offset + size > MAX_WHOLE_BLOB_BYTES:
        response.close()
        raise RegistryError(
            f"{url}: expected a range (status 206), received the whole blob (status {response.status}), which is too "
            "much to read for it; a registry or proxy that serves Range requests is needed"
        )
    position, wanted = 0, bytearray()
    async for piece in response.content.iter_chunked(1 << 18):
        wanted += piece[max(0, offset - position) :]
        position += len(piece)
        if len(wanted) >= size:
            break
    response.close()  # the rest is not wanted
    if len(wanted) < size:
        raise Unreachable(f"{url}: expected {size} bytes at {offset}, the answer ends after {position}")
    return bytes(wanted[:size])


async def _read_up_to(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    data = bytearray()
    async for piece in response.content.iter_chunked(1 << 18):
        data += piece
        if len(data) >= max_bytes:
            break
    return bytes(data[:max_bytes])


async def _error_of(response: aiohttp.ClientResponse, url: str) -> RegistryError:
    body = b""
    with suppress(aiohttp.ClientError):  # docker-registry's 416 promises a body that it does not send
        body = await _read_up_to(response, 300)
    return error_of_status(url, response.status, response.reason, body, response.headers.get("Retry-After"))


@contextmanager
def _translated(place: str) -> Iterator[None]:
    """The seam: what aiohttp raises becomes ours."""
    try:
        yield
    except aiohttp.ClientSSLError as error:
        raise RegistryError(f"{place}: TLS failed: {error}") from error
    except aiohttp.InvalidURL as error:
        raise RegistryError(f"{place}: expected an address that can be asked: {error}") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise Unreachable(f"{place}: no whole answer ({reason}); is the registry running?") from error
