"""What must be known of an environment to take it over from a daemon that was killed: one file in its own directory.

Why a file each and not one database: the record then lives exactly as long as the directory, which is made before anything else of an
environment and removed after everything else, so no two of them can disagree. It is replaced by rename and not synced: it must
survive the daemon, not the machine, after whose crash nothing is left to take over.

The init commands are not in it. They often hold the fault that a harness has to find, and they have run.
"""

import logging
import os
from pathlib import Path

import msgspec

from envlet.ports import MountedPlan, ResolvedGroup
from envlet.rootfs import Mark
from envlet.types import CreateRequest, InitResult, Limits, State, Timings
from envlet.users import User

log = logging.getLogger("envlet")

FILE_NAME = "record.json"
VERSION = 1


class EnvironmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An environment that has been `ready`. Times in seconds, `_unix_s` since the epoch."""

    version: int
    id: str
    state: State
    cause: str | None
    request: CreateRequest
    """Without its init commands."""
    groups: tuple[ResolvedGroup, ...]
    mounted: MountedPlan
    limits: Limits
    user: User
    timings: Timings
    init: list[InitResult]
    marks: tuple[Mark, ...]
    init_pid: int
    init_start_ticks: int
    """Since the boot: with the pid, the identity of a process."""
    created_unix_s: float
    expires_unix_s: float | None


class OtherVersion(Exception):
    """The record is whole, and of a daemon of another version."""


class _Version(msgspec.Struct):
    version: int


def _made_of_text(kind: type, text: str) -> object:
    """The paths of a plan: the one kind of value that JSON has not."""
    return kind(text)


_version_decoder = msgspec.json.Decoder(_Version)
_decoder = msgspec.json.Decoder(EnvironmentRecord, dec_hook=_made_of_text)


def write(directory: Path, record: EnvironmentRecord) -> None:
    """Replaces the record in the environment's directory, whole or not at all. Blocks for one small file. Raises OSError."""
    fresh = directory / f"{FILE_NAME}.new"
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(msgspec.json.encode(record, enc_hook=str))
    fresh.replace(directory / FILE_NAME)


def read(directory: Path) -> EnvironmentRecord | None:
    """The record, or None where there is none or a damaged one. Raises OSError; OtherVersion."""
    try:
        content = (directory / FILE_NAME).read_bytes()
        version = _version_decoder.decode(content).version
        if version != VERSION:
            raise OtherVersion(f"{directory / FILE_NAME}: expected version {VERSION}, received {version}")
        return _decoder.decode(content)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.DecodeError as error:
        log.error("%s is damaged, its environment cannot be taken over: %s", directory / FILE_NAME, error)
        return None
