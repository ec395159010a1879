"""The daemon's mount namespace, and what is mounted in it.

The daemon mounts every environment's root in a namespace of its own, for three reasons. The machine's mount table
stays as it was; the kernel removes every mount of ours when the last process in the namespace ends, however it ends;
and on a hybrid cgroup host crun 1.8 can be kept from seeing `/sys/fs/cgroup/unified`, whose controllers make it
refuse to work. An empty private tmpfs takes that place: crun writes plain directories there, which would else stay on
the machine's own tmpfs.
"""

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path

import attrs

from envlet import syscalls

HIDDEN_CGROUP2 = "weenv-hidden-cgroup2"
"""The source by which the tmpfs over a hidden cgroup2 mount is known."""


@attrs.frozen
class Mount:
    """One line of mountinfo."""

    target: str
    kind: str
    source: str
    options: frozenset[str]
    """Of the superblock."""


def parse_mountinfo(text: str) -> list[Mount]:
    """The mounts in their order: of two with one target, the later one is seen."""
    mounts = []
    for line in text.splitlines():
        place, _, kind = line.partition(" - ")
        fields, tail = place.split(" "), kind.split(" ")
        if len(fields) < 6 or len(tail) < 3:
            raise ValueError(f"a line of mountinfo has 6 fields, ' - ' and 3 more; received {line!r}")
        mounts.append(Mount(_unescape(fields[4]), tail[0], _unescape(tail[1]), frozenset(tail[2].split(","))))
    return mounts


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def current_mounts() -> list[Mount]:
    """The mounts of this thread's namespace."""
    with open("/proc/thread-self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return parse_mountinfo(file.read())


def filesystem_of(path: Path) -> str:
    """The kind of filesystem that a path is on, as the mount table names it. Raises OSError."""
    real = os.path.join(os.path.realpath(path), "")
    found = "rootfs"
    longest = 0
    for mount in current_mounts():
        target = os.path.join(mount.target, "")
        if real.startswith(target) and len(target) >= longest:
            found, longest = mount.kind, len(target)
    return found


def hybrid_unified(mounts: list[Mount]) -> str | None:
    """Where a hybrid host has its cgroup2 mount, beside version 1 controllers; None on any other host."""
    if not any(mount.kind == "cgroup" for mount in mounts):
        return None
    visible = {mount.target: mount for mount in mounts}
    return next((target for target, mount in visible.items() if mount.kind == "cgroup2"), None)


def enter_private_namespace() -> None:
    """Moves this process into a mount namespace of its own. Call it once, before there are threads.

    Mounts of the machine still arrive here (slave), ours do not leave. Raises OSError; it takes CAP_SYS_ADMIN.
    """
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
    unified = hybrid_unified(current_mounts())
    if unified is not None:
        syscalls.umount(unified, syscalls.MNT_DETACH)
        syscalls.mount(HIDDEN_CGROUP2, unified, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=755")


def join_namespace(pid: int) -> None:
    """Moves this process into the mount namespace of another, as `enter_private_namespace` made it. Call it before there are
    threads. The kernel moves it to the namespace's root, too; it is taken back to its working directory, from where the next program
    (node.restart) finds relative paths. Raises OSError; ProcessLookupError if the process is gone.
    """
    pidfd = os.pidfd_open(pid)
    try:
        directory = _working_directory()
        syscalls.setns(pidfd, syscalls.CLONE_NEWNS)
        with contextlib.suppress(OSError):  # one that is not there in that namespace
            os.chdir(directory)
    finally:
        os.close(pidfd)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return "/"


def unmount_below(directory: str, keep: Collection[str] = ()) -> list[str]:
    """Unmounts everything below `directory` but what is in or below its entries `keep`, the deepest first; the targets. Raises OSError."""
    top = directory.rstrip("/") + "/"
    below = [mount.target for mount in current_mounts() if mount.target.startswith(top)]
    targets = [target for target in below if target.removeprefix(top).partition("/")[0] not in keep]
    for target in reversed(targets):
        syscalls.umount(target, syscalls.MNT_DETACH)
    return targets
