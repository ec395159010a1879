"""The few system calls that Python does not have, each once, each raising OSError.

Called through libc, which sets errno; the 64-bit numbers of openat2 are the same on every architecture that has it.
"""

import ctypes
import errno
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
MOUNT_ATTR_NODEV = 0x4
CLONE_NEWNS = 0x20000

RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10

_PR_SET_CHILD_SUBREAPER = 36
_SYS_OPENAT2 = 437
_SYS_MOVE_MOUNT = 429
_SYS_FSOPEN = 430
_SYS_FSCONFIG = 431
_SYS_FSMOUNT = 432
_FSOPEN_CLOEXEC = 1
_FSMOUNT_CLOEXEC = 1
_FSCONFIG_SET_STRING = 1
_FSCONFIG_CMD_CREATE = 6
_MOVE_MOUNT_F_EMPTY_PATH = 4
_AT_FDCWD = -100
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_READ_ONLY = 1
_LO_FLAGS_AUTOCLEAR = 4
_LOOP_ATTEMPTS = 64
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


def mount_new(kind: str, target: str, parameters: Sequence[tuple[str, str]], attributes: int) -> None:
    """fsopen(2), fsconfig(2) with each parameter in turn, fsmount(2), move_mount(2): for what does not fit the page of options that
    mount(2) takes. A value has at most 255 bytes. The error says what the filesystem wrote to its log.
    """
    context = _check(_libc.syscall(ctypes.c_long(_SYS_FSOPEN), kind.encode(), _FSOPEN_CLOEXEC), f"fsopen {kind}")
    try:
        for key, value in parameters:
            _configure(context, _FSCONFIG_SET_STRING, key, value)
        _configure(context, _FSCONFIG_CMD_CREATE, None, None)
        made = _check(_libc.syscall(ctypes.c_long(_SYS_FSMOUNT), context, _FSMOUNT_CLOEXEC, attributes), f"fsmount {kind}")
    finally:
        os.close(context)
    try:
        arguments = (made, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)
        _check(_libc.syscall(ctypes.c_long(_SYS_MOVE_MOUNT), *arguments), f"move_mount {kind} to {target}")
    finally:
        os.close(made)


def _configure(context: int, command: int, key: str | None, value: str | None) -> None:
    arguments = [os.fsencode(text) if text is not None else None for text in (key, value)]
    result = _libc.syscall(ctypes.c_long(_SYS_FSCONFIG), context, command, arguments[0], arguments[1], 0)
    if result < 0:
        number = ctypes.get_errno()
        what = f"{key}={value}" if key is not None else "create"
        raise OSError(number, f"fsconfig {what}: {os.strerror(number)}{_context_log(context)}")


def _context_log(context: int) -> str:
    """What a filesystem says of its refusal; empty if nothing."""
    lines = []
    try:
        while line := os.read(context, 4096):
            lines.append(line.decode(errors="replace").strip())
    except OSError:
        pass  # ENODATA: that was all
    return f" ({'; '.join(lines)})" if lines else ""


def attach_loop(path: str) -> tuple[int, str]:
    """A free loop device over a file, read only, freed by itself after its last use; an open descriptor of it, and its path."""
    backing = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            for _ in range(_LOOP_ATTEMPTS):
                number = _check(_libc.ioctl(control, ctypes.c_ulong(_LOOP_CTL_GET_FREE)), "a free loop device")
                device = f"/dev/loop{number}"
                fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
                # struct loop_config: descriptor, block size, loop_info64 (flags at byte 52 of it), reserved
                config = struct.pack("=II52xI176x64x", backing, 0, _LO_FLAGS_READ_ONLY | _LO_FLAGS_AUTOCLEAR)
                if _libc.ioctl(fd, ctypes.c_ulong(_LOOP_CONFIGURE), config) == 0:
                    return fd, device
                number = ctypes.get_errno()
                os.close(fd)
                if number != errno.EBUSY:  # EBUSY: another process took it meanwhile
                    raise OSError(number, f"{device} over {path}: {os.strerror(number)}")
        finally:
            os.close(control)
    finally:
        os.close(backing)
    raise OSError(errno.EBUSY, f"no loop device for {path}: each of {_LOOP_ATTEMPTS} free ones was taken by another process")


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
