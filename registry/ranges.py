"""Ranges of blobs, asynchronously: what the data plane fetches with. Retries and deadlines are the caller's, except one retry with a fresh token.

A range is what was asked for, to the byte, or an error: a server that ignores the Range header, sends another range or a short body is caught here.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import urljoin, urlsplit

import aiohttp

from registry.credentials import Credentials
from registry.errors import AuthenticationFailed, IntegrityError, InvalidReference, NotFound, RegistryError, Unreachable
from registry.layout import Layout

MAX_REDIRECTS = 5
MAX_WHOLE_BLOB_BYTES = 64 << 20
"""A server that answers a range with the whole blob is read up to here, then refused: what lies before the range is thrown away."""


class RangeReader(Protocol):
    """Reads ranges of the blobs of one source."""

    async def read(self, digest: str, offset: int, size: int) -> bytes:
        """Exactly `size` bytes at `offset`. RegistryError."""
        ...

    async def size(self, digest: str) -> int:
        """Of the blob, bytes. RegistryError."""
        ...

    async def close(self) -> None: ...


async def open_ranges(
    source: str, *, credentials: Credentials | None = None, connections: int = 16, timeout_s: float = 30.0
) -> RangeReader:
    """`source`: `oci:/abs/dir` or `http(s)://host:port/repo`. `connections`: at most, to the one host. Nothing is asked yet."""
    if source.startswith("oci:"):
        return LayoutRanges(Layout(Path(source.removeprefix("oci:"))))
    if source.startswith(("http://", "https://")):
        return HttpRanges(source, credentials, connections, timeout_s)
    raise InvalidReference(f"source '{source}': expected oci:DIR or http(s)://HOST/REPO")


class LayoutRanges:
    """Ranges from a local layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    async def read(self, digest: str, offset: int, size: int) -> bytes:
        return await asyncio.to_thread(self._read, digest, offset, size)

    def _read(self, digest: str, offset: int, size: int) -> bytes:
        path = self._layout.blob_path(digest)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"{path}: there is no such blob") from None
        except OSError as error:
            raise Unreachable(f"{path}: {error.strerror}") from error
        try:
            data = os.pread(fd, size, offset)
            while data and len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
                data += more
        except OSError as error:
            raise Unreachable(f"{path}: {error.strerror}") from error
        finally:
            os.close(fd)
        if len(data) != size:
            raise IntegrityError(f"{path}: expected {size} bytes at {offset}, received {len(data)}: the blob is cut off")
        return data

    async def size(self, digest: str) -> int:
        try:
            return self._layout.blob_path(digest).stat().st_size
        except FileNotFoundError:
            raise NotFound(f"{self._layout.blob_path(digest)}: there is no such blob") from None

    async def close(self) -> None:
        return None


