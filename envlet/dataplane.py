"""The data plane as the daemon sees it: one that does not end.

The process that serves can die at any moment, by a defect, the OOM killer or an upgrade. The daemon keeps the descriptors
(keeper.py) and starts a successor on them, which answers what its predecessor left unanswered: a reader notices a pause and nothing
else. Calls made meanwhile wait and are made again; all of them are idempotent.

Nor does it end with the daemon: a daemon that finds a running data plane takes it over, with its plans.

What cannot be mended is said: when successors do not come up, die too often, or the mount itself is gone, the data plane is
`lost`. Then every call fails, the descriptors are closed, so that the kernel ends every read that waits with an error, and the
daemon reports its environments as lost.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import msgspec
import trio

from envlet import errors, keeper, processes
from envlet.errors import EnvletError
from envlet.keeper import Kept, Running
from envlet.mounts import current_mounts
from envlet.ports import Fault, LayerRef, MountedPlan
from envlet.registry_errors import KINDS
from envlet.syscalls import MNT_DETACH, umount
from envlet.types import CheckedLayer, CheckResult, CollectedLayer, PrefetchedLayer, PrefetchResult
from weefs import protocol
from weefs.cachedir import has_ended
from weefs.fill import Mode
from weefs.peerconfig import PeersConfig

log = logging.getLogger("envlet")

FAULT_BACKLOG = 4096
"""Faults that a busy daemon has not looked at; more than the data plane keeps without an acknowledgement."""
START_DELAYS_S = (0.0, 0.1, 0.5, 1.0, 2.0)
"""Before each attempt to start a successor; after the last, the data plane is lost."""
UNHEARD_MAX = 16
"""Requests for statistics that one process has not answered; they fit into its socket's buffer many times."""
END_QUICKLY_S = 0.5
LOOK_AGAIN_S = 0.02
"""A process that is killed is gone at once, unless a thread of it waits in the kernel, which is looked at in this interval."""
START_TIMEOUT_S = 60.0
"""For a successor to serve: it reads the tables of all its layers first."""


class DataPlaneError(EnvletError):
    """The data plane refused; `kind` as in weefs.protocol.Error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(KINDS.get(kind, errors.MOUNT_FAILED), message)
        self.kind = kind


class DataPlaneLost(DataPlaneError):
    """The data plane is gone for good."""

    def __init__(self) -> None:
        super().__init__("lost", "the data plane is lost, and its environments with it; the log of the daemon says why")


class _Ended(Exception):
    """The process at the other end of a connection is gone."""


@attrs.frozen
class DataPlaneConfig:
    """`mount_path` and `run_dir` are in the daemon's mount namespace. Times in seconds."""

    mount_path: Path
    cache_path: Path
    run_dir: Path
    cache_size_bytes: int | None = None
    """None: as much as its filesystem has room for."""
    cache_free_min_bytes: int = 1 << 30
    """The filesystem keeps so much for others."""
    threads: int = 4
    chunk_deadline_s: float = 30.0
    auth_files: tuple[Path, ...] = ()
    peers: PeersConfig | None = None
    """None: it has none."""
    fill: Mode = "idle"
    """What is fetched when nobody waits: docs/fill.md."""
    fill_rate_bytes: int | None = None
    """A second; None: no bound."""
    profiles: bool = True
    """Whether what is read is recorded, and fetched ahead the next time."""
    answer_deadline_s: float = 30.0
    """A process that answers nothing for so long is killed, and gets a successor."""
    deaths_max_per_minute: int = 120
    """A data plane that dies more often is given up: something in what it is asked kills it."""
    statistics_timeout_s: float = 3.0
    """For figures of a process that may hang: whoever asks how the node is must hear it."""
    arguments: tuple[str, ...] = ()
    """Further arguments of `python -m weefs`, for tests."""

    @property
    def xattr_mount_path(self) -> Path:
        """The second mount, for plans with extended attributes: see weefs_create_session() in csrc/weefs.h."""
        return self.mount_path.with_name(f"{self.mount_path.name}-xattr")

    @property
    def mount_paths(self) -> tuple[Path, Path]:
        return self.mount_path, self.xattr_mount_path

    @property
    def socket_path(self) -> Path:
        return self.run_dir / "weefs.sock"

    @property
    def journal_path(self) -> Path:
        return self.run_dir / "weefs.journal"


