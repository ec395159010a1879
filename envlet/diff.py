"""What an environment changed, as an OCI layer tar: a walk over the upper directory of its overlay.

| in the upper directory                                | in the tar                                   |
|-------------------------------------------------------|----------------------------------------------|
| character device 0:0 `x` (the kernel's whiteout)      | empty file `.wh.x`                           |
| directory with `trusted.overlay.opaque` = y, over a directory of the plan | the directory, then `.wh..wh..opq` in it |
| several names of one inode                            | the first name, then hard links              |
| socket                                                | nothing: it means nothing without its process |
| file with `trusted.overlay.metacopy`                  | itself, its contents as the mounted root shows them |
| directory with `trusted.overlay.redirect`             | as an opaque one, and everything below as the mounted root shows it |
| anything else                                         | itself, with its attributes except `trusted.overlay.*` |

The two that need the mounted root are there only where the kernel view needs `metacopy=on` (envlet/overlay.py): a directory of the
plan that was moved then is one empty directory, and a file with another mode has no contents of its own.

The kernel marks every directory that it makes as opaque; the mark is left out where the plan has no directory in that
place, because it would hide nothing. What envlet added before the start and nobody touched (rootfs.Mark) is left out.
Names are written in order, so equal changes give equal bytes; holes stay holes. Nothing may run in the environment meanwhile (the
caller freezes it): a file that changes its size while it is read is an error.
"""

import contextlib
import errno
import os
import stat
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import attrs

from envlet import errors
from envlet.errors import EnvletError
from envlet.overlay import METACOPY_XATTR, OPAQUE_XATTR, REDIRECT_XATTR, XATTR_PREFIX
from envlet.rootfs import Mark
from envlet.types import DiffResult
from layerformat.errors import printable
from layerformat.model import Entry, Kind, Segment, normalise_segments
from layerformat.tarwriter import TarWriter

WHITEOUT = b".wh."
OPAQUE_NAME = b".wh..wh..opq"
_READ_BYTES = 1 << 20
_SHOWN_BYTES = 200
_DEVICES_SHOWN = 5
_KINDS = {
    stat.S_IFREG: Kind.REGULAR,
    stat.S_IFDIR: Kind.DIRECTORY,
    stat.S_IFLNK: Kind.SYMLINK,
    stat.S_IFIFO: Kind.FIFO,
    stat.S_IFCHR: Kind.CHARACTER,
    stat.S_IFBLK: Kind.BLOCK,
}


class Writable(Protocol):
    """Where a tar goes."""

    def write(self, data: bytes, /) -> int: ...


@attrs.frozen
class Change:
    """One entry of the diff, and where its bytes are (regular files only)."""

    entry: Entry
    source: bytes | None = None
    is_whiteout: bool = False


def refuse(path: bytes, why: str) -> EnvletError:
    return EnvletError(errors.DIFF_FAILED, f"/{printable(path)}: {why}")


def read_xattrs(path: bytes) -> dict[bytes, bytes]:
    """The extended attributes of an entry itself, overlayfs' own left out. Raises OSError."""
    names = os.listxattr(path, follow_symlinks=False)
    return {
        os.fsencode(name): os.getxattr(path, name, follow_symlinks=False) for name in sorted(names) if not name.startswith(XATTR_PREFIX)
    }


