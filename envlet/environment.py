"""One environment: made step by step, watched, ended, removed.

Creation is all or nothing, and so is written without undo steps: `remove` does not ask how far creation came, it
looks at what exists under the environment's name (processes, runtime state, control group, mount, directories) and
takes it away, in the order that the kernel demands. It can be called after any step, and again after it failed
itself.

Who waits for what: `start` runs in the task of the client's request; `supervise` in the daemon's nursery from `ready`
on. Requests on a running environment are activities: they are cancelled when the environment ends under them, and
answer with its state and cause.
"""

import contextlib
import errno
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import attrs
import msgspec
import trio

from envlet import apply, bundle, diff, errors, overlay, processes, record, rootfs
from envlet.cgroups import Cgroup, CgroupError, Layout
from envlet.config import NodeConfig
from envlet.errors import EnvletError
from envlet.execution import Command, Outcome, execute
from envlet.initproc import ProtocolError, Reports, read_reports, send_commands
from envlet.kernel_view import KernelView
from envlet.mounted import MountedPlans
from envlet.plans import Plan
from envlet.ports import MountedPlan
from envlet.removal import remove_directories
from envlet.runtime import Runtime
from envlet.states import FAILURES, check_transition
from envlet.streams import CancellableFile
from envlet.types import (
    CreateRequest,
    DiffResult,
    EnvironmentInfo,
    ExecRequest,
    ExecResult,
    Limits,
    State,
    Timings,
)
from envlet.users import ROOT, User, resolve_user

log = logging.getLogger("envlet")

_UNMOUNT_DEADLINE_S = 10.0
_LOST_WRAPPER_GRACE_S = 0.5
_EXPECTED = (CgroupError, EnvletError, OSError)
"""What the steps of an end raise when the machine refuses; anything else is a defect."""


@attrs.frozen
class Node:
    """What all environments of a daemon share."""

    config: NodeConfig
    runtime: Runtime
    layout: Layout
    plans: MountedPlans
    views: KernelView
    starting: trio.CapacityLimiter
    """First come, first served: starting all at once would make all of them late."""
    null_fd: int
    open_files: int
    """Descriptors that a process may have: as many as the daemon may give."""