class HttpRanges:
    """Ranges from a registry, over one bounded pool of connections."""

    def __init__(self, source: str, credentials: Credentials | None, connections: int, timeout_s: float) -> None:
        parts = urlsplit(source)
        self._base = f"{parts.scheme}://{parts.netloc}/v2{parts.path}"
        self._host = parts.netloc
        self._repository = parts.path.strip("/")
        self._basic = credentials.basic(parts.netloc) if credentials else None
        self._authorization: str | None = None
        self._token_lock = asyncio.Lock()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, limit_per_host=connections),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._session.close()

    async def read(self, digest: str, offset: int, size: int) -> bytes:
        url = f"{self._base}/blobs/{digest}"
        headers = {"Range": f"bytes={offset}-{offset + size - 1}", "Accept-Encoding": "identity"}
        try:
            response = await self._request("GET", url, headers)
            async with response:
                return await _read_range(response, url, offset, size)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{url}: {_reason(error)}") from error

    async def size(self, digest: str) -> int:
        url = f"{self._base}/blobs/{digest}"
        try:
            async with await self._request("HEAD", url, {"Accept-Encoding": "identity"}) as response:
                if response.content_length is None:
                    raise RegistryError(f"{url}: expected a Content-Length, received none")
                return response.content_length
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{url}: {_reason(error)}") from error

    async def _request(self, method: str, url: str, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """A response of 2xx, after redirects and at most one round of authentication."""
        used = self._authorization
        response = await self._follow(method, url, headers, used)
        if response.status == 401:
            challenge = response.headers.getall("WWW-Authenticate", [])
            response.release()
            await self._authenticate(url, challenge, used)
            response = await self._follow(method, url, headers, self._authorization)
        if 200 <= response.status < 300:
            return response
        error = await _error_of(response, url)
        response.release()
        raise error

    async def _follow(self, method: str, url: str, headers: Mapping[str, str], authorization: str | None) -> aiohttp.ClientResponse:
        """Redirects by hand: the Authorization header is for the registry and not for the storage that it points to."""
        for _ in range(MAX_REDIRECTS + 1):
            own = {"Authorization": authorization} if authorization and urlsplit(url).netloc == self._host else {}
            response = await self._session.request(method, url, headers={**headers, **own}, allow_redirects=False)
            if response.status not in (301, 302, 303, 307, 308):
                return response
            location = response.headers.get("Location")
            response.release()
            if not location:
                raise RegistryError(f"{url}: a redirect without a Location")
            url = urljoin(url, location)
        raise RegistryError(f"{url}: more than {MAX_REDIRECTS} redirects")

    async def _authenticate(self, url: str, challenges: list[str], refused: str | None) -> None:
        """Gets a new Authorization value; those who wait here behind another one take what it got."""
        async with self._token_lock:
            if self._authorization != refused:
                return
            parsed = [challenge for text in challenges for challenge in parse_challenges(text)]
            for scheme, parameters in parsed:
                if scheme == "bearer" and "realm" in parameters:
                    self._authorization = f"Bearer {await self._fetch_token(parameters)}"
                    return
                if scheme == "basic" and self._basic:
                    if refused == f"Basic {self._basic}":
                        raise AuthenticationFailed(f"{url}: the registry refuses the user and password for {self._host}")
                    self._authorization = f"Basic {self._basic}"
                    return
        wanted = ", ".join(scheme for scheme, _ in parsed) or "nothing that is known"
        raise AuthenticationFailed(f"{url}: the registry asks for authentication ({wanted}); log in to {self._host} with docker or podman")

    async def _fetch_token(self, parameters: Mapping[str, str]) -> str:
        query = {name: parameters[name] for name in ("service", "scope") if name in parameters}
        query.setdefault("scope", f"repository:{self._repository}:pull")
        headers = {"Authorization": f"Basic {self._basic}"} if self._basic else {}
        realm = parameters["realm"]
        async with self._session.get(realm, params=query, headers=headers, allow_redirects=False) as response:
            if response.status in (400, 401, 403):
                raise AuthenticationFailed(f"{realm}: no token for {self._host}: status {response.status}")
            if response.status != 200:
                raise await _error_of(response, realm)
            try:
                answer = await response.json(content_type=None)
            except ValueError as error:
                raise RegistryError(f"{realm}: expected a token as JSON: {error}") from error
        token = answer.get("token") or answer.get("access_token") if isinstance(answer, dict) else None
        if not isinstance(token, str):
            raise RegistryError(f"{realm}: expected a token, the answer has none")
        return token


async def _read_range(response: aiohttp.ClientResponse, url: str, offset: int, size: int) -> bytes:
    skip = 0
    if response.status == 206:
        expected = rf"bytes {offset}-{offset + size - 1}/(\d+|\*)"
        received = response.headers.get("Content-Range", "none")
        if not re.fullmatch(expected, received):
            raise Unreachable(f"{url}: expected bytes {offset}-{offset + size - 1}, received Content-Range {received}")
    else:
        skip = offset  # 200: the whole blob
        if offset + size > MAX_WHOLE_BLOB_BYTES:
            raise RegistryError(f"{url}: the server ignores ranges (status {response.status}); one that knows Range requests is needed")
    data = bytearray()
    async for piece in response.content.iter_chunked(1 << 18):
        data += piece
        if len(data) >= skip + size:
            break
    wanted = bytes(data[skip : skip + size])
    if len(wanted) != size or (response.status == 206 and len(data) != size):
        raise Unreachable(f"{url}: expected {size} bytes at {offset}, received {len(data) - skip}")
    if response.status != 206:
        response.close()  # the rest is not wanted
    return wanted


async def _error_of(response: aiohttp.ClientResponse, url: str) -> RegistryError:
    status = response.status
    text = " ".join((await response.content.read(300)).decode(errors="replace").split())
    detail = f"{url}: status {status} {response.reason or ''}".rstrip() + (f": {text}" if text else "")
    if status == 404:
        return NotFound(detail)
    if status in (401, 403):
        return AuthenticationFailed(detail)
    if status == 416:
        return IntegrityError(f"{url}: the blob is shorter than its manifest says (status 416)")
    if status == 429 or status >= 500:
        after = response.headers.get("Retry-After", "")
        return Unreachable(detail, float(after) if after.isdecimal() else None)
    return RegistryError(detail)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_CHALLENGE = re.compile(r'([A-Za-z]+)\s+((?:[A-Za-z_]+\s*=\s*(?:"(?:[^"\\]|\\.)*"|[^\s,]+)\s*,?\s*)*)')
_PARAMETER = re.compile(r'([A-Za-z_]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,]+))')


def parse_challenges(text: str) -> list[tuple[str, dict[str, str]]]:
    """A WWW-Authenticate value: schemes in lower case and their parameters (RFC 9110 §11.6.1, as far as registries use it)."""
    challenges = []
    for match in _CHALLENGE.finditer(text):
        parameters = {
            name.lower(): re.sub(r"\\(.)", r"\1", quoted) if plain == "" else plain for name, quoted, plain in _PARAMETER.findall(match[2])
        }
        challenges.append((match[1].lower(), parameters))
    return challenges
