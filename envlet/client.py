"""A blocking, typed client of the daemon: what the command line uses.

One request at a time on one connection; for requests at once, one client each (a thread each, or a process). Closing
the client withdraws what it waits for: an environment that was being made is removed, a command that was running is
killed.
"""

import array
import contextlib
import math
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from envlet import errors, rpc, types
from envlet.errors import ConnectionLost, EnvletError

R = TypeVar("R", bound=types.Result)
_RECEIVE_BYTES = 1 << 18


class Client:
    """A connection to the daemon on this machine. A context manager."""

    def __init__(self, socket_path: Path, connect_timeout_s: float = 10.0) -> None:
        """Connects. Raises ConnectionLost if no daemon listens there, or the caller may not use it."""
        self._decoder = rpc.LineDecoder(2 * rpc.LINE_MAX_BYTES)
        self._lines: deque[bytes] = deque()
        self._descriptors: deque[int] = deque()
        self._last_id = 0
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(connect_timeout_s)
            self._socket.connect(os.fspath(socket_path))
            self._socket.settimeout(None)
        except OSError as error:
            self._socket.close()
            raise ConnectionLost(f"no daemon answers on {socket_path}: {error}; start one with `weenv node serve`") from error

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; the daemon ends what was asked for and not yet answered."""
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    # The methods of the API

    def create(
        self,
        groups: Sequence[str],
        *,
        role: types.Role = "execution",
        init: Sequence[str] = (),
        init_timeout_s: float = 600.0,
        apply_fd: int | None = None,
        cpu: float | None = None,
        memory_bytes: int | None = None,
        pids: int | None = None,
        ttl_s: float | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        id: str | None = None,
        network: types.Network = "none",
        labels: Mapping[str, str] | None = None,
    ) -> types.EnvironmentInfo:
        """Makes an environment; returns when it is ready. `apply_fd`: a diff (tar) to put in first. Raises
        EnvletError.
        """
        request = types.CreateRequest(
            groups=list(groups),
            role=role,
            init=list(init),
            init_timeout_s=init_timeout_s,
            descriptors=0 if apply_fd is None else 1,
            cpu=cpu,
            memory_bytes=memory_bytes,
            pids=pids,
            ttl_s=ttl_s,
            env=dict(env or {}),
            workdir=workdir,
            id=id,
            network=network,
            labels=dict(labels or {}),
        )
        return self.call("env.create", request, types.EnvironmentInfo, [] if apply_fd is None else [apply_fd])

    def exec(
        self,
        id: str,
        argv: Sequence[str],
        *,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdio: Sequence[int] = (),
        on_terminal: Callable[[int], None] | None = None,
        output_limit_bytes: int = 1 << 20,
    ) -> types.ExecResult:
        """Runs a command; returns when it has ended. Raises EnvletError.

        `stdio`: up to three descriptors that become its stdin, stdout and stderr; what is not given is empty or
        captured. `on_terminal`: asks for a terminal, and receives its master, which it owns; the command runs while
        it does, so it must return (start a thread that copies) for the result to be waited for.
        """
        request = types.ExecRequest(
            id=id,
            argv=list(argv),
            workdir=workdir,
            env=dict(env or {}),
            user=user,
            timeout_s=timeout_s,
            tty=on_terminal is not None,
            descriptors=len(stdio),
            output_limit_bytes=output_limit_bytes,
        )
        return self.call("env.exec", request, types.ExecResult, stdio, on_terminal)

    def get(self, id: str) -> types.EnvironmentInfo:
        """One environment. Raises EnvletError(NOT_FOUND)."""
        return self.call("env.get", types.GetRequest(id=id), types.EnvironmentInfo)

    def list(self, all: bool = False) -> Sequence[types.EnvironmentInfo]:
        """All environments; with `all`, also those that have gone."""
        return self.call("env.list", types.ListRequest(all=all), types.ListResult).environments

    def diff(self, id: str, out_fd: int) -> types.DiffResult:
        """Has the daemon write the diff, a tar, to `out_fd`. Raises EnvletError."""
        return self.call("env.diff", types.DiffRequest(id=id), types.DiffResult, [out_fd])

    def delete(self, id: str) -> types.DeleteResult:
        """Removes an environment; returns when nothing is left. Raises EnvletError."""
        return self.call("env.delete", types.DeleteRequest(id=id), types.DeleteResult)

    def resolve(self, groups: Sequence[str], role: types.Role = "execution") -> types.PlanInfo:
        """References to digests. Raises EnvletError."""
        return self.call("plan.resolve", types.ResolveRequest(groups=list(groups), role=role), types.PlanInfo)

    def prefetch(
        self, groups: Sequence[str], *, what: types.PrefetchWhat = "auto", on_progress: Callable[[int, int], None] | None = None
    ) -> types.PrefetchResult:
        """plan.prefetch; returns when all is in the node's cache. `on_progress`: bytes that are wanted, and that are there. Raises
        EnvletError, whose data has the layers, for what could not be had.
        """
        request = types.PrefetchRequest(groups=list(groups), what=what, progress=on_progress is not None)
        return self.call("plan.prefetch", request, types.PrefetchResult, on_progress=on_progress)

    def collect(self, target_bytes: int = 0, dry_run: bool = False) -> types.CollectResult:
        """cache.gc."""
        return self.call("cache.gc", types.CollectRequest(target_bytes=target_bytes, dry_run=dry_run), types.CollectResult)

    def verify(self, digest: str | None = None) -> types.VerifyResult:
        """cache.verify."""
        return self.call("cache.verify", types.VerifyRequest(digest=digest), types.VerifyResult)

    def doctor(self) -> types.DoctorResult:
        """node.doctor."""
        return self.call("node.doctor", types.DoctorRequest(), types.DoctorResult)

    def info(self) -> types.NodeInfo:
        """The node."""
        return self.call("node.info", types.InfoRequest(), types.NodeInfo)

    def restart(self, drain_s: float = 30.0, force: bool = False) -> types.RestartResult:
        """Has the daemon start anew; the connection closes behind the answer. Raises EnvletError(BUSY)."""
        return self.call("node.restart", types.RestartRequest(drain_s=drain_s, force=force), types.RestartResult)

    # One request

    def call(
        self,
        method: str,
        request: types.Request,
        result: type[R],
        descriptors: Sequence[int] = (),
        on_terminal: Callable[[int], None] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> R:
        """Sends a request and waits for its answer. Raises EnvletError, ConnectionLost."""
        for name in request.__struct_fields__:
            value = getattr(request, name)
            if isinstance(value, float) and not math.isfinite(value):  # as JSON it would be null: the default
                raise EnvletError(errors.INVALID_PARAMS, f"{method}: {name} is {value}; a finite number is expected")
        self._last_id += 1
        try:
            with contextlib.suppress(BrokenPipeError):  # refused before it was sent: the reason is still to be read
                self._send(rpc.encode_request(self._last_id, method, request), descriptors)
            while True:
                answer = rpc.decode_answer(self._next_line())
                if answer.method == "exec.terminal":
                    self._receive_terminal(on_terminal)
                elif answer.method == "plan.progress":
                    if on_progress is not None:
                        progress = msgspec.json.decode(answer.payload, type=types.ProgressNotification)
                        on_progress(progress.wanted_bytes, progress.done_bytes)
                elif answer.error is not None and answer.request_id in (self._last_id, None):
                    raise answer.error
                elif answer.request_id == self._last_id:
                    return msgspec.json.decode(answer.payload, type=result)
        except OSError as error:
            raise ConnectionLost(f"the connection to the daemon broke during {method}: {error}") from error

    def _send(self, data: bytes, descriptors: Sequence[int]) -> None:
        if not descriptors:
            self._socket.sendall(data)
            return
        sent = socket.send_fds(self._socket, [data], list(descriptors))
        self._socket.sendall(data[sent:])

    def _next_line(self) -> bytes:
        while not self._lines:
            data, ancillary, _, _ = self._socket.recvmsg(_RECEIVE_BYTES, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(payload)
                    self._descriptors.extend(numbers)
            if not data:
                raise ConnectionLost("the daemon closed the connection before it answered; is it still running?")
            self._lines.extend(self._decoder.feed(data))
        return self._lines.popleft()

    def _receive_terminal(self, on_terminal: Callable[[int], None] | None) -> None:
        if not self._descriptors:
            raise EnvletError(errors.DESCRIPTORS, "the daemon announced a terminal and sent none")
        master = self._descriptors.popleft()
        if on_terminal is None:
            with contextlib.suppress(OSError):
                os.close(master)
            return
        on_terminal(master)


def as_json(value: types.Result) -> Any:
    """A result as plain JSON values, for `--format json`."""
    return msgspec.to_builtins(value)
