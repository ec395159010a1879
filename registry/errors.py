"""What can go wrong with a registry: one tree, whose kinds are what callers do differently.

Foreign exceptions (requests, oras, aiohttp, OSError) become these at each seam and nowhere else. Every sentence says
what was expected, what was received and, where there is something to do, what.
"""

from __future__ import annotations

import contextlib
import errno
import re
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager


class RegistryError(Exception):
    """Base. By itself: a failure that does not fit one of the kinds below."""


class InvalidReference(RegistryError):
    """A reference that cannot be parsed, or that does not fit what is to be done with it."""


class NotFound(RegistryError):
    """The registry answers, and does not have it."""


class AuthenticationFailed(RegistryError):
    """The registry refuses the credentials, or wants some."""


class IntegrityError(RegistryError):
    """Bytes that are not what their digest or their manifest says."""


class NoSpace(RegistryError):
    """A filesystem that is full, or a quota that is used up: which, and what to do."""


class Unreachable(RegistryError):
    """No answer, or one that says "later": the same request may succeed.

    `retry_after_s` when the registry named a time.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@contextlib.contextmanager
def needing_space(where: object, advice: str) -> Iterator[None]:
    """Turns what a full filesystem raises in the block into NoSpace, which names `where` and gives an advice."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"{where}: {error.strerror}; {advice}") from error
        raise


def needing_temporary_space() -> AbstractContextManager[None]:
    """The same of where temporary files are."""
    return needing_space(tempfile.gettempdir(), "make room there, or set $TMPDIR to a directory that has some")


def error_of_status(url: str, status: int, reason: str | None, body: bytes, retry_after: str | None) -> RegistryError:
    """An answer that is a refusal (RFC 9110 §15), as an error of ours.

    `body`: its beginning; `retry_after`: the header.
    """
    text = " ".join(body.decode(errors="replace").split())
    detail = f"{url}: status {status} {reason or ''}".rstrip() + (f": {text}" if text else "")
    if status == 404:
        return NotFound(detail)
    if status in (401, 403):
        return AuthenticationFailed(f"{detail}; log in with docker or podman as a user who may do this")
    if status == 416:
        return IntegrityError(f"{url}: the blob is shorter than its manifest says (status 416)")
    if status in (408, 429) or status >= 500:
        return Unreachable(detail, _seconds(retry_after))
    return RegistryError(detail)


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After in seconds; its other form, a date, is not worth believing two clocks for."""
    return float(retry_after) if retry_after and re.fullmatch(r"[0-9]{1,9}", retry_after.strip()) else None
