"""The data-plane process of a node: answers the daemon's requests over a socket pair, and reports faults.

Ends when the daemon's end closes.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from registry import AuthenticationFailed, Credentials, IntegrityError, NotFound, Unreachable
from weefs import protocol
from weefs.cachedir import CacheDirectory
from weefs.core import Core, DamagedError
from weefs.dataplane import DataPlane
from weefs.errors import LayerRefused
from weefs.fetch import FetchPolicy

_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (NotFound, "not_found"),
    (AuthenticationFailed, "authentication"),
    (IntegrityError, "integrity"),
    (DamagedError, "integrity"),
    (LayerRefused, "integrity"),
    (Unreachable, "unreachable"),
)


def error_kind(error: BaseException) -> str:
    return next((kind for type_, kind in _KINDS if isinstance(error, type_)), "error")


class Service:
    """One connection to the daemon; requests run concurrently."""

    def __init__(self, plane: DataPlane, writer: asyncio.StreamWriter) -> None:
        self._plane = plane
        self._writer = writer

    def send(self, message: protocol.Message) -> None:
        self._writer.write(protocol.encode(message) + b"\n")

    async def _call(self, request: protocol.Request) -> Any:
        match request:
            case protocol.AddPlan(layers=layers):
                return await self._plane.add_plan(layers)
            case protocol.RemovePlan(plan_id=plan_id):
                return await self._plane.remove_plan(plan_id)
            case protocol.GetStatistics():
                return self._plane.statistics()

    async def _answer(self, request: protocol.Request) -> None:
        try:
            result = await self._call(request)
        except Exception as error:  # every failure is the answer; none may end the data plane
            cause = _first(error)
            failure = protocol.Error(kind=error_kind(cause), message=_sentence(cause))
            self.send(protocol.Answer(id=request.id, error=failure))
        else:
            self.send(protocol.Answer(id=request.id, result=result))

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Until the daemon closes its end."""
        async with asyncio.TaskGroup() as tasks:
            while line := await reader.readline():
                tasks.create_task(self._answer(protocol.decode_request(line)))


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


async def serve(
    control: socket.socket,
    fuse_fds: Sequence[int],
    cache_path: Path,
    *,
    policy: FetchPolicy,
    credentials: Credentials | None,
) -> None:
    """Serves the mount behind `fuse_fds` (closed here: the core has its own) until the daemon is gone."""
    cache = CacheDirectory.open(cache_path)
    core = Core()
    reader, writer = await asyncio.open_connection(sock=control, limit=protocol.MAX_LINE_BYTES)
    plane = DataPlane(core, cache, policy=policy, credentials=credentials, on_fault=lambda fault: service.send(fault))
    service = Service(plane, writer)
    core.serve(fuse_fds)
    for fd in fuse_fds:
        os.close(fd)
    service.send(protocol.Ready(pid=os.getpid()))
    try:
        async with asyncio.TaskGroup() as tasks:
            fetcher = tasks.create_task(plane.run_fetcher())
            await service.run(reader)
            fetcher.cancel()
    finally:
        await plane.close()
        cache.close()
        writer.close()