class _Connection:
    """The conversation with one process."""

    def __init__(self, stream: trio.SocketStream, received: bytes = b"") -> None:
        self.stream = stream
        self._received = received
        self._ids = itertools.count(1)
        self._waiting: dict[int, tuple[trio.Event, list[protocol.Answer]]] = {}
        self._send_lock = trio.Lock()
        self.has_ended = False
        self.unheard: set[int] = set()
        """Requests for statistics whose answers nobody waits for any more and that have not come."""

    async def messages(self) -> AsyncIterator[protocol.FaultEvent]:
        """Hands answers to those who wait for them and yields the rest, until the process is gone."""
        pending = self._received
        try:
            while True:
                *lines, pending = pending.split(b"\n")
                for line in lines:
                    match protocol.decode_message(line):
                        case protocol.Answer() as answer:
                            self.unheard.discard(answer.id)
                            if answer.id in self._waiting:
                                event, answers = self._waiting[answer.id]
                                answers.append(answer)
                                event.set()
                        case fault:
                            yield fault
                data = await self.stream.receive_some(1 << 16)
                if not data:
                    return
                pending += data
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        finally:
            self.has_ended = True
            for event, _ in self._waiting.values():
                event.set()

    async def call(self, request: protocol.Request) -> Any:
        """The result. Raises DataPlaneError, and _Ended if the process went away first."""
        if self.has_ended:
            raise _Ended
        event, answers = self._waiting[request.id] = trio.Event(), []
        try:
            await self.send(request)
            await event.wait()
        finally:
            del self._waiting[request.id]
        if not answers:
            raise _Ended
        if error := answers[0].error:
            raise DataPlaneError(error.kind, error.message)
        return answers[0].result

    async def send(self, request: protocol.Request) -> None:
        try:
            async with self._send_lock:
                await self.stream.send_all(protocol.encode(request) + b"\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise _Ended from None

    def next_id(self) -> int:
        return next(self._ids)


@attrs.frozen
class _Process:
    """The process that serves: our child, or another daemon's."""

    pid: int
    pidfd: int

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def end(self) -> None:
        """Kills it, if it still lives, and waits until it is gone, or as good as gone: a thread that waits in the kernel for an answer
        that only a successor can give stays until then. The descriptor is closed.
        """
        self.kill()
        with trio.move_on_after(END_QUICKLY_S):
            await processes.wait_exit(self.pidfd)
        while not processes.has_exited(self.pidfd):
            if has_ended(self.pid):
                log.warning("the data-plane process %d is killed; threads of it wait in the kernel for its successor", self.pid)
                trio.lowlevel.spawn_system_task(self._bury)
                return
            await trio.sleep(LOOK_AGAIN_S)
        await self._bury()

    async def _bury(self) -> None:
        try:
            await processes.wait_exit(self.pidfd)
            processes.reap(self.pidfd)
        finally:
            os.close(self.pidfd)


class WeefsDataPlane:
    """Implements `ports.DataPlane` on weefs processes, one after the other. Made by `open_data_plane`."""

    def __init__(self, config: DataPlaneConfig, kept: Kept) -> None:
        self._config = config
        self._kept: Kept | None = kept
        self._connection: _Connection | None = None
        self._changed = trio.Event()
        self._process: _Process | None = None
        self._closing = False
        self._deaths: deque[float] = deque()
        self._successors = 0
        self._last_fault = 0
        self._longest_gap_s = 0.0
        self._fault_sender, self._fault_receiver = trio.open_memory_channel[Fault](FAULT_BACKLOG)
        self.plans: Collection[str] = ()
        self.adopted = False
        self.lost = trio.Event()

    # ---- the life of the process ----

    async def run(self, running: Running | None, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keeps a process serving until `close`, or until it is lost. Starts with `running`, or with a new one."""
        try:
            if running is not None:
                connection = _Connection(trio.SocketStream(trio.socket.from_stdlib_socket(running.connection)), running.received)
                with contextlib.suppress(ProcessLookupError):  # it died meanwhile: so does the conversation, at once
                    self._process = _Process(running.welcome.pid, os.pidfd_open(running.welcome.pid))
            else:
                connection = await (self._succeed() if self.adopted else self._start())
            while True:
                self._publish(connection)
                task_status.started()
                task_status = trio.TASK_STATUS_IGNORED
                await self._converse(connection)
                if self._closing:
                    return
                self._publish(None)
                gap_begin_s = time.monotonic()
                self._note_death()
                connection = await self._succeed()
                self._successors += 1
                gap_s = time.monotonic() - gap_begin_s
                self._longest_gap_s = max(self._longest_gap_s, gap_s)
                log.warning("the data plane has a successor after %.2f s: process %d", gap_s, self._process.pid if self._process else 0)
        except DataPlaneError as error:
            if self._closing:
                return
            if not self._connected_once:
                raise
            log.error("the data plane is lost: %s", error.message)
        finally:
            self._publish(None)
            if not self._closing:
                self._give_up()

    @property
    def _connected_once(self) -> bool:
        return self._successors > 0 or bool(self._deaths)

    def _publish(self, connection: _Connection | None) -> None:
        self._connection = connection
        self._changed.set()
        self._changed = trio.Event()

    def _give_up(self) -> None:
        """Without a keeper and a server the kernel ends the connection, and every read that waits with an error."""
        self.lost.set()
        self._changed.set()
        self.close_descriptors()
        self._fault_sender.close()

    def close_descriptors(self) -> None:
        """Gives up being the keeper."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            kept.close()

    def _note_death(self) -> None:
        """Raises DataPlaneError when there were too many in a minute."""
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - 60:
            self._deaths.popleft()
        if len(self._deaths) > self._config.deaths_max_per_minute:
            raise DataPlaneError("lost", f"it died {len(self._deaths)} times within a minute")

    async def _converse(self, connection: _Connection) -> None:
        """Until the process is gone, or this is closed."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, connection)
                async for fault in connection.messages():
                    self._take_fault(fault)
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                connection.stream.socket.close()
                if self._process is not None and not self._closing:
                    process, self._process = self._process, None
                    await process.end()  # one that closed the connection and lives on would serve against its successor

    async def _watch(self, connection: _Connection) -> None:
        """Kills a process that lives and does not answer (stopped, or hung): a successor does. It is asked twice, for when this
        process was stopped too, an answer that came meanwhile is late and not missing.
        """
        silent = 0
        with contextlib.suppress(_Ended):
            while silent < 2:
                if not silent:
                    await trio.sleep(self._config.answer_deadline_s / 2)
                with trio.move_on_after(self._config.answer_deadline_s / 2) as waiting:
                    with contextlib.suppress(DataPlaneError):  # an answer
                        await connection.call(protocol.GetStatistics(id=connection.next_id()))
                silent = silent + 1 if waiting.cancelled_caught else 0
            if self._process is not None and not self._closing:
                log.error("the data-plane process %d does not answer and is killed", self._process.pid)
                self._process.kill()

    def _take_fault(self, fault: protocol.FaultEvent) -> None:
        if fault.number <= self._last_fault:
            return
        self._last_fault = fault.number
        known = Fault(number=fault.number, pid=fault.pid, cgroup=fault.cgroup, layer=fault.layer, chunk=fault.chunk, error=fault.error)
        try:
            self._fault_sender.send_nowait(known)
        except trio.WouldBlock:
            log.error("a fault is dropped, %d wait: %s chunk %d", FAULT_BACKLOG, fault.layer, fault.chunk)

    async def _succeed(self) -> _Connection:
        """Starts a successor, patiently. Raises DataPlaneError."""
        failure = DataPlaneError("lost", "no attempt was made")
        for delay_s in START_DELAYS_S:
            await trio.sleep(delay_s)
            mounted = {mount.target for mount in current_mounts() if mount.kind == "fuse.weefs"}
            if gone := [path for path in self._config.mount_paths if str(path) not in mounted]:
                raise DataPlaneError("lost", f"nothing is mounted on {gone[0]} any more")
            try:
                return await self._start()
            except DataPlaneError as error:
                failure = error
                log.error("a successor of the data plane did not come up: %s", error.message)
        raise failure

    async def _start(self) -> _Connection:
        """Starts a process and waits until it serves. Raises DataPlaneError; then it is gone."""
        assert self._kept is not None
        try:
            self._kept = keeper.with_socket(self._kept, self._config.socket_path)
        except OSError as error:
            raise DataPlaneError("error", f"the socket {self._config.socket_path} cannot be made: {error}") from error
        child = await trio.lowlevel.open_process(
            _command(self._config, self._kept), stdin=subprocess.DEVNULL, pass_fds=self._kept.all(), start_new_session=True
        )
        process = _Process(child.pid, os.pidfd_open(child.pid))
        try:
            connection = await self._say_hello(process)
        except BaseException:
            with trio.CancelScope(shield=True):
                await process.end()
            raise
        self._process = process
        return connection

    async def _say_hello(self, process: _Process) -> _Connection:
        try:
            stream = await trio.open_unix_socket(str(self._config.socket_path))
        except OSError as error:
            raise DataPlaneError("error", f"the socket {self._config.socket_path}: {error}") from error
        connection = _Connection(stream)
        welcome: list[Any] = []
        try:
            with trio.move_on_after(START_TIMEOUT_S):
                async with trio.open_nursery() as nursery:

                    async def notice_death() -> None:
                        await processes.wait_exit(process.pidfd)
                        nursery.cancel_scope.cancel()

                    nursery.start_soon(notice_death)
                    await stream.send_all(protocol.encode(protocol.Hello(id=0)) + b"\n")
                    line = b""
                    while b"\n" not in line and (data := await stream.receive_some(1 << 16)):
                        line += data
                    if b"\n" in line:
                        line, _, rest = line.partition(b"\n")
                        welcome.append(protocol.decode_message(line))
                        connection = _Connection(stream, rest)
                    nursery.cancel_scope.cancel()
        except (trio.BrokenResourceError, msgspec.DecodeError) as error:
            raise DataPlaneError("error", f"the data-plane process does not answer: {error}") from error
        finally:
            if not welcome:
                stream.socket.close()
        if not welcome:
            status = processes.reap(process.pidfd)
            how = f"ended with status {status}" if status is not None else f"did not serve within {START_TIMEOUT_S:g} s"
            raise DataPlaneError("error", f"the data-plane process {how}; its reason is on stderr")
        return connection

    # ---- what the daemon asks ----

    async def _call(self, request: type[protocol.Request], **values: Any) -> Any:
        """Asks, and asks a successor again. Raises DataPlaneError; DataPlaneLost."""
        while True:
            connection = await self._current()
            with contextlib.suppress(_Ended):
                return await connection.call(request(id=connection.next_id(), **values))
            await trio.lowlevel.checkpoint()

    async def _current(self) -> _Connection:
        while self._connection is None or self._connection.has_ended:
            if self.lost.is_set():
                raise DataPlaneLost
            await self._changed.wait()
        return self._connection

    async def add_plan(self, layers: Sequence[LayerRef], *, images: bool = False, stacked: bool = False) -> MountedPlan:
        wanted = [protocol.Layer(**attrs.asdict(layer)) for layer in layers]
        plan = msgspec.convert(await self._call(protocol.AddPlan, layers=wanted, images=images, stacked=stacked), protocol.Plan)
        return MountedPlan(
            plan_id=plan.plan_id,
            path=(self._config.xattr_mount_path if plan.xattrs else self._config.mount_path) / plan.plan_id,
            objects=self._config.mount_path / "objects",
            content_bytes=plan.content_bytes,
            entries=plan.entries,
            images=tuple(Path(image) for image in plan.images),
            images_refused=plan.images_refused,
        )

    async def remove_plan(self, plan_id: str) -> None:
        await self._call(protocol.RemovePlan, plan_id=plan_id)

    async def collect_cache(self, target_bytes: int, *, dry_run: bool) -> Sequence[CollectedLayer]:
        removed = await self._call(protocol.CollectCache, target_bytes=target_bytes, dry_run=dry_run)
        return msgspec.convert(removed, list[CollectedLayer])

    async def verify_cache(self, digest: str | None) -> Sequence[CheckedLayer]:
        return msgspec.convert(await self._call(protocol.VerifyCache, digest=digest), list[CheckedLayer])

    async def prefetch(
        self, layers: Sequence[LayerRef], what: str, on_progress: Callable[[int, int], Awaitable[None]]
    ) -> PrefetchResult:
        wanted, caller = [protocol.Layer(**attrs.asdict(layer)) for layer in layers], secrets.token_hex(8)
        done = False
        try:
            while not done:
                answer = await self._call(protocol.Prefetch, caller=caller, layers=wanted, what=what)
                progress = msgspec.convert(answer, protocol.PrefetchProgress)
                done = progress.done
                await on_progress(progress.wanted_bytes, progress.done_bytes)
        finally:
            if not done and self._connection is not None:
                with trio.CancelScope(shield=True), trio.move_on_after(1), contextlib.suppress(_Ended):  # else it is forgotten, later
                    await self._connection.send(protocol.DropPrefetch(id=self._connection.next_id(), caller=caller))
        return _prefetched(progress)

    async def diagnose(self) -> Sequence[CheckResult]:
        return msgspec.convert(await self._call(protocol.Diagnose), list[CheckResult])

    async def statistics(self) -> dict[str, Any]:
        """The process's own figures if it gives them in time; `serving` says whether it did."""
        figures: dict[str, Any] = {"serving": False}
        with trio.move_on_after(self._config.statistics_timeout_s), contextlib.suppress(_Ended, DataPlaneError):
            connection = await self._current()
            # A process that hangs is asked a few times and no more: a send that is cut short would leave half a line in its socket.
            if len(connection.unheard) < UNHEARD_MAX:
                request = protocol.GetStatistics(id=connection.next_id())
                connection.unheard.add(request.id)
                figures = {"serving": True} | await connection.call(request)
        return figures | {
            "process": {
                "pid": self._process.pid if self._process is not None else None,
                "successors": self._successors,
                "longest_gap_s": round(self._longest_gap_s, 3),
                "adopted": self.adopted,
            }
        }

    def faults(self) -> trio.MemoryReceiveChannel[Fault]:
        return self._fault_receiver

    async def acknowledge(self, fault: Fault) -> None:
        if self._connection is not None:
            with contextlib.suppress(_Ended):  # said again by the successor, and known then
                await self._connection.send(protocol.AcknowledgeFaults(id=self._connection.next_id(), through=fault.number))

    # ---- the end ----

    async def close(self) -> None:
        """Unmounts and ends the process: its FUSE threads end with the mount."""
        self._closing = True
        for path in self._config.mount_paths:
            unmount(path)
        if self._process is not None:
            if self._connection is not None:
                with trio.move_on_after(5), contextlib.suppress(_Ended, DataPlaneError):
                    await self._connection.call(protocol.Shutdown(id=self._connection.next_id()))
                    await processes.wait_exit(self._process.pidfd)
            process, self._process = self._process, None
            await process.end()
        for path in (self._config.socket_path, self._config.journal_path):
            path.unlink(missing_ok=True)

    def leave(self) -> None:
        """Lets the process go on, for the next daemon. Idempotent."""
        self._closing = True
        if self._process is not None:
            os.close(self._process.pidfd)
            self._process = None


def _prefetched(progress: protocol.PrefetchProgress) -> PrefetchResult:
    """Raises EnvletError if something could not be had."""
    layers = [
        PrefetchedLayer(
            digest=one.digest,
            source=one.source,
            by=one.by,
            wanted_bytes=one.wanted_bytes,
            done_bytes=one.done_bytes,
            failure=one.failure,
        )
        for one in progress.layers
    ]
    result = PrefetchResult(wanted_bytes=progress.wanted_bytes, done_bytes=progress.done_bytes, layers=layers)
    failed = [one for one in progress.layers if one.failure]
    if not failed:
        return result
    first = failed[0]
    others = f" (and {len(failed) - 1} other layers)" if len(failed) > 1 else ""
    raise EnvletError(
        KINDS.get(first.failure_kind or "", errors.PREFETCH_FAILED),
        f"layer {first.digest}{others}: {first.failure}; {progress.done_bytes} of {progress.wanted_bytes} bytes are in the cache",
        msgspec.to_builtins(result),
    )


def _command(config: DataPlaneConfig, kept: Kept) -> list[str]:
    command = [sys.executable, "-m", "weefs", "--listen", str(kept.listener), "--session", str(kept.session)]
    command += ["--journal", str(config.journal_path), "--cache", str(config.cache_path), "--deadline", str(config.chunk_deadline_s)]
    command += ["--cache-free-min", str(config.cache_free_min_bytes)]
    if config.cache_size_bytes is not None:
        command += ["--cache-size", str(config.cache_size_bytes)]
    if config.peers is not None:
        command += ["--peers", msgspec.json.encode(config.peers).decode()]  # of secrets, it has the names of their files
    command += ["--fill", config.fill]
    if config.fill_rate_bytes is not None:
        command += ["--fill-rate", str(config.fill_rate_bytes)]
    if not config.profiles:
        command += ["--no-profiles"]
    for fd in kept.fuse:
        command += ["--fuse", str(fd)]
    for path in config.auth_files:
        command += ["--auth-file", str(path)]
    return [*command, *config.arguments]


@asynccontextmanager
async def open_data_plane(config: DataPlaneConfig, running: Running | None = None, *, renew: bool = False) -> AsyncIterator[WeefsDataPlane]:
    """Takes `running` over, or mounts and starts a process, and waits until it serves. `renew`: a process that was taken over is
    replaced, which is how a new version is put in its place. On leaving, unmounts and ends it, unless `leave` was called.

    Call it in the daemon's own mount namespace. Raises DataPlaneError, OSError.
    """
    config.cache_path.mkdir(parents=True, exist_ok=True)
    if running is None:  # else it is a mount, which answers no questions while its server is gone
        for path in config.mount_paths:
            path.mkdir(parents=True, exist_ok=True)
    kept = running.kept if running is not None else keeper.make(config.mount_paths, config.socket_path, config.threads)
    plane = WeefsDataPlane(config, kept)
    plane.adopted = running is not None
    if running is not None:
        plane.plans = tuple(plan.plan_id for plan in running.welcome.plans)
        if _must_replace(running, renew):
            log.info("replacing the data-plane process %d", running.welcome.pid)
            with contextlib.suppress(ProcessLookupError):
                await _Process(running.welcome.pid, os.pidfd_open(running.welcome.pid)).end()
            running.connection.close()
            running = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(plane.run, running)
                yield plane
            finally:
                with trio.CancelScope(shield=True):
                    if not plane._closing:
                        await plane.close()
                nursery.cancel_scope.cancel()
    finally:
        plane.close_descriptors()


def _must_replace(running: Running, renew: bool) -> bool:
    """Whether a data plane that was found gets a successor at once. Not one that no successor of this version could follow: it serves
    its environments to their end. Raises DataPlaneError if this version cannot talk to it either.
    """
    speaks = running.welcome.version == protocol.VERSION
    if speaks and not renew:
        return False
    refusal = keeper.session_refusal(running.kept.session)
    if refusal is None:
        return True
    if speaks:
        log.warning("the data plane stays the process of before, %d, until its environments are gone: %s", running.welcome.pid, refusal)
        return False
    raise DataPlaneError(
        "error",
        f"the data plane of before speaks version {running.welcome.version} of the protocol, expected {protocol.VERSION}, and cannot be "
        f"replaced ({refusal}); start the version of before, delete its environments, and restart then",
    )


def unmount(path: Path) -> None:
    """Lazily: an environment that could not be removed must not keep the daemon. EINVAL: not mounted."""
    try:
        umount(str(path), MNT_DETACH)
    except OSError as error:
        if error.errno != 22:
            raise
