"""What envlet adds to a root before its start, and how it is known again later.

A plan may lack /proc, /sys, /dev, /etc/hosts or the working directory. The runtime would make them, and `env.diff`
could then not tell them from the environment's own changes. So they are made here, through the mounted overlay and as
a process inside would see the paths (no symlink leads out), and remembered by inode and change time in the upper
directory: what still has both was not touched since. They have a time of the plan and not of now, so that two environments
of one plan are equal.
"""

import errno
import os
import stat
from pathlib import Path

import attrs

from envlet import errors
from envlet.errors import EnvletError
from envlet.syscalls import open_in_root

MOUNT_POINTS = ("proc", "sys", "dev")
HOSTS = b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
_READ_MAX_BYTES = 4 << 20


@attrs.frozen
class Mark:
    """An entry of the upper directory as we left it."""

    path: bytes
    """From the upper directory, without a leading slash."""
    inode: int
    changed_ns: int


def mark(upper: Path, path: bytes) -> Mark:
    status = os.lstat(os.path.join(os.fsencode(upper), path))
    return Mark(path, status.st_ino, status.st_ctime_ns)


def prepare_root(root: Path, upper: Path, workdir: str, mtime_ns: int, *, resolv_conf: bool = False) -> tuple[Mark, ...]:
    """Adds what is missing in the mounted `root`, with this modification time; what was added. `resolv_conf`: also a file for the node's
    to be mounted on. Blocks. Raises OSError or EnvletError.
    """
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        before = os.stat(root_fd)
        made: list[bytes] = []
        for name in MOUNT_POINTS:
            _make_directory(root_fd, name.encode(), made)
        _make_workdir(root_fd, workdir, made)
        _make_hosts(root_fd, made)
        if resolv_conf:
            _make_resolv_conf(root_fd, made)
        for path in reversed(made):
            os.utime(path, ns=(mtime_ns, mtime_ns), dir_fd=root_fd, follow_symlinks=False)
        if made:
            os.utime(root_fd, ns=(before.st_atime_ns, before.st_mtime_ns))
    finally:
        os.close(root_fd)
    return tuple(mark(upper, path) for path in made)


def _make_directory(parent_fd: int, name: bytes, made: list[bytes], prefix: bytes = b"") -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=parent_fd)
        os.chmod(name, 0o755, dir_fd=parent_fd)
    except FileExistsError:
        if prefix == b"" and not stat.S_ISDIR(os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_mode):
            raise EnvletError(
                errors.MOUNT_FAILED, f"/{name.decode()} of the plan is not a directory, so nothing can be mounted there"
            ) from None
        return
    made.append(prefix + name)


def _make_workdir(root_fd: int, workdir: str, made: list[bytes]) -> None:
    here_fd = os.dup(root_fd)
    try:
        walked = b""
        for part in (part for part in os.fsencode(workdir).split(b"/") if part not in (b"", b".")):
            try:
                next_fd = open_in_root(root_fd, walked + part, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                before = os.stat(here_fd)
                real = os.path.relpath(os.readlink(f"/proc/self/fd/{here_fd}"), os.readlink(f"/proc/self/fd/{root_fd}"))
                prefix = b"" if real == "." else os.fsencode(real) + b"/"
                os.mkdir(part, 0o755, dir_fd=here_fd)
                made.append(prefix + part)
                os.utime(here_fd, ns=(before.st_atime_ns, before.st_mtime_ns))
                next_fd = open_in_root(root_fd, walked + part, os.O_RDONLY | os.O_DIRECTORY)
            os.close(here_fd)
            here_fd = next_fd
            walked += part + b"/"
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.EEXIST):
            raise EnvletError(errors.INVALID_PARAMS, f"the working directory {workdir!r} cannot be made: {error}") from error
        raise
    finally:
        os.close(here_fd)


def _make_hosts(root_fd: int, made: list[bytes]) -> None:
    """Without it `localhost` means nothing to most programs. One that is empty is what image builders leave behind."""
    try:
        etc_fd = open_in_root(root_fd, "etc", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError, OSError):
        return
    try:
        before = os.stat(etc_fd)
        try:
            status = os.stat("hosts", dir_fd=etc_fd, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_size > 0:
                return
        except FileNotFoundError:
            pass
        fd = os.open("hosts", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=etc_fd)
        try:
            os.fchmod(fd, 0o644)
            os.write(fd, HOSTS)
        finally:
            os.close(fd)
        os.utime(etc_fd, ns=(before.st_atime_ns, before.st_mtime_ns))
        made.append(b"etc/hosts")
    finally:
        os.close(etc_fd)


def _make_resolv_conf(root_fd: int, made: list[bytes]) -> None:
    try:
        etc_fd = open_in_root(root_fd, "etc", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        before = os.stat(etc_fd)
        try:
            os.close(os.open("resolv.conf", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=etc_fd))
        except FileExistsError:
            return
        os.utime(etc_fd, ns=(before.st_atime_ns, before.st_mtime_ns))
        made.append(b"etc/resolv.conf")
    finally:
        os.close(etc_fd)


def read_text(root: Path, path: str) -> str:
    """A small text file of the root, as a process inside would find it; empty if there is none. Blocks. Raises
    OSError.
    """
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = open_in_root(root_fd, path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    finally:
        os.close(root_fd)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        return file.read(_READ_MAX_BYTES).decode("utf-8", "surrogateescape")
