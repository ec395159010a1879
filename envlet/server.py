"""The Unix socket: connections in, requests to the daemon, answers out.

Each connection has a nursery; its requests run concurrently in it and are cancelled when the client closes either
direction. So a client that vanishes takes its unfinished creations and commands with it and nothing of anybody else.
Answers of one connection are written one at a time, each whole.

Descriptors (SCM_RIGHTS) arrive at or before the end of the line that they belong to and are taken in order, as many
as the request's `descriptors` says, also when the request is refused for another reason. The kernel never joins what
was sent with descriptors to what follows, but it may deliver a line in pieces; hence a queue, bounded, and a connection
whose count is wrong is closed, because nothing later on it can be trusted to be whole.
"""

import array
import contextlib
import errno
import grp
import logging
import os
import pwd
import socket
import stat
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import trio

from envlet import errors, rpc, syscalls, types
from envlet.config import NodeConfig
from envlet.errors import EnvletError

log = logging.getLogger("envlet")

DESCRIPTORS_MAX = 32
"""Received and not yet taken, of one connection."""
_RECEIVE_BYTES = 65536
_LISTEN_BACKLOG = 128
OnTerminal = Callable[[int], Awaitable[None]]
OnProgress = Callable[[int, int], Awaitable[None]]
_DECODERS = {name: msgspec.json.Decoder(method.request) for name, method in types.METHODS.items()}


class Handlers(Protocol):
    """What the server needs of the daemon: the methods of the API."""

    async def create(self, request: types.CreateRequest, descriptors: Sequence[int]) -> types.EnvironmentInfo: ...
    async def exec(self, request: types.ExecRequest, descriptors: Sequence[int], on_terminal: OnTerminal) -> types.ExecResult: ...
    async def get(self, request: types.GetRequest) -> types.EnvironmentInfo: ...
    async def list(self, request: types.ListRequest) -> types.ListResult: ...
    async def diff(self, request: types.DiffRequest, descriptors: Sequence[int]) -> types.DiffResult: ...
    async def delete(self, request: types.DeleteRequest) -> types.DeleteResult: ...
    async def resolve(self, request: types.ResolveRequest) -> types.PlanInfo: ...
    async def prefetch(self, request: types.PrefetchRequest, on_progress: OnProgress) -> types.PrefetchResult: ...
    async def collect(self, request: types.CollectRequest) -> types.CollectResult: ...
    async def verify(self, request: types.VerifyRequest) -> types.VerifyResult: ...
    async def doctor(self, request: types.DoctorRequest) -> types.DoctorResult: ...
    async def info(self, request: types.InfoRequest) -> types.NodeInfo: ...
    async def restart(self, request: types.RestartRequest) -> types.RestartResult: ...
    def leave(self) -> None:
        """The answer to a restart has been sent."""


async def dispatch(
    handlers: Handlers, request: types.Request, descriptors: Sequence[int], on_terminal: OnTerminal, on_progress: OnProgress
) -> types.Result:
    """Calls the method that a checked request belongs to."""
    match request:
        case types.CreateRequest():
            return await handlers.create(request, descriptors)
        case types.ExecRequest():
            return await handlers.exec(request, descriptors, on_terminal)
        case types.GetRequest():
            return await handlers.get(request)
        case types.ListRequest():
            return await handlers.list(request)
        case types.DiffRequest():
            return await handlers.diff(request, descriptors)
        case types.DeleteRequest():
            return await handlers.delete(request)
        case types.ResolveRequest():
            return await handlers.resolve(request)
        case types.PrefetchRequest():
            return await handlers.prefetch(request, on_progress)
        case types.CollectRequest():
            return await handlers.collect(request)
        case types.VerifyRequest():
            return await handlers.verify(request)
        case types.DoctorRequest():
            return await handlers.doctor(request)
        case types.InfoRequest():
            return await handlers.info(request)
        case types.RestartRequest():
            return await handlers.restart(request)
        case _:
            raise TypeError(f"{type(request).__name__} belongs to no method")


def may_use(uid: int, groups: Sequence[int], own_uid: int, socket_gid: int) -> bool:
    """Whether a peer may use the socket: root, the daemon's own user, a member of the socket's group."""
    return uid in (0, own_uid) or socket_gid in groups


