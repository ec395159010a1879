"""What a data plane needs to live on without the process that serves: descriptors, made once and kept twice.

| descriptor | what it keeps |
|---|---|
| /dev/fuse and its clones | the connection: the mount, and every request that waits in the kernel |
| session memory | what was taken from the kernel and not answered (weefs_session in csrc/) |
| listening socket | the way to the data plane, for the next daemon |

The daemon makes them and hands duplicates to the data plane. While either lives, the other can be replaced: a data plane that
died gets a successor on the daemon's, a daemon that died gets them back from the data plane.

Whoever keeps them must never open anything on the mount: closing a file there could wait for a server that is gone.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

import attrs
import msgspec

from envlet import errors, locks
from envlet.errors import EnvletError
from envlet.syscalls import MNT_DETACH, umount
from weefs import core, protocol

HANDSHAKE_TIMEOUT_S = 20.0
_FUSE_FDS_MAX = 64


@attrs.frozen
class Kept:
    """The descriptors, owned by whoever holds this."""

    listener: int
    session: int
    fuse: tuple[int, ...]

    def all(self) -> tuple[int, ...]:
        return (self.listener, self.session, *self.fuse)

    def close(self) -> None:
        for fd in self.all():
            os.close(fd)


@attrs.frozen
class Running:
    """A data plane that serves, and our connection to it."""

    connection: socket.socket
    kept: Kept
    welcome: protocol.Welcome
    received: bytes = b""
    """What came behind the welcome already."""


def make(mount_paths: Sequence[Path], socket_path: Path, threads: int) -> Kept:
    """Mounts weefs on each path, with as many threads each, and makes what is kept. Nothing serves yet. Raises OSError; then nothing is
    left.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(socket_path))
        stack.callback(socket_path.unlink, missing_ok=True)
        session = core.create_session(threads=threads * len(mount_paths), connections=len(mount_paths))
        stack.callback(os.close, session)
        fuse: list[int] = []
        for path in mount_paths:
            made = core.mount(path, threads=threads)
            stack.callback(close_all, made)
            stack.callback(umount, str(path), MNT_DETACH)
            fuse += made
        stack.pop_all()
    return Kept(listener.detach(), session, tuple(fuse))


def with_socket(kept: Kept, socket_path: Path) -> Kept:
    """The same, with a listening socket that can be found: a new one if somebody removed its file. Only while nothing serves.
    Raises OSError; then all is as it was.
    """
    with socket.socket(fileno=os.dup(kept.listener)) as listener, contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(socket_path.lstat().st_mode) and listener.getsockname() == os.fspath(socket_path):
            return kept
    fresh = _listen(socket_path)
    os.close(kept.listener)
    return attrs.evolve(kept, listener=fresh.detach())


def _listen(socket_path: Path) -> socket.socket:
    """Raises OSError; then nothing is left."""
    socket_path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(os.fspath(socket_path))
        socket_path.chmod(0o600)
        listener.listen(8)
    except BaseException:
        listener.close()
        raise
    return listener


def session_refusal(session: int) -> str | None:
    """Why this version's data plane could not go on with the session memory of another one; None if it can."""
    try:
        core.Core(session_fd=session).close()
    except core.CoreError as error:
        return str(error)
    return None


def claim(run_dir: Path) -> int:
    """The right to be this run directory's keeper: a lock that its holder keeps open. To be taken before `find_running`, which would
    take a data plane away from a daemon that lives. Raises EnvletError(EXISTS), OSError.
    """
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o755)
    return locks.take(run_dir / "keeper.lock", os.O_RDWR | os.O_CREAT, f"run directory {run_dir}")


def find_running(socket_path: Path) -> Running | None:
    """The data plane that an earlier daemon left, or None if there is none. Blocks. Raises EnvletError(EXISTS) if something is
    there and does not answer as a data plane does.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(HANDSHAKE_TIMEOUT_S)
        try:
            connection.connect(os.fspath(socket_path))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        connection.sendall(protocol.encode(protocol.Hello(id=0, descriptors=True)) + b"\n")
        running = _receive_welcome(connection)
        connection.settimeout(None)
    except (OSError, ValueError) as error:
        connection.close()
        raise EnvletError(
            errors.EXISTS,
            f"the data plane of an earlier daemon listens on {socket_path} and does not answer ({error}); find its process with "
            "`ss -xlp`, end it, and start again: its environments are lost",
        ) from error
    return running


def _receive_welcome(connection: socket.socket) -> Running:
    """Reads the answer to `hello` and the descriptors that came with it. Raises OSError, ValueError."""
    line = b""
    descriptors: list[int] = []
    try:
        while b"\n" not in line:
            data, received, _, _ = socket.recv_fds(connection, 65536, 2 + _FUSE_FDS_MAX, socket.MSG_CMSG_CLOEXEC)
            descriptors += received
            if not data:
                raise ConnectionError("it closed the connection")
            line += data
        line, _, rest = line.partition(b"\n")
        answer = protocol.decode_message(line)
        if not isinstance(answer, protocol.Answer) or answer.error is not None or len(descriptors) < 3:
            raise ValueError(f"expected a welcome and at least 3 descriptors, received {line[:200]!r} and {len(descriptors)}")
        welcome = msgspec.convert(answer.result, protocol.Welcome)
    except BaseException:
        close_all(descriptors)
        raise
    listener, session, *fuse = descriptors
    return Running(connection, Kept(listener, session, tuple(fuse)), welcome, rest)


def close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)
