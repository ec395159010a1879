"""Creation is all or nothing at every await; a daemon that was killed, and one that is told to end, leave nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from envlet_harness import Node, daemon_process, isolated, leftovers, make_root, node_config, node_directories, with_node

from envlet.client import Client
from envlet.errors import EnvletError
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


def test_a_command_cancelled_at_any_await_leaves_the_environment_as_it_was(root: Path) -> None:
    async def test(node: Node) -> None:
        made = await node.daemon.create(CreateRequest(groups=["base"]), [])
        group = node.daemon._live[made.id].cgroup
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

    monkeypatch.setattr(owner, name, fail_after_running if step == "run" else fail_after)

    async def test(node: Node) -> None:
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
            assert client.list(all=True) == []
            client.create(["base"], id=made.id)
        assert process.returncode == 0
        assert leftovers(config) == []


def test_two_daemons_do_not_share_a_state_directory(root: Path) -> None:
    with node_directories() as (state_dir, run_dir), daemon_process(state_dir, run_dir, root):
        harness = Path(__file__).with_name("envlet_harness.py")
        second = subprocess.run(
            [sys.executable, str(harness), str(state_dir), str(run_dir), str(root)], capture_output=True, text=True, check=False
        )
        assert second.returncode != 0
        assert "another daemon uses the state directory" in second.stderr


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
