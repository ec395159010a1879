"""Ranges of a registry's blobs over HTTP.

A server that ignores the Range header, sends another range or a short body is caught here.

Authentication: a token is renewed before it ends; a 401 or 403 of the registry's own origin is answered once, with what it asks for or,
where it does not say, with what it asked for last. What a redirect leads to (the registry's storage, usually, by an address that is signed
for some minutes) gets neither header nor password. Where a blob was found is remembered, so that a range costs one request and not two;
when that place refuses, or cannot be reached, the registry is asked again.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import urljoin, urlsplit

import aiohttp

from registry import challenges
from registry.credentials import Credentials
from registry.errors import AuthenticationFailed, IntegrityError, RegistryError, Unreachable, error_of_status
from registry.ranges import Connections
from registry.referrers import find

MAX_REDIRECTS = 5
MAX_PLACES = 4096
"""Redirects that are remembered, for one repository."""
READ_BUFFER_BYTES = 1 << 20
"""Of an answer that arrives faster than it is taken; then its connection waits."""
RENEWED_AT = 0.8
"""Of a token's life: then it is renewed."""
MAX_WHOLE_BLOB_BYTES = 64 << 20
"""A server that answers a range with the whole blob is read up to here and no further: what lies before the range is
thrown away."""


class HttpRanges:
    """Ranges from one repository of a registry."""

    def __init__(
        self, scheme: str, host: str, repository: str, credentials: Credentials | None, connections: Connections | None = None
    ) -> None:
        """`connections` stay the caller's; without them it has its own."""
        self._origin = (scheme, host)
        self._host = host
        self._repository = repository
        self._base = f"{scheme}://{host}/v2/{repository}"
        self._credentials = credentials
        self._authorization: str | None = None
        self._challenges: list[challenges.Challenge] = []
        self._renew_at = math.inf
        self._authenticating = asyncio.Lock()
        self._places: OrderedDict[str, str] = OrderedDict()
        self._connections = connections or Connections()
        self._closes = connections is None

    @property
    def _session(self) -> aiohttp.ClientSession:
        if not isinstance(self._connections.session, aiohttp.ClientSession):
            limits = self._connections
            self._connections.session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, limit_per_host=limits.per_host),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.timeout_s, sock_read=limits.timeout_s),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=READ_BUFFER_BYTES,
            )
        return self._connections.session

    async def close(self) -> None:
        if self._closes:
            await self._connections.close()

    async def read(self, digest: str, offset: int, size: int) -> bytes:
        data = bytearray(size)
        await self.read_into(digest, offset, memoryview(data))
        return bytes(data)

    async def read_into(self, digest: str, offset: int, into: memoryview) -> None:
        if not into:
            return
        url = f"{self._base}/blobs/{digest}"
        headers = {"Range": f"bytes={offset}-{offset + len(into) - 1}", "Accept-Encoding": "identity"}
        with _translated(url):
            async with await self._request("GET", url, headers) as response:
                try:
                    await _read_range(response, url, offset, into)
                except BaseException:
                    self._places.pop(url, None)  # the registry may know a better one
                    raise

    async def size(self, digest: str) -> int:
        url = f"{self._base}/blobs/{digest}"
        with _translated(url):
            async with await self._request("HEAD", url, {"Accept-Encoding": "identity"}) as response:
                if response.content_length is None:
                    raise RegistryError(f"{url}: expected a Content-Length, received none")
                return response.content_length

    async def attached(self, digest: str, artifact_type: str, max_bytes: int) -> bytes | None:
        without = self._connections.without_referrers
        found, lists = await find(self._get, digest, artifact_type, max_bytes, lists_referrers=self._host not in without)
        if not lists:
            without.add(self._host)
        return found

    async def _get(self, path: str, accept: str, max_bytes: int) -> bytes:
        url = f"{self._base}/{path}"
        with _translated(url):
            async with await self._request("GET", url, {"Accept": accept, "Accept-Encoding": "identity"}) as response:
                data = await _read_up_to(response, max_bytes + 1)
        if len(data) > max_bytes:
            raise IntegrityError(f"{url}: expected at most {max_bytes} bytes, received more")
        return data

    async def _request(self, method: str, url: str, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """A response of 2xx."""
        response = await self._ask_place(method, url, headers) or await self._ask_registry(method, url, headers)
        if 200 <= response.status < 300:
            return response
        async with response:
            raise await _error_of(response, url)

    async def _ask_place(self, method: str, url: str, headers: Mapping[str, str]) -> aiohttp.ClientResponse | None:
        """Where the blob was last. None: it is not known, or not there (any more)."""
        place = self._places.get(url)
        if place is None:
            return None
        try:
            response = await self._session.request(method, place, headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._places.pop(url, None)
            return None
        if 200 <= response.status < 300 or response.status == 429 or response.status >= 500:
            return response
        response.release()
        self._places.pop(url, None)
        return None

    async def _ask_registry(self, method: str, url: str, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """After redirects and at most one round of authentication."""
        await self._renew()
        used = self._authorization
        response = await self._follow(method, url, headers, used)
        if not self._is_ours(str(response.url)) or response.status not in (401, 403):
            return response
        offered = challenges.parse_challenges(response.headers.getall("WWW-Authenticate", []))
        if not offered and response.status == 403:
            offered = self._challenges
            if not offered:
                return response
        try:
            await self._authenticate(offered, used)
        except AuthenticationFailed:
            if response.status == 403:  # it says better why not
                return response
            response.release()
            raise
        response.release()
        return await self._follow(method, url, headers, self._authorization)

    async def _follow(
        self, method: str, url: str, headers: Mapping[str, str], authorization: str | None
    ) -> aiohttp.ClientResponse:
        """Redirects by hand: the Authorization header is for the registry and not for the storage that it points to."""
        start = url
        for _ in range(MAX_REDIRECTS + 1):
            own = {"Authorization": authorization} if authorization and self._is_ours(url) else {}
            response = await self._session.request(method, url, headers={**headers, **own}, allow_redirects=False)
            if response.status not in (301, 302, 303, 307, 308):
                if url != start and not self._is_ours(url) and 200 <= response.status < 300:
                    self._remember(start, url)
                return response
            location = response.headers.get("Location", "")
            response.release()
            url = urljoin(url, location)
            if not location or urlsplit(url).scheme not in ("http", "https"):
                raise RegistryError(f"{start}: expected a redirect to http or https, received '{location}'")
        raise RegistryError(f"{start}: expected at most {MAX_REDIRECTS} redirects, received more")

    def _remember(self, url: str, place: str) -> None:
        self._places[url] = place
        if len(self._places) > MAX_PLACES:
            self._places.popitem(last=False)

    def _is_ours(self, url: str) -> bool:
        parts = urlsplit(url)
        return (parts.scheme, parts.netloc) == self._origin

    async def _authenticate(self, offered: list[challenges.Challenge], refused: str | None) -> None:
        """Gets a new Authorization value; those who wait here behind another one take what it got."""
        async with self._authenticating:
            if self._authorization != refused:
                return
            self._challenges = offered
            await self._answer(refused)

    async def _renew(self) -> None:
        """Of a token that ends soon. If that fails, the old one is used as long as it is taken."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._renew_at:
            return
        async with self._authenticating:
            if loop.time() < self._renew_at:
                return
            self._renew_at = math.inf
            with suppress(RegistryError):
                await self._answer(None)

    async def _answer(self, refused: str | None) -> None:
        """What the registry asks for. RegistryError."""
        basic = None
        if self._credentials:
            basic = await asyncio.to_thread(self._credentials.basic, self._host, self._repository)
        chosen = challenges.answer(self._challenges, host=self._host, repository=self._repository, basic=basic, refused=refused)
        if isinstance(chosen, challenges.Basic):
            self._authorization = chosen.value
            return
        asked_at = asyncio.get_running_loop().time()
        token = await self._fetch_token(chosen)
        self._authorization = token.authorization
        self._renew_at = asked_at + RENEWED_AT * token.lifetime_s

    async def _fetch_token(self, wanted: challenges.TokenRequest) -> challenges.Token:
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
        return challenges.received_token(realm, data)


async def _read_range(response: aiohttp.ClientResponse, url: str, offset: int, into: memoryview) -> None:
    if response.status != 206:
        await _slice_whole(response, url, offset, into)
        return
    size = len(into)
    received = response.headers.get("Content-Range", "none")
    if not re.fullmatch(rf"bytes {offset}-{offset + size - 1}/(\d+|\*)", received):
        raise Unreachable(f"{url}: expected bytes {offset}-{offset + size - 1}, received Content-Range {received}")
    at = 0
    async for piece in response.content.iter_any():
        if at + len(piece) > size:
            raise Unreachable(f"{url}: expected {size} bytes at {offset}, received more")
        into[at : at + len(piece)] = piece
        at += len(piece)
    if at != size:
        raise Unreachable(f"{url}: expected {size} bytes at {offset}, received {at}")


async def _slice_whole(response: aiohttp.ClientResponse, url: str, offset: int, into: memoryview) -> None:
    """The range out of an answer of the whole blob."""
    end = offset + len(into)
    if end > MAX_WHOLE_BLOB_BYTES:
        response.close()
        raise RegistryError(
            f"{url}: expected a range (status 206), received the whole blob (status {response.status}), which is too "
            "much to read for it; a registry or proxy that serves Range requests is needed"
        )
    position = 0
    async for piece in response.content.iter_chunked(1 << 18):
        wanted = memoryview(piece)[max(0, offset - position) : max(0, end - position)]
        begin = max(position, offset) - offset
        into[begin : begin + len(wanted)] = wanted
        position += len(piece)
        if position >= end:
            break
    response.close()  # the rest is not wanted
    if position < end:
        raise Unreachable(f"{url}: expected {len(into)} bytes at {offset}, the answer ends after {position}")


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
