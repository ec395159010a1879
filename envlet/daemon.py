"""The node daemon: owns all environments, the plans they share and the life of the whole.

`serve` is the entry. It is called inside `trio.run`, in a process that `mounts.enter_private_namespace` has moved
into a mount namespace of its own. One nursery holds the daemon; every environment is supervised by one task in it;
every client's request runs in the nursery of its connection, and what it was making goes when it goes.

A daemon that is killed leaves its environments running, and the data plane that serves their files. The next one, with the same
state directory, takes over what has a record (record.py) and whose plan is still served, and removes the rest: what was being made,
and everything if the data plane is gone too; of that it says `lost`. The directory of an environment is made before anything else of it
and removed after everything else, so its names are the complete list. Before it touches any of it, it takes three locks: on the state
directory, on the run directory and on the parent of the control groups. Each alone names environments that another daemon's clean-up
would take for its own leftovers.
"""

import contextlib
import errno
import logging
import os
import resource
import secrets
import signal
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs
import trio

from envlet import (
    cgroups,
    ending,
    errors,
    kernel_view,
    leftovers,
    locks,
    metrics,
    metrics_server,
    mounts,
    overlay,
    processes,
    syscalls,
)
from envlet.bundle import OPEN_FILES_MAX
from envlet.cgroups import CgroupError
from envlet.config import NodeConfig
from envlet.environment import Environment, Node
from envlet.errors import EnvletError
from envlet.groups import first_error
from envlet.mounted import MountedPlans
from envlet.plans import Plans
from envlet.ports import DataPlane, Resolver
from envlet.record import EnvironmentRecord
from envlet.registry_errors import translate
from envlet.removal import remove_directories
from envlet.runtime import Runtime, open_null
from envlet.server import Server
from envlet.types import (
    CheckResult,
    CollectRequest,
    CollectResult,
    CreateRequest,
    DeleteRequest,
    DeleteResult,
    DiffRequest,
    DiffResult,
    DoctorRequest,
    DoctorResult,
    EnvironmentInfo,
    ExecRequest,
    ExecResult,
    GetRequest,
    InfoRequest,
    ListRequest,
    ListResult,
    NodeInfo,
    PlanInfo,
    PrefetchRequest,
    PrefetchResult,
    ResolveRequest,
    RestartRequest,
    RestartResult,
    VerifyRequest,
    VerifyResult,
)

log = logging.getLogger("envlet")

@attrs.frozen
class HandOver:
    """What a daemon that leaves has for the next one in its process."""

    listener: socket.socket
    signals: ending.LateSignals


OnTerminal = Callable[[int], Awaitable[None]]
OnProgress = Callable[[int, int], Awaitable[None]]
_REMOVE_AT_ONCE = 8
_FULL_BYTES = 65536
_FULL_INODES = 16
"""With less than this left, an environment cannot be made."""


