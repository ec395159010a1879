"""The inverse of diff.py: a layer tar into the fresh upper directory of an environment that has not started.

The tar comes from a client, and this runs as root on the machine, so nothing in it is trusted: an entry's directory
is reached one component at a time through descriptors that do not follow symlinks, and never leaves the upper
directory. Refused by name: `..`, a path through something that is not a directory, devices, sockets.

What makes the merged root equal to the one that the tar was taken from: a removed entry becomes overlayfs' own
whiteout; an opaque directory gets its attribute; a directory that the tar only passes through gets the metadata it
has in the plan; a directory that replaces a removed one is opaque; a hard link to a file of the plan copies that file
up first, as the kernel would.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from envlet import errors
from envlet.diff import OPAQUE_NAME, WHITEOUT, is_whiteout, read_xattrs
from envlet.errors import EnvletError
from envlet.overlay import OPAQUE_XATTR, XATTR_PREFIX
from envlet.streams import CancellableFile
from layerformat.errors import LayerError, printable
from layerformat.model import Data, Entry, Kind
from layerformat.tarreader import read_tar

_COPY_BYTES = 1 << 20
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _refuse(path: bytes, why: str) -> EnvletError:
    return EnvletError(errors.APPLY_REFUSED, f"/{printable(path)}: {why}")


def apply_diff(tar: CancellableFile, upper: Path, lower: Path) -> int:
    """Extracts the tar into `upper`, which shows through over `lower`; the number of entries. Blocks.

    Raises EnvletError(APPLY_REFUSED) or OSError; what was extracted by then stays.
    """
    applier = _Applier(upper, lower)
    try:
        count = 0
        for entry, data in read_tar(tar, "the diff"):  # type: ignore[arg-type]
            applier.add(entry, data)
            count += 1
        applier.finish()
    except LayerError as error:
        raise EnvletError(errors.APPLY_REFUSED, str(error)) from error
    finally:
        applier.close()
    return count


def clean_path(path: bytes) -> bytes:
    """The path from the root without `.` and doubled slashes; empty for the root. Raises EnvletError(APPLY_REFUSED)."""
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in parts or b"\0" in path:
        raise _refuse(path, "a path with '..' could leave the environment")
    return b"/".join(parts)


class _Applier:
    def __init__(self, upper: Path, lower: Path) -> None:
        self._upper_fd = os.open(upper, _DIRECTORY_FLAGS)
        self._lower = os.fsencode(lower)
        self._opaque: set[bytes] = set()
        self._times: dict[bytes, tuple[int, int]] = {}
        """Access and modification time of each directory, set last because filling a directory changes them."""

    def close(self) -> None:
        os.close(self._upper_fd)

    def finish(self) -> None:
        """Sets the times of the directories, the deepest first."""
        for path in sorted(self._times, key=lambda path: path.count(b"/"), reverse=True):
            with self._opened(path) as fd:
                os.utime(fd, ns=self._times[path])

    @contextlib.contextmanager
    def _opened(self, path: bytes) -> Iterator[int]:
        fd = self._open_directory(path)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open_directory(self, path: bytes) -> int:
        """A descriptor of a directory in the upper, made (as the plan has it) where it is missing."""
        here = os.dup(self._upper_fd)
        walked = b""
        try:
            for part in path.split(b"/") if path else []:
                walked = os.path.join(walked, part)
                try:
                    following = os.open(part, _DIRECTORY_FLAGS, dir_fd=here)
                except FileNotFoundError:
                    self._pass_through(here, part, walked)
                    following = os.open(part, _DIRECTORY_FLAGS, dir_fd=here)
                except OSError as error:
                    raise _refuse(walked, f"an entry below it needs a directory here: {error.strerror}") from error
                os.close(here)
                here = following
        except BaseException:
            os.close(here)
            raise
        return here

    def _hidden(self, path: bytes) -> bool:
        """Whether an opaque directory of the tar above hides the plan's entry."""
        parent = os.path.dirname(path)
        while True:
            if parent in self._opaque:
                return True
            if not parent:
                return False
            parent = os.path.dirname(parent)

    def _lower_path(self, path: bytes) -> bytes | None:
        """Where the plan has this entry, if it is visible and not behind a symlink."""
        if self._hidden(path):
            return None
        full = self._lower
        parts = path.split(b"/")
        for index, part in enumerate(parts):
            full = os.path.join(full, part)
            try:
                mode = os.lstat(full).st_mode
            except FileNotFoundError:
                return None
            if index < len(parts) - 1 and not stat.S_ISDIR(mode):
                return None
        return full

    def _pass_through(self, parent_fd: int, name: bytes, path: bytes) -> None:
        """A directory that the tar has no entry for: as in the plan, else root's."""
        source = self._lower_path(path)
        if source is None:
            os.mkdir(name, 0o755, dir_fd=parent_fd)
            return
        status = os.lstat(source)
        if not stat.S_ISDIR(status.st_mode):
            raise _refuse(path, "an entry below it needs a directory here; the plan has something else and the tar nothing")
        os.mkdir(name, 0o700, dir_fd=parent_fd)
        self._set_metadata(parent_fd, name, path, _entry_of(source, status, path))

    def add(self, entry: Entry, data: Data) -> None:
        """One entry of the tar."""
        path = clean_path(entry.path)
        parent, name = os.path.split(path)
        if entry.kind in (Kind.CHARACTER, Kind.BLOCK, Kind.SOCKET):
            raise _refuse(path, "devices and sockets are not applied; remove it before the diff is taken")
        if name.startswith(WHITEOUT):
            self._whiteout(parent, name)
            return
        if not path:
            if entry.kind is not Kind.DIRECTORY:
                raise _refuse(path, "the root can only be a directory")
            self._set_metadata(self._upper_fd, b".", b"", entry)
            return
        with self._opened(parent) as parent_fd:
            replaced_whiteout = self._make_way(parent_fd, name, path, entry.kind)
            self._create(parent_fd, name, path, entry, data)
            if entry.kind is Kind.DIRECTORY and replaced_whiteout:
                self._set_opaque(parent_fd, name, path)

    def _whiteout(self, parent: bytes, name: bytes) -> None:
        target = name.removeprefix(WHITEOUT)
        path = os.path.join(parent, target)
        with self._opened(parent) as parent_fd:
            if name == OPAQUE_NAME:
                self._set_opaque(parent_fd, b".", parent)
                return
            if target in (b"", b".", b"..") or target.startswith(WHITEOUT):
                raise _refuse(os.path.join(parent, name), "this is not the name of a whiteout")
            try:
                status = os.stat(target, dir_fd=parent_fd, follow_symlinks=False)
            except FileNotFoundError:
                os.mknod(target, stat.S_IFCHR, 0, dir_fd=parent_fd)
                return
            if stat.S_ISDIR(status.st_mode):  # the tar's own directory: only what is below it in the plan goes
                self._set_opaque(parent_fd, target, path)

    def _set_opaque(self, parent_fd: int, name: bytes, path: bytes) -> None:
        fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent_fd)
        try:
            os.setxattr(fd, OPAQUE_XATTR, b"y")
        finally:
            os.close(fd)
        self._opaque.add(path)

    def _make_way(self, parent_fd: int, name: bytes, path: bytes, kind: Kind) -> bool:
        """Removes what an earlier entry of the tar put here, unless directory meets directory; whether it was a
        whiteout.
        """
        try:
            status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if stat.S_ISDIR(status.st_mode):
            if kind is not Kind.DIRECTORY:
                raise _refuse(path, "the tar has it as a directory before; it has one kind only")
            return False
        os.unlink(name, dir_fd=parent_fd)
        return is_whiteout(status)

    def _create(self, parent_fd: int, name: bytes, path: bytes, entry: Entry, data: Data) -> None:
        if entry.kind is Kind.HARD_LINK:
            self._link(parent_fd, name, path, clean_path(entry.target))
            return
        if entry.kind is Kind.DIRECTORY:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=parent_fd)
        elif entry.kind is Kind.SYMLINK:
            os.symlink(entry.target, name, dir_fd=parent_fd)
        elif entry.kind is Kind.FIFO:
            os.mkfifo(name, 0o600, dir_fd=parent_fd)
        else:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent_fd)
            try:
                _write_contents(fd, entry, data)
            finally:
                os.close(fd)
        self._set_metadata(parent_fd, name, path, entry)

    def _link(self, parent_fd: int, name: bytes, path: bytes, target: bytes) -> None:
        target_parent, target_name = os.path.split(target)
        with self._opened(target_parent) as target_fd:
            try:
                status = os.stat(target_name, dir_fd=target_fd, follow_symlinks=False)
            except FileNotFoundError:
                self._copy_up(target_fd, target_name, target, path)
            else:
                if is_whiteout(status) or stat.S_ISDIR(status.st_mode):
                    raise _refuse(path, f"it is a hard link to /{printable(target)}, which is a directory or was removed")
            os.link(target_name, name, src_dir_fd=target_fd, dst_dir_fd=parent_fd, follow_symlinks=False)

    def _copy_up(self, parent_fd: int, name: bytes, path: bytes, link: bytes) -> None:
        source = self._lower_path(path)
        status = os.lstat(source) if source is not None else None
        if source is None or status is None or not stat.S_ISREG(status.st_mode):
            raise _refuse(link, f"it is a hard link to /{printable(path)}, which neither the tar nor the plan has as a file")
        with open(source, "rb", buffering=0) as file:
            self._create(parent_fd, name, path, _entry_of(source, status, path), file)

    def _set_metadata(self, parent_fd: int, name: bytes, path: bytes, entry: Entry) -> None:
        """Owner before mode, because a change of owner clears set-id bits and capabilities; times last."""
        where = f"/proc/self/fd/{parent_fd}/".encode() + name
        os.chown(name, entry.uid, entry.gid, dir_fd=parent_fd, follow_symlinks=False)
        if entry.kind is not Kind.SYMLINK:
            os.chmod(name, entry.mode, dir_fd=parent_fd)
        for attribute, value in entry.xattrs.items():
            if attribute.startswith(XATTR_PREFIX.encode()):
                raise _refuse(path, f"the attribute {printable(attribute)} would instruct the overlay; it is no content")
            os.setxattr(where, attribute, value, follow_symlinks=False)
        times = (entry.mtime_ns, entry.mtime_ns)
        if entry.kind is Kind.DIRECTORY:
            self._times[path] = times
        else:
            os.utime(name, ns=times, dir_fd=parent_fd, follow_symlinks=False)


def _entry_of(source: bytes, status: os.stat_result, path: bytes) -> Entry:
    return Entry(
        path=path,
        kind=Kind.DIRECTORY if stat.S_ISDIR(status.st_mode) else Kind.REGULAR,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        mtime_ns=status.st_mtime_ns,
        size=status.st_size if stat.S_ISREG(status.st_mode) else 0,
        xattrs=read_xattrs(source),
    )


def _write_contents(fd: int, entry: Entry, data: Data) -> None:
    """The contents; runs of zeros stay holes."""
    for offset, length in entry.sparse if entry.sparse is not None else ((0, entry.size),):
        end = offset + length
        while offset < end:
            piece = data.read(min(end - offset, _COPY_BYTES))
            if not piece:
                raise _refuse(entry.path, f"its contents end {end - offset} bytes early")
            if piece.count(0) != len(piece):
                os.pwrite(fd, piece, offset)
            offset += len(piece)
    os.ftruncate(fd, entry.size)
