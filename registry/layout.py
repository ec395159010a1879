"""The local OCI image layout: a registry in a folder, for one machine, without a server.

Blobs appear under their digest by renaming, so one that is there is whole; the index is replaced by renaming under a lock, so readers need none and
writers at the same time lose nothing. The image specification's `image-layout.md` says what the files are.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec

from registry.errors import IntegrityError, NotFound, RegistryError
from registry.manifest import GROUP_TYPE, MANIFEST_TYPE, MAX_MANIFEST_BYTES, Descriptor, digest_of

TAG = "org.opencontainers.image.ref.name"
_COPY_BYTES = 1 << 20
_VERSION = b'{"imageLayoutVersion":"1.0.0"}'


class _Index(msgspec.Struct, rename="camel", omit_defaults=True):
    schema_version: int
    manifests: list[Descriptor]
    media_type: str | None = None


class Layout:
    """One layout. Safe for several processes at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def blob_path(self, digest: str) -> Path:
        """Where a blob is, or would be."""
        return self.directory / "blobs" / "sha256" / digest.removeprefix("sha256:")

    # ---- reading ----

    def resolve(self, tag: str) -> str:
        """The digest of a tag's manifest. NotFound, IntegrityError."""
        for descriptor in self._read_index().manifests:
            if descriptor.annotations.get(TAG) == tag:
                return descriptor.digest
        raise NotFound(f"oci:{self.directory}: no group has the tag '{tag}'")

    def read_blob(self, digest: str, max_bytes: int = MAX_MANIFEST_BYTES) -> bytes:
        """A small blob, verified. NotFound, IntegrityError."""
        path = self.blob_path(digest)
        try:
            with path.open("rb") as file:
                data = file.read(max_bytes + 1)
        except FileNotFoundError:
            raise NotFound(f"oci:{self.directory}: there is no blob {digest}") from None
        if len(data) > max_bytes:
            raise IntegrityError(f"{path}: expected at most {max_bytes} bytes")
        if digest_of(data) != digest:
            raise IntegrityError(f"{path}: expected {digest}, received {digest_of(data)}; push the group again")
        return data

    def _read_index(self) -> _Index:
        path = self.directory / "index.json"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise NotFound(f"oci:{self.directory}: expected an OCI image layout, index.json is missing") from None
        try:
            return msgspec.json.decode(data, type=_Index)
        except msgspec.MsgspecError as error:
            raise IntegrityError(f"{path}: expected an OCI image index: {error}") from error

    # ---- writing ----

    def create(self) -> None:
        """Makes the layout where there is none yet."""
        (self.directory / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        with self._locked():
            if not (self.directory / "oci-layout").exists():
                self._replace(self.directory / "oci-layout", _VERSION)
            if not (self.directory / "index.json").exists():
                self._write_index(_Index(schema_version=2, manifests=[], media_type="application/vnd.oci.image.index.v1+json"))

    def has_blob(self, digest: str, size: int) -> bool:
        try:
            return self.blob_path(digest).stat().st_size == size
        except FileNotFoundError:
            return False

    def add_bytes(self, data: bytes) -> str:
        """Adds a small blob; returns its digest."""
        digest = digest_of(data)
        if not self.has_blob(digest, len(data)):
            self._replace(self.blob_path(digest), data)
        return digest

    def add_file(self, path: Path, digest: str) -> None:
        """Adds a file's contents, which must have `digest`. IntegrityError when the file changed meanwhile."""
        if self.has_blob(digest, path.stat().st_size):
            return
        target = self.blob_path(digest)
        with path.open("rb") as source, self._unfinished(target) as unfinished:
            received = hashlib.sha256()
            with unfinished.open("wb") as file:
                while data := source.read(_COPY_BYTES):
                    received.update(data)
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if received.hexdigest() != digest.removeprefix("sha256:"):
                raise IntegrityError(f"{path}: expected {digest}, received sha256:{received.hexdigest()}; it changed while it was pushed")
            unfinished.replace(target)

    def tag(self, tag: str | None, manifest: bytes) -> str:
        """Adds a manifest and lets `tag` mean it; returns its digest."""
        digest = self.add_bytes(manifest)
        annotations = {TAG: tag} if tag else {}
        entry = Descriptor(media_type=MANIFEST_TYPE, digest=digest, size=len(manifest), annotations=annotations, artifact_type=GROUP_TYPE)
        with self._locked():
            index = self._read_index()
            kept = [d for d in index.manifests if not (tag and d.annotations.get(TAG) == tag) and (d.digest != digest or d.annotations)]
            if tag or not any(d.digest == digest for d in kept):
                kept.append(entry)
            self._write_index(msgspec.structs.replace(index, manifests=kept))
        return digest

    def _write_index(self, index: _Index) -> None:
        self._replace(self.directory / "index.json", msgspec.json.encode(index))

    def _replace(self, path: Path, data: bytes) -> None:
        with self._unfinished(path) as unfinished:
            with unfinished.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)

    @contextlib.contextmanager
    def _unfinished(self, path: Path) -> Iterator[Path]:
        unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            yield unfinished
        except OSError as error:
            raise RegistryError(f"oci:{self.directory}: cannot write {path.name}: {error.strerror}") from error
        finally:
            unfinished.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
