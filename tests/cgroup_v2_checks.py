"""Runs inside the test machine: the whole path on pure cgroup version 2, observed; prints what it saw as one JSON value.

It judges nothing: test_cgroup_v2_machine.py does, where a failure can be read. An observation that could not be made
is the traceback, under "error" of its scenario; the later ones still run.

The commands are those of the command line, each in a process of its own, but forked from this one, which has imported
everything: in an emulated machine the imports of a new interpreter take many seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import shutil
import struct
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

CGROUPS = Path("/sys/fs/cgroup")
LAYOUT = "oci:/tmp/layout:base"
PIDS_MAX = 40
COMMAND_LIMIT_S = 60.0
EVENT_LIMIT_S = 30.0
IN_MODIFY = 0x2
PRELOADED = ("tools.cli", "registry", "layerformat", "envlet.client", "envlet.daemon", "envlet.dataplane", "envlet.resolver")
APPLETS = ("sh", "cat", "dd", "echo", "rm", "sleep", "true")

libc = ctypes.CDLL(None, use_errno=True)


fork = multiprocessing.get_context("fork")


class Command:
    """`weenv ARGUMENTS` in a process of its own. `inside`: the control group that it enters first."""

    count = 0

    def __init__(self, *arguments: str, inside: Path | None = None) -> None:
        Command.count += 1
        self.stdout, self.stderr = (Path(f"/tmp/output/{Command.count}.{name}") for name in ("out", "err"))
        self.stdout.parent.mkdir(exist_ok=True)
        self.process = fork.Process(target=self._run, args=(arguments, inside))
        self.process.start()

    def _run(self, arguments: tuple[str, ...], inside: Path | None) -> None:
        from tools import cli

        for number, path in ((1, self.stdout), (2, self.stderr)):
            with path.open("wb") as file:
                os.dup2(file.fileno(), number)
        if inside is not None:
            (inside / "cgroup.procs").write_text("0")
        sys.exit(cli.run(arguments))

    def wait(self, limit_s: float = COMMAND_LIMIT_S) -> dict[str, Any]:
        """Its exit status and output; killed at the limit, with the signal as its status."""
        self.process.join(limit_s)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        stdout, stderr = (path.read_text(errors="replace").strip() for path in (self.stdout, self.stderr))
        return {"status": self.process.exitcode, "stdout": stdout, "stderr": stderr[-5000:]}


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether it came true within EVENT_LIMIT_S."""
    deadline_s = time.monotonic() + EVENT_LIMIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def processes(group: Path) -> list[int]:
    return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]


def values(group: Path, *names: str) -> dict[str, str]:
    return {name: (group / name).read_text().strip() for name in names}


