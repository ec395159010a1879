"""Creation is all or nothing at every await; a daemon that was killed, and one that is told to end, leave nothing."""

import os
import signal
import subprocess
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing
from envlet_harness import (
    DirectoryDataPlane,
    Node,
    daemon_process,
    default_resolver,
    isolated,
    leftovers,
    make_root,
    node_config,
    node_directories,
    with_node,
)

from envlet import overlay, processes, syscalls
from envlet.client import Client
from envlet.daemon import serve
from envlet.errors import ENDED, EnvletError
from envlet.types import CreateRequest, ExecRequest


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("lower") / "root")


class CancelAt(trio.abc.Instrument):
    """Cancels a scope when its task is scheduled for the n-th time: every await that really waits is met by some n."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.scope = trio.CancelScope()
        self.task: trio.lowlevel.Task | None = None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.left -= 1
            if self.left == 0:
                self.scope.cancel()


def test_a_creation_cancelled_at_any_await_leaves_nothing(root: Path) -> None:
    async def test(node: Node) -> None:
        count = 0
        while True:
            count += 1
            canceller = CancelAt(count)
            created = None

            async def attempt(canceller: CancelAt = canceller) -> None:
                nonlocal created
                canceller.task = trio.lowlevel.current_task()
                with canceller.scope:
                    created = await node.daemon.create(CreateRequest(groups=["base", "task"], init=["echo x > y"]), [])

            trio.lowlevel.add_instrument(canceller)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(attempt)
            trio.lowlevel.remove_instrument(canceller)
            if created is not None:
                break
            assert node.daemon._live == {}
            assert leftovers(node.config) == []
            assert node.daemon._node.plans.statistics()["used"] == 0
        assert count > 8, "the creation waits more often than that"

    with_node(root, test)


def test_a_creation_that_is_deleted_answers_both(root: Path) -> None:
    async def test(node: Node) -> None:
        async def create() -> None:
            with pytest.raises(EnvletError) as raised:
                await node.call(lambda client: client.create(["base"], id="halfway", init=["sleep 100"]))
            assert raised.value.code is ENDED

        async with trio.open_nursery() as nursery:
            nursery.start_soon(create)
            while "halfway" not in node.daemon._live or len(node.daemon._live["halfway"].cgroup.processes()) < 2:
                await trio.lowlevel.checkpoint()
            assert (await node.call(lambda client: client.delete("halfway"))).id == "halfway"
        assert node.daemon._live == {}
        assert leftovers(node.config) == []

    with_node(root, test)


def test_a_command_cancelled_at_any_await_leaves_the_environment_as_it_was(root: Path) -> None:
    async def test(node: Node) -> None:
        made = await node.daemon.create(CreateRequest(groups=["base"]), [])
        group = node.daemon._live[made.id].cgroup
        await trio.testing.wait_all_tasks_blocked()  # the watcher of pid 1 has its descriptor then
        descriptors = set(os.listdir("/proc/self/fd"))
        request = ExecRequest(id=made.id, argv=["sh", "-c", "sleep 0.05"])
        count = 0
        while True:
            count += 1
            canceller = CancelAt(count)
            result = None

            async def refuse_terminal(master: int) -> None:
                raise AssertionError("no terminal was asked for")

            async def attempt(canceller: CancelAt = canceller) -> None:
                nonlocal result
                canceller.task = trio.lowlevel.current_task()
                with canceller.scope:
                    result = await node.daemon.exec(request, [], refuse_terminal)

            trio.lowlevel.add_instrument(canceller)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(attempt)
            trio.lowlevel.remove_instrument(canceller)
            assert len(group.processes()) == 1
            assert set(os.listdir("/proc/self/fd")) == descriptors
            if result is not None:
                break
        assert count >= 2, "it waits for the runtime and for the end of the command"

    with_node(root, test)


@pytest.mark.parametrize("step", ["mount", "prepare_root", "create", "run"])
def test_a_failure_of_any_step_leaves_nothing(root: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from envlet import cgroups, overlay, rootfs, runtime

    owner, name = {
        "mount": (overlay, "mount"),
        "prepare_root": (rootfs, "prepare_root"),
        "create": (cgroups.Cgroup, "create"),
        "run": (runtime.Runtime, "run"),
    }[step]
    real = getattr(owner, name)

    async def fail_after_running(*arguments: object, **options: object) -> None:
        await real(*arguments, **options)
        raise OSError(5, "injected")

    def fail_after(*arguments: object, **options: object) -> None:
        real(*arguments, **options)
        raise OSError(5, "injected")

    async def test(node: Node) -> None:
        monkeypatch.setattr(owner, name, fail_after_running if step == "run" else fail_after)
        with pytest.raises(EnvletError, match="injected"):
            await node.daemon.create(CreateRequest(groups=["base"]), [])
        assert node.daemon._live == {}
        assert leftovers(node.config) == []

    with_node(root, test)


def test_sigterm_ends_everything(root: Path) -> None:
    with node_directories() as (state_dir, run_dir):
        config = node_config(state_dir, run_dir)
        with daemon_process(state_dir, run_dir, root) as process:
            with Client(config.socket_path) as client:
                first = client.create(["base"])
                client.create(["base", "task"])
                client.exec(first.id, ["sh", "-c", "sleep 1000 & setsid sleep 1001 &"])
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        assert leftovers(config) == []
        assert not config.socket_path.exists()
        assert list(Path("/sys/fs/cgroup").glob(f"*{config.cgroup_parent}")) == []


def test_a_restart_removes_what_a_killed_daemon_left(root: Path) -> None:
    with node_directories() as (state_dir, run_dir):
        config = node_config(state_dir, run_dir)
        with daemon_process(state_dir, run_dir, root) as process:
            with Client(config.socket_path) as client:
                made = client.create(["base"], init=["sleep 1000 &"])
            process.kill()
            process.wait(60)
        assert leftovers(config) != []
        with daemon_process(state_dir, run_dir, root) as process, Client(config.socket_path) as client:
            assert leftovers(config) == []
            assert client.list() == []
            assert [(past.id, past.state) for past in client.list(all=True)] == [(made.id, "lost")]
            client.create(["base"], id=made.id)
        assert process.returncode == 0
        assert leftovers(config) == []


@pytest.mark.parametrize("shared", ["state directory", "run directory", "control group"])
def test_two_daemons_share_nothing(root: Path, shared: str) -> None:
    with node_directories() as (state_dir, run_dir), node_directories() as (other_state, other_run):
        first = node_config(state_dir, run_dir)
        changes = {
            "state directory": {"state_dir": state_dir},
            "run directory": {"run_dir": run_dir},
            "control group": {"cgroup_parent": first.cgroup_parent},
        }[shared]
        second = attrs.evolve(node_config(other_state, other_run), **changes)

        async def start() -> None:
            await serve(second, default_resolver(), DirectoryDataPlane(root), handle_signals=False)

        def work() -> None:
            with pytest.raises(EnvletError, match=f"another daemon uses the {shared}"):
                trio.run(start)

        with daemon_process(state_dir, run_dir, root), Client(first.socket_path) as client:
            made = client.create(["base"])
            isolated(work)
            assert client.exec(made.id, ["true"]).exit_code == 0
        assert leftovers(first) == []
        assert list(Path("/sys/fs/cgroup").glob(f"*{second.cgroup_parent}")) == []


def test_a_state_directory_that_cannot_hold_an_upper_is_refused_by_name(root: Path) -> None:
    def work() -> None:
        with node_directories() as (state_dir, run_dir):
            scratch = state_dir.parent
            for name in ("lower", "upper", "work", "merged"):
                (scratch / name).mkdir()
            overlay.mount(scratch / "lower", scratch / "upper", scratch / "work", scratch / "merged")
            config = node_config(scratch / "merged" / "state", run_dir)

            async def start() -> None:
                await serve(config, default_resolver(), DirectoryDataPlane(root), handle_signals=False)

            try:
                with pytest.raises(EnvletError, match=r"merged/state is on overlay, .* choose a state_dir on ext4"):
                    trio.run(start)
                assert sorted(os.listdir(config.state_dir)) == ["envs", "lock"]
            finally:
                overlay.unmount(scratch / "merged")

    isolated(work)


@pytest.mark.parametrize("full", ["state", "run", "runtime"])
def test_a_full_disk_is_said_to_be_one(root: Path, full: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(node: Node) -> None:
        if full == "runtime":
            async def fail(*_: object) -> int:
                return 28

            monkeypatch.setattr("envlet.processes.run", fail)
        else:
            target = node.config.uppers_dir if full == "state" else node.config.bundles_dir
            syscalls.mount("none", str(target), "tmpfs", 0, "size=1m,nr_inodes=4")
        try:
            with pytest.raises(EnvletError, match=r"capacity: .*: no space left"):
                await node.daemon.create(CreateRequest(groups=["base"]), [])
        finally:
            monkeypatch.undo()
            if full != "runtime":
                syscalls.umount(str(target))
        assert leftovers(node.config) == []

    with_node(root, test)


def test_the_machine_does_not_see_the_mounts(root: Path) -> None:
    with (
        node_directories() as (state_dir, run_dir),
        daemon_process(state_dir, run_dir, root),
        Client(node_config(state_dir, run_dir).socket_path) as client,
    ):
        client.create(["base"])
        assert str(run_dir) not in Path("/proc/self/mountinfo").read_text()


def test_isolated_reports_what_fails_in_the_child() -> None:
    def broken() -> None:
        raise ValueError("seen")

    with pytest.raises(AssertionError, match="ValueError: seen"):
        isolated(broken)


def test_a_node_on_a_full_disk_says_so_when_it_starts(root: Path) -> None:
    def work() -> None:
        with node_directories() as (state_dir, run_dir):
            state_dir.mkdir()
            syscalls.mount("none", str(state_dir), "tmpfs", 0, "size=1m,nr_inodes=5")  # its root, the lock, envs: two are left

            async def start() -> None:
                await serve(node_config(state_dir, run_dir), default_resolver(), DirectoryDataPlane(root), handle_signals=False)

            try:
                with pytest.raises(EnvletError, match=r"capacity: .*: no space left"):
                    trio.run(start)
            finally:
                syscalls.umount(str(state_dir))

    isolated(work)


def test_waiting_for_a_process_is_not_ended_by_another_one() -> None:
    """A wait that was given up leaves nothing behind that could wake the next one, whose descriptor has the same number."""

    first, second = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))

    async def main() -> None:
        pidfds = [os.pidfd_open(process.pid) for process in (first, second)]
        try:
            with trio.move_on_after(0.05):
                await processes.wait_exit(pidfds[0])
            ended = []

            async def wait_for_second() -> None:
                await processes.wait_exit(pidfds[1])
                ended.append(second.pid)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for_second)
                await trio.testing.wait_all_tasks_blocked()
                first.kill()
                first.wait()  # reaped: now its descriptor says so, to whoever is registered
                await processes.wait_exit(pidfds[0])
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert ended == []
                second.kill()
            assert ended == [second.pid]
        finally:
            for process, pidfd in zip((first, second), pidfds, strict=True):
                process.kill()
                process.wait()
                os.close(pidfd)

    trio.run(main)
