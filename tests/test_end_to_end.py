"""The whole path by command line: layers, a real registry, the daemon with its data plane, environments, a diff, a
reward; and its failures.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
from registry_fixture import run_registry

WEENV = Path(sys.executable).with_name("weenv")
BUSYBOX = Path("/bin/busybox")
NODE_NUMBERS = itertools.count()


def weenv(*arguments: str | Path, status: int = 0, stdin: bytes | None = None) -> str:
    """Runs the command line; its stdout. The exit status must be the expected one."""
    result = subprocess.run([WEENV, *map(str, arguments)], input=stdin, capture_output=True)
    assert result.returncode == status, f"status {result.returncode}\n{result.stdout.decode()}\n{result.stderr.decode()}"
    return result.stdout.decode().strip()


def refusal(*arguments: str | Path, status: int) -> str:
    """stderr of a command that must fail with this status and print nothing on stdout."""
    result = subprocess.run([WEENV, *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (status, ""), result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr.strip()


def make_base(root: Path) -> None:
    """A root that runs: busybox, static, under the names of its applets."""
    (root / "bin").mkdir(parents=True)
    shutil.copy(BUSYBOX, root / "bin/busybox")
    for name in (
        "sh",
        "cat",
        "ls",
        "sleep",
        "grep",
        "sed",
        "touch",
        "rm",
        "mv",
        "ln",
        "id",
        "env",
        "pwd",
        "tty",
        "true",
        "false",
        "dd",
        "seq",
    ):
        (root / "bin" / name).symlink_to("busybox")
    for name in ("etc", "proc", "sys", "dev", "tmp", "usr/share"):
        (root / name).mkdir(parents=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
    (root / "usr/share/large").write_bytes(os.urandom(3 << 20))


@attrs.frozen
class Groups:
    base: str
    task: str
    harness: str
    evaluator: str


def make_groups(scratch: Path, prefix: str) -> Groups:
    """Four groups: the task's answer.txt is right, a mutation breaks it, the harness repairs it, the evaluator
    looks.
    """
    roots = {name: scratch / name for name in ("base", "task", "harness", "evaluator")}
    make_base(roots["base"])
    for name, path, text in (
        ("task", "work/answer.txt", "42\n"),
        ("task", "work/doomed", "x\n"),
        ("harness", "opt/repair", "#!/bin/sh\nsed -i s/41/42/ /work/answer.txt\nrm /work/doomed\n"),
        (
            "evaluator",
            "eval/check",
            "#!/bin/sh\ngrep -qx 42 /work/answer.txt && [ ! -e /work/doomed ] && echo reward 1\n",
        ),
    ):
        target = roots[name] / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(0o755)
    task_options = ["--workdir", "/work", "--env", "GREETING=hello"]
    pushed = {
        name: weenv(
            "group",
            "push",
            f"{prefix}{name}:1",
            "--rootfs",
            root,
            "--role",
            name,
            *(task_options if name == "task" else []),
        )
        for name, root in roots.items()
    }
    for name, reference in pushed.items():
        assert reference.startswith(f"{prefix}{name}:1@sha256:")
    return Groups(**pushed)


@attrs.frozen
class Node:
    """A running daemon."""

    process: subprocess.Popen[bytes]
    directory: Path
    cgroup: str

    @property
    def socket(self) -> Path:
        return self.directory / "run/envlet.sock"

    def __call__(self, *arguments: str | Path, status: int = 0) -> str:
        """A command of `weenv env` or `weenv node` on this node."""
        head, tail = list(arguments[:2]), list(arguments[2:])
        return weenv(*head, "--socket", self.socket, *tail, status=status)

    def refused(self, *arguments: str | Path, status: int) -> str:
        return refusal(*arguments[:2], "--socket", self.socket, *arguments[2:], status=status)

    def log(self) -> str:
        return (self.directory / "log").read_text()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.01)


def start_node(directory: Path, cgroup: str, *, group: bool = False) -> Node:
    directory.mkdir(exist_ok=True)
    config = directory / "node.toml"
    config.write_text(f'state_dir = "{directory}/state"\nrun_dir = "{directory}/run"\ncgroup_parent = "{cgroup}"\nchunk_deadline_s = 2.0\n')
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(
            [WEENV, "node", "serve", "--config", config], stdout=log, stderr=subprocess.STDOUT, process_group=0 if group else None
        )
    node = Node(process, directory, cgroup)
    wait_until(lambda: node.socket.exists() or process.poll() is not None, "the start of the daemon")
    assert process.poll() is None, node.log()
    return node


def left_behind(node: Node) -> list[str]:
    """What a daemon that has ended must not leave: mounts, cgroups, environments' directories."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if str(node.directory) in line]
    cgroups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"*{node.cgroup}")] + [
        str(path) for path in [Path(f"/sys/fs/cgroup{node.cgroup}")] if path.exists()
    ]
    states = [str(path) for name in ("state/envs", "run/envs") for path in (node.directory / name).glob("*")]
    return mounts + cgroups + states


