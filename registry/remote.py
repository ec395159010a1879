"""A registry over HTTP for whole blobs and manifests: `oras` does the speaking, this turns its outcomes into ours.

Blocking. Ranges are `ranges.py`'s. A request that failed for a reason that may pass is tried again a few times.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import oras.container
import oras.provider
import requests

from registry.credentials import Credentials
from registry.errors import AuthenticationFailed, IntegrityError, NotFound, RegistryError, Unreachable
from registry.manifest import MANIFEST_TYPE, MAX_MANIFEST_BYTES, digest_of
from registry.reference import RegistryReference

ATTEMPTS = 4
FIRST_DELAY_S = 0.2
TIMEOUT_S = 30.0
UPLOAD_PIECE_BYTES = 16 << 20
_COPY_BYTES = 1 << 20

T = TypeVar("T")


class _Session(requests.Session):
    """requests waits for ever unless told otherwise at each call; oras does not tell."""

    def request(self, *args: object, **kwargs: object) -> requests.Response:
        kwargs.setdefault("timeout", TIMEOUT_S)
        return super().request(*args, **kwargs)  # type: ignore[arg-type]


class Remote:
    """One repository."""

    def __init__(self, reference: RegistryReference, credentials: Credentials | None) -> None:
        self._reference = reference
        backend = "token"
        self._client = oras.provider.Registry(hostname=reference.host, insecure=reference.scheme == "http", auth_backend=backend)
        session = _Session()
        session.cookies.set_policy(self._client.session.cookies.get_policy())
        self._client.session = self._client.auth.session = session
        basic = credentials.basic(reference.host) if credentials else None
        if basic:
            self._client.auth._basic_auth = basic
        self._basic = basic
        self._container = oras.container.Container(f"{reference.host}/{reference.repository}:latest")
        self._base = f"{reference.scheme}://{reference.host}/v2/{reference.repository}"

    # ---- reading ----

    def read_manifest(self, tag_or_digest: str) -> bytes:
        """The manifest's bytes, verified against the digest when one is given, else against the registry's own header."""
        url = f"{self._base}/manifests/{tag_or_digest}"
        response = self._retried(lambda: self._request("GET", url, headers={"Accept": MANIFEST_TYPE}))
        data = response.content
        if len(data) > MAX_MANIFEST_BYTES:
            raise IntegrityError(f"{url}: expected a manifest of at most {MAX_MANIFEST_BYTES} bytes, received {len(data)}")
        expected = tag_or_digest if tag_or_digest.startswith("sha256:") else response.headers.get("Docker-Content-Digest")
        if expected and expected != digest_of(data):
            raise IntegrityError(f"{url}: expected {expected}, received {digest_of(data)}")
        return bytes(data)

    def read_blob(self, digest: str, max_bytes: int = MAX_MANIFEST_BYTES) -> bytes:
        """A small blob, verified."""
        url = f"{self._base}/blobs/{digest}"
        data = self._retried(lambda: self._request("GET", url)).content
        if len(data) > max_bytes or digest_of(data) != digest:
            raise IntegrityError(f"{url}: expected {digest}, received {len(data)} bytes with {digest_of(data)}")
        return bytes(data)

    def download(self, digest: str, size: int, path: Path) -> None:
        """A blob into a file that must not exist; verified, or not there."""
        self._retried(lambda: self._download(digest, size, path))

    def _download(self, digest: str, size: int, path: Path) -> None:
        url = f"{self._base}/blobs/{digest}"
        received, length = hashlib.sha256(), 0
        try:
            with self._request("GET", url, stream=True) as response, path.open("wb") as file:
                for piece in response.iter_content(_COPY_BYTES):
                    received.update(piece)
                    length += len(piece)
                    file.write(piece)
            if length != size or f"sha256:{received.hexdigest()}" != digest:
                raise IntegrityError(f"{url}: expected {size} bytes with {digest}, received {length} with sha256:{received.hexdigest()}")
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    # ---- writing ----

    def upload_file(self, path: Path, digest: str, size: int) -> bool:
        """Sends a blob unless it is there; whether it was sent."""
        if self._has(digest):
            return False
        layer = {"digest": digest, "size": size, "mediaType": "application/octet-stream"}
        self._retried(
            lambda: self._checked(
                f"{self._base}/blobs/{digest}",
                lambda: self._client.upload_blob(
                    str(path), self._container, layer, do_chunked=size > UPLOAD_PIECE_BYTES, chunk_size=UPLOAD_PIECE_BYTES
                ),
            )
        )
        return True

    def upload_bytes(self, data: bytes, scratch: Path) -> str:
        """Sends a small blob; `scratch` is a file name that may be used meanwhile."""
        digest = digest_of(data)
        scratch.write_bytes(data)
        try:
            self.upload_file(scratch, digest, len(data))
        finally:
            scratch.unlink()
        return digest

    def upload_manifest(self, tag_or_digest: str, manifest: bytes) -> None:
        """Our bytes as they are: the digest is promised to the caller."""
        url = f"{self._base}/manifests/{tag_or_digest}"
        self._retried(lambda: self._request("PUT", url, data=manifest, headers={"Content-Type": MANIFEST_TYPE}))

    def _has(self, digest: str) -> bool:
        try:
            self._retried(lambda: self._request("HEAD", f"{self._base}/blobs/{digest}"))
        except NotFound:
            return False
        return True

    # ---- one request ----

    def _request(
        self, method: str, url: str, *, headers: dict[str, str] | None = None, data: bytes | None = None, stream: bool = False
    ) -> requests.Response:
        return self._checked(url, lambda: self._client.do_request(url, method, data=data, headers=headers or {}, stream=stream))

    def _checked(self, url: str, call: Callable[[], requests.Response]) -> requests.Response:
        """Calls oras; its exceptions and refusals become ours."""
        try:
            response = call()
        except (requests.ConnectionError, requests.Timeout) as error:
            raise Unreachable(f"{url}: no answer: {type(error).__name__}; is the registry running, and the host right?") from error
        except requests.RequestException as error:
            raise RegistryError(f"{url}: {error}") from error
        except ValueError as error:  # how oras says that it cannot authenticate
            raise AuthenticationFailed(
                f"{url}: the registry asks for authentication; log in to {self._reference.host} with docker or podman ({error})"
            ) from error
        status = response.status_code
        if status < 400:
            return response
        text = " ".join(response.text[:300].split()) if not response.raw or not response.raw.closed else ""
        detail = f"{url}: status {status} {response.reason}" + (f": {text}" if text else "")
        if status == 404:
            raise NotFound(detail)
        if status in (401, 403):
            raise AuthenticationFailed(detail)
        if status == 429 or status >= 500:
            after = response.headers.get("Retry-After", "")
            raise Unreachable(detail, float(after) if after.isdecimal() else None)
        raise RegistryError(detail)

    def _retried(self, call: Callable[[], T]) -> T:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return call()
            except Unreachable as error:
                if attempt == ATTEMPTS:
                    raise
                time.sleep(min(5.0, error.retry_after_s or FIRST_DELAY_S * 2.0 ** (attempt - 1)))
        raise AssertionError("the last attempt returns or raises")
