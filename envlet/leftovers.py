"""What an earlier daemon left of its environments: what is known of them, and its removal where they are not taken over."""

import logging
import os
from collections.abc import Collection
from pathlib import Path

import trio

from envlet import errors, mounts, record
from envlet.cgroups import Cgroup, CgroupError, Layout
from envlet.config import NodeConfig
from envlet.errors import EnvletError
from envlet.record import EnvironmentRecord
from envlet.removal import remove_directories
from envlet.runtime import Runtime
from envlet.types import EnvironmentInfo

log = logging.getLogger("envlet")

ENDING = ("deleting", "deleted", "expired")
"""States of a record whose environment was being removed when its daemon was killed."""


def find_records(uppers_dir: Path, are_served: bool = False) -> list[EnvironmentRecord]:
    """The environments that have a record, in the order of their creation. Blocks. Raises OSError, and EnvletError(EXISTS) for one of
    another version if their files `are_served`, for then a daemon of that version can take it over; else it is lost anyway.
    """
    found = []
    for directory in uppers_dir.iterdir():
        try:
            known = record.read(directory)
        except record.OtherVersion as error:
            if are_served:
                raise EnvletError(
                    errors.EXISTS, f"an environment of another version runs ({error}); delete it with a daemon of that version first"
                ) from error
            continue
        if known is not None:
            found.append(known)
    return sorted(found, key=lambda known: known.created_unix_s)


def past_info(known: EnvironmentRecord) -> EnvironmentInfo:
    """What is said of an environment that could not be taken over: it is `lost`, unless it had ended before."""
    was_alive = known.state == "ready"
    return EnvironmentInfo(
        id=known.id,
        state="lost" if was_alive else "deleted" if known.state in ENDING else known.state,
        cause="the daemon and the data plane ended; the environment was removed at the next start" if was_alive else known.cause,
        role=known.request.role,
        groups=[group.reference for group in known.groups],
        plan_id=known.mounted.plan_id,
        content_bytes=known.mounted.content_bytes,
        limits=known.limits,
        labels=known.request.labels,
        created_unix_s=known.created_unix_s,
        expires_unix_s=known.expires_unix_s,
        timings=known.timings,
        init=known.init,
    )


async def clean_up(config: NodeConfig, runtime: Runtime, layout: Layout, null_fd: int, keep: Collection[str] = ()) -> list[str]:
    """Removes what an earlier daemon left of its environments, but not `keep`; their ids. What cannot be removed does not keep the
    rest. Raises EnvletError(CLEANUP_FAILED), which names what is left.
    """
    left = sorted({*os.listdir(config.uppers_dir), *os.listdir(config.bundles_dir), *os.listdir(config.runtime_dir)} - set(keep))
    failures: list[str] = []
    try:
        await runtime.end_all()
        mounts.unmount_below(str(config.bundles_dir), keep)
        for socket_file in config.console_dir.iterdir():
            socket_file.unlink()
    except OSError as error:
        failures.append(str(error))
    for environment_id in left:
        try:
            await _clean_up_one(config, runtime, layout, null_fd, environment_id)
            log.warning("removed %s, which an earlier daemon left", environment_id)
        except Exception as error:  # of any kind: the others are still removed, and the node says what stays
            log.error("%s is not removed", environment_id, exc_info=not isinstance(error, (CgroupError, OSError, EnvletError)))
            failures.append(f"{environment_id}: {error}")
    if failures:
        more = f"; and {len(failures) - 3} more" if len(failures) > 3 else ""
        raise EnvletError(
            errors.CLEANUP_FAILED,
            f"what an earlier daemon left could not be removed: {'; '.join(failures[:3])}{more}; remove it by hand and start again",
        )
    return left


async def _clean_up_one(config: NodeConfig, runtime: Runtime, layout: Layout, null_fd: int, environment_id: str) -> None:
    group = Cgroup(layout, f"{config.cgroup_parent.rstrip('/')}/{environment_id}")
    if group.exists():
        await group.kill()
    await runtime.delete(environment_id, config.run_dir / "cleanup.log", null_fd)
    await group.remove()
    directories = (config.runtime_dir, config.bundles_dir, config.uppers_dir)
    await trio.to_thread.run_sync(remove_directories, *(directory / environment_id for directory in directories))
