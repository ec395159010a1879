"""The whole path by command line: layers, a real registry, the daemon with its data plane, environments, a diff, a
reward; and its failures.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_process import WEENV, Groups, Node, create, make_base, make_groups, refusal, run_node, weenv
from registry_fixture import run_registry


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with run_node(tmp_path_factory.mktemp("node")) as node:
        yield node


def test_from_a_registry_to_a_reward(node: Node, groups: Groups, tmp_path: Path) -> None:
    execution = create(node, groups.base, groups.task, groups.harness, options=("--init", "sed -i s/42/41/ answer.txt"))
    assert node("env", "exec", execution, "--", "cat", "answer.txt") == "41"
    node("env", "exec", execution, "--", "/opt/repair")
    diff = tmp_path / "diff.tar"
    node("env", "diff", execution, "-o", diff)
    several = ("--group", groups.base, groups.task, groups.evaluator)  # one option may have several references
    evaluation = node("env", "create", *several, "--role", "evaluation", "--apply", diff)
    assert node("env", "exec", evaluation, "--", "/eval/check") == "reward 1"
    listed = {env["id"]: env for env in json.loads(node("env", "ls", "--format", "json"))}
    assert listed[execution]["state"] == listed[evaluation]["state"] == "ready"
    timings = json.loads(node("env", "inspect", execution))["timings"]
    assert timings["total_s"] >= timings["mutation_s"] > 0
    assert node("env", "rm", execution, evaluation).split() == [execution, evaluation]
    assert json.loads(node("env", "ls", "--format", "json")) == []


def ended_children(parent: int) -> list[str]:
    """The processes that this one has not reaped: /proc/PID/stat of each."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = path.read_text()
            if text.rpartition(")")[2].split()[:2] == ["Z", str(parent)]:
                found.append(text)
    return found


def test_no_process_is_left_of_what_made_environments(node: Node, groups: Groups) -> None:
    """Not the ones that the runtime leaves, either, but for what the last one left a moment ago."""
    for _ in range(6):
        environment = create(node, groups.base)
        node("env", "exec", environment, "--", "true")
        node("env", "rm", environment)
    assert len(ended_children(node.process.pid)) <= 2


def test_contents_are_fetched_as_they_are_read(node: Node, groups: Groups) -> None:
    def fetched() -> int:
        layers = json.loads(node("node", "info", "--format", "json"))["statistics"]["data_plane"]["layers"]
        return sum(layer["bytes"] for layer in layers.values())

    environment = create(node, groups.base)
    before = fetched()
    node("env", "exec", environment, "--", "dd", "if=/usr/share/large", "of=/dev/null", "bs=64k", "count=1")
    one_read = fetched() - before
    assert 0 < one_read < 1 << 20
    again = create(node, groups.base)
    node("env", "exec", again, "--", "dd", "if=/usr/share/large", "of=/dev/null", "bs=64k", "count=1")
    assert fetched() - before == one_read
    node("env", "rm", environment, again)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("true",), 0),
        (("false",), 1),
        (("sh", "-c", "exit 7"), 7),
        (("sh", "-c", "kill -9 $$"), 137),
        (("nothing",), 127),
        (("/etc",), 126),
    ],
)
def test_the_exit_status_is_the_commands(node: Node, groups: Groups, command: tuple[str, ...], status: int) -> None:
    environment = create(node, groups.base)
    node("env", "exec", environment, "--", *command, status=status)
    node("env", "rm", environment)


def test_exec_options(node: Node, groups: Groups) -> None:
    environment = create(node, groups.base, groups.task, options=("--env", "WHO=world"))
    assert node("env", "exec", environment, "--", "sh", "-c", "echo $GREETING $WHO $(pwd)") == "hello world /work"
    assert node("env", "exec", environment, "--workdir", "/etc", "--env", "WHO=you", "--", "sh", "-c", "echo $WHO $(pwd)") == "you /etc"
    assert node("env", "exec", environment, "--timeout", "0.3", "--", "sh", "-c", "sleep 100 & sleep 100", status=124) == ""
    assert "sleep" not in node("env", "exec", environment, "--", "sh", "-c", "cat /proc/[0-9]*/cmdline")
    node("env", "rm", environment)
    assert "there is no environment" in node.refused("env", "exec", "nobody", "--", "true", status=125)


