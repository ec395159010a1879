"""The errors of the registry package and of the data plane as codes of the API: the one place where the trees meet."""

from __future__ import annotations

from envlet import errors
from envlet.errors import EnvletError, ErrorCode
from registry import AuthenticationFailed, IntegrityError, InvalidReference, NotFound, RegistryError, Unreachable

_CODES: tuple[tuple[type[RegistryError], ErrorCode], ...] = (
    (InvalidReference, errors.INVALID_PARAMS),
    (NotFound, errors.REFERENCE_NOT_FOUND),
    (AuthenticationFailed, errors.AUTHENTICATION),
    (IntegrityError, errors.INTEGRITY),
    (Unreachable, errors.REGISTRY_UNAVAILABLE),
)

KINDS: dict[str, ErrorCode] = {
    "not_found": errors.REFERENCE_NOT_FOUND,
    "authentication": errors.AUTHENTICATION,
    "integrity": errors.INTEGRITY,
    "capacity": errors.CAPACITY,
    "unreachable": errors.REGISTRY_UNAVAILABLE,
}
"""The kinds of weefs.protocol.Error that have a code of their own."""


def translate(error: Exception, reference: str) -> EnvletError | None:
    """The API's error for a failure to resolve `reference`; None if it is no failure that the registry package
    announces.
    """
    if not isinstance(error, RegistryError):
        return None
    code = next((code for kind, code in _CODES if isinstance(error, kind)), errors.REFERENCE_NOT_FOUND)
    return EnvletError(code, f"{reference}: {error}" if reference not in str(error) else str(error), {"reference": reference})
