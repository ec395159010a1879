"""Reads a directory as entries: what tar would put into an archive of it, in sorted order, straight from the file
system.

Nothing is left out but sockets, which tar leaves out too: they are reported. What a layer cannot say is refused by
name. A file is compared with itself before and after it is read, because half of an old file and half of a new one is
neither.

With `upper`, the directory is the upper directory of an overlay, and overlayfs' own marks are translated: a character
device 0:0 or a file with the whiteout attribute deletes the name below, the opaque attribute hides the directory below,
escaped attributes are unescaped, other marks are dropped. A redirect or a metadata-only copy is refused: their contents
lie elsewhere.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator

from . import spec
from .errors import SourceError, UnsupportedEntry, printable
from .model import NO_DATA, Data, Entry, Kind, Segment, normalise_segments

OVERLAY_PREFIX = "trusted.overlay."
_OPAQUE = OVERLAY_PREFIX + "opaque"
_WHITEOUT = OVERLAY_PREFIX + "whiteout"
_ESCAPED = OVERLAY_PREFIX + "overlay."
_ELSEWHERE = {OVERLAY_PREFIX + "redirect": "redirect_dir=off", OVERLAY_PREFIX + "metacopy": "metacopy=off"}
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_Identity = tuple[int, int]
"""Device and inode."""


class _Place:
    """The directory that is being read, open. What is in it is looked up by name, since the kernel takes no path as long
    as the root's and an entry's together can be. One that was left is opened anew, from the root: a descriptor for each
    level would be more than a process may have.
    """

    def __init__(self, root: bytes) -> None:
        self._root = os.open(root, _DIRECTORY_FLAGS)
        self._path = b""
        self.descriptor = os.dup(self._root)

    def enter(self, path: bytes, identity: _Identity) -> None:
        """Makes the directory at a path from the root the one being read. OSError when it is not the one that was seen."""
        if path == self._path:
            return
        descriptor = os.open(path or b".", _DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=self._root)
        os.close(self.descriptor)
        self.descriptor, self._path = descriptor, path
        if _identity(os.fstat(descriptor)) != identity:
            raise OSError(errno.ESTALE, "another directory took its place while it was read")

    def path_of(self, name: bytes) -> bytes:
        """A short path of an entry, for the calls that take no directory's descriptor."""
        return b"/proc/self/fd/%d/%s" % (self.descriptor, name)

    def close(self) -> None:
        """May be called again."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            os.close(self._root)
            self.descriptor = -1


class _FileData:
    """The data segments of an open file, back to back."""

    def __init__(self, reader: DirectoryReader, descriptor: int, name: bytes, segments: list[Segment]) -> None:
        self._reader = reader
        self._descriptor = descriptor
        self._name = name
        self._segments = [segment for segment in reversed(segments) if segment[1]]  # an empty file has one of no bytes

    def read(self, size: int, /) -> bytes:
        parts: list[bytes] = []
        while size and self._segments:
            offset, length = self._segments.pop()
            data = os.pread(self._descriptor, min(size, length), offset)
            if not data:
                raise self._reader.error(
                    f"expected data at byte {offset}, received the end: the file changed while it was read", self._name
                )
            parts.append(data)
            size -= len(data)
            if len(data) < length:
                self._segments.append((offset + len(data), length - len(data)))
        self._reader.bytes_read += sum(map(len, parts))
        return parts[0] if len(parts) == 1 else b"".join(parts)


class DirectoryReader:
    """Yields the entries of a directory. `bytes_read` counts contents. OSError when the directory cannot be opened."""

    def __init__(self, root: bytes, *, upper: bool, warn: Callable[[str], None]) -> None:
        self._root = root
        self._upper = upper
        self._warn = warn
        self._place = _Place(root)
        self._links: dict[tuple[int, int], bytes] = {}
        self.bytes_read = 0

    def error(self, what: str, name: bytes) -> SourceError:
        return SourceError(os.fsdecode(self._root), what, name=name)

    def close(self) -> None:
        """Forgets the hard links and closes what is open, also of a reading that was given up."""
        self._links.clear()
        self._place.close()

    def entries(self) -> Iterator[tuple[Entry, Data]]:
        """The root first, then depth first, names ascending. SourceError for what cannot be read or changes meanwhile."""
        path = b""
        try:
            place = self._place
            status = os.fstat(place.descriptor)
            yield from self._directory(b"./", b".", status)
            todo = _children(path, place.descriptor, status)
            while todo:
                path, identity = todo.pop()
                if len(path) > spec.MAX_PATH:
                    raise UnsupportedEntry(path, f"a path of more than {spec.MAX_PATH:,} bytes")
                parent, name = os.path.split(path)
                place.enter(parent, identity)
                status = os.lstat(name, dir_fd=place.descriptor)
                yield from self._entry(path, name, status)
                if stat.S_ISDIR(status.st_mode):
                    place.enter(path, _identity(status))
                    todo += _children(path, place.descriptor, status)
        except OSError as error:
            raise self.error(f"{error.strerror}; it must be readable and stay as it is meanwhile", path) from error

    def _entry(self, path: bytes, name: bytes, status: os.stat_result) -> Iterator[tuple[Entry, Data]]:
        if name.startswith(spec.WHITEOUT_PREFIX):
            raise UnsupportedEntry(path, "a name that begins with .wh. would be a whiteout in a layer; rename it")
        mode = status.st_mode
        if stat.S_ISDIR(mode):
            yield from self._directory(path, name, status)
            return
        if stat.S_ISSOCK(mode):
            self._warn(f"{printable(path)}: a socket, left out")
            return
        if self._upper and self._is_whiteout(name, status):
            yield Entry(path=os.path.join(os.path.dirname(path), spec.WHITEOUT_PREFIX + name), kind=Kind.REGULAR), NO_DATA
            return
        if status.st_nlink > 1:
            first = self._links.setdefault((status.st_dev, status.st_ino), path)
            if first != path:
                yield self._make(path, Kind.HARD_LINK, status, target=first), NO_DATA
                return
        if stat.S_ISREG(mode):
            yield from self._regular(path, name, status)
            return
        xattrs, _ = self._xattrs(path, self._place.path_of(name))
        if stat.S_ISLNK(mode):
            yield self._make(path, Kind.SYMLINK, status, target=os.readlink(name, dir_fd=self._place.descriptor), xattrs=xattrs), NO_DATA
        else:
            rdev = status.st_rdev if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else 0
            yield self._make(path, Kind(stat.S_IFMT(mode) >> 12), status, rdev=rdev, xattrs=xattrs), NO_DATA

    def _make(
        self,
        path: bytes,
        kind: Kind,
        status: os.stat_result,
        *,
        target: bytes = b"",
        rdev: int = 0,
        size: int = 0,
        xattrs: dict[bytes, bytes] | None = None,
        sparse: tuple[Segment, ...] | None = None,
    ) -> Entry:
        return Entry(
            path=path,
            kind=kind,
            mode=stat.S_IMODE(status.st_mode),
            uid=status.st_uid,
            gid=status.st_gid,
            mtime_ns=status.st_mtime_ns,
            rdev=rdev,
            size=size,
            target=target,
            xattrs=xattrs or {},
            sparse=sparse,
        )

    def _directory(self, path: bytes, name: bytes, status: os.stat_result) -> Iterator[tuple[Entry, Data]]:
        xattrs, opaque = self._xattrs(path, self._place.path_of(name))
        yield self._make(path, Kind.DIRECTORY, status, xattrs=xattrs), NO_DATA
        if opaque:
            yield Entry(path=os.path.join(path, spec.OPAQUE_MARKER), kind=Kind.REGULAR), NO_DATA

    # Contents

    def _regular(self, path: bytes, name: bytes, status: os.stat_result) -> Iterator[tuple[Entry, Data]]:
        descriptor = os.open(name, _OPEN_FLAGS, dir_fd=self._place.descriptor)
        try:
            before = os.fstat(descriptor)
            if _identity(before) != _identity(status):
                raise self.error("another file took its place while it was read", path)
            xattrs, _ = self._xattrs(path, descriptor)
            segments = _data_segments(descriptor, before)
            sparse = normalise_segments(segments, before.st_size)
            entry = self._make(path, Kind.REGULAR, before, size=before.st_size, xattrs=xattrs, sparse=sparse)
            yield entry, _FileData(self, descriptor, path, segments)
            after = os.fstat(descriptor)
            if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise self.error(
                    f"expected {before.st_size} bytes as at the start, received {after.st_size} or other contents: "
                    "the file changed while it was read",
                    path,
                )
        finally:
            os.close(descriptor)

    # Attributes and overlay marks

    def _xattrs(self, path: bytes, file: bytes | int) -> tuple[dict[bytes, bytes], bool]:
        """The attributes of a file, and whether overlayfs calls it an opaque directory."""
        xattrs: dict[bytes, bytes] = {}
        opaque = False
        for attribute in _list_xattrs(file):
            value = os.getxattr(file, attribute, follow_symlinks=isinstance(file, int))
            if self._upper and attribute.startswith(OVERLAY_PREFIX):
                if attribute in _ELSEWHERE:
                    raise UnsupportedEntry(path, f"its contents lie in another layer ({attribute}); mount with {_ELSEWHERE[attribute]}")
                if attribute.startswith(_ESCAPED):
                    xattrs[os.fsencode(OVERLAY_PREFIX + attribute[len(_ESCAPED) :])] = value
                elif attribute == _OPAQUE:
                    opaque = value == b"y"
                continue
            xattrs[os.fsencode(attribute)] = value
        return xattrs, opaque

    def _is_whiteout(self, name: bytes, status: os.stat_result) -> bool:
        if stat.S_ISCHR(status.st_mode):
            return status.st_rdev == 0
        return stat.S_ISREG(status.st_mode) and status.st_size == 0 and _WHITEOUT in _list_xattrs(self._place.path_of(name))


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino


def _children(path: bytes, descriptor: int, status: os.stat_result) -> list[tuple[bytes, _Identity]]:
    """The paths in a directory, names descending, each with the directory's identity."""
    identity = _identity(status)
    return [(os.path.join(path, name), identity) for name in sorted(map(os.fsencode, os.listdir(descriptor)), reverse=True)]


def _list_xattrs(file: bytes | int) -> list[str]:
    try:
        return os.listxattr(file, follow_symlinks=isinstance(file, int))
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return []
        raise


def _data_segments(descriptor: int, status: os.stat_result) -> list[Segment]:
    """Where the file has data: all of it unless it takes less room than its size and the file system knows its holes."""
    size = status.st_size
    if status.st_blocks * 512 >= size:
        return [(0, size)]
    segments: list[Segment] = []
    offset = 0
    while offset < size:
        try:
            start = os.lseek(descriptor, offset, os.SEEK_DATA)
            end = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                break
            raise
        segments.append((start, end - start))
        offset = end
    return segments
