"""One command in a running environment: from the request to its result.

The OCI runtime starts our wrapper (csrc/init.c, `run`), which starts the command, tells its end over a socket, and
kills all that descends from the command when the socket is closed. So a timeout, a client that went away and a daemon
that died are one case, and nothing has to be found by pid. The output goes straight to the client's descriptors; only
without them is it captured here, its head and its tail, within a bound.

When the command has ended, captured output is what the pipes hold then: a process left in the background that keeps
them open is not waited for.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from envlet import errors, processes
from envlet.errors import EnvletError
from envlet.runtime import Runtime
from envlet.types import ExecResult

KILL_DEADLINE_S = 20.0
_PIPE_BYTES = 65536
_DRAIN_MAX_BYTES = 4 << 20


class Capture:
    """Head and tail of an output within `limit_bytes`; what is between them is only counted."""

    def __init__(self, limit_bytes: int) -> None:
        self._head_room = limit_bytes - limit_bytes // 2
        self._tail_room = limit_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes) -> None:
        self._total += len(data)
        room = self._head_room - len(self._head)
        self._head += data[:room]
        if self._tail_room:
            self._tail += data[room:] if room > 0 else data
            if len(self._tail) > 2 * self._tail_room + _PIPE_BYTES:
                del self._tail[: -self._tail_room]

    def value(self) -> tuple[bytes, int]:
        """The output, and how many bytes between head and tail are not in it."""
        kept = bytes(self._head) + (bytes(self._tail[-self._tail_room :]) if self._tail_room else b"")
        return kept, self._total - len(kept)


@attrs.frozen
class Command:
    """What to run, and with what."""

    container_id: str
    process: dict[str, Any]
    """The OCI `process` object, its `args` our wrapper's."""
    directory: Path
    """Where the object is written."""
    name: str
    """Of the file, unique among the commands of the environment."""
    console_path: Path | None
    """A terminal: where the runtime connects to hand over its master."""
    timeout_s: float | None
    output_limit_bytes: int


@attrs.frozen
class Outcome:
    """How a command ended. `lost`: its wrapper went without a word, so something killed it from outside."""

    result: ExecResult
    signal: int | None
    lost: bool


def parse_report(report: bytes, program: str, workdir: str) -> tuple[int, int | None, str | None] | None:
    """Exit code, signal and failure of the wrapper's line; None if it said nothing. Raises ValueError."""
    if not report.endswith(b"\n"):
        return None
    word, _, number = report.decode("ascii").strip().partition(" ")
    value = int(number)
    if word == "exit":
        return value, None, None
    if word == "signal":
        return 128 + value, value, None
    reason = os.strerror(value)
    if word == "exec":
        return (127 if value == 2 else 126), None, f"cannot execute {program!r}: {reason}"
    if word == "chdir":
        return 126, None, f"cannot change to the working directory {workdir!r}: {reason}"
    raise ValueError(f"the wrapper reports exit, signal, exec or chdir; received {report!r}")


async def execute(
    runtime: Runtime,
    command: Command,
    stdio: Sequence[int],
    null_fd: int,
    on_terminal: Callable[[int], Awaitable[None]],
) -> Outcome:
    """Runs it. `stdio`: the client's descriptors, borrowed. `on_terminal` gets the terminal's master, borrowed.

    Cancelled, it returns only when nothing of the command is left. Raises EnvletError, OSError.
    """
    async with contextlib.AsyncExitStack() as stack:
        execution = _Execution(runtime, command, null_fd, stack)
        await execution.start(stdio)
        return await execution.finish(on_terminal)


