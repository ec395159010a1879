"""Starting programs and waiting for processes, without a thread for each.

posix_spawn instead of subprocess: it does not copy the daemon's page tables, and it puts descriptors exactly where
they are wanted (an OCI runtime hands on descriptor 3, not any number). A process is waited for through its pidfd. The
daemon is a child subreaper: what the runtime leaves behind (pid 1 of an environment, the wrapper of a command)
becomes its child, so that nothing stays a zombie on machines whose own pid 1 does not reap. Only processes that we
know are reaped, never any child: others may have theirs here.
"""

import contextlib
import errno
import fcntl
import os
import select
import signal
from collections.abc import Mapping

import trio

PROGRAM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEFAULT_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)


def seal_descriptors() -> None:
    """Keeps what this process inherited above stderr from its children: a descriptor of the machine has no place in
    an environment.
    """
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the one of listdir itself
                os.set_inheritable(int(name), False)


def spawn(argv: list[str], descriptors: Mapping[int, int]) -> int:
    """Starts a program with these descriptors (number there: number here) and no others; its pid. Raises OSError.

    The numbers here must not be below 3 unless they stay what they are, which holds for a daemon whose 0–2 are open.
    """
    # In ascending order a source is never overwritten before its turn: targets are 0..n, and what is open here is above
    # them or is moved out of their way first.
    moved: list[int] = []
    try:
        actions: list[tuple[int, int, int]] = []
        for target, source in sorted(descriptors.items()):
            if source <= max(descriptors) and source != target:
                source = _above(source, max(descriptors))
                moved.append(source)
            actions.append((os.POSIX_SPAWN_DUP2, source, target))
        environment = {"PATH": PROGRAM_PATH}
        return os.posix_spawn(argv[0], argv, environment, file_actions=actions, setpgroup=0, setsigmask=(), setsigdef=_DEFAULT_SIGNALS)
    finally:
        for fd in moved:
            os.close(fd)


def _above(fd: int, lowest: int) -> int:
    """A duplicate whose number is above `lowest`."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest + 1)


async def wait_exit(pidfd: int) -> None:
    """Returns when the process has ended. It can be anybody's, and several may wait.

    Each waits on a descriptor of its own: trio lets one task wait for a descriptor, and the caller may close `pidfd`
    meanwhile. It must be taken out of trio's epoll before it is closed: what it leads to is still open, so the kernel would go on
    reporting it, by a number that is somebody else's then, who would believe that its process has ended.
    """
    own = os.dup(pidfd)
    try:
        await trio.lowlevel.wait_readable(own)
    finally:
        trio.lowlevel.notify_closing(own)
        os.close(own)


def has_exited(pidfd: int) -> bool:
    """Whether the process has ended, with all its threads."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since the boot: with the pid, its identity. Raises ProcessLookupError."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, f"there is no process {pid}") from None
    return int(line.rpartition(b")")[2].split()[19])  # behind the name, which may hold anything


def reap(pidfd: int) -> int | None:
    """Takes the status of a child that has ended: its exit code, or minus the signal; None if it is not ours to reap."""
    with contextlib.suppress(ChildProcessError):
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
        if result is not None:
            return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
    return None


class Orphans:
    """What a program leaves behind in processes that it does not wait for: children of ours now, since this is a subreaper, whose pids
    nobody knows. crun leaves one for each environment that it starts.
    """

    def __init__(self, name: str) -> None:
        """`name`: of the program; they have it too."""
        self._name = name[:15]  # as the kernel keeps it
        self.running: set[int] = set()
        """The programs themselves, whose status somebody waits for."""

    def reap(self) -> None:
        """Takes those that have ended. It looks at one ended child after the other without taking it, and stops at the first that is
        somebody else's, who will take it; then this is for the next time.
        """
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in self.running or _name_of(ended.si_pid) != self._name:
                    return
                os.waitid(os.P_PID, ended.si_pid, os.WEXITED | os.WNOHANG)


def _name_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().rstrip("\n")
    except OSError:
        return ""


async def run(argv: list[str], descriptors: Mapping[int, int], orphans: Orphans | None = None) -> int:
    """Runs a program to its end: exit code, or minus the signal. Cancelled, it still waits: the programs run so are
    short, and one that is left alone would make things that nobody removes. `orphans` are told of it, and reaped.
    """
    pid = spawn(argv, descriptors)
    if orphans is not None:
        orphans.running.add(pid)
    pidfd = os.pidfd_open(pid)
    try:
        with trio.CancelScope(shield=True):
            await wait_exit(pidfd)
        status = reap(pidfd)
    finally:
        os.close(pidfd)
        if orphans is not None:
            orphans.running.discard(pid)
            orphans.reap()
    if status is None:
        raise ChildProcessError(f"the status of {argv[0]} (pid {pid}) was taken by somebody else")
    return status
