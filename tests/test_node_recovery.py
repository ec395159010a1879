"""What a node loses when its processes are killed or replaced: nothing, as long as one of the two lives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from node_process import WEENV, Groups, Node, create, end_node, left_behind, make_base, run_node, start_node, wait_until, weenv
from registry_fixture import run_proxy

from envlet.client import Client
from envlet.errors import ConnectionLost

BEAT = "(while :; do echo x >> /tmp/beat; sleep 0.02; done) > /dev/null 2>&1 &"
SAME = ("id", "state", "role", "groups", "plan_id", "content_bytes", "workdir", "limits", "labels", "created_unix_s", "timings", "init")


def info(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(node("node", "info", "--format", "json"))
    return found


def plane_of(node: Node) -> int:
    pid: int = info(node)["statistics"]["data_plane"]["process"]["pid"]
    return pid


def inspect(node: Node, environment: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(node("env", "inspect", environment))
    return found


def hold_ranges(released: threading.Event) -> Callable[[web.Request], Awaitable[web.StreamResponse | None]]:
    """A registry that answers no range until it is released."""

    async def hold(request: web.Request) -> web.StreamResponse | None:
        if "Range" in request.headers:
            await asyncio.to_thread(released.wait)
        return None

    return hold


@contextlib.contextmanager
def killed_node(directory: Path) -> Iterator[list[Node]]:
    """A node whose daemon the test kills, any number of times, with `next_daemon`. The last one ends by SIGTERM and leaves nothing."""
    nodes = [start_node(directory, f"/weenv-killed-{os.getpid()}-{directory.parent.name[-12:]}")]
    try:
        yield nodes
    finally:
        node = nodes[-1]
        status = end_node(node)
    assert status == 0, node.log()
    assert left_behind(node) == []


def kill_daemon(node: Node) -> None:
    node.process.kill()
    node.process.wait()
    node.socket.unlink()


def next_daemon(nodes: list[Node]) -> Node:
    nodes.append(start_node(nodes[-1].directory, nodes[-1].cgroup))
    return nodes[-1]


def test_the_data_plane_killed(groups: Groups, tmp_path: Path) -> None:
    """A command that reads what must be fetched goes on under a successor, and so do old and new environments."""
    with run_node(tmp_path / "node") as node:
        environment = create(node, groups.base, groups.task)
        before = plane_of(node)
        for round_ in range(3):
            os.kill(plane_of(node), signal.SIGKILL)
            size = node("env", "exec", environment, "--", "sh", "-c", "cat /usr/share/large /work/answer.txt | wc -c")
            assert int(size) == (3 << 20) + 3
            another = create(node, groups.base)
            assert node("env", "exec", another, "--", "cat", "/etc/passwd").startswith("root:")
            process = info(node)["statistics"]["data_plane"]["process"]
            assert process["successors"] == round_ + 1
        assert plane_of(node) != before
        assert inspect(node, environment)["state"] == "ready"


def test_readers_that_wait_when_the_data_plane_is_killed(registry: str, groups: Groups, tmp_path: Path) -> None:
    """They wait for a chunk that the registry holds back; the successor fetches it."""
    with run_proxy(registry) as proxy, run_node(tmp_path / "node", settings="chunk_deadline_s = 60.0\n") as node:
        environment = create(node, groups.base.replace(registry, proxy.host))
        released = threading.Event()
        proxy.fault = hold_ranges(released)
        with subprocess.Popen(
            [WEENV, "env", "exec", "--socket", node.socket, environment, "--", "sh", "-c", "cat /usr/share/large | wc -c"],
            stdout=subprocess.PIPE,
        ) as reading:
            try:
                wait_until(lambda: info(node)["statistics"]["data_plane"]["fuse"]["pending"] > 0, "a read that waits")
                os.kill(plane_of(node), signal.SIGKILL)
                wait_until(lambda: info(node)["statistics"]["data_plane"]["process"]["successors"] == 1, "a successor")
                wait_until(lambda: info(node)["statistics"]["data_plane"]["fuse"]["pending"] > 0, "the read is asked again")
            finally:  # whatever happened, nobody waits for ever
                released.set()
            out, _ = reading.communicate(timeout=60)
        assert (reading.returncode, int(out)) == (0, 3 << 20)


def test_the_daemon_killed(groups: Groups, tmp_path: Path) -> None:
    """Processes, files and the diff of its environments are what they were; what was being made is gone."""
    with killed_node(tmp_path / "node") as nodes:
        first = nodes[0]
        with Client(first.socket) as client:
            environment = client.create([groups.base, groups.task], init=["sed -i s/42/41/ answer.txt"], labels={"a": "b"}, ttl_s=3600).id
        first("env", "exec", environment, "--", "sh", "-c", f"echo new > /work/new; {BEAT}")
        before = inspect(first, environment)

        def make_unfinished() -> None:
            with Client(first.socket) as client, pytest.raises(ConnectionLost):
                client.create([groups.base], id="unfinished", init=["sleep 1000"])

        making = threading.Thread(target=make_unfinished)
        making.start()
        wait_until(lambda: (first.directory / "run/envs/unfinished/init.pid").exists(), "the environment that is not finished")
        plane = plane_of(first)
        kill_daemon(first)
        making.join(60)
        second = next_daemon(nodes)
        after = inspect(second, environment)
        assert [env["id"] for env in json.loads(second("env", "ls", "--format", "json"))] == [environment]
        assert {key: after[key] for key in SAME} == {key: before[key] for key in SAME}
        assert (after["state"], plane_of(second)) == ("ready", plane)
        assert info(second)["statistics"]["adopted"] == 1
        beat = "wc -c < /tmp/beat"
        count = second("env", "exec", environment, "--", "sh", "-c", beat)
        wait_until(lambda: second("env", "exec", environment, "--", "sh", "-c", beat) != count, "the process that was left goes on")
        diff = tmp_path / "diff.tar"
        second("env", "diff", environment, "-o", diff)
        names = subprocess.run(["tar", "tf", diff], capture_output=True, text=True, check=True).stdout.split()
        assert sorted(name for name in names if not name.endswith("/")) == ["tmp/beat", "work/answer.txt", "work/new"]
        again = create(second, groups.base, groups.task)
        assert second("env", "exec", again, "--", "cat", "/work/answer.txt") == "42"
        second("env", "rm", environment)
        kill_daemon(second)
        third = next_daemon(nodes)
        assert [env["id"] for env in json.loads(third("env", "ls", "--format", "json"))] == [again]
        third("env", "rm", again)
        assert info(third)["statistics"]["data_plane"]["plans"] == 1  # kept for the next environment


def test_what_happened_while_there_was_no_daemon(groups: Groups, tmp_path: Path) -> None:
    with killed_node(tmp_path / "node") as nodes:
        first = nodes[0]
        killed, expired, failed, thawed = (create(first, groups.base, options=options) for options in ((), ("--ttl", "8"), (), ()))
        pid = int((first.directory / f"run/envs/{failed}/init.pid").read_text())
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: inspect(first, failed)["state"] == "killed", "the failure")
        pid = int((first.directory / f"run/envs/{killed}/init.pid").read_text())
        # A diff whose reader does not read holds its environment frozen.
        first("env", "exec", thawed, "--", "dd", "if=/dev/zero", "of=/large", "bs=1M", "count=4")
        reading, writing = os.pipe()

        def take_diff() -> None:
            with contextlib.suppress(Exception), Client(first.socket) as client:
                client.diff(thawed, writing)

        diffing = threading.Thread(target=take_diff)
        diffing.start()
        assert os.read(reading, 1)
        kill_daemon(first)
        os.kill(pid, signal.SIGKILL)
        diffing.join(60)
        os.close(reading)
        os.close(writing)
        time.sleep(max(0.0, inspect_expiry(first, expired) - time.time()))
        second = next_daemon(nodes)
        states = {name: inspect(second, name) for name in (killed, expired, failed)}
        wait_until(lambda: inspect(second, expired)["state"] == "expired", "the expiry")
        assert (states[killed]["state"], states[failed]["state"]) == ("killed", "killed")
        assert second("env", "exec", thawed, "--", "sh", "-c", "wc -c < /large") == str(4 << 20)
        second("env", "diff", failed, "-o", tmp_path / "diff.tar")
        second("env", "rm", killed, failed, thawed)


@pytest.mark.parametrize(
    "fault", ["no such runtime", "no place for the socket", "no configuration", "another version", "what is left cannot be removed"]
)
def test_a_daemon_that_cannot_start_loses_nothing(groups: Groups, tmp_path: Path, fault: str) -> None:
    """What it found goes on, and the next daemon takes it over."""
    with killed_node(tmp_path / "node") as nodes:
        first = nodes[0]
        environment = create(first, groups.base)
        first("env", "exec", environment, "--", "sh", "-c", f"echo kept > /kept; {BEAT}")
        plane = plane_of(first)
        config, good = first.directory / "node.toml", (first.directory / "node.toml").read_text()
        leftover, record = first.directory / "state/envs/leftover", first.directory / f"state/envs/{environment}/record.json"
        match fault:
            case "no such runtime":
                config.write_text(f'{good}runtime = "/no/such/runtime"\n')
            case "no place for the socket":
                config.write_text(f'{good}socket = "{config}"\n')
            case "no configuration":
                config.write_text("state_dir =")
            case "another version":
                record.write_text(record.read_text().replace('"version":1', '"version":99'))
            case _:
                leftover.write_text("not a directory")
        kill_daemon(first)
        failed = subprocess.run([WEENV, "node", "serve", "--config", config], capture_output=True, text=True)
        assert (failed.returncode != 0, "Traceback" in failed.stderr) == (True, False), failed.stderr
        config.write_text(good)
        leftover.unlink(missing_ok=True)
        record.write_text(record.read_text().replace('"version":99', '"version":1'))
        second = next_daemon(nodes)
        assert (plane_of(second), inspect(second, environment)["state"]) == (plane, "ready")
        assert second("env", "exec", environment, "--", "cat", "/kept") == "kept"


def test_a_restart_into_a_configuration_that_is_broken(groups: Groups, tmp_path: Path) -> None:
    with killed_node(tmp_path / "node") as nodes:
        first = nodes[0]
        environment = create(first, groups.base)
        config, good = first.directory / "node.toml", (first.directory / "node.toml").read_text()
        config.write_text(f'{good}runtime = "/no/such/runtime"\n')
        first.refused("node", "restart", status=1)
        assert first.process.wait(60) != 0
        config.write_text(good)
        first.socket.unlink(missing_ok=True)
        second = next_daemon(nodes)
        assert inspect(second, environment)["state"] == "ready"
        assert int(second("env", "exec", environment, "--", "sh", "-c", "cat /usr/share/large | wc -c")) == 3 << 20


def test_relative_paths_are_found_again_by_every_daemon(groups: Groups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the configuration and in it: by one that took over, and by one that it restarts into."""
    directory = tmp_path / "node"
    directory.mkdir()
    monkeypatch.chdir(tmp_path)
    cgroup = f"/weenv-relative-{os.getpid()}"
    (directory / "node.toml").write_text(f'state_dir = "node/state"\nrun_dir = "node/run"\ncgroup_parent = "{cgroup}"\n')

    def serve() -> Node:
        with (directory / "log").open("ab") as log:
            process = subprocess.Popen([WEENV, "node", "serve", "--config", "node/node.toml"], stdout=log, stderr=subprocess.STDOUT)
        node = Node(process, directory, cgroup)
        wait_until(lambda: node.socket.exists() or process.poll() is not None, "the start of the daemon")
        assert process.poll() is None, node.log()
        return node

    first = serve()
    environment = create(first, groups.base)
    kill_daemon(first)
    second = serve()
    try:
        assert "1 environments taken over" in second("node", "restart")
        assert inspect(second, environment)["state"] == "ready"
    finally:
        second.process.terminate()
        assert second.process.wait(60) == 0, second.log()
    assert left_behind(second) == []


