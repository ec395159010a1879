"""Images in tar files: what `docker save` writes, and OCI image layouts as archives, plain or compressed with gzip.

Members are found by one pass over the headers and then read where they lie, so an archive with gzip around it is first
decompressed beside. Layers may be symlinks or hard links to other members, as older archives have them.
"""

from __future__ import annotations

import errno
import gzip
import io
import posixpath
import shutil
import tarfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from registry.errors import IntegrityError, NotFound, RegistryError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_LINKS = 40
_GZIP_MAGIC = b"\x1f\x8b"


class Section(io.RawIOBase):
    """A part of a file, as a file of its own; read from its beginning."""

    def __init__(self, path: Path, offset: int, size: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._file.seek(offset)
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")[: self._left]
        count = self._file.readinto(view) or 0
        self._left -= count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class TarArchive:
    """The members of one tar. `scratch` is a directory for what must be decompressed. IntegrityError, NotFound."""

    def __init__(self, path: Path, scratch: Path) -> None:
        self.path = path
        self._plain = path
        try:
            with path.open("rb") as file:
                compressed = file.read(2) == _GZIP_MAGIC
            if compressed:
                self._plain = scratch / "archive.tar"
                with gzip.open(path) as source, self._plain.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
            with tarfile.open(self._plain, "r:") as tar:
                self._members = {posixpath.normpath(member.name).lstrip("/"): member for member in tar}
        except FileNotFoundError:
            raise NotFound(f"{path}: there is no such file") from None
        except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise IntegrityError(
                f"{path}: expected an archive of `docker save` or an OCI archive, a tar, plain or with gzip: {error}"
            ) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # of `scratch`, whose owner knows what to do
            raise RegistryError(f"{path}: cannot be read: {error.strerror}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def find(self, name: str) -> tarfile.TarInfo:
        """The regular file of a name, links followed. IntegrityError."""
        at = posixpath.normpath(name).lstrip("/")
        for _ in range(MAX_LINKS):
            member = self._members.get(at)
            if member is None:
                break
            if member.isreg():
                return member
            if not (member.issym() or member.islnk()):
                break
            base = "" if member.islnk() else posixpath.dirname(at)
            at = posixpath.normpath(posixpath.join("/", base, member.linkname)).lstrip("/")
        raise IntegrityError(f"{self.path}: expected the file {name} in the archive, it is not there; is it whole?")

    def open(self, name: str) -> Section:
        """The bytes of a file, as the archive has them."""
        member = self.find(name)
        return Section(self._plain, member.offset_data, member.size)

    def read(self, name: str, max_bytes: int) -> bytes:
        """A small file. IntegrityError when it is not."""
        member = self.find(name)
        if member.size > max_bytes:
            raise IntegrityError(f"{self.path}: {name}: expected at most {max_bytes} bytes, received {member.size}")
        with self.open(name) as file:
            data = file.read() or b""
        if len(data) != member.size:
            raise IntegrityError(f"{self.path}: {name}: expected {member.size} bytes, received {len(data)}: it is cut off")
        return data