def is_whiteout(status: os.stat_result) -> bool:
    """The kernel's sign for an entry that was removed."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def walk_changes(upper: Path, lower: Path, marks: Collection[Mark] = (), *, root: Path | None = None) -> Iterator[Change]:
    """The entries of the diff, each directory before what is in it. `lower`: what the plan shows; `root`: the mounted overlay, for what the
    upper directory does not say by itself. Blocks. Raises OSError or EnvletError(DIFF_FAILED).
    """
    walk = _Walk(os.fsencode(upper), {mark.path: mark for mark in marks}, os.fsencode(root) if root is not None else None)
    return walk.changes(os.fsencode(lower))


@attrs.define
class _Directory:
    """A directory that the walk is in."""

    path: bytes
    lower: bytes | None
    """What the plan shows in its place, if that is a directory that one still sees."""
    own: Change
    said: tuple[Change, ...] | None
    """What is written at once, after the directory itself; None: it is as it was."""
    names: deque[bytes]
    """What is in it and not visited yet."""
    is_redirected: bool = False
    """It or one above was moved: what is in it is what the mounted root shows."""


class _Walk:
    """One pass; remembers the first name of each inode that has several."""

    def __init__(self, upper: bytes, marks: dict[bytes, Mark], root: bytes | None) -> None:
        self._upper = upper
        self._marks = marks
        self._root = root
        self._first_names: dict[tuple[int, int], bytes] = {}

    def changes(self, lower: bytes) -> Iterator[Change]:
        """All of it. A directory that is as it was is held back and written only if something below it is not:
        overlayfs copies all parents of what it copies up. A list and no recursion: strangers choose the depth.
        """
        held: list[Change] = []
        stack: list[_Directory] = []
        found: Change | _Directory | None = self._directory(b"", lower)
        while True:
            if isinstance(found, _Directory):
                held.append(found.own)
                stack.append(found)
                said = found.said
            else:
                said = (found,) if found is not None else None
            if said is not None:
                yield from held
                held.clear()
                yield from said
            while stack and not stack[-1].names:
                left = stack.pop()
                if held and held[-1] is left.own:
                    held.pop()
            if not stack:
                return
            found = self._child(stack[-1], stack[-1].names.popleft())

    def _child(self, parent: _Directory, name: bytes) -> "Change | _Directory | None":
        path = os.path.join(parent.path, name)
        try:
            return self._found(parent, name, path)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            shown = path[:_SHOWN_BYTES] + b"..."
            raise refuse(shown, f"a path of {len(path)} bytes is too long for this system; remove it or make it shorter") from error

    def _found(self, parent: _Directory, name: bytes, path: bytes) -> "Change | _Directory | None":
        full = self._shown(path) if parent.is_redirected else os.path.join(self._upper, path)
        status = os.lstat(full)
        if is_whiteout(status):
            return Change(Entry(os.path.join(parent.path, WHITEOUT + name), Kind.REGULAR), is_whiteout=True)
        if name.startswith(WHITEOUT):
            raise refuse(path, "an OCI layer cannot have this name, it would remove another entry; rename it")
        if stat.S_ISDIR(status.st_mode):
            below = _lower_directory(parent.lower, name)
            if parent.is_redirected or _has_xattr(full, REDIRECT_XATTR):
                return self._redirected_directory(path, below)
            return self._directory(path, below)
        if (self._untouched(path, status) and not parent.is_redirected) or stat.S_ISSOCK(status.st_mode):
            return None
        if stat.S_ISREG(status.st_mode) and not parent.is_redirected and _has_xattr(full, METACOPY_XATTR):
            full = self._shown(path)
            status = os.lstat(full)
        entry = self._entry(path, full, status)
        if status.st_nlink > 1:
            first = self._first_names.setdefault(self._identity(path, status), path)
            if first != path:
                return Change(attrs.evolve(entry, kind=Kind.HARD_LINK, target=first, size=0, xattrs={}))
        return Change(entry, full if entry.kind is Kind.REGULAR else None)

    def _directory(self, path: bytes, lower: bytes | None) -> _Directory:
        full = os.path.join(self._upper, path)
        status = os.lstat(full)
        own = Change(self._entry(path or b".", full, status))
        is_changed = not self._untouched(path, status) and not self._is_as_below(own.entry, full, lower)
        said: tuple[Change, ...] | None = () if is_changed else None
        if _is_opaque(full):
            if lower is not None:
                said = (Change(Entry(os.path.join(path, OPAQUE_NAME), Kind.REGULAR), is_whiteout=True),)
            lower = None
        return _Directory(path, lower, own, said, deque(sorted(os.listdir(full))))

    def _redirected_directory(self, path: bytes, lower: bytes | None) -> _Directory:
        """All of it is new in this place, and hides what the plan has there."""
        full = self._shown(path)
        own = Change(self._entry(path, full, os.lstat(full)))
        said = (Change(Entry(os.path.join(path, OPAQUE_NAME), Kind.REGULAR), is_whiteout=True),) if lower is not None else ()
        return _Directory(path, None, own, said, deque(sorted(os.listdir(full))), is_redirected=True)

    def _shown(self, path: bytes) -> bytes:
        if self._root is None:
            raise refuse(path, "the upper directory does not have all of it, and the environment's root is not mounted any more")
        return os.path.join(self._root, path)

    def _identity(self, path: bytes, status: os.stat_result) -> tuple[int, int]:
        """Of a file with several names, the same by each: its inode in the upper directory, or what the root shows if there is none."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            own = os.lstat(os.path.join(self._upper, path))
            return own.st_dev, own.st_ino
        return status.st_dev, status.st_ino

    def _untouched(self, path: bytes, status: os.stat_result) -> bool:
        return self._marks.get(path) == Mark(path, status.st_ino, status.st_ctime_ns)

    def _is_as_below(self, entry: Entry, full: bytes, lower: bytes | None) -> bool:
        """Whether a directory of the upper says nothing that the plan does not say."""
        return lower is not None and not _is_opaque(full) and entry == self._entry(entry.path, lower, os.lstat(lower))

    @staticmethod
    def _entry(path: bytes, full: bytes, status: os.stat_result) -> Entry:
        kind = _KINDS[stat.S_IFMT(status.st_mode)]
        is_device = kind in (Kind.CHARACTER, Kind.BLOCK)
        return Entry(
            path=path,
            kind=kind,
            mode=stat.S_IMODE(status.st_mode),
            uid=status.st_uid,
            gid=status.st_gid,
            mtime_ns=status.st_mtime_ns,
            rdev=status.st_rdev if is_device else 0,
            size=status.st_size if kind is Kind.REGULAR else 0,
            target=os.readlink(full) if kind is Kind.SYMLINK else b"",
            xattrs=read_xattrs(full),
        )


