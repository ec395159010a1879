"""Control groups: the fixed quota of an environment, its use, and the certain end of its processes; versions 1, 2 and
hybrid.

We make the group, set its limits and remove it; the OCI runtime only puts the process in, because `cgroupsPath` names
a group that exists. Rejected: leaving the limits to the runtime (`linux.resources`). Then what exists depends on how
far a failing runtime came, and the two runtimes differ in version 2 below a delegated group. As it is, no process of
an environment ever runs outside its limits, and removal needs no runtime.

A group is empty when the kernel says so: `kill` repeats until `cgroup.procs` is empty in the group and all below it,
and `remove` is rmdir, which the kernel refuses for a group in use.
"""

import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import attrs
import trio

from envlet.mounts import HIDDEN_CGROUP2, parse_mountinfo

Kind = Literal["v1", "v2", "hybrid"]
CPU_PERIOD_US = 50_000
"""Half the kernel's default: a 200 ms sample then holds four periods."""
_POLL_S = (0.001, 0.002, 0.004, 0.008, 0.016)


class CgroupError(Exception):
    """A control group could not be made, emptied or removed; the message names it."""


@attrs.frozen
class Hierarchy:
    """One mounted tree of control groups."""

    version: Literal[1, 2]
    path: Path
    controllers: frozenset[str]


@attrs.frozen
class Layout:
    """What the machine has."""

    kind: Kind
    hierarchies: tuple[Hierarchy, ...]
    litter: Path | None = None
    """Where crun leaves plain directories, because cgroup2 is hidden there."""

    def having(self, controller: str) -> Hierarchy | None:
        """The tree with this controller."""
        return next((tree for tree in self.hierarchies if controller in tree.controllers), None)


def detect(mountinfo: str, proc_cgroups: str, root: Path = Path("/")) -> Layout:
    """The layout, from the texts of `/proc/self/mountinfo` and `/proc/cgroups`, and what a version 2 tree says of
    itself. `root` is put before the paths (for tests).

    Raises CgroupError where there is none.
    """
    enabled: dict[str, int] = {}
    for line in proc_cgroups.splitlines():
        if line and not line.startswith("#"):
            name, hierarchy, _, on = line.split()
            if on == "1":
                enabled[name] = int(hierarchy)
    visible = {mount.target: mount for mount in parse_mountinfo(mountinfo)}
    trees: list[Hierarchy] = []
    litter = None
    for target, mount in visible.items():
        path = root / target.lstrip("/")
        if mount.kind == "cgroup":
            controllers = frozenset(name for name in mount.options if name in enabled or name.startswith("name="))
            if controllers and not any(tree.controllers == controllers for tree in trees):
                trees.append(Hierarchy(1, path, controllers))
        elif mount.kind == "cgroup2" and not any(tree.version == 2 for tree in trees):
            unused = frozenset(name for name, number in enabled.items() if number == 0)
            trees.append(Hierarchy(2, path, _own_controllers(path, unused)))
        elif mount.source == HIDDEN_CGROUP2:
            litter = path
    versions = {tree.version for tree in trees}
    if not versions:
        raise CgroupError("no cgroup file system is mounted; mount one at /sys/fs/cgroup")
    kind: Kind = "hybrid" if len(versions) == 2 or litter else ("v1" if 1 in versions else "v2")
    return Layout(kind, tuple(trees), litter)


def _own_controllers(path: Path, unused: frozenset[str]) -> frozenset[str]:
    """What a version 2 tree has: it says so itself. `/proc/cgroups` is about version 1: it names controllers that
    version 2 does not have (net_cls), and releases of Linux 6.12 left out those that only version 2 has, memory among
    them. `unused`, what it says to be in no version 1 tree, serves where there is no file.
    """
    try:
        return frozenset((path / "cgroup.controllers").read_text().split())
    except FileNotFoundError:
        return unused


