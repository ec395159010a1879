"""A node daemon as its users have it: a process of the command line with directories of its own, real groups in a registry, and what
must not be left of it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

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


def start_node(directory: Path, cgroup: str, *, group: bool = False, settings: str = "") -> Node:
    """`settings`: further lines of its configuration. Unless they say something of `fill`, nothing is fetched that nobody waits for."""
    directory.mkdir(exist_ok=True)
    config = directory / "node.toml"
    own = f'state_dir = "{directory}/state"\nrun_dir = "{directory}/run"\ncgroup_parent = "{cgroup}"\n'
    deadline = "" if "chunk_deadline_s" in settings else "chunk_deadline_s = 2.0\n"
    ahead = "" if "fill =" in settings else 'fill = "off"\nprofiles = false\n'
    config.write_text(own + deadline + ahead + settings)
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


def end_node(node: Node) -> int:
    """Tells the daemon to end; its exit status."""
    node.process.send_signal(signal.SIGTERM)
    try:
        return node.process.wait(60)
    except subprocess.TimeoutExpired:
        node.process.kill()
        raise


@contextlib.contextmanager
def run_node(directory: Path, *, status: int = 0, group: bool = False, settings: str = "") -> Iterator[Node]:
    """A daemon that must end with `status` and leave nothing."""
    node = start_node(directory, f"/weenv-test-{os.getpid()}-{next(NODE_NUMBERS)}", group=group, settings=settings)
    try:
        yield node
    finally:
        ended = end_node(node)
    assert ended == status, node.log()
    assert left_behind(node) == []


def create(node: Node, *references: str, options: tuple[str | Path, ...] = ()) -> str:
    arguments: list[str | Path] = []
    for reference in references:
        arguments += ["--group", reference]
    return node("env", "create", *arguments, *options)