def _has_xattr(full: bytes, name: str) -> bool:
    try:
        os.getxattr(full, name, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.ENODATA:
            return False
        raise
    return True


def _is_opaque(full: bytes) -> bool:
    try:
        return os.getxattr(full, OPAQUE_XATTR, follow_symlinks=False) == b"y"
    except OSError:
        return False


def _lower_directory(lower: bytes | None, name: bytes) -> bytes | None:
    if lower is None:
        return None
    full = os.path.join(lower, name)
    try:
        return full if stat.S_ISDIR(os.lstat(full).st_mode) else None
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_diff(changes: Iterable[Change], out: Writable) -> DiffResult:
    """Writes the tar and its end. Blocks. Raises OSError or EnvletError(DIFF_FAILED)."""
    entries = whiteouts = content_bytes = device_count = 0
    devices: list[str] = []
    with TarWriter(cast(BinaryIO, out)) as tar:
        for change in changes:
            if change.source is None:
                tar.add(change.entry)
            else:
                _add_file(tar, change.entry, change.source)
            entries += 1
            whiteouts += change.is_whiteout
            content_bytes += change.entry.size
            if change.entry.kind in (Kind.CHARACTER, Kind.BLOCK):
                device_count += 1
                if len(devices) < _DEVICES_SHOWN:
                    devices.append(f"/{printable(change.entry.path)}")
    return DiffResult(entries=entries, whiteouts=whiteouts, content_bytes=content_bytes, devices=devices, device_count=device_count)


def _add_file(tar: TarWriter, entry: Entry, source: bytes) -> None:
    fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if status.st_size != entry.size:
            raise refuse(entry.path, f"its size went from {entry.size} to {status.st_size} bytes while the diff was taken")
        if status.st_blocks * 512 < entry.size:
            entry = attrs.evolve(entry, sparse=_segments(fd, entry.size))
        tar.add(entry, _read_pieces(fd, entry))
    finally:
        os.close(fd)


def _segments(fd: int, size: int) -> tuple[Segment, ...] | None:
    """Where a file with holes has data; None if it has no hole after all."""
    segments: list[Segment] = []
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: only a hole is left
                raise
            break
        end = os.lseek(fd, start, os.SEEK_HOLE)
        segments.append((start, end - start))
    return normalise_segments(segments, size)


def _read_pieces(fd: int, entry: Entry) -> Iterator[bytes]:
    for offset, length in entry.sparse if entry.sparse is not None else ((0, entry.size),):
        end = offset + length
        while offset < end:
            data = os.pread(fd, min(end - offset, _READ_BYTES), offset)
            if not data:
                raise refuse(entry.path, f"it ended at byte {offset} of {entry.size}; it changed while the diff was taken")
            yield data
            offset += len(data)
