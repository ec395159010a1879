"""The data plane as the daemon sees it: mounts weefs, keeps the descriptors, runs the data-plane process, and talks
to it.

The daemon is the keeper of the FUSE connection: it opens /dev/fuse, mounts, makes the clones and gives duplicates to
the process that serves, so that the connection outlives that process. It never opens anything on the mount itself:
closing a file there could wait for a server that is gone.

When the data plane dies, every call fails with DataPlaneLost, the daemon reports its environments as lost, and the kept
descriptors are closed: the kernel then ends every read that waits with an error. A successor on the same descriptors,
which readers would not notice, is not built yet.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import msgspec
import trio

from envlet import errors
from envlet.errors import EnvletError
from envlet.ports import Fault, LayerRef, MountedPlan
from envlet.registry_errors import KINDS
from envlet.syscalls import MNT_DETACH, umount
from weefs import core, protocol

FAULT_BACKLOG = 1024
"""Faults kept for a daemon that is busy; further ones are dropped: their environments are marked by the first."""


class DataPlaneError(EnvletError):
    """The data plane refused; `kind` as in weefs.protocol.Error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(KINDS.get(kind, errors.MOUNT_FAILED), message)
        self.kind = kind


class DataPlaneLost(DataPlaneError):
    """The data-plane process is gone."""

    def __init__(self) -> None:
        super().__init__("lost", "the data-plane process has ended; its environments are lost")


@attrs.frozen
class DataPlaneConfig:
    """`mount_path` is in the daemon's mount namespace. Times in seconds."""

    mount_path: Path
    cache_path: Path
    threads: int = 4
    chunk_deadline_s: float = 30.0
    auth_files: tuple[Path, ...] = ()


class WeefsDataPlane:
    """Implements `ports.DataPlane` on a weefs process. Made by `open_data_plane`."""

    def __init__(self, config: DataPlaneConfig, stream: trio.SocketStream, fuse_fds: list[int]) -> None:
        self._config = config
        self._fuse_fds = fuse_fds
        self._stream = stream
        self._ids = itertools.count(1)
        self._waiting: dict[int, tuple[trio.Event, list[protocol.Answer]]] = {}
        self._send_lock = trio.Lock()
        self._fault_sender, self._fault_receiver = trio.open_memory_channel[Fault](FAULT_BACKLOG)
        self.ready = trio.Event()
        self.lost = trio.Event()

    async def receive(self) -> None:
        """Runs until the process is gone."""
        pending = b""
        try:
            while data := await self._stream.receive_some(1 << 16):
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._dispatch(protocol.decode_message(line))
        except trio.BrokenResourceError:
            pass
        finally:
            self.lost.set()
            self.close_descriptors()
            for event, _ in self._waiting.values():
                event.set()
            self._fault_sender.close()

    def close_descriptors(self) -> None:
        """Gives up being the connection's keeper: without a serving process, it ends."""
        while self._fuse_fds:
            os.close(self._fuse_fds.pop())

    def _dispatch(self, message: protocol.Message) -> None:
        match message:
            case protocol.Answer(id=number):
                if number in self._waiting:
                    event, answers = self._waiting[number]
                    answers.append(message)
                    event.set()
            case protocol.FaultEvent(pid=pid, layer=layer, chunk=chunk, error=error):
                try:
                    self._fault_sender.send_nowait(Fault(pid=pid, layer=layer, chunk=chunk, error=error))
                except trio.WouldBlock:
                    print(f"envlet: fault dropped, {FAULT_BACKLOG} wait: {layer} chunk {chunk}", file=sys.stderr)
            case protocol.Ready():
                self.ready.set()

    async def _call(self, request: protocol.Request) -> Any:
        if self.lost.is_set():
            raise DataPlaneLost
        event, answers = self._waiting[request.id] = trio.Event(), []
        try:
            async with self._send_lock:
                await self._stream.send_all(protocol.encode(request) + b"\n")
            await event.wait()
        except trio.BrokenResourceError:
            raise DataPlaneLost from None
        finally:
            del self._waiting[request.id]
        if not answers:
            raise DataPlaneLost
        if error := answers[0].error:
            raise DataPlaneError(error.kind, error.message)
        return answers[0].result

    async def add_plan(self, layers: Sequence[LayerRef]) -> MountedPlan:
        wanted = [protocol.Layer(**attrs.asdict(layer)) for layer in layers]
        result = await self._call(protocol.AddPlan(id=next(self._ids), layers=wanted))
        plan = msgspec.convert(result, protocol.Plan)
        return MountedPlan(
            plan_id=plan.plan_id,
            path=self._config.mount_path / plan.plan_id,
            content_bytes=plan.content_bytes,
            entries=plan.entries,
        )

    async def remove_plan(self, plan_id: str) -> None:
        await self._call(protocol.RemovePlan(id=next(self._ids), plan_id=plan_id))

    async def statistics(self) -> dict[str, Any]:
        result: dict[str, Any] = await self._call(protocol.GetStatistics(id=next(self._ids)))
        return result

    def faults(self) -> trio.MemoryReceiveChannel[Fault]:
        return self._fault_receiver