def inspect_expiry(node: Node, environment: str) -> float:
    """When an environment ends, from its record: there is no daemon to ask. Seconds since the epoch."""
    record = json.loads((node.directory / f"state/envs/{environment}/record.json").read_bytes())
    return float(record["expires_unix_s"])


def test_both_killed(groups: Groups, tmp_path: Path) -> None:
    """The next daemon says what was lost, removes it, and works."""
    with killed_node(tmp_path / "node") as nodes:
        first = nodes[0]
        environment = create(first, groups.base)
        plane = plane_of(first)
        os.kill(first.process.pid, signal.SIGSTOP)  # so that it does not start a successor meanwhile
        os.kill(plane, signal.SIGKILL)
        kill_daemon(first)
        second = next_daemon(nodes)
        assert json.loads(second("env", "ls", "--format", "json")) == []
        lost = inspect(second, environment)
        assert (lost["state"], lost["groups"]) == ("lost", [groups.base])
        assert "removed at the next start" in lost["cause"]
        with Client(second.socket) as client:
            assert client.create([groups.base], id=environment).state == "ready"


def test_a_data_plane_that_cannot_be_replaced(groups: Groups, tmp_path: Path) -> None:
    """Its environments are reported as lost, nothing hangs, nothing is left, and the daemon's end says so."""
    with run_node(tmp_path / "node", status=1) as node:
        environment = create(node, groups.base)
        plane = plane_of(node)
        layers = node.directory / "state/cache/layers"
        layers.rename(layers.with_name("moved"))
        layers.write_text("no successor can use this")
        os.kill(plane, signal.SIGKILL)
        wait_until(lambda: inspect(node, environment)["state"] == "lost", "the loss")
        assert "the data plane is lost" in node.refused("env", "create", "--group", groups.base, status=1)