class Daemon:
    """The methods of the API, one each, and what they work on."""

    def __init__(self, node: Node, plans: Plans, data_plane: DataPlane, nursery: trio.Nursery) -> None:
        self._node = node
        self._plans = plans
        self._data_plane = data_plane
        self._nursery = nursery
        self._live: dict[str, Environment] = {}
        self._remembered: OrderedDict[str, EnvironmentInfo] = OrderedDict()
        self._closing = False
        self._instance = secrets.token_hex(8)
        self._started_unix_s = time.time()
        self._working = 0
        self._idle = trio.Condition()
        self._restarting = False
        self.leaving = trio.Event()
        """Set after the answer to node.restart: the environments are for the next daemon."""
        self._data_plane_ended = False
        self._counts = Counter[str](created=0, adopted=0, failed_creations=0, removed=0, faults=0, faults_unassigned=0, execs=0)

    def _find(self, environment_id: str) -> Environment:
        try:
            return self._live[environment_id]
        except KeyError:
            pass
        past = self._remembered.get(environment_id)
        if past is not None:
            raise EnvletError(
                errors.WRONG_STATE,
                f"the environment {environment_id} is {past.state}{f' ({past.cause})' if past.cause else ''}",
                {"id": environment_id, "state": past.state, "cause": past.cause},
            )
        raise EnvletError(
            errors.NOT_FOUND,
            f"there is no environment {environment_id!r}; env.list has those of this node",
            {"id": environment_id},
        )

    async def create(self, request: CreateRequest, descriptors: Sequence[int]) -> EnvironmentInfo:
        """env.create. Whatever ends it before its end, nothing is left."""
        async with self._work():
            return await self._create(request, descriptors)

    async def _create(self, request: CreateRequest, descriptors: Sequence[int]) -> EnvironmentInfo:
        if self._closing:
            raise EnvletError(errors.SHUTTING_DOWN, "the daemon is ending; ask another node")
        if self._data_plane_ended:
            raise EnvletError(errors.MOUNT_FAILED, "the data plane is lost; restart the daemon or ask another node")
        if len(self._live) >= self._node.config.environments_max:
            raise EnvletError(
                errors.CAPACITY,
                f"this node holds {len(self._live)} environments, its maximum; delete one or ask another node",
            )
        if request.network == "host" and not self._node.config.host_network:
            raise EnvletError(
                errors.NETWORK_REFUSED,
                "network: expected none, received host; this node lends its network when its configuration says host_network = true",
            )
        begin_s = time.perf_counter()
        plan = await self._plans.resolve(request.groups, request.role)
        resolve_s = time.perf_counter() - begin_s
        environment_id = request.id or f"e{secrets.token_hex(6)}"
        if environment_id in self._live:
            raise EnvletError(
                errors.EXISTS, f"there is an environment {environment_id!r} already; choose another id or none"
            )
        environment = self._live[environment_id] = Environment(self._node, environment_id, request, plan)
        self._remembered.pop(environment_id, None)
        try:
            await environment.start(descriptors[0] if descriptors else None, resolve_s)
        except BaseException as error:
            self._counts["failed_creations"] += 1
            full = _no_space(error, self._node.config)  # before the undoing makes room
            await self._undo(environment)
            if full is not None:
                raise full from error
            if isinstance(error, (CgroupError, OSError)):
                raise EnvletError(errors.RUNTIME_FAILED, f"{environment_id} could not be made: {error}") from error
            raise
        self._counts["created"] += 1
        self._nursery.start_soon(self._supervise, environment)
        return environment.info()

    @contextlib.asynccontextmanager
    async def _work(self) -> AsyncIterator[None]:
        """A request that a restart waits for, and that must not begin under one."""
        if self._restarting:
            raise EnvletError(errors.SHUTTING_DOWN, "the daemon restarts; ask again in a second")
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            with trio.CancelScope(shield=True):
                async with self._idle:
                    self._idle.notify_all()

    async def restart(self, request: RestartRequest) -> RestartResult:
        """node.restart: waits until nothing runs that a client waits for."""
        if self._restarting:
            raise EnvletError(errors.BUSY, "a restart has been asked for already")
        self._restarting = True
        try:
            with trio.move_on_after(request.drain_s):
                async with self._idle:
                    while self._working:
                        await self._idle.wait()
            if self._working and not request.force:
                raise EnvletError(
                    errors.BUSY,
                    f"after {request.drain_s:g} s {self._working} requests still run; wait longer (drain_s), or force it, which kills "
                    "their commands",
                    {"requests": self._working},
                )
        except BaseException:
            self._restarting = False
            raise
        return RestartResult(cut_short=self._working)

    def leave(self) -> None:
        self.leaving.set()

    async def _undo(self, environment: Environment) -> None:
        """Removes what a creation left. What cannot be removed stays listed, as `error`, for env.delete to try again."""
        try:
            await environment.remove()
        except EnvletError as error:
            log.error("after a failed creation: %s", error)
        else:
            if self._live.get(environment.id) is environment:  # env.delete may have been first
                del self._live[environment.id]

    async def adopt(self, records: Sequence[EnvironmentRecord]) -> None:
        """Takes over environments that an earlier daemon left running. One that cannot be is reported as `error`."""
        for known in records:
            environment = self._live[known.id] = Environment.recall(self._node, known)
            try:
                await environment.adopt()
            except (CgroupError, OSError) as error:
                environment.fail("error", f"it could not be taken over from the daemon before: {error}")
            self._counts["adopted"] += 1
            self._nursery.start_soon(self._supervise, environment)
        for plan_id in set(self._data_plane.plans) - self._node.plans.served():
            await self._data_plane.remove_plan(plan_id)

    def remember(self, past: EnvironmentInfo) -> None:
        """Keeps the record of one that is gone, the newest `remembered_max`."""
        self._remembered[past.id] = past
        while len(self._remembered) > self._node.config.remembered_max:
            self._remembered.popitem(last=False)

    async def _supervise(self, environment: Environment) -> None:
        await environment.supervise()
        if environment.is_removed:
            self._forget(environment)

    def _forget(self, environment: Environment) -> None:
        if self._live.pop(environment.id, None) is None:
            return
        self._counts["removed"] += 1
        self.remember(environment.info())

    async def exec(self, request: ExecRequest, descriptors: Sequence[int], on_terminal: OnTerminal) -> ExecResult:
        """env.exec."""
        if request.tty and descriptors:
            raise EnvletError(
                errors.DESCRIPTORS, "with tty the terminal is all three streams; hand over no descriptors"
            )
        self._counts["execs"] += 1
        async with self._work():
            return await self._find(request.id).exec(request, descriptors, on_terminal)

    async def get(self, request: GetRequest) -> EnvironmentInfo:
        """env.get."""
        past = self._remembered.get(request.id)
        if past is not None and request.id not in self._live:
            return past
        return self._find(request.id).info()

    async def list(self, request: ListRequest) -> ListResult:
        """env.list."""
        past = list(self._remembered.values()) if request.all else []
        return ListResult(environments=[*past, *(environment.info() for environment in self._live.values())])

    async def diff(self, request: DiffRequest, descriptors: Sequence[int]) -> DiffResult:
        """env.diff."""
        async with self._work():
            return await self._find(request.id).diff(descriptors[0])

    async def delete(self, request: DeleteRequest) -> DeleteResult:
        """env.delete. Of one that has gone already it is a success."""
        begin_s = time.perf_counter()
        if request.id in self._live or request.id not in self._remembered:
            environment = self._find(request.id)
            async with self._work():
                await environment.remove()
            self._forget(environment)
        return DeleteResult(id=request.id, wall_s=time.perf_counter() - begin_s)

    async def resolve(self, request: ResolveRequest) -> PlanInfo:
        """plan.resolve."""
        return (await self._plans.resolve(request.groups, request.role)).info()

    async def prefetch(self, request: PrefetchRequest, on_progress: OnProgress) -> PrefetchResult:
        """plan.prefetch. Nobody looks into what is fetched, so a group's role does not matter."""
        plan = await self._plans.resolve(request.groups, "evaluation")
        return await self._data_plane.prefetch(plan.layers, request.what, on_progress)

    async def collect(self, request: CollectRequest) -> CollectResult:
        """cache.gc."""
        return CollectResult(layers=[*await self._data_plane.collect_cache(request.target_bytes, dry_run=request.dry_run)])

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """cache.verify."""
        return VerifyResult(layers=[*await self._data_plane.verify_cache(request.digest)])

    async def doctor(self, request: DoctorRequest) -> DoctorResult:
        """node.doctor."""
        node, view = self._node, self._node.views.view
        own = [
            CheckResult(name="daemon", ok=True, detail=f"version {_version()}, answers"),
            CheckResult(name="view", ok=view.kind == "kernel" or node.config.view == "merged", detail=f"{view.kind}: {view.reason}"),
            CheckResult(name="runtime", ok=True, detail=f"{node.runtime.name} {node.runtime.version}, cgroups {node.layout.kind}"),
        ]
        begin_s = time.perf_counter()
        try:
            found = [*await self._data_plane.diagnose()]
        except EnvletError as error:
            found = [CheckResult(name="data plane", ok=False, detail=error.message, took_s=time.perf_counter() - begin_s)]
        return DoctorResult(checks=[*own, *found])

    async def info(self, request: InfoRequest) -> NodeInfo:
        """node.info."""
        statistics: dict[str, Any] = {
            **self._counts,
            "plans": self._node.plans.statistics(),
            "references": self._plans.statistics(),
            "views": self._node.views.statistics(),
            "starting": self._node.starting.borrowed_tokens,
            "remembered": len(self._remembered),
            "data_plane": await self._data_plane.statistics(),
        }
        return NodeInfo(
            version=_version(),
            instance=self._instance,
            pid=os.getpid(),
            started_unix_s=self._started_unix_s,
            runtime=f"{self._node.runtime.name} {self._node.runtime.version}",
            cgroups=self._node.layout.kind,
            view=self._node.views.view.kind,
            view_reason=self._node.views.view.reason,
            environments=dict(Counter(str(environment.state) for environment in self._live.values())),
            environments_max=self._node.config.environments_max,
            starting_max=self._node.config.starting_max,
            statistics=statistics,
        )

    async def metrics(self) -> bytes:
        """The figures of node.info as Prometheus reads them."""
        return metrics.exposition(await self.info(InfoRequest()))

    async def watch_faults(self) -> None:
        """Marks the environment of each reader that got EIO. The end of the faults is the end of the data plane."""
        async for fault in self._data_plane.faults():
            self._counts["faults"] += 1
            environment = self._live.get(cgroups.group_member(fault.cgroup, self._node.config.cgroup_parent) or "")
            if environment is None:
                self._counts["faults_unassigned"] += 1
                log.error("a read failed, its process %d is in no environment: %s", fault.pid, fault.error)
            else:
                environment.fail("faulted", f"chunk {fault.chunk} of layer {fault.layer} could not be read: {fault.error}")
            await self._data_plane.acknowledge(fault)

        self._data_plane_ended = True
        log.error("the data plane is lost; so are the environments, and no new ones can be made")
        for environment in self._live.values():
            environment.fail("lost", "the data plane ended; the files of the environment cannot be read any more")

    async def close(self) -> None:
        """Deletes all environments and stops serving their plans. Raises EnvletError for the first that stays."""
        self._closing = True
        failed: list[EnvletError] = []
        limit = trio.CapacityLimiter(_REMOVE_AT_ONCE)

        async def remove(environment: Environment) -> None:
            async with limit:
                try:
                    await environment.remove()
                except EnvletError as error:
                    failed.append(error)
                else:
                    self._forget(environment)

        async with trio.open_nursery() as nursery:
            for environment in list(self._live.values()):
                nursery.start_soon(remove, environment)
        await self._node.plans.close()
        await trio.to_thread.run_sync(self._node.views.close)
        if failed:
            raise failed[0]


