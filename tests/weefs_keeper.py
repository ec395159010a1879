"""What keeps a weefs mount alive while its processes die: the descriptors, and starting the next one. And a source of layers that takes
its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from aiohttp import web
from registry_fixture import run_server

from weefs import core, protocol

THREADS = 2
PARKED_SIZE = 48
"""Of a record of a READ that waits (csrc/session.h)."""
MNT_FORCE, MNT_DETACH = 1, 2
PLAIN_PYTHON = os.readlink("/proc/self/exe")
"""For a process whose threads a test counts: tools/sanitize.sh runs `sys.executable` with a runtime that has threads of its own."""


def umount(path: Path, flags: int) -> int:
    """umount2(2): 0 when it worked."""
    done: int = ctypes.CDLL(None).umount2(os.fsencode(path), flags)
    return done


def wait_until(condition: Callable[[], bool], what: str = "what was waited for") -> None:
    """For what has no event to wait for."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.001)


@attrs.define
class Source:
    """Serves layer files as a registry would, each answer after `delay_s`; while `open` is cleared, none."""

    delay_s: float
    blobs: dict[str, bytes] = attrs.field(factory=dict)
    host: str = ""
    requests: int = 0
    open: threading.Event = attrs.field(factory=threading.Event)
    error: int = 0
    """An HTTP status to answer instead."""

    def add(self, blob: bytes) -> protocol.Layer:
        digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
        self.blobs[digest] = blob
        return protocol.Layer(digest=digest, size_bytes=len(blob), source=f"http://{self.host}/repo")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        await asyncio.sleep(self.delay_s)
        await asyncio.to_thread(self.open.wait)
        if self.error:
            return web.Response(status=self.error)
        blob = self.blobs[request.path.rpartition("/")[2]]
        begin, _, end = request.headers["Range"].removeprefix("bytes=").partition("-")
        piece = blob[int(begin) : int(end) + 1]
        headers = {"Content-Range": f"bytes {begin}-{int(begin) + len(piece) - 1}/{len(blob)}"}
        return web.Response(status=206, body=piece, headers=headers)


@contextlib.contextmanager
def run_source(delay_s: float = 0.0) -> Iterator[Source]:
    source = Source(delay_s)
    source.open.set()
    with run_server(source.handle) as host:
        source.host = host
        try:
            yield source
        finally:
            source.open.set()