def user_processes() -> dict[int, str]:
    """Command lines of all processes but the kernel's own; zombies too."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if "2" not in (parent, entry.name):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = command or f"(state {state}, no command)"
    return found


def state_of_the_machine() -> dict[str, list[str]]:
    """What must be the same before and after."""
    return {
        "mounts": sorted(line.split(" ", 2)[2] for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        "cgroups": sorted(str(path) for path in CGROUPS.rglob("*") if path.is_dir()),
        "processes": sorted(f"{pid}: {command}" for pid, command in user_processes().items()),
    }


class Writes:
    """Counts the writes to one file by inotify: how a file without memory, as cgroup.kill, shows that it was used."""

    def __init__(self, path: Path) -> None:
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0 or libc.inotify_add_watch(self._fd, os.fsencode(path), IN_MODIFY) < 0:
            raise OSError(ctypes.get_errno(), f"inotify on {path}")

    def count(self) -> int:
        """How often it was written since the last call; adjacent writes may count as one."""
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return 0
        number = offset = 0
        while offset < len(data):
            _, mask, _, name_bytes = struct.unpack_from("iIII", data, offset)
            offset += 16 + name_bytes
            number += bool(mask & IN_MODIFY)
        return number


class Node:
    """A daemon and the commands to it. `inside`: the control group that it is started in."""

    def __init__(self, name: str, parent: str, runtime: str, inside: Path = CGROUPS) -> None:
        self.directory = Path("/tmp/nodes") / name
        self.parent = CGROUPS / parent.lstrip("/")
        self.socket = self.directory / "run/envlet.sock"
        self.directory.mkdir(parents=True)
        config = self.directory / "node.toml"
        config.write_text(
            f'state_dir = "{self.directory}/state"\nrun_dir = "{self.directory}/run"\ncgroup_parent = "{parent}"\n'
            f'runtime = "{runtime}"\npids = {PIDS_MAX}\n'
        )
        self.daemon = Command("node", "serve", "--config", str(config), inside=inside)
        wait_until(lambda: self.socket.exists() or not self.daemon.process.is_alive())
        if not self.socket.exists():
            self.daemon.process.terminate()
            raise RuntimeError(f"the daemon does not serve: {self.daemon.wait()}")

    def begin(self, *arguments: str) -> Command:
        """Starts `weenv ARGUMENTS` on this node."""
        return Command(*arguments[:2], "--socket", str(self.socket), *arguments[2:])

    def __call__(self, *arguments: str) -> dict[str, Any]:
        """`weenv ARGUMENTS` on this node."""
        return self.begin(*arguments).wait()

    def create(self, *options: str) -> str:
        """The id of a new environment."""
        made = self("env", "create", "--group", LAYOUT, "--cpu", "0.5", "--memory", "64M", *options)
        if made["status"] != 0:
            raise RuntimeError(f"env create failed: {made}")
        return str(made["stdout"])

    def stop(self) -> dict[str, Any]:
        """Ends the daemon: its status and messages, and what it left in its directories."""
        self.daemon.process.terminate()
        ended = self.daemon.wait()
        left = [str(path) for name in ("state/envs", "run/envs", "run/runtime") for path in (self.directory / name).glob("*")]
        return {**ended, "left": left}


@contextlib.contextmanager
def observed(report: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """A scenario's own part of the report, with its failure and its time."""
    part: dict[str, Any] = report.setdefault(name, {})
    begin_s = time.monotonic()
    try:
        yield part
    except Exception:
        part["error"] = traceback.format_exc()
    part["seconds"] = round(time.monotonic() - begin_s, 1)


def limits(node: Node, part: dict[str, Any]) -> None:
    """The group of a new environment, and what runs in it."""
    name = node.create()
    group = node.parent / name
    part["files"] = values(group, "cpu.max", "memory.max", "memory.swap.max", "pids.max", "cgroup.controllers")
    part["delegated"] = values(node.parent, "cgroup.subtree_control")["cgroup.subtree_control"].split()
    part["init"] = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in processes(group)]
    part["seen_inside"] = node("env", "exec", name, "--", "cat", "/proc/self/cgroup")
    part["seen_outside"] = [Path(f"/proc/{pid}/cgroup").read_text().strip() for pid in processes(group)]
    part["expected_outside"] = f"0::{str(group).removeprefix(str(CGROUPS))}"
    part["status_7"] = node("env", "exec", name, "--", "sh", "-c", "exit 7")["status"]
    node("env", "exec", name, "--", "sh", "-c", "echo new > /etc/new; rm /etc/passwd")
    diff = node.directory / "diff.tar"
    part["diff"] = node("env", "diff", name, "-o", str(diff))
    with tarfile.open(diff) as tar:
        part["diff_names"] = sorted(tar.getnames())
    part["removed"] = node("env", "rm", name)
    part["group_exists"] = group.exists()


def fork_bomb(node: Node, part: dict[str, Any]) -> None:
    """A command that leaves processes behind at its timeout; then one that makes as many as it can."""
    name = node.create()
    group = node.parent / name
    part["timed_out"] = node("env", "exec", name, "--timeout", "1", "--", "sh", "-c", "sleep 1000 & (sleep 1000 &) ; sleep 1000")
    part["left_by_timeout"] = len(processes(group)) - 1
    bomb = node.begin("env", "exec", name, "--", "sh", "-c", "f() { f & f & }; f; sleep 1000")

    def refusals() -> int:
        return int((group / "pids.events").read_text().split()[1])

    most = 0

    def bounded() -> bool:
        nonlocal most
        most = max(most, int((group / "pids.current").read_text()))
        return refusals() > 0

    part["bomb_met_the_limit"] = wait_until(bounded)
    part["most_processes"] = most
    kill = Writes(group / "cgroup.kill")
    part["removed"] = node("env", "rm", name)
    part["kill_writes"] = kill.count()
    part["bomb_status"] = bomb.wait()["status"]
    part["group_exists"] = group.exists()