def detect_here() -> Layout:
    """The layout that this process sees."""
    return detect(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"), Path("/proc/cgroups").read_text())


def group_member(proc_cgroup: str, parent: str) -> str | None:
    """The name of the group directly below `parent` that a process is in, from the text of its `/proc/PID/cgroup`."""
    prefix = parent.rstrip("/") + "/"
    for line in proc_cgroup.splitlines():
        path = line.split(":", 2)[-1]
        start = path.find(prefix)
        if start >= 0:
            return path[start + len(prefix) :].split("/")[0]
    return None


@attrs.frozen
class Usage:
    """What a group uses and used. Zero where the machine has no such controller."""

    cpu_us: int
    memory_bytes: int
    memory_peak_bytes: int
    pids: int
    oom_kills: int


@attrs.frozen
class Cgroup:
    """One group, in all trees that the layout has. `path` is absolute, from the roots of the trees."""

    layout: Layout
    path: str

    def __attrs_post_init__(self) -> None:
        parts = self.path.split("/")
        if parts[0] != "" or len(parts) < 3 or any(part in ("", ".", "..") for part in parts[1:]):
            raise CgroupError(f"a control group path is absolute and has two parts or more, as /weenv/ID; received {self.path!r}")

    def directory(self, tree: Hierarchy) -> Path:
        """Where the group is in this tree."""
        return tree.path / self.path.lstrip("/")

    def create(self, cpu: float, memory_bytes: int, pids: int) -> None:
        """Makes the group and sets its limits. Raises CgroupError; what was made by then stays for `remove`."""
        for tree in self.layout.hierarchies:
            directory = self.directory(tree)
            try:
                self._make_parents(tree)
                directory.mkdir()
                if "cpuset" in tree.controllers and tree.version == 1:
                    _inherit_cpuset(directory)
            except FileExistsError as error:
                raise CgroupError(f"the control group {directory} exists already; it belongs to something else") from error
            except OSError as error:
                raise CgroupError(f"the control group {directory} could not be made: {error}") from error
        self.set_limits(cpu, memory_bytes, pids)

    def _make_parents(self, tree: Hierarchy) -> None:
        here = tree.path
        for part in self.path.strip("/").split("/"):
            if tree.version == 2:
                self._delegate(here)
            here = here / part
            if here == self.directory(tree):
                return
            with contextlib.suppress(FileExistsError):
                here.mkdir()
            if "cpuset" in tree.controllers and tree.version == 1:
                _inherit_cpuset(here)

    @staticmethod
    def _delegate(directory: Path) -> None:
        """Hands cpu, memory and pids down to the groups below `directory` (version 2)."""
        available = set((directory / "cgroup.controllers").read_text().split())
        active = set((directory / "cgroup.subtree_control").read_text().split())
        missing = [name for name in ("cpu", "memory", "pids") if name in available - active]
        if not missing:
            return
        try:
            _write(directory / "cgroup.subtree_control", " ".join(f"+{name}" for name in missing))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise CgroupError(
                f"{directory} holds processes, so it cannot hand {', '.join(missing)} down; run the daemon in a group below it "
                "(systemd: DelegateSubgroup=) or choose another cgroup parent"
            ) from error

    def set_limits(self, cpu: float, memory_bytes: int, pids: int) -> None:
        """Sets the quota: cores, bytes, processes. A controller that the machine lacks is an error: no quota is
        silently none.
        """
        quota_us = max(1000, round(cpu * CPU_PERIOD_US))
        for controller, version_1, version_2 in (
            ("cpu", [("cpu.cfs_period_us", str(CPU_PERIOD_US)), ("cpu.cfs_quota_us", str(quota_us))],
             [("cpu.max", f"{quota_us} {CPU_PERIOD_US}")]),
            ("memory", [("memory.limit_in_bytes", str(memory_bytes))], [("memory.max", str(memory_bytes))]),
            ("pids", [("pids.max", str(pids))], [("pids.max", str(pids))]),
        ):  # fmt: skip
            tree = self.layout.having(controller)
            if tree is None:
                raise CgroupError(f"this machine has no {controller} controller; it cannot hold an environment to its quota")
            for name, value in version_1 if tree.version == 1 else version_2:
                try:
                    _write(self.directory(tree) / name, value)
                except OSError as error:
                    raise CgroupError(f"{self.directory(tree) / name} did not take {value!r}: {error}") from error
        self._forbid_swap(memory_bytes)

    def _forbid_swap(self, memory_bytes: int) -> None:
        """Memory is memory: no swap on top, where the kernel accounts for it."""
        tree = self.layout.having("memory")
        if tree is None:
            return
        name, value = ("memory.memsw.limit_in_bytes", str(memory_bytes)) if tree.version == 1 else ("memory.swap.max", "0")
        with contextlib.suppress(FileNotFoundError):
            _write(self.directory(tree) / name, value)

    def exists(self) -> bool:
        """Whether any of it is there."""
        return any(self.directory(tree).exists() for tree in self.layout.hierarchies)

    def processes(self) -> set[int]:
        """The processes in the group and below it."""
        found: set[int] = set()
        for tree in self.layout.hierarchies:
            for directory in _tree_of(self.directory(tree)):
                with contextlib.suppress(OSError):
                    found.update(int(pid) for pid in (directory / "cgroup.procs").read_text().split())
        return found

    def usage(self) -> Usage:
        """The figures of now; zero for what the machine does not count."""
        cpu, memory, pids = (self.layout.having(name) for name in ("cpu", "memory", "pids"))
        cpuacct = self.layout.having("cpuacct")
        cpu_us = 0
        if cpu is not None and cpu.version == 2:
            cpu_us = _keyed(self.directory(cpu) / "cpu.stat", "usage_usec")
        elif cpuacct is not None:
            cpu_us = _number(self.directory(cpuacct) / "cpuacct.usage") // 1000
        current = peak = 0
        if memory is not None:
            names = ("memory.usage_in_bytes", "memory.max_usage_in_bytes") if memory.version == 1 else ("memory.current", "memory.peak")
            current, peak = (_number(self.directory(memory) / name) for name in names)
        running = _number(self.directory(pids) / "pids.current") if pids is not None else 0
        return Usage(cpu_us, current, peak, running, self.oom_kills())

    def oom_kills(self) -> int:
        """How many processes of the group the kernel killed for want of memory."""
        memory = self.layout.having("memory")
        if memory is None:
            return 0
        return _keyed(self.directory(memory) / ("memory.oom_control" if memory.version == 1 else "memory.events"), "oom_kill")

    async def freeze(self, frozen: bool, deadline_s: float = 10.0) -> None:
        """Stops all processes of the group, or lets them go on; returns when it is so. Raises CgroupError."""
        tree = self.layout.having("freezer") or next((tree for tree in self.layout.hierarchies if tree.version == 2), None)
        if tree is None:
            raise CgroupError("this machine has neither a freezer controller nor cgroup version 2")
        directory = self.directory(tree)
        wanted: str | int
        if tree.version == 1:
            order, wanted = ("freezer.state", "FROZEN" if frozen else "THAWED")
        else:
            order, wanted = ("cgroup.freeze", int(frozen))
        _write(directory / order, str(wanted))
        with trio.move_on_after(deadline_s):
            for pause_s in _pauses():
                if tree.version == 1:
                    now: str | int = (directory / "freezer.state").read_text().strip()
                else:
                    now = _keyed(directory / "cgroup.events", "frozen")
                if now == wanted:
                    return
                await trio.sleep(pause_s)
        raise CgroupError(f"{directory} was not {'frozen' if frozen else 'thawed'} within {deadline_s:g} s")

    async def kill(self, deadline_s: float = 20.0) -> None:
        """Kills all processes of the group and below, and returns when there are none. Raises CgroupError."""
        left: set[int] = set()
        with trio.move_on_after(deadline_s):
            for pause_s in _pauses():
                left = self.processes()
                if not left:
                    return
                self._kill_once(left)
                await trio.sleep(pause_s)
        raise CgroupError(f"{self.path} still has processes {sorted(left)[:10]} {deadline_s:g} s after SIGKILL; they hang in the kernel")

    def _kill_once(self, processes: set[int]) -> None:
        if self.layout.kind == "v2":
            order = self.directory(self.layout.hierarchies[0]) / "cgroup.kill"
            if order.exists():
                _write(order, "1")
                return
        freezer = self.layout.having("freezer")
        state = self.directory(freezer) / "freezer.state" if freezer is not None and freezer.version == 1 else None
        if state is not None and state.exists():  # frozen, they cannot fork away from the list
            _write(state, "FROZEN")
            processes = self.processes()
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if state is not None and state.exists():
            _write(state, "THAWED")

    async def remove(self, deadline_s: float = 10.0) -> None:
        """Removes the group and all below it. It has no processes. Raises CgroupError; fine if it does not exist."""
        problem: OSError | None = None
        with trio.move_on_after(deadline_s):
            for pause_s in _pauses():
                problem = self._remove_once()
                if problem is None:
                    return
                await trio.sleep(pause_s)
        raise CgroupError(f"the control group {self.path} could not be removed: {problem}")

    def _remove_once(self) -> OSError | None:
        for tree in self.layout.hierarchies:
            for directory in reversed(list(_tree_of(self.directory(tree)))):
                try:
                    directory.rmdir()
                except FileNotFoundError:
                    continue
                except OSError as error:
                    return error
        if self.layout.litter is not None:
            shutil.rmtree(self.layout.litter / self.path.lstrip("/"), ignore_errors=True)
        return None


def make_parent(layout: Layout, path: str) -> Path:
    """The parent of the environments' groups in the first hierarchy, made if it is not there: what a daemon locks. Raises
    CgroupError.
    """
    tree = layout.hierarchies[0]
    here = tree.path
    for part in path.strip("/").split("/"):
        here = here / part
        try:
            here.mkdir(exist_ok=True)
            if "cpuset" in tree.controllers and tree.version == 1:
                _inherit_cpuset(here)
        except OSError as error:
            raise CgroupError(f"the control group {here} could not be made: {error}; run the daemon where it may make groups") from error
    return here


def remove_if_empty(layout: Layout, path: str) -> None:
    """Removes a parent group that has nothing in it; leaves one that has."""
    for tree in layout.hierarchies:
        with contextlib.suppress(OSError):
            (tree.path / path.lstrip("/")).rmdir()


def _pauses() -> Iterator[float]:
    yield from _POLL_S
    while True:
        yield _POLL_S[-1]


def _tree_of(directory: Path) -> Iterator[Path]:
    """The group and all below it, parents first."""
    if directory.is_dir():
        for here, _, _ in os.walk(directory):
            yield Path(here)


def _inherit_cpuset(directory: Path) -> None:
    """A new version 1 cpuset is empty and takes no process before it has CPUs and memory nodes."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        target = directory / name
        if target.exists() and not target.read_text().strip():
            _write(target, (directory.parent / name).read_text().strip())


def _write(path: Path, value: str) -> None:
    """One write(2), as these files want it; does not create."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0


def _keyed(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [key]), 0)