class Server:
    """Listens on the socket of the node."""

    def __init__(self, config: NodeConfig, handlers: Handlers, listener: socket.socket | None = None) -> None:
        """`listener`: the socket of the daemon before, which listens already; it is this object's now."""
        self._path = config.socket_path
        self._gid = os.getgid() if config.socket_group is None else config.socket_group
        self._connections = trio.Semaphore(config.connections_max)
        self._requests_max = config.requests_max
        self._handlers = handlers
        self._given = listener
        self._accepting = trio.CancelScope()
        self._hands_over = False
        self.handed_over: socket.socket | None = None
        """After `hand_over` and the end of `run`: the socket, still listening, for whoever starts next."""

    def hand_over(self) -> None:
        """Accepts no more and leaves the socket where it is: clients that connect from now on wait for the next daemon."""
        self._hands_over = True
        self._accepting.cancel()

    def withdraw(self) -> None:
        """After `run`: nobody starts next after all."""
        if self.handed_over is not None:
            self.handed_over.close()
            self.handed_over = None
            self._path.unlink(missing_ok=True)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accepts until cancelled; then the socket is gone. Raises EnvletError(EXISTS) if a daemon listens there
        already.
        """
        listener = trio.socket.from_stdlib_socket(self._given or self._listen())
        try:
            async with trio.open_nursery() as nursery:
                task_status.started()
                with self._accepting:
                    await self._accept(listener, nursery)
        finally:
            if self._hands_over:
                self.handed_over = socket.socket(fileno=os.dup(listener.fileno()))
            else:
                with contextlib.suppress(FileNotFoundError):
                    self._path.unlink()
            listener.close()

    async def _accept(self, listener: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        while True:
            await self._connections.acquire()
            try:
                peer, _ = await listener.accept()
            except OSError as error:
                self._connections.release()
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    await trio.sleep(0.1)
                    continue
                if error.errno == errno.ECONNABORTED:
                    continue
                raise
            nursery.start_soon(self._serve_peer, peer)

    def _listen(self) -> socket.socket:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._remove_stale()
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(os.fspath(self._path))
            os.chown(self._path, -1, self._gid)
            self._path.chmod(0o660)
            listener.listen(_LISTEN_BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    def _remove_stale(self) -> None:
        """Removes the socket of a daemon that was killed; refuses to take over from one that lives, or to remove
        anything else.
        """
        try:
            status = os.lstat(self._path)
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(status.st_mode):
            raise EnvletError(errors.EXISTS, f"{self._path} exists and is no socket; remove it or choose another path")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(os.fspath(self._path))
            except ConnectionRefusedError:
                self._path.unlink()
                return
        raise EnvletError(errors.EXISTS, f"a daemon listens on {self._path} already; stop it or choose another path")

    async def _serve_peer(self, peer: trio.socket.SocketType) -> None:
        try:
            with peer:
                connection = _Connection(peer, self._handlers, self._requests_max, self.hand_over)
                refusal = self._refusal(peer)
                if refusal is not None:
                    await connection.send(rpc.encode_error(None, refusal))
                    return
                await connection.serve()
        except OSError as error:
            log.warning("a connection broke: %s", error)
        except Exception:  # a defect costs this connection, not the node
            log.exception("a connection was given up")
        finally:
            self._connections.release()

    def _refusal(self, peer: trio.socket.SocketType) -> EnvletError | None:
        raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, gid = struct.unpack("3i", raw)
        groups = [gid]
        with contextlib.suppress(OSError):  # more than 256 groups do not fit: then the first counts
            groups += syscalls.unpack_groups(peer.getsockopt(socket.SOL_SOCKET, syscalls.SO_PEERGROUPS, 1024))
        if may_use(uid, groups, os.geteuid(), self._gid):
            return None
        return EnvletError(
            errors.PERMISSION,
            f"user {_name(pwd.getpwuid, uid)} may not use this node; it is for root and the group {_name(grp.getgrgid, self._gid)}",
        )


def _name(look_up: Callable[[int], Any], number: int) -> str:
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)


class _Connection:
    """One client."""

    def __init__(self, peer: trio.socket.SocketType, handlers: Handlers, requests_max: int, on_restart: Callable[[], None]) -> None:
        self._on_restart = on_restart
        self._peer = peer
        self._handlers = handlers
        self._sending = trio.Lock()
        self._requests = trio.Semaphore(requests_max)
        self._descriptors: deque[int] = deque()

    async def serve(self) -> None:
        """Until the client closes, or breaks the protocol."""
        decoder = rpc.LineDecoder()
        try:
            async with trio.open_nursery() as nursery:
                try:
                    while data := await self._receive():
                        for line in decoder.feed(data):
                            await self._requests.acquire()
                            await self._begin(line, nursery)
                except EnvletError as error:
                    with contextlib.suppress(ConnectionError):
                        await self.send(rpc.encode_error(None, error))
                except ConnectionError:
                    pass  # the client is gone: what it began is cancelled below, as after an orderly close
                nursery.cancel_scope.cancel()
        finally:
            _close_all(self._descriptors)

    async def _receive(self) -> bytes:
        data, ancillary, flags, _ = await self._peer.recvmsg(
            _RECEIVE_BYTES, socket.CMSG_SPACE(DESCRIPTORS_MAX * 4), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                self._descriptors.extend(numbers)
        if flags & socket.MSG_CTRUNC or len(self._descriptors) > DESCRIPTORS_MAX:
            raise EnvletError(errors.DESCRIPTORS, f"more than {DESCRIPTORS_MAX} descriptors wait for their requests")
        return data

    async def _begin(self, line: bytes, nursery: trio.Nursery) -> None:
        """Checks a request and starts it. What cannot be understood is answered at once."""
        request_id: rpc.RequestId | None = None
        try:
            call = rpc.decode_request(line)
            request_id = call.request_id
            request = _checked(call)
            taken = self._take_descriptors(request)
        except EnvletError as error:
            self._requests.release()
            if request_id is None:
                request_id = rpc.request_id_of(line)
            count = _said_count(line)
            await self.send(rpc.encode_error(request_id, error))
            if self._descriptors and (count is None or count > len(self._descriptors)):
                # whose are they? Not those of the next request, which would take them
                raise EnvletError(errors.DESCRIPTORS, "a refused request does not say how many of the descriptors are its own") from error
            _close_all([self._descriptors.popleft() for _ in range(count or 0) if self._descriptors])
            return
        nursery.start_soon(self._run, request_id, request, taken)

    def _take_descriptors(self, request: types.Request) -> list[int]:
        count = getattr(request, "descriptors", 0)
        if count > len(self._descriptors):
            raise EnvletError(
                errors.DESCRIPTORS,
                f"the request says that it has {count} descriptors, {len(self._descriptors)} came; send them with the line",
            )
        return [self._descriptors.popleft() for _ in range(count)]

    async def _run(self, request_id: rpc.RequestId, request: types.Request, descriptors: list[int]) -> None:
        result: types.Result | None = None
        try:
            try:
                on_terminal, on_progress = partial(self._send_terminal, request_id), partial(self._send_progress, request_id, request)
                result = await dispatch(self._handlers, request, descriptors, on_terminal, on_progress)
                answer = rpc.encode_result(request_id, result)
            except EnvletError as error:
                answer = rpc.encode_error(request_id, error)
            except Exception as error:
                log.exception("%s failed", type(request).__name__)
                defect = EnvletError(errors.INTERNAL_ERROR, f"{type(error).__name__}: {error}; the log of the daemon has the traceback")
                answer = rpc.encode_error(request_id, defect)
        finally:
            _close_all(descriptors)
            self._requests.release()
        restarts = isinstance(result, types.RestartResult)
        if restarts:  # before the answer: whoever connects after it must reach the next daemon
            self._on_restart()
        try:
            with contextlib.suppress(ConnectionError):  # gone before its answer: `serve` sees it, too
                await self.send(answer)
        finally:
            if restarts:
                self._handlers.leave()

    async def send(self, data: bytes) -> None:
        """Writes one message, whole. Raises OSError."""
        async with self._sending:
            view = memoryview(data)
            while view:
                view = view[await self._peer.send(view) :]

    async def _send_terminal(self, request_id: rpc.RequestId, master: int) -> None:
        notification = types.TerminalNotification(request_id=request_id)
        data = rpc.encode_notification("exec.terminal", notification)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [master]))]
        async with self._sending:
            sent = await self._peer.sendmsg([data], rights)
            while sent < len(data):
                sent += await self._peer.send(data[sent:])


    async def _send_progress(self, request_id: rpc.RequestId, request: types.Request, wanted_bytes: int, done_bytes: int) -> None:
        """If the request wants it."""
        if getattr(request, "progress", False):
            notification = types.ProgressNotification(request_id=request_id, wanted_bytes=wanted_bytes, done_bytes=done_bytes)
            with contextlib.suppress(ConnectionError):  # the client is gone: `serve` sees it, too
                await self.send(rpc.encode_notification("plan.progress", notification))


def _said_count(line: bytes) -> int | None:
    """How many descriptors a refused request says that it has; None if that cannot be read."""
    said = rpc.descriptors_of(line)
    if said is None or said.count is not None:
        return None if said is None else said.count
    method = types.METHODS.get(said.method)
    defaults = {field.name: field.default for field in msgspec.structs.fields(method.request)} if method is not None else {}
    return int(defaults.get("descriptors", 0))


def _checked(call: rpc.Call) -> types.Request:
    if call.method not in _DECODERS:
        raise EnvletError(errors.METHOD_NOT_FOUND, f"there is no method {call.method!r}; there are {', '.join(sorted(types.METHODS))}")
    try:
        return _DECODERS[call.method].decode(call.params)
    except msgspec.ValidationError as error:
        raise EnvletError(errors.INVALID_PARAMS, f"{call.method}: {error}") from error


def _close_all(descriptors: deque[int] | list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
