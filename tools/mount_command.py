"""`weenv mount GROUP... MOUNTPOINT`: one plan, mounted lazily and read-only by this process, for looking around."""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from tools import exits, output, settings

if TYPE_CHECKING:
    from weefs.core import Core


def register(commands: Any) -> None:
    parser = commands.add_parser("mount", help="mount groups lazily and read-only, without the daemon; ^C unmounts")
    parser.add_argument("groups", nargs="+", metavar="GROUP", help="references, base first")
    parser.add_argument("mountpoint", type=Path, metavar="MOUNTPOINT")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="keep what was fetched here (default: a temporary directory)"
    )
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="FUSE threads")
    output.add_format(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.mountpoint.is_dir():
        raise exits.CommandError(f"{arguments.mountpoint}: expected a directory to mount on", exits.NOT_FOUND)
    with tempfile.TemporaryDirectory(prefix="weenv-mount-") as scratch:
        return asyncio.run(_mount(arguments, arguments.cache or Path(scratch)))


async def _mount(arguments: argparse.Namespace, cache_path: Path) -> int:
    from registry import resolve_group
    from weefs import core, dataplane
    from weefs.cachedir import CacheDirectory
    from weefs.protocol import Layer

    credentials = settings.credentials()
    layers = []
    for reference in arguments.groups:
        group = await asyncio.to_thread(resolve_group, reference, credentials=credentials)
        layers += [Layer(source=group.source, **attrs.asdict(layer)) for layer in group.layers]
    cache = CacheDirectory.open(cache_path)
    filesystem = core.Core(escape_overlay_xattrs=False)
    plane = dataplane.DataPlane(filesystem, cache, credentials=credentials)
    try:
        plan = await plane.add_plan(layers)
        plane.show_as_root(plan.plan_id)
        descriptors = core.mount(arguments.mountpoint, source=arguments.groups[-1], threads=arguments.threads)
        try:
            filesystem.serve(descriptors)
        finally:
            for fd in descriptors:
                os.close(fd)
        output.say(
            f"mounted on {arguments.mountpoint}: {plan.entries} names, {output.size(plan.content_bytes)} of files; "
            "^C unmounts"
        )
        await _serve_until_interrupted(plane, filesystem, arguments.mountpoint)
    finally:
        statistics = plane.statistics()
        await plane.close()
        filesystem.close()
        cache.close()
    _report(statistics, arguments.format)
    return exits.OK


async def _serve_until_interrupted(plane: Any, filesystem: Core, mountpoint: Path) -> None:
    """Until ^C or SIGTERM, or until somebody else unmounts."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as tasks:
        fetcher = tasks.create_task(plane.run_fetcher())
        try:
            while not stop.is_set() and not filesystem.ended:
                try:
                    await asyncio.wait_for(stop.wait(), 0.5)
                except TimeoutError:
                    continue
        finally:
            if not filesystem.ended:
                await _unmount(mountpoint)
            while not filesystem.ended:  # noqa: ASYNC110 - the FUSE threads set no event
                await asyncio.sleep(0.01)
            fetcher.cancel()


async def _unmount(mountpoint: Path) -> None:
    from envlet.syscalls import MNT_DETACH, umount

    try:
        await asyncio.to_thread(umount, str(mountpoint))
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        output.say(f"weenv: {mountpoint} is in use; it is detached and ends with its last user")
        await asyncio.to_thread(umount, str(mountpoint), MNT_DETACH)


def _report(statistics: dict[str, Any], form: str) -> None:
    if form == "json":
        output.print_json(statistics)
        return
    for digest, layer in statistics["layers"].items():
        output.say(
            f"{digest}: metadata {output.size(layer['metadata_bytes'])} in {layer['metadata_requests']} requests, "
            f"contents {output.size(layer['bytes'])} of {output.size(layer['stored_bytes'])} "
            f"({output.share(layer['bytes'], layer['stored_bytes'])}) "
            f"in {layer['requests']}"
        )
