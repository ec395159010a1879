"""Locks between daemons: held by an open descriptor, and so gone with its process, however that ends."""

import fcntl
import os
from pathlib import Path

from envlet import errors
from envlet.errors import EnvletError


def take(path: Path, flags: int, what: str) -> int:
    """The descriptor that holds the lock. `what` is locked, for people. Raises EnvletError(EXISTS) if another daemon has it, OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise EnvletError(errors.EXISTS, f"another daemon uses the {what}; stop it or choose another") from None
    return fd
