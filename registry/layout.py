"""The local OCI image layout: a registry in a folder, for one machine, without a server.

Blobs appear under their digest by renaming, so one that is there is whole; the index is replaced by renaming under a
lock, so readers need none and writers at the same time lose nothing. What is being written is locked by its writer: a
file that nobody has locked was left by one that died, and the next push removes it. What other tools wrote into the
index is kept as it is. The image specification's `image-layout.md` says what the files are.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from registry.errors import IntegrityError, InvalidReference, NotFound, RegistryError, needing_space
from registry.manifest import GROUP_TYPE, MANIFEST_TYPE, MAX_MANIFEST_BYTES, Descriptor, digest_of, digest_of_stream

TAG = "org.opencontainers.image.ref.name"
CREATED = "org.opencontainers.image.created"
MAX_INDEX_BYTES = 64 << 20
_COPY_BYTES = 1 << 20
_VERSION = b'{"imageLayoutVersion":"1.0.0"}'
_EMPTY_INDEX = b'{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[]}'
_UNFINISHED = ".unfinished-"


class _Index(msgspec.Struct, rename="camel"):
    schema_version: int
    manifests: list[Descriptor]


class Layout:
    """One layout. Safe for several processes at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def blob_path(self, digest: str) -> Path:
        """Where a blob is, or would be."""
        return self.directory / "blobs" / "sha256" / digest.removeprefix("sha256:")

    # ---- reading ----

    def entries(self) -> list[Descriptor]:
        """What the index names. NotFound, IntegrityError."""
        try:
            return msgspec.json.decode(self._read_index(), type=_Index).manifests
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise IntegrityError(f"{self.directory / 'index.json'}: expected an OCI image index: {error}") from error

    def resolve(self, tag: str) -> str:
        """The digest of a tag's manifest. NotFound, IntegrityError."""
        for descriptor in self.entries():
            if descriptor.annotations.get(TAG) == tag:
                return descriptor.digest
        raise NotFound(f"oci:{self.directory}: no group has the tag '{tag}'")

    def read_blob(self, digest: str) -> bytes:
        """A small blob, verified. NotFound, IntegrityError."""
        path = self.blob_path(digest)
        data = _read(path, MAX_MANIFEST_BYTES, f"oci:{self.directory}: there is no blob {digest}")
        if digest_of(data) != digest:
            raise IntegrityError(f"{path}: expected {digest}, received {digest_of(data)}; push the group again")
        return data

    def copy_blob(self, digest: str, size_bytes: int, path: Path) -> None:
        """A blob into a file that must not exist; verified, or not there. NotFound, IntegrityError."""
        source_path = self.blob_path(digest)
        try:
            source = source_path.open("rb")
        except FileNotFoundError:
            raise NotFound(f"oci:{self.directory}: there is no blob {digest}") from None
        with source, path.open("xb") as file:
            try:
                actual = _copy(source, file)
                if actual != digest or file.tell() != size_bytes:
                    expected = f"{size_bytes} bytes with {digest}"
                    raise IntegrityError(f"{source_path}: expected {expected}, received {file.tell()} with {actual}")
            except BaseException:
                path.unlink()
                raise

    def _read_index(self) -> bytes:
        what = f"oci:{self.directory}: expected an OCI image layout, index.json is missing"
        return _read(self.directory / "index.json", MAX_INDEX_BYTES, what)

    # ---- writing ----

    def create(self) -> None:
        """Makes the layout where there is none yet, and removes what writers that died have left.

        InvalidReference, with nothing changed, for a directory of something else.
        """
        with self._failing("create the layout"):
            self._refuse_other_directories()
            (self.directory / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
            with self._locked():
                for folder in (self.directory, self.directory / "blobs" / "sha256"):
                    _remove_unfinished(folder)
                if not (self.directory / "oci-layout").exists():
                    self._replace(self.directory / "oci-layout", _VERSION)
                if not (self.directory / "index.json").exists():
                    self._replace(self.directory / "index.json", _EMPTY_INDEX)

    def _refuse_other_directories(self) -> None:
        """What has neither file of a layout may hold only what its making begins with. It may be made meanwhile: so one
        listing decides."""
        if not self.directory.exists():
            return
        names = os.listdir(self.directory)
        foreign = sorted(name for name in names if not _is_beginning(name))
        if foreign and "oci-layout" not in names and not self._has_image_index():
            shown = ", ".join(map(repr, foreign[:3])) + (", …" if len(foreign) > 3 else "")
            raise InvalidReference(
                f"oci:{self.directory}: expected an OCI image layout, an empty directory or none, received a directory with {shown}; "
                "name another one, which may be below it"
            )

    def _has_image_index(self) -> bool:
        try:
            self.entries()
        except (NotFound, IntegrityError):
            return False
        return True

    def has_blob(self, digest: str) -> bool:
        """Whether a blob is there with the bytes of its digest: pushing again mends a damaged one."""
        try:
            with self.blob_path(digest).open("rb") as file:
                return digest_of_stream(file) == digest
        except FileNotFoundError:
            return False

    def add_bytes(self, data: bytes) -> str:
        """Adds a small blob; returns its digest."""
        digest = digest_of(data)
        with self._failing(f"add {digest}"):
            if not self.has_blob(digest):
                self._replace(self.blob_path(digest), data)
        return digest

    def add_file(self, path: Path, digest: str) -> None:
        """Adds a file's contents, which must have `digest`. IntegrityError when the file changed meanwhile."""
        with self._failing(f"add {path}"):
            if self.has_blob(digest):
                return
            with path.open("rb") as source, _replacing(self.blob_path(digest)) as file:
                actual = _copy(source, file)
                if actual != digest:
                    raise IntegrityError(f"{path}: expected {digest}, received {actual}; did it change meanwhile?")

    def tag(self, tag: str | None, manifest: bytes) -> str:
        """Adds a manifest and lets `tag` mean it; returns its digest."""
        annotations = {TAG: tag} if tag else {}
        return self._add_entry(manifest, GROUP_TYPE, annotations, lambda other, digest: _replaced(other, tag, digest))

    def attach(self, manifest: bytes, artifact_type: str, annotations: dict[str, str]) -> str:
        """Adds the manifest of an artifact beside a group, in the place of the one of that type whose annotations but the time of its
        making are the same; returns its digest.
        """

        def is_same(other: dict[str, Any], digest: str) -> bool:
            before = dict(other.get("annotations") or {}) | {CREATED: annotations.get(CREATED)}
            return other.get("artifactType") == artifact_type and before == annotations | {CREATED: annotations.get(CREATED)}

        return self._add_entry(manifest, artifact_type, annotations, is_same)

    def _add_entry(
        self, manifest: bytes, artifact_type: str, annotations: dict[str, str], is_replaced: Callable[[dict[str, Any], str], bool]
    ) -> str:
        """The manifest's digest."""
        digest = self.add_bytes(manifest)
        entry: dict[str, Any] = {
            "mediaType": MANIFEST_TYPE,
            "digest": digest,
            "size": len(manifest),
            "artifactType": artifact_type,
        }
        if annotations:
            entry["annotations"] = annotations
        with self._failing(f"tag {digest}"), self._locked():
            path = self.directory / "index.json"
            try:
                index = msgspec.json.decode(self._read_index(), type=dict[str, Any])
                manifests = msgspec.convert(index.get("manifests"), list[dict[str, Any]])
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise IntegrityError(f"{path}: expected an OCI image index: {error}; mend or remove it") from error
            kept = [other for other in manifests if not is_replaced(other, digest)]
            self._replace(path, msgspec.json.encode(index | {"manifests": [*kept, entry]}))
        return digest

    def _replace(self, path: Path, data: bytes) -> None:
        with _replacing(path) as file:
            file.write(data)

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            with needing_space(f"oci:{self.directory}: cannot {what}", "make room there, or publish to another place"):
                yield
        except OSError as error:
            raise RegistryError(f"oci:{self.directory}: cannot {what}: {error.strerror}") from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _is_beginning(name: str) -> bool:
    """Whether a writer that makes a layout writes this before the files that it is known by."""
    return name in ("blobs", ".lock") or name.startswith(_UNFINISHED)


def _replaced(entry: dict[str, Any], tag: str | None, digest: str) -> bool:
    """Whether a new entry takes this one's place: that of the same tag, or one without a tag for the same manifest."""
    annotations = entry.get("annotations") or {}
    if TAG in annotations:
        return tag is not None and bool(annotations[TAG] == tag)
    return bool(entry.get("digest") == digest)


def _read(path: Path, max_bytes: int, missing: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(missing) from None
    except OSError as error:
        raise RegistryError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise IntegrityError(f"{path}: expected at most {max_bytes} bytes, received more")
    return data


def _copy(source: BinaryIO, target: BinaryIO) -> str:
    """Copies; returns the digest of what was copied."""
    received = hashlib.sha256()
    while data := source.read(_COPY_BYTES):
        received.update(data)
        target.write(data)
    return f"sha256:{received.hexdigest()}"


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, on the disk before its name is."""
    while True:
        unfinished = path.with_name(f"{_UNFINISHED}{secrets.token_hex(8)}")
        file = unfinished.open("xb")
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            break
        file.close()  # removed as a leftover before the lock was ours
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_unfinished(folder: Path) -> None:
    for path in folder.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # its writer lives
            path.unlink()