def test_restart(groups: Groups, tmp_path: Path) -> None:
    with run_node(tmp_path / "node") as node:
        environment = create(node, groups.base)
        node("env", "exec", environment, "--", "sh", "-c", BEAT)
        before = info(node)
        plane = plane_of(node)
        with subprocess.Popen(
            [WEENV, "env", "exec", "--socket", node.socket, environment, "--", "sh", "-c", "echo begun; cat; echo done"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as command:
            assert command.stdin is not None
            assert command.stdout is not None
            assert command.stdout.readline() == b"begun\n"
            assert "1 requests still run" in node.refused("node", "restart", "--drain", "0.1", status=1)
            assert info(node)["instance"] == before["instance"]
            said = node("node", "restart", "--drain", "0.1", "--force")
            assert "1 environments taken over" in said
            assert "1 requests cut short" in said
            command.stdin.close()
            assert command.wait(60) != 0  # it was cut short, and says so
        after = info(node)
        assert (after["pid"], after["instance"] != before["instance"]) == (before["pid"], True)
        assert plane_of(node) != plane
        assert not Path(f"/proc/{plane}").exists()
        count = node("env", "exec", environment, "--", "sh", "-c", "wc -c < /tmp/beat")
        wait_until(lambda: node("env", "exec", environment, "--", "sh", "-c", "wc -c < /tmp/beat") != count, "the process goes on")
        assert int(node("env", "exec", environment, "--", "sh", "-c", "cat /usr/share/large | wc -c")) == 3 << 20
        assert json.loads(node("node", "restart", "--format", "json"))["info"]["statistics"]["adopted"] == 1
        assert json.loads(node("env", "inspect", environment))["state"] == "ready"


def test_a_daemon_that_is_told_to_end_while_it_restarts(groups: Groups, tmp_path: Path) -> None:
    """It ends, after it has taken its environments over: nothing is left of them."""
    with run_node(tmp_path / "node") as node:
        create(node, groups.base)
        with Client(node.socket) as client:
            client.restart()
            node.process.send_signal(signal.SIGTERM)  # the exit status and what is left are looked at when the block ends


def test_a_second_daemon_takes_nothing_from_one_that_lives(groups: Groups, tmp_path: Path) -> None:
    with run_node(tmp_path / "node") as node:
        environment, plane = create(node, groups.base), plane_of(node)
        other = subprocess.run([WEENV, "node", "serve", "--config", node.directory / "node.toml"], capture_output=True, text=True)
        assert (other.returncode != 0, "another daemon uses the run directory" in other.stderr) == (True, True), other.stderr
        assert (plane_of(node), info(node)["statistics"]["data_plane"]["process"]["successors"]) == (plane, 0)
        assert inspect(node, environment)["state"] == "ready"


def test_plans_with_and_without_attributes(registry: str, tmp_path: Path) -> None:
    """In the merged view the kernel never asks for attributes of plans that have none, and shows those of plans that have some; both after
    the data plane was killed, too.
    """
    roots = [tmp_path / "plain", tmp_path / "marked"]
    for root in roots:
        make_base(root)
        for number in range(50):
            (root / "usr/share" / f"file{number}").write_text(f"{number}\n")
    os.setxattr(roots[1] / "usr/share/file7", "user.mark", b"seven")
    plain, marked = (weenv("group", "push", f"{registry}/attributes/{root.name}:1", "--rootfs", root) for root in roots)
    with run_node(tmp_path / "node", settings='view = "merged"\n') as node:
        environments = create(node, plain), create(node, marked)

        def asked() -> int:
            fuse = info(node)["statistics"]["data_plane"]["fuse"]
            return int(fuse.get("requests_getxattr", 0))

        def walk(environment: str) -> int:
            before = asked()
            assert node("env", "exec", environment, "--", "sh", "-c", "cat /usr/share/file*").split() == sorted(map(str, range(50)))
            return asked() - before

        walk(environments[0])
        for _ in range(2):
            another = create(node, plain)
            assert walk(another) == 0
            assert walk(create(node, marked)) > 50
            namespace = f"/proc/{node.process.pid}/root{node.directory}/run/envs/{environments[1]}/root/usr/share/file7"
            assert os.getxattr(namespace, "user.mark") == b"seven"
            os.kill(plane_of(node), signal.SIGKILL)
            wait_until(lambda: info(node)["statistics"]["data_plane"]["serving"], "a successor")