@contextlib.contextmanager
def run_node(directory: Path, *, status: int = 0, group: bool = False) -> Iterator[Node]:
    """A daemon that must end with `status` and leave nothing."""
    node = start_node(directory, f"/weenv-test-{os.getpid()}-{next(NODE_NUMBERS)}", group=group)
    try:
        yield node
    finally:
        node.process.send_signal(signal.SIGTERM)
        try:
            ended = node.process.wait(60)
        except subprocess.TimeoutExpired:
            node.process.kill()
            raise
    assert ended == status, node.log()
    assert left_behind(node) == []


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running.host


@pytest.fixture(scope="module")
def groups(registry: str, tmp_path_factory: pytest.TempPathFactory) -> Groups:
    return make_groups(tmp_path_factory.mktemp("groups"), f"{registry}/demo/")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with run_node(tmp_path_factory.mktemp("node")) as node:
        yield node


def create(node: Node, *references: str, options: tuple[str | Path, ...] = ()) -> str:
    arguments: list[str | Path] = []
    for reference in references:
        arguments += ["--group", reference]
    return node("env", "create", *arguments, *options)


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


def test_the_data_plane_killed(groups: Groups, tmp_path: Path) -> None:
    """Its environments are reported as lost, nothing hangs, nothing is left, and the daemon's end says so."""
    with run_node(tmp_path / "node", status=1) as node:
        environment = create(node, groups.base)
        tasks = Path(f"/proc/{node.process.pid}/task").iterdir()
        children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        (plane,) = [pid for pid in children if b"weefs" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(plane, signal.SIGKILL)
        wait_until(lambda: json.loads(node("env", "inspect", environment))["state"] == "lost", "the loss")
        assert "data-plane process has ended" in node.refused("env", "create", "--group", groups.base, status=1)


def test_the_daemon_killed_and_started_again(groups: Groups, tmp_path: Path) -> None:
    """A new daemon on the same directories finds what the old one left, removes it, and works."""
    with run_node(tmp_path / "node", status=-signal.SIGKILL) as first:
        create(first, groups.base)
        first.process.kill()
        first.process.wait()
        first.socket.unlink()
        second = start_node(first.directory, first.cgroup)
        try:
            assert json.loads(second("env", "ls", "--format", "json")) == []
            environment = create(second, groups.base)
            assert second("env", "exec", environment, "--", "cat", "/etc/passwd").startswith("root:")
        finally:
            second.process.send_signal(signal.SIGTERM)
            assert second.process.wait(60) == 0, second.log()
        assert left_behind(second) == []


def test_a_signal_to_the_whole_process_group_ends_it_cleanly(groups: Groups, tmp_path: Path) -> None:
    """As a service manager or a terminal sends it: the data plane must wait until the daemon has removed everything."""
    with run_node(tmp_path / "node", group=True) as node:
        create(node, groups.base, groups.task)
        os.killpg(node.process.pid, signal.SIGTERM)
        assert node.process.wait(60) == 0, node.log()
        assert "ERROR" not in node.log()


def test_a_second_daemon_on_the_same_state_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with run_node(tmp_path / "node") as node:
        message = refusal("node", "serve", "--config", node.directory / "node.toml", status=1)
        assert "another process serves from this cache" in message
        assert node("env", "ls", "--format", "json") == "[]"
