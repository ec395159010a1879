"""The data-plane process of a node: serves the mount, answers the daemon's requests, and reports faults.

It outlives its daemon, and its successor takes over what it leaves: see weefs/protocol.py for the one side, and weefs/journal.py and
csrc/session.h for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from registry import Credentials
from weefs import journal, protocol
from weefs.cachedir import CacheDirectory
from weefs.core import Core
from weefs.dataplane import DataPlane
from weefs.failures import error_kind, first_cause, sentence
from weefs.fetch import FetchPolicy
from weefs.fill import FillPolicy
from weefs.journal import Journal
from weefs.log import say, say_traceback
from weefs.peerconfig import PeersConfig
from weefs.room import CacheBound

CACHE_WAIT_S = 10.0
"""A predecessor that was killed has let its cache go when it is gone for good; one that is being replaced ends at once."""
ACCEPT_PAUSE_S = 0.1
"""After accept(2) failed, for want of descriptors or memory."""


class Service:
    """What the daemon may ask for, whichever connection it comes by. Requests run concurrently, and to their end even when nobody waits
    for their answers any more: each of them can be asked for again.
    """

    def __init__(self, plane: DataPlane, journal: Journal, descriptors: Sequence[int], *, resumed: bool) -> None:
        """`descriptors`: what a `hello` can ask for, in the protocol's order."""
        self._plane = plane
        self._journal = journal
        self._descriptors = descriptors
        self._resumed = resumed
        self._connection: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.shutdown = asyncio.Event()

    def report(self, fault: protocol.FaultEvent) -> None:
        """Says it now if there is a daemon, and to the next one until it is acknowledged."""
        try:
            self._journal.append(journal.faulted(fault))
        except OSError as error:
            say(f"journal: {error}; a fault would be lost with this process")
            self._journal.state.apply(journal.faulted(fault))
        if self._connection is not None:
            _send(self._connection, fault)

    async def accept(self, listener: socket.socket) -> None:
        """One daemon after the other; a new one ends the connection before."""
        loop = asyncio.get_running_loop()
        before: asyncio.StreamWriter | None = None
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
                reader, writer = await asyncio.open_connection(sock=accepted, limit=protocol.MAX_LINE_BYTES)
            except OSError as error:
                say(f"cannot accept a connection: {error}")
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            self._connection = None  # until it has said hello
            if before is not None:
                before.close()
            before = writer
            self._spawn(self._converse(reader, writer))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the connection ends, however it does."""
        try:
            while line := await reader.readline():
                self._receive(writer, protocol.decode_request(line))
        except (OSError, ValueError, msgspec.MsgspecError) as error:  # ValueError: a line without end
            say(f"the connection to the daemon ends: {error}")
        except Exception:
            say_traceback()
        finally:
            if self._connection is writer:
                self._connection = None
            writer.close()

    def _receive(self, writer: asyncio.StreamWriter, request: protocol.Request) -> None:
        match request:
            case protocol.Hello():
                self._greet(writer, request)
            case protocol.AcknowledgeFaults(through=through):
                try:
                    self._journal.append(journal.Acknowledged(through=through))
                except OSError as error:
                    say(f"journal: {error}; acknowledged faults are repeated")
            case protocol.DropPrefetch(caller=caller):
                self._plane.warmer.drop(caller)
            case _:
                self._spawn(self._answer(writer, request))

    def _greet(self, writer: asyncio.StreamWriter, request: protocol.Hello) -> None:
        welcome = protocol.Welcome(version=protocol.VERSION, pid=os.getpid(), resumed=self._resumed, plans=self._plane.plans())
        line = protocol.encode(protocol.Answer(id=request.id, result=welcome)) + b"\n"
        if request.descriptors:
            line = line[_send_descriptors(writer, line[:1], self._descriptors) :]
        writer.write(line)
        self._connection = writer
        for fault in self._journal.state.faults.values():
            _send(writer, fault)

    async def _call(self, request: protocol.Request) -> Any:
        match request:
            case protocol.AddPlan(layers=layers, images=images, stacked=stacked):
                return await self._plane.add_plan(layers, images=images, stacked=stacked)
            case protocol.RemovePlan(plan_id=plan_id):
                return await self._plane.remove_plan(plan_id)
            case protocol.GetStatistics():
                return self._plane.statistics()
            case protocol.CollectCache(target_bytes=target, dry_run=dry_run):
                return await self._plane.room.collect(target, dry_run=dry_run)
            case protocol.VerifyCache(digest=digest):
                return await self._plane.verify(digest)
            case protocol.Prefetch(caller=caller, layers=layers, what=what):
                return await self._plane.warmer.progress(caller, layers, what)
            case protocol.Diagnose():
                return await self._plane.diagnose()

    async def _answer(self, writer: asyncio.StreamWriter, request: protocol.Request) -> None:
        try:
            result = await self._call(request)
        except Exception as error:  # every failure is the answer; none may end the data plane
            cause = first_cause(error)
            failure = protocol.Error(kind=error_kind(cause), message=sentence(cause))
            _send(writer, protocol.Answer(id=request.id, error=failure))
        else:
            _send(writer, protocol.Answer(id=request.id, result=result))
        if isinstance(request, protocol.Shutdown):
            with contextlib.suppress(OSError):
                await writer.drain()
            self.shutdown.set()


def _send(writer: asyncio.StreamWriter, message: protocol.Message) -> None:
    """What the transport cannot take at once it keeps; a connection that has ended takes nothing."""
    if not writer.is_closing():
        writer.write(protocol.encode(message) + b"\n")


def _send_descriptors(writer: asyncio.StreamWriter, data: bytes, descriptors: Sequence[int]) -> int:
    """Sends them with `data`, before anything else was written; how many bytes were sent. OSError."""
    with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as connection:
        return socket.send_fds(connection, [data], list(descriptors))


async def serve(
    listen_fd: int,
    session_fd: int,
    fuse_fds: Sequence[int],
    cache_path: Path,
    journal_path: Path,
    *,
    policy: FetchPolicy,
    bound: CacheBound,
    credentials: Credentials | None,
    fill: FillPolicy,
    profiles: bool,
    resend: bool = True,
    peers: PeersConfig | None = None,
) -> None:
    """Serves the mount behind `fuse_fds` until it is gone, or until the daemon says so. The descriptors stay the caller's.

    What is unfinished then is not given up: the caller ends the process at once, and a successor finds it.

    Errors: WeefsError, CoreError; as add_plan() when the layers of a predecessor cannot be served again.
    """
    listener = socket.socket(fileno=os.dup(listen_fd))
    listener.setblocking(False)
    core = Core(session_fd=session_fd, resend=resend)
    resumed = core.times_served > 0
    cache = CacheDirectory.open(cache_path, wait_s=CACHE_WAIT_S)
    kept = Journal.resume(journal_path) if resumed else Journal.begin(journal_path)
    plane = DataPlane(
        core,
        cache,
        policy=policy,
        bound=bound,
        credentials=credentials,
        on_fault=lambda fault: service.report(fault),
        journal=kept,
        peers=peers,
        fill=fill,
        profiles=profiles,
    )
    await plane.restore()
    service = Service(plane, kept, [listen_fd, session_fd, *fuse_fds], resumed=resumed)
    # In a thread, since the kernel may wait for an answer of ours while it takes what we tell it.
    await asyncio.to_thread(core.serve, fuse_fds)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(core.ended_fd, ended.set)
    fetcher = asyncio.create_task(plane.run())
    await plane.finish_removals()  # before a name can come again
    forever = [fetcher, asyncio.create_task(service.accept(listener))]
    until = [asyncio.create_task(ended.wait()), asyncio.create_task(service.shutdown.wait())]
    done, _ = await asyncio.wait([*forever, *until], return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
