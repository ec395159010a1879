"""A node for measurements: a daemon with directories of its own, groups from a local layout, environments, and the same tree shown in
the ways that weefs is compared with.

Environments' roots are looked at from the daemon's mount namespace and from outside of their control group: what is compared are
filesystems, not quotas.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from bench.measure import WEENV, Run, run

AHEAD = 'fill = "off"\nprofiles = false\n'
"""What is measured is what readers cause."""


@attrs.frozen
class ServedNode:
    """A running daemon. `namespace`: the command that enters its mount namespace."""

    directory: Path
    process: subprocess.Popen[bytes]

    @property
    def socket(self) -> Path:
        return self.directory / "run/envlet.sock"

    @property
    def namespace(self) -> list[str]:
        return ["nsenter", f"--mount=/proc/{self.process.pid}/ns/mnt", "--"]

    def weenv(self, *arguments: str | Path) -> str:
        command = [WEENV, *arguments[:2], "--socket", self.socket, *arguments[2:]]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def create(self, *references: str, options: Sequence[str] = ()) -> str:
        """An environment of these groups, base first; its id."""
        return self.weenv("env", "create", *(word for reference in references for word in ("--group", reference)), *options)

    def root(self, environment: str) -> Path:
        """Where its root is mounted, in the daemon's namespace."""
        return self.directory / "run/envs" / environment / "root"

    def data_plane(self) -> dict[str, Any]:
        """Its figures."""
        info: dict[str, Any] = json.loads(self.weenv("node", "info", "--format", "json"))["statistics"]["data_plane"]
        return info

    def fuse_requests(self) -> dict[str, int]:
        """How many requests of each operation so far."""
        return {name.removeprefix("requests_"): n for name, n in self.data_plane()["fuse"].items() if name.startswith("requests_") and n}

    def run(self, *command: str | Path) -> Run:
        """A command in the daemon's namespace."""
        return run([*self.namespace, *command])


@contextlib.contextmanager
def served_node(scratch: Path, view: str, settings: str = "", *, enter: Sequence[str] = ()) -> Iterator[ServedNode]:
    """A daemon with this view and further lines of configuration; nothing of it is left afterwards. `enter`: begins its command, to run it
    on another host (hosts.py).
    """
    directory = Path(tempfile.mkdtemp(prefix="node-", dir=scratch))
    (directory / "node.toml").write_text(
        f'state_dir = "{directory}/state"\nrun_dir = "{directory}/run"\ncgroup_parent = "/weenv-bench-{os.getpid()}-{directory.name[5:]}"\n'
        f'view = "{view}"\n{AHEAD if "fill =" not in settings else ""}{settings}'
    )
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([*enter, WEENV, "node", "serve", "--config", directory / "node.toml"], stdout=log, stderr=log)
    node = ServedNode(directory, process)
    try:
        while not node.socket.exists():
            if process.poll() is not None:
                raise SystemExit(f"the daemon did not start:\n{(directory / 'log').read_text()}")
            time.sleep(0.05)
        yield node
    finally:
        process.send_signal(signal.SIGTERM)
        if process.wait() != 0:
            print((directory / "log").read_text()[-3000:])
        shutil.rmtree(directory, ignore_errors=True)


def push(scratch: Path, name: str, root: Path) -> str:
    """A group of one layer from a directory, in a local layout; its reference. Made once."""
    made = scratch / f"{name}.reference"
    if not made.exists():
        command = [WEENV, "group", "push", f"oci:{scratch}/groups:{name}", "--rootfs", root, "-j", "2"]
        pushed = subprocess.run(command, capture_output=True, text=True)
        if pushed.returncode != 0:
            raise SystemExit(f"{' '.join(map(str, command))}: {pushed.stderr}")
        made.write_text(pushed.stdout.strip())
    return made.read_text()


def fill(node: ServedNode, environment: str) -> None:
    """Reads every file of an environment once: afterwards all chunks are present."""
    node.run("sh", "-c", f"tar -C {node.root(environment)} --one-file-system -cf - . | cat > /dev/null")


@contextlib.contextmanager
def overlay_on(node: ServedNode, lower: Path, scratch: Path) -> Iterator[Path]:
    """An overlay over `lower` with an upper of its own, as an environment has; its root. All in the daemon's namespace."""
    directory = Path(tempfile.mkdtemp(prefix="overlay-", dir=scratch))
    for name in ("upper", "work", "root"):
        (directory / name).mkdir()
    options = f"lowerdir={lower},upperdir={directory}/upper,workdir={directory}/work,index=off,xino=on"
    node.run("mount", "-t", "overlay", "overlay", "-o", options, str(directory / "root"))
    try:
        yield directory / "root"
    finally:
        node.run("umount", str(directory / "root"))
        shutil.rmtree(directory)


@contextlib.contextmanager
def squashfs(node: ServedNode, image: Path, scratch: Path, *, fuse: bool) -> Iterator[Path]:
    """A squashfs image mounted by the kernel, or by squashfuse_ll; the mount point."""
    target = Path(tempfile.mkdtemp(prefix="squashfs-", dir=scratch))
    if fuse:
        node.run("squashfuse_ll", "-o", "allow_other", str(image), str(target))
    else:
        node.run("mount", "-t", "squashfs", "-o", "ro,loop", str(image), str(target))
    try:
        yield target
    finally:
        node.run("umount", str(target))
        target.rmdir()


def make_squashfs(root: Path, image: Path) -> Path:
    """A zstd image of a tree, 128 KiB blocks (mksquashfs' default). Made once."""
    if not image.exists():
        unfinished = image.with_suffix(".new")
        subprocess.run(["mksquashfs", root, unfinished, "-comp", "zstd", "-quiet", "-no-progress"], check=True, stdout=subprocess.DEVNULL)
        unfinished.rename(image)
    return image
