"""The data plane behind a mount of its own, in the test's process: without the daemon, and with a real source of layers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from registry import Credentials, Group
from weefs import core
from weefs.cachedir import CacheDirectory
from weefs.dataplane import DataPlane
from weefs.fetch import FetchPolicy
from weefs.fill import FillPolicy
from weefs.peerconfig import PeersConfig
from weefs.protocol import FaultEvent, Layer
from weefs.room import CacheBound

QUICK = FetchPolicy(deadline_s=30, read_ahead_chunks=0, first_delay_s=0.01, longest_delay_s=0.05)
IMPATIENT = FetchPolicy(deadline_s=0.3, read_ahead_chunks=0, first_delay_s=0.01, longest_delay_s=0.05)


def layers_of(group: Group, *, annotated: bool = True) -> list[Layer]:
    found = []
    for layer in group.layers:
        known = attrs.asdict(layer)
        if not annotated:
            known |= {name: None for name in known if name.startswith("toc_")}
        found.append(Layer(source=group.source, group=group.digest, **known))
    return found


@attrs.define
class Mounted:
    """A plan, mounted by itself. Files are read in other processes and threads, never on the event loop."""

    path: Path
    plane: DataPlane
    faults: list[FaultEvent]
    digest: str
    readers: ThreadPoolExecutor
    """Of their own: the data plane needs the loop's threads to answer them."""
    fetcher: asyncio.Task[None] | None = None

    def start_fetching(self) -> None:
        self.fetcher = asyncio.create_task(self.plane.run())

    async def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        """Exactly this range and no read-ahead: with O_DIRECT where a size is given."""
        return await asyncio.get_running_loop().run_in_executor(self.readers, self._read, name, offset, size)

    def _read(self, name: str, offset: int, size: int | None) -> bytes:
        fd = os.open(self.path / name, os.O_RDONLY | (0 if size is None else os.O_DIRECT))
        try:
            return os.pread(fd, os.fstat(fd).st_size if size is None else size, offset)
        finally:
            os.close(fd)

    def traffic(self) -> dict[str, Any]:
        found: dict[str, Any] = self.plane.statistics()["layers"][self.digest]
        return found


def umount(path: Path, *options: str) -> bool:
    """Whether it worked."""
    return subprocess.run(["umount", *options, path], check=False).returncode == 0


@contextlib.asynccontextmanager
async def mounted(
    directory: Path,
    layers: list[Layer],
    *,
    policy: FetchPolicy = QUICK,
    bound: CacheBound | None = None,
    credentials: Credentials | None = None,
    fetching: bool = True,
    keep_cache: bool = False,
    peers: PeersConfig | None = None,
    fill: FillPolicy | None = None,
    profiles: bool = False,
    rooted: bool = True,
) -> AsyncIterator[Mounted]:
    """The layers as one plan on a mountpoint of their own; everything is gone afterwards, but the cache if it is kept for the next. Without
    `rooted` the plan is a directory of the mount, and can be removed.
    """
    mountpoint = directory / "mnt"
    mountpoint.mkdir(parents=True, exist_ok=True)
    cache = CacheDirectory.open(directory / "cache")
    filesystem = core.Core()
    faults: list[FaultEvent] = []
    plane = DataPlane(
        filesystem, cache, policy=policy, bound=bound, credentials=credentials, on_fault=faults.append,
        fill=fill, profiles=profiles, peers=peers,
    )
    try:
        plan = await plane.add_plan(layers)
        if rooted:
            plane.show_as_root(plan.plan_id)
        descriptors = core.mount(mountpoint, source="weefs-test", threads=2)
        filesystem.serve(descriptors)
        for fd in descriptors:
            os.close(fd)
        mount = Mounted(mountpoint if rooted else mountpoint / plan.plan_id, plane, faults, layers[0].digest, ThreadPoolExecutor(16))
        if fetching:
            mount.start_fetching()
        try:
            yield mount
        finally:
            done = await asyncio.to_thread(umount, mountpoint)
            if not done:
                await asyncio.to_thread(umount, mountpoint, "-l")
            if mount.fetcher:
                mount.fetcher.cancel()
                await asyncio.wait([mount.fetcher])
            mount.readers.shutdown()
            assert done
    finally:
        await plane.close()
        filesystem.close()
        cache.close()
        if not keep_cache:
            shutil.rmtree(directory)


async def wait_until(condition: Callable[[], bool]) -> None:
    """For what has no event to wait for: a counter, or a list that another thread fills."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - there is none
            await asyncio.sleep(0.002)


