"""The few system calls that Python does not have, each once, each raising OSError.

Called through libc, which sets errno; the 64-bit numbers of openat2 are the same on every architecture that has it.
"""

import ctypes
import os
import struct
from collections.abc import Sequence

_libc = ctypes.CDLL(None, use_errno=True)

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_REMOUNT = 0x20
MS_NOATIME = 0x400
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MS_SLAVE = 0x80000
MNT_DETACH = 0x2
CLONE_NEWNS = 0x20000

RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10

_PR_SET_CHILD_SUBREAPER = 36
_SYS_OPENAT2 = 437
SO_PEERGROUPS = 59


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2)."""
    arguments = [os.fsencode(text) if text is not None else None for text in (source, target, kind, options)]
    result = _libc.mount(arguments[0], arguments[1], arguments[2], ctypes.c_ulong(flags), arguments[3])
    _check(result, f"mount {kind or source} on {target}")


def umount(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    _check(_libc.umount2(os.fsencode(target), flags), f"umount {target}")


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """setns(2)."""
    _check(_libc.setns(fd, flags), "setns")


def set_child_subreaper() -> None:
    """Orphaned descendants become children of this process, which must then reap those that it knows of."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl PR_SET_CHILD_SUBREAPER")


def open_in_root(root_fd: int, path: str | bytes, flags: int, resolve: int = RESOLVE_IN_ROOT) -> int:
    """openat2(2): opens `path` as a process whose root is `root_fd` would, so that no symlink leads out of it."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, resolve | RESOLVE_NO_MAGICLINKS)
    name = os.fsencode(path)
    result = _libc.syscall(ctypes.c_long(_SYS_OPENAT2), root_fd, name, how, ctypes.c_size_t(len(how)))
    return _check(result, f"openat2 {os.fsdecode(path)!r}")


def unpack_groups(raw: bytes) -> Sequence[int]:
    """The value of the socket option SO_PEERGROUPS: the supplementary groups of the process at the other end."""
    return struct.unpack(f"={len(raw) // 4}I", raw)