class Connection:
    """A daemon's end: blocking, one thread."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60)
        self._socket.connect(str(path))
        self._buffer = b""
        self._numbers = itertools.count(1)
        self.faults: list[protocol.FaultEvent] = []

    def send(self, make: Callable[..., Any], **parameters: Any) -> int:
        number = next(self._numbers)
        self._socket.sendall(protocol.encode(make(id=number, **parameters)) + b"\n")
        return number

    def receive(self) -> protocol.Message:
        while b"\n" not in self._buffer:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the data plane closed the connection")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return protocol.decode_message(line)

    def answer(self, number: int) -> Any:
        """Waits for it; faults that come before it are kept."""
        while True:
            message = self.receive()
            if isinstance(message, protocol.FaultEvent):
                self.faults.append(message)
            elif message.id == number:
                if message.error is not None:
                    raise RuntimeError(f"{message.error.kind}: {message.error.message}")
                return message.result

    def next_fault(self) -> protocol.FaultEvent:
        if self.faults:
            return self.faults.pop(0)
        message = self.receive()
        assert isinstance(message, protocol.FaultEvent), message
        return message

    def call(self, make: Callable[..., Any], **parameters: Any) -> Any:
        return self.answer(self.send(make, **parameters))

    def hello(self, *, descriptors: bool = False) -> tuple[dict[str, Any], list[int]]:
        number = self.send(protocol.Hello, descriptors=descriptors)
        fds: list[int] = []
        if descriptors:
            data, fds, _flags, _address = socket.recv_fds(self._socket, 1 << 16, 70)
            self._buffer += data
        return self.answer(number), fds

    def add_plan(self, layers: Sequence[protocol.Layer]) -> str:
        plan: str = self.call(protocol.AddPlan, layers=list(layers))["plan_id"]
        return plan

    def close(self) -> None:
        self._socket.close()


class Keeper:
    """Mounts, and starts one weefs after the other on the same descriptors. Use `keeper`."""

    def __init__(
        self, directory: Path, *, resend: bool = True, deadline_s: float = 30.0, threads: int = THREADS, max_pending: int = 512
    ) -> None:
        self.directory = directory
        self.mountpoint = directory / "mnt"
        self.mountpoint.mkdir(parents=True)
        self.journal = directory / "journal"
        self.cache = directory / "cache"
        self.stderr = (directory / "stderr").open("ab")
        self.resend = resend
        self.deadline_s = deadline_s
        self.process: subprocess.Popen[bytes] | None = None
        self.session_fd = core.create_session(threads=threads, max_pending=max_pending)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(directory / "socket"))
        self.listener.listen()
        self.fuse_fds = core.mount(self.mountpoint, source="weefs-test", threads=threads)
        self.max_pending = max_pending

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "weefs", "--listen", str(self.listener.fileno()), "--session", str(self.session_fd)]
        for fd in self.fuse_fds:
            command += ["--fuse", str(fd)]
        command += ["--journal", str(self.journal), "--cache", str(self.cache), "--deadline", str(self.deadline_s)]
        command += ["--fill", "off", "--no-profiles"]
        if not self.resend:
            command.append("--no-resend")
        self.process = subprocess.Popen(
            command, pass_fds=[self.listener.fileno(), self.session_fd, *self.fuse_fds], stdout=self.stderr, stderr=self.stderr
        )
        return self.process

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def connect(self, *, hello: bool = True) -> Connection:
        """Waits until the process serves."""
        connection = Connection(self.directory / "socket")
        if hello:
            connection.hello()
        return connection

    def parked(self) -> int:
        """READs that wait for chunks, as the memory that outlives the processes says."""
        table = os.pread(self.session_fd, self.max_pending * PARKED_SIZE, 4096)
        return sum(table[at : at + 8] != bytes(8) for at in range(0, len(table), PARKED_SIZE))

    def said(self) -> str:
        """What the processes wrote to stderr."""
        return (self.directory / "stderr").read_text()

    def unmount(self) -> None:
        """Ends the connection, whoever else has the mount in a namespace of its own. Not with umount(8), which looks at the mount point
        and waits for ever when nobody serves.
        """
        umount(self.mountpoint, MNT_FORCE)
        umount(self.mountpoint, MNT_DETACH)

    def close(self) -> None:
        self.unmount()
        if self.process is not None:
            try:
                self.process.wait(20)  # it ends by itself when its mount is gone
            finally:
                self.process.kill()
                self.process.wait()
        for fd in [*self.fuse_fds, self.session_fd]:
            os.close(fd)
        self.listener.close()
        self.stderr.close()


@contextlib.contextmanager
def keeper(directory: Path, **options: Any) -> Iterator[Keeper]:
    kept = Keeper(directory, **options)
    try:
        yield kept
    finally:
        kept.close()


# Readers


def expected_of(files: dict[str, bytes], root: Path) -> dict[str, Any]:
    """What readers compare with: contents as they were made, and attributes as they are shown before anything is killed."""
    attributes = {}
    for name in files:
        status = os.lstat(root / name)
        attributes[name] = [status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_size, status.st_nlink]
    directories: dict[str, list[str]] = {}
    for name in files:
        directory, _, base = name.rpartition("/")
        directories.setdefault(directory, []).append(base)
    return {
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        "attributes": attributes,
        "directories": {name: sorted(names) for name, names in directories.items() if name},
    }


READER = Path(__file__).parent / "weefs_reader.py"


@attrs.define
class Readers:
    """Processes that read and compare everything until they are told to stop."""

    processes: list[subprocess.Popen[str]]

    def stop(self) -> list[dict[str, Any]]:
        """What each has counted."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        found = []
        for process in self.processes:
            assert process.stdout is not None
            said = process.stdout.read()
            process.stdout.close()
            assert process.wait() == 0, said
            found.append(json.loads(said))
        return found


@contextlib.contextmanager
def readers(roots: Sequence[Path], expected: Path) -> Iterator[Readers]:
    """One for each of `roots`. They end with the block in any case, when the mount still answers or is gone."""
    started = Readers([])
    try:
        for seed, root in enumerate(roots):
            command = [sys.executable, str(READER), str(root), str(expected), str(seed)]
            started.processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        yield started
    finally:
        for process in started.processes:
            process.kill()
