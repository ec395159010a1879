"""The OCI runtime, crun or runc: starts an environment, runs a command in it, forgets it.

Both are used detached. `run --detach` costs one process start less than create and start; `exec --detach` leaves no
runtime process waiting beside each command. How a command ended comes over a socket of our own wrapper (csrc/init.c),
not through the runtime. The runtime's messages go to a log file, because its stderr is that of the command.
"""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import attrs

from envlet import errors, processes
from envlet.errors import EnvletError


@attrs.frozen
class Runtime:
    """One OCI runtime with a state directory of its own."""

    program: str
    name: str
    version: str
    state_dir: Path
    _orphans: processes.Orphans = attrs.field(
        default=attrs.Factory(lambda self: processes.Orphans(Path(self.program).name), takes_self=True), init=False, eq=False, repr=False
    )

    @classmethod
    def find(cls, wanted: str, state_dir: Path) -> "Runtime":
        """The runtime of this name or absolute path. Blocks. Raises EnvletError(RUNTIME_FAILED)."""
        program = shutil.which(wanted, path=processes.PROGRAM_PATH)
        if program is None:
            raise EnvletError(errors.RUNTIME_FAILED, f"no OCI runtime {wanted!r} in {processes.PROGRAM_PATH}; install crun or runc")
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise EnvletError(errors.RUNTIME_FAILED, f"{program} --version failed: {answer.stderr.strip()}")
        name = Path(program).name
        first = answer.stdout.split("\n")[0].removeprefix(name).removeprefix(" version").strip()
        return cls(program, name, first, state_dir)

    def _command(self, log: Path, *arguments: str) -> list[str]:
        manager = ["--cgroup-manager=cgroupfs"] if self.name == "crun" else []
        return [
            self.program, "--root", str(self.state_dir), "--log", str(log), "--log-format", "json", *manager, *arguments
        ]  # fmt: skip

    async def run(self, container_id: str, bundle: Path, control_fd: int, null_fd: int) -> int:
        """Starts pid 1, which gets `control_fd` as descriptor 3; its pid here. Raises EnvletError(RUNTIME_FAILED)."""
        log, pid_file = bundle / "runtime.log", bundle / "init.pid"
        command = self._command(
            log, "run", "--detach", "--pid-file", str(pid_file), "--preserve-fds", "1", "--bundle", str(bundle), container_id
        )
        return await self._start(command, {0: null_fd, 1: null_fd, 2: null_fd, 3: control_fd}, log, pid_file)

    async def exec(self, container_id: str, process: Path, descriptors: Mapping[int, int], console_socket: Path | None) -> int:
        """Starts a command; the pid of its wrapper here. `process` holds the `process` object. Raises
        EnvletError(RUNTIME_FAILED).
        """
        log, pid_file = process.with_suffix(".log"), process.with_suffix(".pid")
        console = ["--console-socket", str(console_socket)] if console_socket is not None else []
        command = self._command(
            log, "exec", "--detach", "--process", str(process), "--pid-file", str(pid_file), "--preserve-fds", "1",
            *console, container_id,
        )  # fmt: skip
        try:
            return await self._start(command, descriptors, log, pid_file)
        finally:
            pid_file.unlink(missing_ok=True)
            log.unlink(missing_ok=True)

    async def delete(self, container_id: str, log: Path, null_fd: int) -> None:
        """Forgets an environment whose processes have ended; fine if it is not known. Raises
        EnvletError(RUNTIME_FAILED).
        """
        if not (self.state_dir / container_id).exists():
            return
        command = self._command(log, "delete", "--force", container_id)
        status = await processes.run(command, {0: null_fd, 1: null_fd, 2: null_fd}, self._orphans)
        if (self.state_dir / container_id).exists():
            raise self._failure(command, status, log)

    async def end_all(self) -> None:
        """Kills the runtime's own processes that an earlier daemon started and did not live to wait for: one that is still making an
        environment would finish it after the clean-up. Raises OSError.
        """
        ours = [b"--root", os.fsencode(self.state_dir)]
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                arguments = _arguments_of(entry)
                if arguments[1:3] != ours or os.path.basename(arguments[0]) != os.fsencode(Path(self.program).name):
                    continue
                pidfd = os.pidfd_open(int(entry))
                try:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    await processes.wait_exit(pidfd)
                finally:
                    os.close(pidfd)

    async def _start(self, command: list[str], descriptors: Mapping[int, int], log: Path, pid_file: Path) -> int:
        status = await processes.run(command, descriptors, self._orphans)
        if status != 0:
            raise self._failure(command, status, log)
        return _read_pid(pid_file)

    def _failure(self, command: list[str], status: int, log: Path) -> EnvletError:
        how = f"exit status {status}" if status >= 0 else f"signal {-status}"
        verb = next(word for word in command if word in ("run", "exec", "delete"))
        message = read_log(log)
        if verb == "run" and (os.strerror(errno.ENOSPC) in message or (status == errno.ENOSPC and not message)):
            return EnvletError(  # a full disk takes no log either; the exit status is then all that crun can say
                errors.CAPACITY,
                f"{log.parent} or {self.state_dir}: no space left ({self.name} {verb} failed with {how}: "
                f"{message or 'it could not write its log'}); free some (df -h, df -i) or ask another node",
            )
        message = message or "it left no message"
        return EnvletError(errors.RUNTIME_FAILED, f"{self.name} {verb} failed with {how}: {message}")


def _arguments_of(pid: str) -> list[bytes]:
    return Path("/proc", pid, "cmdline").read_bytes().split(b"\0")


def _read_pid(path: Path) -> int:
    return int(path.read_text())


def read_log(log: Path) -> str:
    """The errors of a runtime's JSON log, warnings and noise left out; all of it where no line says that it is an
    error.
    """
    try:
        with log.open("rb") as file:
            lines = file.read(65536).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    messages: list[str] = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            messages.append(line.strip())
            continue
        if isinstance(entry, dict) and entry.get("level", "error") in ("error", "fatal"):
            messages.append(str(entry.get("msg", "")).strip())
    return "; ".join(dict.fromkeys(filter(None, messages)))


def open_null() -> int:
    """/dev/null for reading and writing."""
    return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