class _Execution:
    def __init__(self, runtime: Runtime, command: Command, null_fd: int, stack: contextlib.AsyncExitStack) -> None:
        self._runtime = runtime
        self._command = command
        self._null_fd = null_fd
        self._stack = stack
        self._captures: dict[int, tuple[int, Capture]] = {}
        self._console: socket.socket | None = None
        self._begin_s = time.monotonic()

    def _descriptor(self, fd: int) -> int:
        self._stack.callback(os.close, fd)
        return fd

    async def start(self, stdio: Sequence[int]) -> None:
        """Starts the wrapper; from here on, closing our end of its socket ends everything."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._control = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
            self._stack.callback(self._control.socket.close)
            descriptors = {0: self._null_fd, 1: self._null_fd, 2: self._null_fd, 3: theirs.fileno()}
            to_close: list[int] = []
            if self._command.console_path is not None:
                self._console = self._listen(self._command.console_path)
            else:
                descriptors.update(enumerate(stdio))
                for number in range(max(1, len(stdio)), 3):
                    reading, descriptors[number] = os.pipe2(os.O_CLOEXEC)
                    os.set_blocking(reading, False)
                    to_close.append(descriptors[number])
                    self._captures[number] = (self._descriptor(reading), Capture(self._command.output_limit_bytes))
            process_path = self._command.directory / f"{self._command.name}.json"
            process_path.write_text(json.dumps(self._command.process))
            try:
                pid = await self._runtime.exec(self._command.container_id, process_path, descriptors, self._command.console_path)
            finally:
                process_path.unlink()
                for fd in to_close:
                    os.close(fd)
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):  # ended and reaped already
            self._pidfd = self._descriptor(os.pidfd_open(pid))

    def _listen(self, path: Path) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        self._stack.callback(listener.close)
        listener.bind(os.fspath(path))
        self._stack.callback(path.unlink)
        listener.listen(1)
        listener.setblocking(False)
        return listener

    async def _hand_over_terminal(self, on_terminal: Callable[[int], Awaitable[None]]) -> None:
        assert self._console is not None
        try:
            peer, _ = self._console.accept()  # the runtime connected before it ended
            with peer:
                peer.settimeout(1.0)
                _, descriptors, _, _ = socket.recv_fds(peer, 4096, 1)
        except OSError as error:
            raise EnvletError(errors.RUNTIME_FAILED, f"{self._runtime.name} did not hand over the terminal: {error}") from error
        if len(descriptors) != 1:
            raise EnvletError(errors.RUNTIME_FAILED, f"{self._runtime.name} handed over no terminal")
        try:
            await on_terminal(descriptors[0])
        finally:
            os.close(descriptors[0])

    async def finish(self, on_terminal: Callable[[int], Awaitable[None]]) -> Outcome:
        report = b""
        try:
            if self._console is not None:
                await self._hand_over_terminal(on_terminal)
            with trio.move_on_after(self._command.timeout_s or float("inf")) as timeout:
                async with trio.open_nursery() as nursery:
                    for fd, capture in self._captures.values():
                        nursery.start_soon(self._read_output, fd, capture)
                    report = await self._read_report()
                    nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._end()
        timed_out = timeout.cancelled_caught
        for fd, capture in self._captures.values():
            _drain(fd, capture)
        args = self._command.process["args"]
        parsed = (137, 9, None) if timed_out else parse_report(report, args[5], args[3])
        code, signal, failure = parsed or (137, 9, None)
        outputs = [self._captures[number][1].value() if number in self._captures else (b"", 0) for number in (1, 2)]
        result = ExecResult(
            exit_code=code,
            timed_out=timed_out,
            wall_s=time.monotonic() - self._begin_s,
            failure=failure,
            stdout=outputs[0][0],
            stderr=outputs[1][0],
            stdout_omitted_bytes=outputs[0][1],
            stderr_omitted_bytes=outputs[1][1],
        )
        return Outcome(result, signal, lost=parsed is None)

    async def _read_report(self) -> bytes:
        report = b""
        while not report.endswith(b"\n") and len(report) < 256:
            try:
                data = await self._control.receive_some(256)
            except trio.BrokenResourceError:
                break
            if not data:
                break
            report += data
        return report

    @staticmethod
    async def _read_output(fd: int, capture: Capture) -> None:
        while True:
            await trio.lowlevel.wait_readable(fd)
            try:
                data = os.read(fd, _PIPE_BYTES)
            except BlockingIOError:
                continue
            if not data:
                return
            capture.add(data)

    async def _end(self) -> None:
        """Closes the socket, which makes the wrapper kill what is left, and waits until the wrapper is gone."""
        self._control.socket.close()
        if self._pidfd is None:
            return
        with trio.move_on_after(KILL_DEADLINE_S) as scope:
            await processes.wait_exit(self._pidfd)
        if scope.cancelled_caught:
            raise EnvletError(
                errors.CLEANUP_FAILED,
                f"the command could not be killed within {KILL_DEADLINE_S:g} s, it hangs in the kernel; delete the environment",
            )
        processes.reap(self._pidfd)


def _drain(fd: int, capture: Capture) -> None:
    """What the pipe holds now. Bounded: a background process may go on writing."""
    taken = 0
    while taken < _DRAIN_MAX_BYTES:
        try:
            data = os.read(fd, _PIPE_BYTES)
        except BlockingIOError:
            return
        if not data:
            return
        capture.add(data)
        taken += len(data)
