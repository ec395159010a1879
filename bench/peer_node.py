"""`python -m bench.peer_node`: one node of bench.peers, in a process of its own: a data plane without a mount.

Its first line of input is a JSON object (Start), each further one a command: `{"bring": [chunk, …]}` fetches these chunks of the one layer
as a background fill would, several groups at once, and is answered with a line (Brought); `{}` asks for the figures alone."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from weefs.cachedir import CacheDirectory
from weefs.core import ChunkIndex, Core
from weefs.dataplane import DataPlane
from weefs.peerconfig import PeersConfig
from weefs.placement import group_of
from weefs.protocol import Layer


class Start(msgspec.Struct, kw_only=True):
    """`groups_at_once`: that are fetched side by side."""

    cache: str
    layer: Layer
    peers: PeersConfig | None = None
    groups_at_once: int = 8


class Brought(msgspec.Struct, kw_only=True):
    """Seconds; CPU time is of this process so far. `figures`: of the data plane."""

    took_s: float
    cpu_s: float
    chunks: int
    figures: dict[str, Any]


async def _bring(plane: DataPlane, digest: str, chunks: list[int], at_once: int) -> None:
    slot = plane._layers[digest].slot
    groups: dict[int, list[ChunkIndex]] = {}
    for chunk in chunks:
        groups.setdefault(group_of(chunk), []).append(ChunkIndex(chunk))
    todo = deque(groups.values())

    async def work() -> None:
        while todo:
            await plane._fetcher.bring(slot, todo.popleft())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(work())


async def _run() -> None:
    loop = asyncio.get_running_loop()
    start = msgspec.json.decode(await asyncio.to_thread(sys.stdin.readline), type=Start)
    core = Core()
    cache = CacheDirectory.open(Path(start.cache))
    plane = DataPlane(core, cache, peers=start.peers)
    running = asyncio.create_task(plane.run())
    await plane.add_plan([start.layer])
    if plane.peering is not None:
        await plane.peering.listening.wait()
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        begin_s = loop.time()
        await _bring(plane, start.layer.digest, command.get("bring", []), start.groups_at_once)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        present = core.layer_info(plane._layers[start.layer.digest].slot).present_chunks
        brought = Brought(
            took_s=loop.time() - begin_s, cpu_s=usage.ru_utime + usage.ru_stime, chunks=present, figures=plane.statistics()
        )  # fmt: skip
        print(msgspec.json.encode(brought).decode(), flush=True)
    running.cancel()
    await asyncio.wait([running])
    await plane.close()
    core.close()
    cache.close()


if __name__ == "__main__":
    asyncio.run(_run())
