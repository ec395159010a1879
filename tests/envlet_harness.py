"""What the tests of envlet share: a small real root, a data plane that serves it unpacked, and daemons to test.

Run as a program (`python envlet_harness.py STATE_DIR RUN_DIR ROOT`) it is a node daemon over that data plane, for the
tests that need a process of its own: signals, kill -9, a restart.
"""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))

from envlet import mounts  # noqa: E402
from envlet.client import Client  # noqa: E402
from envlet.config import NodeConfig  # noqa: E402
from envlet.daemon import Daemon, serve  # noqa: E402
from envlet.ports import Fault, LayerRef, MountedPlan, ResolvedGroup  # noqa: E402

BUSYBOX = Path("/usr/bin/busybox")
CGROUP_PARENT = "/weenv-test"


def ensure_init_program() -> Path:
    """Our static pid 1, built if it is missing or older than its source."""
    source, target = REPOSITORY / "csrc" / "init.c", REPOSITORY / "envlet" / "weenv-init"
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        flags = ["-std=gnu11", "-O2", "-static", "-Wall", "-Wextra", "-Werror"]
        subprocess.run(["cc", *flags, "-o", f"{target}.new", str(source)], check=True)
        os.replace(f"{target}.new", target)
    return target


def make_root(directory: Path) -> Path:
    """A root of busybox: no /proc, /sys, /dev or /etc/hosts, so that envlet has to add them."""
    (directory / "bin").mkdir(parents=True)
    shutil.copy2(BUSYBOX, directory / "bin" / "busybox")
    applets = subprocess.run([BUSYBOX, "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in applets:
        if applet != "busybox":
            (directory / "bin" / applet).symlink_to("busybox")
    (directory / "etc").mkdir()
    (directory / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\nworker:x:1000:1000::/home/worker:/bin/sh\n")
    (directory / "etc" / "group").write_text("root:x:0:\nworker:x:1000:\nextra:x:2000:worker\n")
    (directory / "root").mkdir(mode=0o700)
    (directory / "tmp").mkdir()
    (directory / "tmp").chmod(0o1777)
    (directory / "project").mkdir()
    (directory / "project" / "data").write_text("original\n")
    (directory / "project" / "sub").mkdir()
    (directory / "project" / "sub" / "one").write_text("1\n")
    (directory / "project" / "sub" / "two").write_text("2\n")
    return directory


class DirectoryDataPlane:
    """A data plane whose every plan is one unpacked directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plans: dict[str, int] = {}
        self.send_fault, self._faults = trio.open_memory_channel[Fault](16)
        self.acknowledged: list[Fault] = []

    async def add_plan(self, layers: Sequence[LayerRef], *, images: bool = False, stacked: bool = False) -> MountedPlan:
        await trio.lowlevel.checkpoint()
        plan_id = "-".join(layer.digest.removeprefix("sha256:")[:8] for layer in layers)
        self.plans[plan_id] = self.plans.get(plan_id, 0) + 1
        return MountedPlan(plan_id, self.root, 1000, 10)

    async def remove_plan(self, plan_id: str) -> None:
        await trio.lowlevel.checkpoint()
        del self.plans[plan_id]

    async def statistics(self) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return {"plans": len(self.plans)}

    def faults(self) -> "trio.MemoryReceiveChannel[Fault]":
        return self._faults

    async def acknowledge(self, fault: Fault) -> None:
        await trio.lowlevel.checkpoint()
        self.acknowledged.append(fault)

    def leave(self) -> None:
        """Nothing of it would be there for another daemon."""


def group(reference: str, role: str | None = "base", **changes: Any) -> ResolvedGroup:
    """A group of one layer whose digest depends on the reference alone."""
    digest = "sha256:" + reference.encode().hex().ljust(64, "0")[:64]
    layer = LayerRef(digest, 100, "oci:/nowhere", None, None, None)
    values: dict[str, Any] = {"env": (), "workdir": None, "user": None, **changes}
    return ResolvedGroup(f"{reference}@{digest}", digest, role, (layer,), **values)


class TableResolver:
    """References from a table; an exception in it is raised."""

    def __init__(self, **groups: ResolvedGroup | Exception) -> None:
        self.groups = groups
        self.asked: list[str] = []
        self.prepared = threading.Event()

    def prepare(self) -> None:
        self.prepared.set()

    def resolve(self, reference: str) -> ResolvedGroup:
        self.asked.append(reference)
        found = self.groups[reference]
        if isinstance(found, Exception):
            raise found
        return found


def default_resolver() -> TableResolver:
    return TableResolver(
        base=group("base", env=("LANG=C.UTF-8", "A=base"), workdir="/project"),
        task=group("task", "task", env=("A=task",)),
        user=group("user", "task", user="worker"),
        made=group("made", "task", workdir="/srv/deep/dir"),
        judge=group("judge", "evaluator"),
    )


@contextmanager
def node_directories() -> Iterator[tuple[Path, Path]]:
    """State and run directory of one node, short enough for sockets; they are gone afterwards."""
    top = Path(tempfile.mkdtemp(prefix="wv"))
    try:
        yield top / "s", top / "r"
    finally:
        shutil.rmtree(top)


def node_config(state_dir: Path, run_dir: Path, **changes: Any) -> NodeConfig:
    values: dict[str, Any] = {
        "state_dir": state_dir,
        "run_dir": run_dir,
        "socket_path": run_dir / "api",
        "init_program": ensure_init_program(),
        "cgroup_parent": f"{CGROUP_PARENT}-{run_dir.parent.name}",
        "cpu": 2.0,
        "memory_bytes": 256 << 20,
        "pids": 200,
        **changes,
    }
    return NodeConfig(**values)


class Node:
    """A daemon in this process, and how to reach it."""

    def __init__(self, config: NodeConfig, daemon: Daemon, data_plane: DirectoryDataPlane, resolver: TableResolver) -> None:
        self.config = config
        self.daemon = daemon
        self.data_plane = data_plane
        self.resolver = resolver

    async def call(self, work: Callable[[Client], Any]) -> Any:
        """Runs blocking work with a client of its own, in a thread."""

        def run() -> Any:
            with Client(self.config.socket_path) as client:
                return work(client)

        return await trio.to_thread.run_sync(run, abandon_on_cancel=True)


def leftovers(config: NodeConfig) -> list[str]:
    """Everything of environments that exists on the machine: none is right."""
    found: list[str] = []
    for directory in (config.uppers_dir, config.bundles_dir, config.runtime_dir, config.console_dir):
        if directory.exists():
            found += [str(path) for path in directory.iterdir()]
    found += [mount.target for mount in mounts.current_mounts() if mount.target.startswith(str(config.run_dir))]
    name = config.cgroup_parent.strip("/")
    for tree in Path("/sys/fs/cgroup").iterdir():
        if (tree / name).is_dir():
            found += [str(path) for path in (tree / name).iterdir() if path.is_dir()]
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                text = (process / "cgroup").read_text()
            except OSError:
                continue
            if f"/{name}/" in text:
                found.append(f"process {process.name}: {(process / 'cmdline').read_bytes()!r}")
    return found


def with_node(root: Path, test: Callable[[Node], Awaitable[None]], **changes: Any) -> None:
    """Runs `test` against a daemon in a child process (it changes its mount namespace), and checks that nothing is
    left.
    """

    async def main() -> None:
        with node_directories() as (state_dir, run_dir):
            config = node_config(state_dir, run_dir, **changes)
            data_plane, resolver = DirectoryDataPlane(root), default_resolver()
            with trio.fail_after(120):
                async with trio.open_nursery() as nursery:
                    start = functools.partial(serve, config, resolver, data_plane, handle_signals=False)
                    daemon = await nursery.start(start)
                    await test(Node(config, daemon, data_plane, resolver))
                    nursery.cancel_scope.cancel()
            assert leftovers(config) == []
            assert not config.socket_path.exists()
            assert data_plane.plans == {}

    isolated(functools.partial(trio.run, main))


def isolated(work: Callable[[], object]) -> None:
    """Runs `work` in a forked child with a mount namespace of its own; its failure is raised here."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            mounts.enter_private_namespace()
            work()
            status = 0
        except BaseException:
            os.write(writing, traceback.format_exc()[-60000:].encode())
        finally:
            os._exit(status)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as file:
            report = file.read().decode(errors="replace")
    except BaseException:  # a timeout of the test: the child still removes what it made
        os.kill(pid, signal.SIGINT)
        os.waitpid(pid, 0)
        raise
    _, wait_status = os.waitpid(pid, 0)
    if wait_status != 0:
        raise AssertionError(f"in the child process:\n{report or f'wait status {wait_status}'}")


@contextmanager
def daemon_process(state_dir: Path, run_dir: Path, root: Path) -> Iterator["subprocess.Popen[str]"]:
    """A daemon as a process of its own; yields when it serves. Ended by its pid."""
    command = [sys.executable, __file__, str(state_dir), str(run_dir), str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert json.loads(line) == {"serving": True}
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(60)


async def _main(config: NodeConfig, root: Path) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(functools.partial(serve, config, default_resolver(), DirectoryDataPlane(root)))
        print(json.dumps({"serving": True}), flush=True)


if __name__ == "__main__":
    mounts.enter_private_namespace()
    state, run, lower = (Path(argument) for argument in sys.argv[1:4])
    trio.run(_main, node_config(state, run), lower)
