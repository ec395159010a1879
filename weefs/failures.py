"""Failures as the protocol says them: their kinds, and one sentence."""

from __future__ import annotations

from registry import AuthenticationFailed, IntegrityError, NotFound, Unreachable
from weefs.core import DamagedError
from weefs.errors import LayerRefused, NoRoom

_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (NotFound, "not_found"),
    (AuthenticationFailed, "authentication"),
    (IntegrityError, "integrity"),
    (DamagedError, "integrity"),
    (LayerRefused, "integrity"),
    (NoRoom, "capacity"),
    (Unreachable, "unreachable"),
)


def error_kind(error: BaseException) -> str:
    """As in protocol.Error."""
    return next((kind for type_, kind in _KINDS if isinstance(error, type_)), "error")


def first_cause(error: BaseException) -> BaseException:
    """Of several that came at once."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def sentence(error: BaseException) -> str:
    """For people."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