def freezing(node: Node, part: dict[str, Any]) -> None:
    """Processes that ignore what can be ignored: a diff freezes and thaws them; frozen by somebody, they still end."""
    name = node.create()
    group = node.parent / name
    sleeper = "trap '' TERM INT HUP; sleep 1000 & sleep 1000 & sleep 1000 & echo started; exec sleep 1000"
    command = node.begin("env", "exec", name, "--", "sh", "-c", sleeper)
    part["started"] = wait_until(lambda: command.stdout.exists() and "started" in command.stdout.read_text())
    freezer = Writes(group / "cgroup.freeze")
    part["diff"] = node("env", "diff", name, "-o", "/dev/null")
    part["freeze_writes"] = freezer.count()
    part["frozen_after_diff"] = (group / "cgroup.freeze").read_text().strip()
    (group / "cgroup.freeze").write_text("1")
    kill = Writes(group / "cgroup.kill")
    part["removed"] = node("env", "rm", name)
    part["kill_writes"] = kill.count()
    part["command_status"] = command.wait()["status"]
    part["group_exists"] = group.exists()


def memory_hog(node: Node, part: dict[str, Any]) -> None:
    """A command that takes more memory than there is: one buffer of 200 MB."""
    name = node.create()
    group = node.parent / name
    part["hog"] = node("env", "exec", name, "--", "dd", "if=/dev/zero", "of=/dev/null", "bs=200M", "count=1")
    inspected = json.loads(node("env", "inspect", name)["stdout"])
    part["state"], part["cause"] = inspected["state"], inspected["cause"]
    part["diff_status"] = node("env", "diff", name, "-o", "/dev/null")["status"]
    part["removed"] = node("env", "rm", name)
    part["group_exists"] = group.exists()


SCENARIOS: Mapping[str, Callable[[Node, dict[str, Any]], None]] = {
    "limits": limits,
    "fork_bomb": fork_bomb,
    "freeze": freezing,
    "memory_hog": memory_hog,
}


def visit(report: dict[str, Any], title: str, parent: str, runtime: str, inside: Path, scenarios: tuple[str, ...]) -> None:
    """One daemon's life: scenarios, one environment left for its end, and what is left after that."""
    with observed(report, title) as part:
        before = state_of_the_machine()
        node = Node(title, parent, runtime, inside)
        try:
            part["info"] = json.loads(node("node", "info", "--format", "json")["stdout"])
            for name in scenarios:
                with observed(part, name) as seen:
                    SCENARIOS[name](node, seen)
            part["left_for_the_end"] = node.create()
        finally:
            part["end"] = node.stop()
        after = state_of_the_machine()
        part["new"] = {what: sorted(set(after[what]) - set(before[what])) for what in before}


def internal_processes(report: dict[str, Any]) -> None:
    """A daemon in the very group below which it is to make its own: the kernel forbids it."""
    with observed(report, "internal") as part:
        unit = CGROUPS / "bad.service"
        unit.mkdir()
        node = Node("internal", "/bad.service/weenv", "crun", unit)
        try:
            part["refused"] = node("env", "create", "--group", LAYOUT)
            part["environments"] = node("env", "ls", "--format", "json")
        finally:
            part["end"] = node.stop()
        part["groups"] = [str(path) for path in unit.rglob("*") if path.is_dir()]
        unit.rmdir()


def make_root(root: Path) -> None:
    for name in ("bin", "etc", "tmp"):
        (root / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin/busybox")
    for name in APPLETS:
        (root / "bin" / name).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\n")


def main() -> None:
    report: dict[str, Any] = {
        "mounted": [line for line in Path("/proc/mounts").read_text().splitlines() if "cgroup" in line],
        "kernel": os.uname().release,
        "proc_cgroups": Path("/proc/cgroups").read_text(),
    }
    with observed(report, "imports"):
        for name in PRELOADED:
            importlib.import_module(name)
    with observed(report, "push") as part:
        make_root(Path("/tmp/root"))
        part |= Command("group", "push", LAYOUT, "--rootfs", "/tmp/root").wait()
    visit(report, "root", "/weenv", "crun", CGROUPS, tuple(SCENARIOS))
    with observed(report, "unit") as part:
        daemon = CGROUPS / "weenv.service" / "daemon"
        daemon.mkdir(parents=True)
    visit(report, "delegated", "/weenv.service/envs", "crun", daemon, ("limits", "memory_hog"))
    internal_processes(report)
    visit(report, "runc", "/weenv", "runc", CGROUPS, ("limits",))
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