def _command(config: DataPlaneConfig, control: int, fuse_fds: Sequence[int]) -> list[str]:
    command = [sys.executable, "-m", "weefs", "--control", str(control), "--cache", str(config.cache_path)]
    command += ["--deadline", str(config.chunk_deadline_s)]
    for fd in fuse_fds:
        command += ["--fuse", str(fd)]
    for path in config.auth_files:
        command += ["--auth-file", str(path)]
    return command


@asynccontextmanager
async def open_data_plane(config: DataPlaneConfig) -> AsyncIterator[WeefsDataPlane]:
    """Mounts, starts the process, and waits until it serves; on leaving, unmounts and ends the process. Call it in
    the daemon's own mount namespace.
    """
    config.mount_path.mkdir(parents=True, exist_ok=True)
    config.cache_path.mkdir(parents=True, exist_ok=True)
    fuse_fds = core.mount(config.mount_path, threads=config.threads)
    try:
        ours, theirs = socket.socketpair()
        with theirs:
            command = _command(config, theirs.fileno(), fuse_fds)
            process = await trio.lowlevel.open_process(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno(), *fuse_fds]
            )
        async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream, trio.open_nursery() as nursery:
            plane = WeefsDataPlane(config, stream, fuse_fds)
            nursery.start_soon(plane.receive)
            try:
                await _wait_until_ready(plane, process)
                yield plane
            finally:
                nursery.cancel_scope.cancel()
                await _end(process, stream, config.mount_path)
    finally:
        _unmount(config.mount_path)
        while fuse_fds:
            os.close(fuse_fds.pop())


async def _wait_until_ready(plane: WeefsDataPlane, process: trio.Process) -> None:
    async with trio.open_nursery() as nursery:

        async def fail_when_lost() -> None:
            await plane.lost.wait()
            status = await process.wait()
            raise DataPlaneError(
                "error", f"the data-plane process ended with status {status} before it served; its reason is on stderr"
            )

        nursery.start_soon(fail_when_lost)
        await plane.ready.wait()
        nursery.cancel_scope.cancel()


async def _end(process: trio.Process, stream: trio.SocketStream, mount_path: Path) -> None:
    """Unmounts first: the process's FUSE threads end with the mount. The end of the stream ends the process."""
    with trio.CancelScope(shield=True):
        _unmount(mount_path)
        await stream.aclose()
        with trio.move_on_after(5):
            await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()


def _unmount(path: Path) -> None:
    """Lazily: an environment that could not be removed must not keep the daemon. EINVAL: not mounted."""
    try:
        umount(str(path), MNT_DETACH)
    except OSError as error:
        if error.errno != 22:
            raise