def test_a_terminal(node: Node, groups: Groups) -> None:
    environment = create(node, groups.base)
    pid, master = pty.fork()
    if pid == 0:
        os.execv(
            WEENV,
            [
                str(WEENV),
                "env",
                "exec",
                "--socket",
                str(node.socket),
                environment,
                "-t",
                "--",
                "sh",
                "-c",
                "tty; read x; echo got $x; exit 3",
            ],
        )
    seen = b""
    while b"/dev/pts" not in seen:
        seen += os.read(master, 1000)
    os.write(master, b"typed\r")
    try:
        while select.select([master], [], [], 30)[0] and (data := os.read(master, 1000)):
            seen += data
    except OSError:
        pass  # EIO: the other side has closed
    assert b"got typed" in seen
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    os.close(master)
    node("env", "rm", environment)


def test_refusals_say_what_and_have_their_status(node: Node, groups: Groups, registry: str) -> None:
    assert "role evaluator" in node.refused("env", "create", "--group", groups.base, "--group", groups.evaluator, status=1)
    assert registry in node.refused("env", "create", "--group", f"{registry}/demo/nothing:1", status=3)
    assert "expected oci:DIR:TAG or HOST" in node.refused("env", "create", "--group", "nonsense", status=2)
    refused = node.refused("env", "create", "--group", groups.base, "--init", "echo some output; exit 9", status=1)
    assert "some output" in refused
    assert "9" in refused
    assert "no environment" in node.refused("env", "inspect", "nobody", status=3)
    assert "start one with `weenv node serve`" in refusal("env", "ls", "--socket", "/nonexistent", status=1)
    assert json.loads(node("env", "ls", "--format", "json")) == []


def test_a_layout_instead_of_a_registry_by_a_relative_path(node: Node, tmp_path: Path) -> None:
    make_base(tmp_path / "root")
    (tmp_path / "here").mkdir()
    result = subprocess.run(
        [WEENV, "group", "push", "oci:layout:base", "--rootfs", "../root"],
        cwd=tmp_path / "here",
        capture_output=True,
        text=True,
    )
    assert result.stdout.startswith("oci:layout:base@sha256:"), result.stderr
    command = [WEENV, "env", "create", "--socket", node.socket, "--group", "oci:layout:base"]
    made = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    node("env", "rm", made.stdout.strip())


def test_the_cache_is_listed_beside_the_daemon(node: Node, groups: Groups) -> None:
    environment = create(node, groups.base, groups.task)
    cache = node.directory / "state/cache"
    listed = json.loads(weenv("cache", "ls", "--cache", cache, "--format", "json"))
    assert {layer["source"].rpartition("/")[2] for layer in listed} >= {"base", "task"}
    df = json.loads(weenv("cache", "df", "--cache", cache, "--format", "json"))
    assert df["layers"] == len(listed)
    assert 0 < df["present_chunks"] <= df["chunks"]
    node("env", "rm", environment)


def test_the_registry_away(tmp_path: Path) -> None:
    """What is known and cached goes on; what is not gives a fault that is known as such; what is new is refused."""
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(run_node(tmp_path / "node"))
        with run_registry(tmp_path / "registry") as running:
            made = make_groups(tmp_path, f"{running.host}/away/")
            environment = create(node, made.base)
            node("env", "exec", environment, "--", "cat", "/etc/passwd")
        again = create(node, made.base)
        assert node("env", "exec", again, "--", "cat", "/etc/passwd").startswith("root:")
        ended = node.refused("env", "exec", environment, "--", "cat", "/usr/share/large", status=125)
        assert "faulted" in ended
        faulted = json.loads(node("env", "inspect", environment))
        assert faulted["state"] == "faulted"
        assert "could not be read" in faulted["cause"]
        assert json.loads(node("env", "inspect", again))["state"] == "ready"
        node.refused("env", "create", "--group", f"{running.host}/away/other:1", status=1)


def test_a_signal_to_the_whole_process_group_ends_it_cleanly(groups: Groups, tmp_path: Path) -> None:
    """As a service manager or a terminal sends it: the data plane must wait until the daemon has removed everything."""
    with run_node(tmp_path / "node", group=True) as node:
        create(node, groups.base, groups.task)
        os.killpg(node.process.pid, signal.SIGTERM)
        assert node.process.wait(60) == 0, node.log()
        assert "ERROR" not in node.log()
