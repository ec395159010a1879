"""A registry over HTTP for whole blobs and manifests: `oras` knows the upload protocol, the requests under it are ours.

Blocking. Ranges are `ranges.py`'s. oras has one method through which all its requests go; here it is overridden,
because oras' own answers a Basic challenge with a token request, keeps using a token that has expired, sends the
Authorization header wherever an upload's Location points, and waits for ever. What comes out of it are responses of
success, or errors of ours. A request that failed for a reason that may pass is tried again a few times.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import urlsplit

import oras.container
import oras.provider
import requests

from registry import challenges
from registry.credentials import Credentials
from registry.errors import IntegrityError, NotFound, RegistryError, Unreachable, error_of_status
from registry.manifest import MANIFEST_TYPE, MANIFEST_TYPES, MAX_MANIFEST_BYTES, digest_of
from registry.reference import RegistryReference

ATTEMPTS = 4
FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 5.0
TIMEOUT_S = 30.0
"""To connect, and between two pieces of an answer."""
UPLOAD_PIECE_BYTES = 16 << 20
"""oras holds one piece in memory; smaller blobs go in one request."""
_COPY_BYTES = 1 << 20

T = TypeVar("T")


class _Client(oras.provider.Registry):  # type: ignore[misc]  # oras has no types
    """oras with requests of ours: bounded in time, authenticated by challenge, failing with errors of ours."""

    def __init__(self, reference: RegistryReference, credentials: Credentials | None) -> None:
        super().__init__(hostname=reference.host, insecure=reference.scheme == "http", auth_backend="token")
        self.session.trust_env = False  # neither ~/.netrc nor proxies: the range reader does not use them either
        self._reference = reference
        self._credentials = credentials
        self._authorization: str | None = None

    def do_request(
        self,
        url: str,
        method: str = "GET",
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
        json: object | None = None,
        stream: bool = False,
    ) -> requests.Response:
        """One request, and once more after a 401. Success, or RegistryError and its kinds."""
        with _translated(url):
            response = self._send(method, url, data, headers, json, stream)
            if response.status_code == 401 and self._is_ours(response.url):
                response.close()
                self._authenticate(response)
                response = self._send(method, url, data, headers, json, stream)
            if response.status_code < 400:
                return response
            body = b""
            with response, contextlib.suppress(requests.RequestException):  # a refusal with half a body is one
                body = b"" if method == "HEAD" else next(response.iter_content(300), b"")
            after = response.headers.get("Retry-After")
            raise error_of_status(url, response.status_code, response.reason, body[:300], after)

    def _send(
        self,
        method: str,
        url: str,
        data: bytes | None,
        headers: dict[str, str] | None,
        json: object | None,
        stream: bool,
    ) -> requests.Response:
        sent = dict(headers or {})
        if self._authorization and self._is_ours(url):
            sent["Authorization"] = self._authorization
        response: requests.Response = self.session.request(
            method, url, data=data, json=json, headers=sent, stream=stream, timeout=TIMEOUT_S
        )
        return response

    def _is_ours(self, url: str) -> bool:
        parts = urlsplit(url)
        return (parts.scheme, parts.netloc) == (self._reference.scheme, self._reference.host)

    def _authenticate(self, response: requests.Response) -> None:
        host, repository = self._reference.host, self._reference.repository
        offered = challenges.parse_challenges([response.headers.get("WWW-Authenticate", "")])
        basic = self._credentials.basic(host, repository) if self._credentials else None
        chosen = challenges.answer(offered, host=host, repository=repository, basic=basic, refused=self._authorization)
        if isinstance(chosen, challenges.Basic):
            self._authorization = chosen.value
            return
        with (
            _translated(chosen.realm),
            self.session.get(
                chosen.realm,
                params=chosen.query,
                headers=chosen.headers,
                allow_redirects=False,
                stream=True,
                timeout=TIMEOUT_S,
            ) as received,
        ):
            if received.status_code in (400, 401, 403):
                raise challenges.refusal_of_token(chosen.realm, host, received.status_code)
            data = _read_bounded(received, chosen.realm, challenges.MAX_TOKEN_ANSWER_BYTES)
            if received.status_code != 200:
                after = received.headers.get("Retry-After")
                raise error_of_status(chosen.realm, received.status_code, received.reason, data[:300], after)
        self._authorization = challenges.received_token(chosen.realm, data).authorization


class Remote:
    """One repository. Of one thread; closes its connections as a context manager."""

    def __init__(self, reference: RegistryReference, credentials: Credentials | None) -> None:
        self._client = _Client(reference, credentials)
        self._container = _container(reference)
        self._base = f"{reference.scheme}://{reference.host}/v2/{reference.repository}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.session.close()

    # ---- reading ----

    def read_manifest(self, tag_or_digest: str) -> bytes:
        """The manifest's bytes, verified against the digest when one is given, else against the registry's own
        header."""
        url = f"{self._base}/manifests/{tag_or_digest}"
        data, headers = self._retried(lambda: self._read(url, {"Accept": ", ".join(MANIFEST_TYPES)}))
        by_digest = tag_or_digest.startswith("sha256:")
        expected = tag_or_digest if by_digest else headers.get("Docker-Content-Digest")
        if expected and expected != digest_of(data):
            raise IntegrityError(f"{url}: expected a manifest with {expected}, received {digest_of(data)}")
        return data

    def read_blob(self, digest: str) -> bytes:
        """A small blob, verified."""
        url = f"{self._base}/blobs/{digest}"
        data, _headers = self._retried(lambda: self._read(url, {}))
        if digest_of(data) != digest:
            raise IntegrityError(f"{url}: expected {digest}, received {len(data)} bytes with {digest_of(data)}")
        return data

    def _read(self, url: str, headers: dict[str, str]) -> tuple[bytes, requests.structures.CaseInsensitiveDict[str]]:
        with self._client.do_request(url, headers=headers, stream=True) as response:
            return _read_bounded(response, url, MAX_MANIFEST_BYTES), response.headers

    def has_blob(self, digest: str) -> bool:
        """Whether the repository has a blob."""
        try:
            self._retried(lambda: self._client.do_request(f"{self._base}/blobs/{digest}", "HEAD"))
        except NotFound:
            return False
        return True

    def blob_size(self, digest: str) -> int | None:
        """Of a blob, in bytes; None when the repository does not have it, or does not say."""
        try:
            response = self._retried(lambda: self._client.do_request(f"{self._base}/blobs/{digest}", "HEAD"))
        except NotFound:
            return None
        length = response.headers.get("Content-Length", "")
        return int(length) if length.isascii() and length.isdigit() else None

    def download(self, digest: str, size_bytes: int, path: Path) -> None:
        """A blob into a file that must not exist; verified, or not there."""
        self._retried(lambda: self._download(digest, size_bytes, path))

    def _download(self, digest: str, size: int, path: Path) -> None:
        url = f"{self._base}/blobs/{digest}"
        received, length = hashlib.sha256(), 0
        with path.open("xb") as file:
            try:
                with _translated(url), self._client.do_request(url, stream=True) as response:
                    for piece in response.iter_content(_COPY_BYTES):
                        received.update(piece)
                        length += len(piece)
                        if length > size:
                            break
                        file.write(piece)
                actual = f"sha256:{received.hexdigest()}"
                if length != size or actual != digest:
                    raise IntegrityError(f"{url}: expected {size} bytes with {digest}, received {length} with {actual}")
            except BaseException:
                path.unlink()
                raise

    # ---- writing ----

    def upload_file(self, path: Path, digest: str, size_bytes: int) -> bool:
        """Sends a blob unless it is there; whether it was sent."""
        if self.has_blob(digest):
            return False
        self._retried(lambda: self._upload(path, digest, size_bytes))
        return True

    def _upload(self, path: Path, digest: str, size: int) -> None:
        layer = {"digest": digest, "size": size, "mediaType": "application/octet-stream"}
        try:
            if size > UPLOAD_PIECE_BYTES:
                self._client.chunked_upload(str(path), self._container, layer, chunk_size=UPLOAD_PIECE_BYTES)
            else:
                self._client.put_upload(str(path), self._container, layer)
        except ValueError as error:  # oras' word for an answer of success that is not the protocol's
            raise RegistryError(f"{self._base}/blobs/uploads/: expected an upload to be accepted: {error}") from error

    def upload_bytes(self, data: bytes, scratch: Path) -> str:
        """Sends a small blob; `scratch` is a file name that may be used meanwhile."""
        digest = digest_of(data)
        scratch.write_bytes(data)
        try:
            self.upload_file(scratch, digest, len(data))
        finally:
            scratch.unlink()
        return digest

    def upload_manifest(self, tag: str, manifest: bytes) -> None:
        """Our bytes as they are: the digest is promised to the caller."""
        self.upload_artifact(tag, manifest, MANIFEST_TYPE)

    def upload_artifact(self, tag: str, manifest: bytes, media_type: str) -> bool:
        """A manifest of any media type; whether the registry lists it among the referrers of its subject."""
        url = f"{self._base}/manifests/{tag}"
        headers = {"Content-Type": media_type}
        response = self._retried(lambda: self._client.do_request(url, "PUT", data=manifest, headers=headers))
        stored = response.headers.get("Docker-Content-Digest")
        if stored and stored != digest_of(manifest):
            raise IntegrityError(f"{url}: sent a manifest with {digest_of(manifest)}, the registry stored {stored}")
        return "OCI-Subject" in response.headers

    def _retried(self, call: Callable[[], T]) -> T:
        for attempt in range(1, ATTEMPTS):
            try:
                return call()
            except Unreachable as error:
                delay_s = error.retry_after_s or FIRST_DELAY_S * 2.0 ** (attempt - 1)
                time.sleep(min(LONGEST_DELAY_S, delay_s))
        return call()


def _container(reference: RegistryReference) -> oras.container.Container:
    """oras' word for a repository.

    Its parts are set and not parsed: oras takes a host without a dot for a namespace.
    """
    container = oras.container.Container("repository")
    container.registry, container.namespace, container.repository = reference.host, None, reference.repository
    return container


@contextlib.contextmanager
def _translated(url: str) -> Iterator[None]:
    """The seam: what requests raises becomes ours."""
    try:
        yield
    except requests.exceptions.SSLError as error:
        raise RegistryError(f"{url}: TLS failed: {error}") from error
    except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
        kind = type(error).__name__
        raise Unreachable(f"{url}: no whole answer ({kind}); is the registry running?") from error
    except requests.RequestException as error:
        raise RegistryError(f"{url}: {type(error).__name__}: {error}") from error


def _read_bounded(response: requests.Response, url: str, max_bytes: int) -> bytes:
    data = bytearray()
    with _translated(url):
        for piece in response.iter_content(64 << 10):
            data += piece
            if len(data) > max_bytes:
                raise IntegrityError(f"{url}: expected at most {max_bytes} bytes, received more")
    return bytes(data)