class Environment:
    """One environment. Its owner is the daemon."""

    def __init__(self, node: Node, environment_id: str, request: CreateRequest, plan: Plan) -> None:
        self._node = node
        self.id = environment_id
        self._request = request
        self._plan = plan
        config = node.config
        self._limits = Limits(
            cpu=request.cpu or config.cpu,
            memory_bytes=request.memory_bytes or config.memory_bytes,
            pids=request.pids or config.pids,
        )
        self._env = bundle.merge_env((group.env for group in plan.groups), request.env)
        self._workdir = request.workdir or plan.workdir
        self._user = ROOT
        self._directory = config.uppers_dir / environment_id
        self._bundle = config.bundles_dir / environment_id
        self.cgroup = Cgroup(node.layout, f"{config.cgroup_parent.rstrip('/')}/{environment_id}")
        self.state: State = "creating"
        self.cause: str | None = None
        self._created_unix_s = time.time()
        self._expires_s = trio.current_time() + request.ttl_s if request.ttl_s else float("inf")
        self._mounted: MountedPlan | None = None
        self._timings = Timings()
        self._reports = Reports()
        self._marks: tuple[rootfs.Mark, ...] = ()
        self._init_pidfd: int | None = None
        self._init_pid = 0
        self._init_start_ticks = 0
        self._activities: dict[trio.CancelScope, bool] = {}
        self._activity_ended = trio.Condition()
        self._ending = trio.Event()
        self._removed = trio.Event()
        self._removal = trio.Lock()
        self._freezing = trio.Lock()
        self._commands = 0
        self._is_recorded = False

    @property
    def _root(self) -> Path:
        return self._bundle / "root"

    @property
    def _upper(self) -> Path:
        return self._directory / "upper"

    @property
    def is_removed(self) -> bool:
        """Nothing of it is left but its record."""
        return self._removed.is_set()

    def info(self) -> EnvironmentInfo:
        """What the API says of it."""
        has_expiry = self._expires_s != float("inf")
        return EnvironmentInfo(
            id=self.id,
            state=self.state,
            cause=self.cause,
            role=self._request.role,
            groups=[group.reference for group in self._plan.groups],
            plan_id=self._mounted.plan_id if self._mounted else None,
            content_bytes=self._mounted.content_bytes if self._mounted else 0,
            workdir=self._workdir,
            limits=self._limits,
            labels=self._request.labels,
            created_unix_s=self._created_unix_s,
            expires_unix_s=time.time() + self._expires_s - trio.current_time() if has_expiry else None,
            timings=self._timings,
            init=list(self._reports.results),
            usage=attrs.asdict(self.cgroup.usage()) if self.state == "ready" else {},
        )

    # States

    def _move(self, state: State, cause: str | None = None) -> None:
        check_transition(self.state, state)
        log.info("environment %s: %s -> %s%s", self.id, self.state, state, f": {cause}" if cause else "")
        self.state, self.cause = state, cause or self.cause
        if self._is_recorded and state != "deleted":
            try:
                self._save()
            except OSError as error:  # the disk is full: the next daemon would believe the state before
                log.error("environment %s: its state could not be written: %s", self.id, error)

    def fail(self, state: State, cause: str) -> None:
        """It ends in a state of failure, unless it has ended already."""
        if self.state not in ("creating", "ready"):
            return
        self._move(state, cause)
        self._ending.set()
        for scope, needs_processes in list(self._activities.items()):
            if needs_processes:
                scope.cancel()

    def ended_error(self) -> EnvletError:
        """What a request hears that ran when the environment ended."""
        return EnvletError(
            errors.ENDED,
            f"the environment {self.id} ended as {self.state}: {self.cause or 'it was deleted'}",
            {"id": self.id, "state": self.state, "cause": self.cause},
        )

    def _require(self, states: frozenset[State]) -> None:
        if self.state not in states:
            cause = f" ({self.cause})" if self.cause else ""
            raise EnvletError(
                errors.WRONG_STATE,
                f"the environment {self.id} is {self.state}{cause}; expected {' or '.join(sorted(states))}",
                {"id": self.id, "state": self.state, "cause": self.cause},
            )

    @contextlib.asynccontextmanager
    async def _activity(self, needs_processes: bool) -> AsyncIterator[None]:
        """A request that the end of the environment cuts short."""
        scope = trio.CancelScope()
        self._activities[scope] = needs_processes
        try:
            with scope:
                yield
        finally:
            del self._activities[scope]
            with trio.CancelScope(shield=True):
                async with self._activity_ended:
                    self._activity_ended.notify_all()
        if scope.cancelled_caught:
            raise self.ended_error()

    # Creation

    async def start(self, tar_fd: int | None, resolve_s: float) -> None:
        """From nothing to `ready`. `resolve_s`: what the plan took before. On any error or cancellation the caller calls `remove`.
        Raises EnvletError, OSError.
        """
        begin_s = time.perf_counter()
        async with self._activity(needs_processes=True):
            mounted = self._mounted = await self._node.plans.acquire(self._plan.layers)
            plan_s = time.perf_counter() - begin_s
            async with self._starting_slot() as release_slot:
                queue_s = time.perf_counter() - begin_s - plan_s
                apply_s, mount_s, cgroup_s = await trio.to_thread.run_sync(partial(self._prepare, mounted, tar_fd))
                runtime_begin_s = time.perf_counter()
                async with await self._start_runtime() as control:
                    init_begin_s = time.perf_counter()
                    await self._run_init(control, release_slot)
                end_s = time.perf_counter()
            self._timings = Timings(
                resolve_s=resolve_s,
                mount_s=plan_s + mount_s,
                queue_s=queue_s,
                apply_s=apply_s,
                runtime_s=cgroup_s + init_begin_s - runtime_begin_s,
                mutation_s=end_s - init_begin_s,
                total_s=resolve_s + end_s - begin_s,
            )
        self._move("ready")
        self._save()
        self._is_recorded = True

    @contextlib.asynccontextmanager
    async def _starting_slot(self) -> AsyncIterator[Callable[[], None]]:
        """A place among those that start, given back at the end or when the yielded function is called."""
        limiter = self._node.starting
        borrower = object()
        await limiter.acquire_on_behalf_of(borrower)
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                limiter.release_on_behalf_of(borrower)

        try:
            yield release
        finally:
            release()

    def _prepare(self, plan: MountedPlan, tar_fd: int | None) -> tuple[float, float, float]:
        """Directories, diff, overlay, control group, bundle; seconds of apply, mount and the rest. Runs in a thread."""
        begin_s = time.perf_counter()
        lower = plan.path
        self._upper.mkdir(parents=True)
        (self._directory / "work").mkdir()
        self._root.mkdir(parents=True)
        overlay.copy_metadata(lower, self._upper)
        apply_s = 0.0
        if tar_fd is not None:
            apply_begin_s = time.perf_counter()
            apply.apply_diff(CancellableFile(tar_fd, trio.from_thread.check_cancelled), self._upper, lower)
            apply_s = time.perf_counter() - apply_begin_s
        try:
            self._node.views.mount(plan, self._upper, self._directory / "work", self._root)
        except (OSError, ValueError) as error:
            raise EnvletError(errors.MOUNT_FAILED, f"the root of {self.id} could not be mounted: {error}") from error
        host_network = self._request.network == "host"
        self._marks = rootfs.prepare_root(
            self._root, self._upper, self._workdir, os.stat(lower).st_mtime_ns, resolv_conf=host_network
        )
        if self._plan.user:
            self._user = self._find_user(self._plan.user)
        mounted_s = time.perf_counter()
        self.cgroup.create(self._limits.cpu, self._limits.memory_bytes, self._limits.pids)
        spec = bundle.BundleSpec(
            root=self._root,
            hostname=self.id,
            cgroup_path=self.cgroup.path,
            init_program=self._node.config.init_program,
            workdir=self._workdir,
            env=self._env,
            open_files=self._node.open_files,
            resolv_conf=self._node.config.resolv_conf if host_network else None,
        )
        (self._bundle / "config.json").write_text(json.dumps(bundle.runtime_config(spec)))
        return apply_s, mounted_s - begin_s - apply_s, time.perf_counter() - mounted_s

    def _find_user(self, text: str) -> User:
        """The user by the environment's own files. Blocks."""
        return resolve_user(text, rootfs.read_text(self._root, "etc/passwd"), rootfs.read_text(self._root, "etc/group"))

    async def _start_runtime(self) -> trio.SocketStream:
        """Starts pid 1; our end of its socket."""
        ours, theirs = socket.socketpair()  # theirs stays blocking
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        try:
            with theirs:
                pid = await self._node.runtime.run(self.id, self._bundle, theirs.fileno(), self._node.null_fd)
            try:
                self._init_pidfd = os.pidfd_open(pid)
                self._init_pid, self._init_start_ticks = pid, processes.start_ticks(pid)
            except ProcessLookupError:
                raise EnvletError(errors.RUNTIME_FAILED, f"pid 1 of {self.id} ended at once") from None
        except BaseException:
            stream.socket.close()
            raise
        return stream

    async def _run_init(self, control: trio.SocketStream, release_slot: Callable[[], None]) -> None:
        """Has pid 1 run the init commands. Raises EnvletError(INIT_FAILED, TIMEOUT or RUNTIME_FAILED)."""
        with trio.move_on_after(self._request.init_timeout_s) as timeout:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_commands, control, self._request.init)
                try:
                    with trio.move_on_after(self._node.config.starting_slot_s):
                        await read_reports(control, self._reports)
                    if not self._reports.ready:
                        release_slot()
                        await read_reports(control, self._reports)
                except ProtocolError as error:
                    self._reports.failure = str(error)
                nursery.cancel_scope.cancel()
        if not self._reports.ready:
            raise self._init_error(timeout.cancelled_caught)

    def _init_error(self, timed_out: bool) -> EnvletError:
        commands, results = self._request.init, self._reports.results
        if results and results[-1].exit_code != 0:
            index, last = len(results) - 1, results[-1]
            return EnvletError(
                errors.INIT_FAILED,
                f"init command {index} ({commands[index][:200]!r}) ended with status {last.exit_code}",
                {"index": index, "command": commands[index], "exit_code": last.exit_code, "output_tail": last.output_tail},
            )
        running = f"init command {len(results)} ({commands[len(results)][:200]!r})" if len(results) < len(commands) else "pid 1"
        if timed_out:
            return EnvletError(
                errors.TIMEOUT,
                f"{running} did not end within init_timeout_s = {self._request.init_timeout_s:g}; give it longer",
                {"index": len(results)},
            )
        if self.cgroup.oom_kills():
            return EnvletError(
                errors.INIT_FAILED,
                f"{running} was killed: {self._limits.memory_bytes} bytes of memory were not enough; ask for more",
                {"index": len(results), "state": "oom"},
            )
        reason = self._reports.failure or "pid 1 ended without saying why"
        return EnvletError(errors.RUNTIME_FAILED, f"{running} could not be run: {reason}")

    # From one daemon to the next

    def _save(self) -> None:
        """Writes down what the next daemon must know. Raises OSError."""
        assert self._mounted is not None
        has_expiry = self._expires_s != float("inf")
        record.write(
            self._directory,
            record.EnvironmentRecord(
                version=record.VERSION,
                id=self.id,
                state=self.state,
                cause=self.cause,
                request=msgspec.structs.replace(self._request, init=[]),
                groups=self._plan.groups,
                mounted=self._mounted,
                limits=self._limits,
                user=self._user,
                timings=self._timings,
                init=self._reports.results,
                marks=self._marks,
                init_pid=self._init_pid,
                init_start_ticks=self._init_start_ticks,
                created_unix_s=self._created_unix_s,
                expires_unix_s=time.time() + self._expires_s - trio.current_time() if has_expiry else None,
            ),
        )

    @classmethod
    def recall(cls, node: Node, known: record.EnvironmentRecord) -> "Environment":
        """The environment that a record is of. Nothing is looked at or done: `adopt` does."""
        environment = cls(node, known.id, known.request, Plan(known.groups))
        environment.state, environment.cause = known.state, known.cause
        environment._mounted = known.mounted
        environment._limits, environment._user, environment._timings = known.limits, known.user, known.timings
        environment._reports = Reports(results=list(known.init), ready=True)
        environment._marks = known.marks
        environment._init_pid, environment._init_start_ticks = known.init_pid, known.init_start_ticks
        environment._created_unix_s = known.created_unix_s
        if known.expires_unix_s is not None:
            environment._expires_s = trio.current_time() + known.expires_unix_s - time.time()
        environment._is_recorded = True
        return environment

    async def adopt(self) -> None:
        """Takes over what another daemon left running, on a data plane that still serves its plan. Commands that ran for clients of
        that daemon ended with it; a diff that it was taking left the processes frozen. Raises CgroupError, OSError.
        """
        assert self._mounted is not None
        self._node.plans.adopt(self._plan.layers, self._mounted)
        await trio.to_thread.run_sync(self._node.views.adopt, self._mounted)
        for leftover in self._bundle.glob("exec-*"):
            leftover.unlink()
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(self._init_pid)
            if processes.start_ticks(self._init_pid) == self._init_start_ticks:
                self._init_pidfd = pidfd
            else:
                os.close(pidfd)
        if self.cgroup.exists():
            await self.cgroup.freeze(False)
        if self.state in FAILURES:
            self._ending.set()
        elif self._init_pidfd is None:
            self._judge_init_end()

    # Life

    async def supervise(self) -> None:
        """Watches a ready environment until nothing of it is left, or it failed and waits for its deletion."""
        if not self._ending.is_set():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_init)
                nursery.start_soon(self._watch_expiry)
                await self._ending.wait()
                nursery.cancel_scope.cancel()
        if self.state in ("deleting", "deleted"):
            return
        with trio.CancelScope(shield=True):
            await self._end_failed(remove=self.state == "expired")
        if self.state == "expired":
            return
        with trio.move_on_at(self._expires_s) as scope:
            await self._removed.wait()
        if scope.cancelled_caught:
            with trio.CancelScope(shield=True):
                await self._end_failed(remove=True)

    async def _end_failed(self, remove: bool) -> None:
        """After a failure: processes end now; the rest only if it is to be removed. What cannot be done is in the
        cause.
        """
        async with self._removal:
            if self.is_removed:
                return
            try:
                await self._stop_processes()
                if remove:
                    await self._quiet(needs_processes_only=False)
                    await self._remove_files()
            except (CgroupError, EnvletError, OSError) as error:
                log.error("environment %s: %s", self.id, error)
                self.cause = f"{self.cause}; then: {error}"

    async def _watch_init(self) -> None:
        assert self._init_pidfd is not None
        await processes.wait_exit(self._init_pidfd)
        self._judge_init_end()

    def _judge_init_end(self) -> None:
        if self.cgroup.exists() and self.cgroup.oom_kills():
            self.fail("oom", f"pid 1 was killed: {self._limits.memory_bytes} bytes of memory were not enough")
        else:
            self.fail("killed", "pid 1 ended: something killed it, from inside or outside")

    async def _watch_expiry(self) -> None:
        await trio.sleep_until(self._expires_s)
        self.fail("expired", f"its ttl_s of {self._request.ttl_s:g} is over")

    async def exec(self, request: ExecRequest, stdio: Sequence[int], on_terminal: Callable[[int], Awaitable[None]]) -> ExecResult:
        """Runs a command. Raises EnvletError."""
        self._require(frozenset(("ready",)))
        async with self._activity(needs_processes=True):
            user = self._user
            if request.user is not None:
                user = await trio.to_thread.run_sync(self._find_user, request.user)
            self._commands += 1
            number = self._commands
            workdir = request.workdir or self._workdir
            env = bundle.merge_env((self._env,), request.env)
            argv = [bundle.INIT_PATH, "run", str(bundle.CONTROL_FD), workdir, "--", *request.argv]
            console = self._node.config.console_dir / f"{time.monotonic_ns() % 10**10}.sock" if request.tty else None
            command = Command(
                container_id=self.id,
                process=bundle.process_config(argv, env, "/", user, terminal=request.tty, open_files=self._node.open_files),
                directory=self._bundle,
                name=f"exec-{number}",
                console_path=console,
                timeout_s=request.timeout_s,
                output_limit_bytes=request.output_limit_bytes,
            )
            kills_before = self.cgroup.oom_kills()
            try:
                outcome = await execute(self._node.runtime, command, stdio, self._node.null_fd, on_terminal)
            except (EnvletError, OSError):
                await self._settle()
                raise
            await self._judge(outcome, kills_before)
            return outcome.result
        raise self.ended_error()

    async def _settle(self) -> None:
        """Gives the watcher of pid 1 the moment it needs: if the environment is ending, this is cancelled."""
        await trio.sleep(_LOST_WRAPPER_GRACE_S)

    async def _judge(self, outcome: Outcome, kills_before: int) -> None:
        """Whether what killed the command ends the environment, too."""
        if outcome.result.timed_out:
            return
        died = outcome.lost or outcome.result.exit_code == 137
        if died and self.cgroup.oom_kills() > kills_before:
            self.fail("oom", f"a command was killed: {self._limits.memory_bytes} bytes of memory were not enough")
            raise self.ended_error()
        if outcome.lost:
            await self._settle()

    async def diff(self, out_fd: int) -> DiffResult:
        """Writes the diff as a tar to a borrowed descriptor. Raises EnvletError."""
        if self.state == "lost":
            raise EnvletError(
                errors.WRONG_STATE,
                f"the environment {self.id} is lost ({self.cause}): a diff compares with files that cannot be read any more; delete it",
                {"id": self.id, "state": self.state, "cause": self.cause},
            )
        self._require((FAILURES - {"expired", "lost"}) | {"ready"})
        async with self._activity(needs_processes=False), self._freezing:
            frozen = self.state == "ready"
            try:
                if frozen:
                    await self.cgroup.freeze(True)
                return await trio.to_thread.run_sync(self._write_diff, out_fd)
            except (OSError, CgroupError) as error:
                if self._ending.is_set():
                    await trio.lowlevel.checkpoint()
                if isinstance(error, OSError) and error.errno == errno.ENOTCONN:
                    raise EnvletError(
                        errors.DIFF_FAILED, "the data plane ended while the diff was taken; what the environment changed cannot be said"
                    ) from error
                raise EnvletError(errors.DIFF_FAILED, f"the diff could not be written: {error}") from error
            finally:
                if frozen and self.cgroup.exists():
                    with trio.CancelScope(shield=True), contextlib.suppress(CgroupError, FileNotFoundError):
                        await self.cgroup.freeze(False)
        raise self.ended_error()

    def _write_diff(self, out_fd: int) -> DiffResult:
        assert self._mounted is not None
        out = CancellableFile(out_fd, trio.from_thread.check_cancelled)
        return diff.write_diff(diff.walk_changes(self._upper, self._mounted.path, self._marks, root=self._root), out)

    # The end

    async def remove(self) -> None:
        """Ends and removes all that is there of it. Idempotent; not to be cancelled by its caller's end.

        Raises EnvletError(CLEANUP_FAILED), which names what is left; then it can be called again.
        """
        with trio.CancelScope(shield=True):
            async with self._removal:
                if self.state == "deleted":
                    return
                if self.state != "deleting":
                    self._move("deleting")
                self._ending.set()
                for scope in list(self._activities):
                    scope.cancel()
                try:
                    if not self.is_removed:
                        await self._stop_processes()
                        await self._quiet(needs_processes_only=False)
                        await self._remove_files()
                except Exception as error:  # also of a kind that nobody thought of: it must be possible to try again
                    log.error("environment %s is not removed", self.id, exc_info=not isinstance(error, _EXPECTED))
                    self._move("error", f"cleanup: {error}")
                    raise EnvletError(errors.CLEANUP_FAILED, f"{self.id} is not removed: {error}; delete it again") from error
                self._move("deleted")

    async def _quiet(self, needs_processes_only: bool) -> None:
        """Returns when no activity uses the environment any more. They have been cancelled."""
        for scope, needs_processes in list(self._activities.items()):
            if needs_processes or not needs_processes_only:
                scope.cancel()
        async with self._activity_ended:
            while any(needs or not needs_processes_only for needs in self._activities.values()):
                await self._activity_ended.wait()

    async def _stop_processes(self) -> None:
        if self.cgroup.exists():
            await self.cgroup.kill()
        if self._init_pidfd is not None:
            await processes.wait_exit(self._init_pidfd)
            processes.reap(self._init_pidfd)
            os.close(self._init_pidfd)
            self._init_pidfd = None
        await self._node.runtime.delete(self.id, self._bundle / "delete.log", self._node.null_fd)
        await self.cgroup.remove()

    async def _remove_files(self) -> None:
        await self._unmount()
        await trio.to_thread.run_sync(remove_directories, self._bundle, self._directory)
        if self._mounted is not None and not self.is_removed:
            await self._node.plans.release(self._plan.layers)
        self._removed.set()

    async def _unmount(self) -> None:
        """Not lazily: a lazy unmount succeeds while something still uses the root, and then nothing is proven."""
        deadline_s = trio.current_time() + _UNMOUNT_DEADLINE_S
        while True:
            try:
                await trio.to_thread.run_sync(overlay.unmount, self._root)
                return
            except OSError as error:
                if error.errno != errno.EBUSY or trio.current_time() > deadline_s:
                    raise
            await trio.sleep(0.01)
