"""Where the blobs of ordinary images are: OCI layouts, archives, registries; and how a blob is verified while it is read."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeVar, cast

import msgspec

from registry.archives import TarArchive
from registry.errors import IntegrityError, InvalidReference, NotFound
from registry.layout import Layout
from registry.manifest import CONFIG_TYPE, MANIFEST_TYPE, MAX_MANIFEST_BYTES, Descriptor, Manifest, digest_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from registry.remote import Remote

TAR_TYPE = "application/vnd.oci.image.layer.v1.tar"
_COPY_BYTES = 1 << 20

T = TypeVar("T")


class ImageStore(Protocol):
    """Where the blobs of an image are."""

    def read_manifest(self, digest: str) -> bytes:
        """A manifest or an index, verified. NotFound, IntegrityError."""
        ...

    def read_blob(self, digest: str) -> bytes:
        """A small blob, verified. NotFound, IntegrityError."""
        ...

    def blob(self, digest: str, size_bytes: int, scratch: Path) -> AbstractContextManager[BinaryIO]:
        """A blob, open, to be read once, not verified, and closed when the block ends; `scratch` is a directory for what
        must be fetched first. NotFound, IntegrityError."""
        ...

    def size(self, digest: str) -> int | None:
        """How many bytes a blob has here, without reading it; None when it is not here. IntegrityError."""
        ...


class Blob(io.RawIOBase):
    """A blob that is verified while somebody else reads it: `verify` reads what is left and compares."""

    def __init__(self, file: BinaryIO, name: str, digest: str, size_bytes: int) -> None:
        self.name = name
        self._file = file
        self._expected = f"{size_bytes} bytes with {digest}"
        self._received = hashlib.sha256()
        self._position = 0

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        data = self._file.read(len(view))
        view[: len(data)] = data
        self._received.update(data)
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        """Nothing: the conversion closes what it read, and what it left is still to be verified."""

    def verify(self) -> None:
        """To be called once, at the end. IntegrityError."""
        while self.read(_COPY_BYTES):
            pass
        received = f"{self._position} bytes with sha256:{self._received.hexdigest()}"
        if received != self._expected:
            raise IntegrityError(f"{self.name}: expected {self._expected}, received {received}")


class LayoutStore:
    """An OCI layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def read_manifest(self, digest: str) -> bytes:
        return self._layout.read_blob(digest)

    def read_blob(self, digest: str) -> bytes:
        return self._layout.read_blob(digest)

    @contextlib.contextmanager
    def blob(self, digest: str, size_bytes: int, scratch: Path) -> Iterator[BinaryIO]:
        try:
            file = self._layout.blob_path(digest).open("rb", buffering=0)
        except FileNotFoundError:
            raise NotFound(f"oci:{self._layout.directory}: there is no blob {digest}") from None
        with file:
            yield cast(BinaryIO, file)

    def size(self, digest: str) -> int | None:
        try:
            return self._layout.blob_path(digest).stat().st_size
        except FileNotFoundError:
            return None


class RegistryStore:
    """A repository of a registry."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def read_manifest(self, digest: str) -> bytes:
        return self._remote.read_manifest(digest)

    def read_blob(self, digest: str) -> bytes:
        return self._remote.read_blob(digest)

    @contextlib.contextmanager
    def blob(self, digest: str, size_bytes: int, scratch: Path) -> Iterator[BinaryIO]:
        """Downloaded whole before it is read: a connection that breaks costs no conversion."""
        path = scratch / digest.removeprefix("sha256:")
        self._remote.download(digest, size_bytes, path)
        try:
            with path.open("rb", buffering=0) as file:
                yield cast(BinaryIO, file)
        finally:
            path.unlink()

    def size(self, digest: str) -> int | None:
        return self._remote.blob_size(digest)


class OciArchiveStore:
    """An OCI layout in a tar."""

    def __init__(self, archive: TarArchive) -> None:
        self._archive = archive

    def read_manifest(self, digest: str) -> bytes:
        return self.read_blob(digest)

    def read_blob(self, digest: str) -> bytes:
        data = self._archive.read(_blob_name(digest), MAX_MANIFEST_BYTES)
        if digest_of(data) != digest:
            raise IntegrityError(f"{self._archive.path}: expected {digest}, received {digest_of(data)}")
        return data

    @contextlib.contextmanager
    def blob(self, digest: str, size_bytes: int, scratch: Path) -> Iterator[BinaryIO]:
        with self._archive.open(_blob_name(digest)) as file:
            yield cast(BinaryIO, file)

    def size(self, digest: str) -> int | None:
        return self._archive.find(_blob_name(digest)).size


def _blob_name(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


class _Saved(msgspec.Struct, rename="pascal"):
    """An entry of manifest.json, as `docker save` writes it."""

    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


class DockerArchiveStore:
    """What `docker save` writes. It names files, not digests: those are found by reading each file once. `manifest` is what
    an OCI layout would have.

    IntegrityError, InvalidReference: several images.
    """

    def __init__(self, archive: TarArchive) -> None:
        self._archive = archive
        saved = decode_json(archive.read("manifest.json", MAX_MANIFEST_BYTES), list[_Saved], str(archive.path))
        if len(saved) != 1:
            names = [", ".join(one.repo_tags or ["without a name"]) for one in saved]
            raise InvalidReference(f"{archive.path}: expected an archive of one image, it has {len(saved)}: {'; '.join(names)}")
        self.names: dict[str, str] = {}
        config = self._describe(saved[0].config, CONFIG_TYPE)
        digests: dict[tuple[int, int], Descriptor] = {}
        layers = []
        for name in saved[0].layers:
            member = archive.find(name)
            place = member.offset_data, member.size
            if place not in digests:  # one file under several names is read once
                digests[place] = self._describe(name, TAR_TYPE)
            layers.append(digests[place])
        self.manifest = msgspec.json.encode(Manifest(schema_version=2, config=config, layers=layers, media_type=MANIFEST_TYPE))

    def _describe(self, name: str, media_type: str) -> Descriptor:
        received, size = hashlib.sha256(), 0
        with self._archive.open(name) as file:
            while data := file.read(_COPY_BYTES):
                received.update(data)
                size += len(data)
        digest = f"sha256:{received.hexdigest()}"
        self.names[digest] = name
        return Descriptor(media_type=media_type, digest=digest, size=size)

    def read_manifest(self, digest: str) -> bytes:
        raise NotFound(f"{self._archive.path}: there is no manifest {digest}")

    def read_blob(self, digest: str) -> bytes:
        return self._archive.read(self.names[digest], MAX_MANIFEST_BYTES)

    @contextlib.contextmanager
    def blob(self, digest: str, size_bytes: int, scratch: Path) -> Iterator[BinaryIO]:
        with self._archive.open(self.names[digest]) as file:
            yield cast(BinaryIO, file)

    def size(self, digest: str) -> int | None:
        return self._archive.find(self.names[digest]).size


def decode_json(data: bytes, kind: type[T], name: str) -> T:
    """IntegrityError unless the JSON is of that kind."""
    with _translated(name):
        return msgspec.json.decode(data, type=kind)


def convert_json(value: object, kind: type[T], name: str) -> T:
    """The same of decoded JSON."""
    with _translated(name):
        return msgspec.convert(value, kind)


@contextlib.contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{name}: expected an image's index, manifest or configuration: {error}") from error
