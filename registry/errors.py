"""What can go wrong with a registry: one tree, whose kinds are what callers do differently.

Foreign exceptions (requests, oras, aiohttp, OSError) become these at each seam and nowhere else. Every sentence says what was expected, what was received
and, where there is something to do, what.
"""

from __future__ import annotations


class RegistryError(Exception):
    """Base. By itself: a failure that does not fit one of the kinds below."""


class InvalidReference(RegistryError):
    """A reference that cannot be parsed."""


class NotFound(RegistryError):
    """The registry answers, and does not have it."""


class AuthenticationFailed(RegistryError):
    """The registry refuses the credentials, or wants some."""


class IntegrityError(RegistryError):
    """Bytes that are not what their digest or their manifest says."""


class Unreachable(RegistryError):
    """No answer, or one that says "later": the same request may succeed. `retry_after_s` when the registry named a time."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
