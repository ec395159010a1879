"""`weenv mount GROUP... MOUNTPOINT`: one plan, mounted lazily and read-only by this process, for looking around."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from tools import exits, output, settings

if TYPE_CHECKING:
    from weefs.core import Core
    from weefs.protocol import Layer


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
    _require_free(arguments.mountpoint)
    # Resolved first: whoever interrupts that finds nothing to clean.
    layers = _resolve(arguments.groups)
    return asyncio.run(_mount(arguments, layers))


def _require_free(mountpoint: Path) -> None:
    """CommandError unless it is an empty directory that is no mount: what it shows now must not vanish below."""
    real = os.path.realpath(mountpoint)
    with open("/proc/self/mountinfo", "rb") as mounts:
        mounted = {re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), line.split()[4]) for line in mounts}
    if os.fsencode(real) in mounted:
        raise exits.CommandError(f"{mountpoint}: something is mounted there; unmount it or give another directory")
    if not os.path.isdir(real):
        raise exits.CommandError(f"{mountpoint}: expected a directory to mount on", exits.NOT_FOUND)
    if os.listdir(real):
        raise exits.CommandError(f"{mountpoint}: expected an empty directory to mount on, received one with entries; give another")


def _resolve(references: list[str]) -> list[Layer]:
    from registry import resolve_group
    from weefs.protocol import Layer

    credentials = settings.credentials()
    groups = [resolve_group(reference, credentials=credentials) for reference in references]
    return [Layer(source=group.source, group=group.digest, **attrs.asdict(layer)) for group in groups for layer in group.layers]


async def _mount(arguments: argparse.Namespace, layers: list[Layer]) -> int:
    """The handlers stand before the scratch directory does, and raise nothing: what was begun is always cleaned."""
    from weefs import core, dataplane
    from weefs.cachedir import CacheDirectory

    stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGINT, *exits.ending_signals()):
        asyncio.get_running_loop().add_signal_handler(number, _stop, stop, number)
    with contextlib.ExitStack() as stack:
        cache_path = arguments.cache or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weenv-mount-")))
        cache = CacheDirectory.open(cache_path)
        stack.callback(cache.close)
        filesystem = core.Core(escape_overlay_xattrs=False)
        stack.callback(filesystem.close)
        plane = dataplane.DataPlane(filesystem, cache, credentials=settings.credentials())
        try:
            adding = asyncio.ensure_future(plane.add_plan(layers))
            await asyncio.wait((adding, stop), return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                adding.cancel()
                await asyncio.gather(adding, return_exceptions=True)
                return 128 + stop.result()
            plan = adding.result()
            plane.show_as_root(plan.plan_id)
            _attach(filesystem, arguments)
            output.say(
                f"mounted on {arguments.mountpoint}: {plan.entries} names, {output.size(plan.content_bytes)} of files; ^C unmounts"
            )
            await _serve_until_interrupted(plane, filesystem, arguments.mountpoint, stop)
        finally:
            statistics = plane.statistics()
            await plane.close()
    _report(statistics, arguments.format)
    return exits.OK


def _stop(stop: asyncio.Future[int], number: int) -> None:
    if not stop.done():
        stop.set_result(number)


def _attach(filesystem: Core, arguments: argparse.Namespace) -> None:
    """Mounts and starts the FUSE threads."""
    from envlet.syscalls import MNT_DETACH, umount
    from weefs import core

    descriptors = core.mount(arguments.mountpoint, source=arguments.groups[-1], threads=arguments.threads)
    try:
        filesystem.serve(descriptors)
    except BaseException:
        umount(str(arguments.mountpoint), MNT_DETACH)
        raise
    finally:
        for fd in descriptors:
            os.close(fd)


async def _serve_until_interrupted(plane: Any, filesystem: Core, mountpoint: Path, stop: asyncio.Future[int]) -> None:
    """Until ^C, SIGTERM or SIGHUP, or until somebody else unmounts."""
    async with asyncio.TaskGroup() as tasks:
        fetcher = tasks.create_task(plane.run())
        try:
            while not stop.done() and not filesystem.ended:
                await asyncio.wait((stop,), timeout=0.5)
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