def _version() -> str:
    try:
        return metadata.version("weenv")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


async def serve(
    config: NodeConfig,
    resolver: Resolver,
    data_plane: DataPlane,
    *,
    handle_signals: bool = True,
    listener: socket.socket | None = None,
    task_status: trio.TaskStatus[Daemon] = trio.TASK_STATUS_IGNORED,
) -> HandOver | None:
    """Serves the node until SIGTERM or SIGINT (`handle_signals`; main thread only) or its cancellation; then nothing
    is left, and the result is None. After node.restart everything is left, for a daemon that is to start next, and the result is what that
    one needs: it takes the socket as `listener`.

    Call `mounts.enter_private_namespace()` before `trio.run`. Raises EnvletError or OSError if the node cannot start,
    and EnvletError(CLEANUP_FAILED) if something could not be removed at the end.
    """
    try:
        return await _serve(config, resolver, data_plane, handle_signals, listener, task_status)
    except BaseExceptionGroup as group:
        error = first_error(group)
        if error is None:
            raise
        raise error from None


async def _serve(
    config: NodeConfig,
    resolver: Resolver,
    data_plane: DataPlane,
    handle_signals: bool,
    listener: socket.socket | None,
    task_status: trio.TaskStatus[Daemon],
) -> HandOver | None:
    os.umask(0o022)
    syscalls.set_child_subreaper()
    processes.seal_descriptors()
    with contextlib.ExitStack() as stack:
        start = stack.enter_context(_Start(data_plane))
        for directory, what in ((config.state_dir, "state directory"), (config.run_dir, "run directory")):
            directory.mkdir(parents=True, exist_ok=True, mode=0o755)
            stack.callback(os.close, locks.take(directory / "lock", os.O_RDWR | os.O_CREAT, f"{what} {directory}"))
        layout = cgroups.detect_here()
        parent = cgroups.make_parent(layout, config.cgroup_parent)
        stack.callback(os.close, locks.take(parent, os.O_RDONLY | os.O_DIRECTORY, f"control group {config.cgroup_parent}"))
        stack.callback(cgroups.remove_if_empty, layout, config.cgroup_parent)
        listeners = await metrics_server.listen(*config.metrics_listen) if config.metrics_listen is not None else []
        for listener_of_metrics in listeners:
            stack.callback(listener_of_metrics.socket.close)
        _make_directories(config)
        null_fd = open_null()
        stack.callback(os.close, null_fd)
        runtime = await trio.to_thread.run_sync(Runtime.find, config.runtime, config.runtime_dir)
        left = await trio.to_thread.run_sync(leftovers.find_records, config.uppers_dir, bool(data_plane.plans))
        adopted = {known.id: known for known in left if known.mounted.plan_id in data_plane.plans and known.state not in leftovers.ENDING}
        await leftovers.clean_up(config, runtime, layout, null_fd, keep=adopted)
        view = await trio.to_thread.run_sync(_require_upper, config)  # after the clean-up, which may make the room for it
        views = kernel_view.KernelView(config.images_dir, view, required=config.view == "kernel")
        node = Node(
            config=config,
            runtime=runtime,
            layout=layout,
            plans=MountedPlans(data_plane, images=view.kind == "kernel", stacked=view.stack, on_unused=views.forget),
            views=views,
            starting=trio.CapacityLimiter(config.starting_max),
            null_fd=null_fd,
            open_files=min(OPEN_FILES_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        )
        plans = Plans(resolver, config.state_dir / "refs.json", translate)
        async with trio.open_nursery() as nursery:
            daemon = Daemon(node, plans, data_plane, nursery)
            for known in left:
                if known.id not in adopted:
                    daemon.remember(leftovers.past_info(known))
            server = Server(config, daemon, listener)
            late = ending.LateSignals()
            leaves = False
            try:
                await daemon.adopt(list(adopted.values()))
                await trio.to_thread.run_sync(views.sweep)
                nursery.start_soon(daemon.watch_faults)
                nursery.start_soon(partial(trio.to_thread.run_sync, resolver.prepare, abandon_on_cancel=True))
                if listeners:
                    nursery.start_soon(metrics_server.serve, listeners, daemon.metrics)
                async with trio.open_nursery() as accepting:
                    await accepting.start(server.run)
                    start.is_done = True
                    if handle_signals:
                        late.begin()
                        await accepting.start(_cancel_on_signal, accepting.cancel_scope)
                    task_status.started(daemon)
                    await daemon.leaving.wait()
                    leaves = not accepting.cancel_scope.cancel_called  # a signal to end is stronger
                    accepting.cancel_scope.cancel()
            finally:
                if leaves or start.has_failed_with_environments:
                    data_plane.leave()
                else:
                    if handle_signals:
                        late.end()
                    server.withdraw()
                    with trio.CancelScope(shield=True):
                        await daemon.close()
                nursery.cancel_scope.cancel()
    return HandOver(server.handed_over, late) if leaves and server.handed_over is not None else None


@attrs.define
class _Start:
    """Until the API is there. A daemon that cannot start (a wrong configuration, a program that is missing) took nothing over: the data
    plane that it found, and the environments on it, are for the next one.
    """

    data_plane: DataPlane
    is_done: bool = False

    @property
    def has_failed_with_environments(self) -> bool:
        """While an error passes."""
        return not self.is_done and bool(self.data_plane.plans)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self.has_failed_with_environments:
            log.error("this daemon cannot start; the data plane of the one before goes on, with its environments, for the next")
            self.data_plane.leave()


async def _cancel_on_signal(
    scope: trio.CancelScope, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(*ending.SIGNALS) as signals:
        ending.take_over()
        task_status.started()
        number = await anext(aiter(signals))
    if scope.cancel_called:  # the daemon leaves already, and this task woke up before it heard of it: the signal is for the next daemon
        signal.raise_signal(number)
        return
    log.info("%s: ending", signal.Signals(number).name)
    scope.cancel()


def _make_directories(config: NodeConfig) -> None:
    for directory in (config.uppers_dir, config.bundles_dir, config.runtime_dir, config.console_dir):
        directory.mkdir(parents=True, exist_ok=True, mode=0o755)
    for directory in (config.state_dir, config.run_dir):
        directory.chmod(0o711)
    for directory in (config.uppers_dir, config.bundles_dir, config.runtime_dir, config.console_dir):
        directory.chmod(0o700)


def _require_upper(config: NodeConfig) -> kernel_view.View:
    """Refuses a filesystem on which no environment could start; else how roots are shown on it. Blocks. Raises EnvletError(MOUNT_FAILED or
    CAPACITY).
    """
    state_dir = config.state_dir
    scratch = state_dir / "probe"
    try:
        remove_directories(scratch)
        overlay.probe(scratch)
        return kernel_view.choose(config.view, scratch / "view")
    except OSError as error:
        full = _no_space(error, config)
        if full is not None:
            raise full from error
        raise EnvletError(
            errors.MOUNT_FAILED,
            f"the state directory {state_dir} is on {mounts.filesystem_of(state_dir)}, which cannot hold what environments write "
            f"(the upper directory of an overlay: {error}); choose a state_dir on ext4, xfs or btrfs, in a container on a volume",
        ) from error
    finally:
        remove_directories(scratch)


def _no_space(error: BaseException, config: NodeConfig) -> EnvletError | None:
    """A full disk as what it is: no room on this node. Not everybody says ENOSPC: an overlay whose work directory cannot
    be made is read-only, and a runtime that cannot write its log says nothing.
    """
    failed = isinstance(error, (OSError, CgroupError)) or (
        isinstance(error, EnvletError) and error.code in (errors.RUNTIME_FAILED, errors.MOUNT_FAILED)
    )
    if not failed:
        return None
    where = next((str(path) for path in (config.uppers_dir, config.bundles_dir, config.runtime_dir) if _is_full(path)), None)
    cause = error.__cause__ if isinstance(error, EnvletError) else error
    if where is None and isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        where = os.fsdecode(cause.filename or f"{config.state_dir} or {config.run_dir}")
    if where is None:
        return None
    return EnvletError(errors.CAPACITY, f"{where}: no space left; free some (df -h, df -i) or ask another node ({error})")


def _is_full(path: Path) -> bool:
    try:
        status = os.statvfs(path)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize < _FULL_BYTES or (status.f_files > 0 and status.f_ffree < _FULL_INODES)
