"""`USER[:GROUP]` of an image or a request to numbers, by the passwd and group files of the environment itself."""

import attrs

from envlet import errors
from envlet.errors import EnvletError

_ID_MAX = 2**32 - 2


@attrs.frozen
class User:
    """Who a command runs as."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    """Supplementary."""
    home: str = "/"


ROOT = User(0, 0, (), "/root")


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and int(text) <= _ID_MAX else None


def _rows(text: str, fields: int) -> list[list[str]]:
    """The rows that have the fields; images hold broken lines, and libc passes over them as well."""
    return [row for row in (line.split(":") for line in text.splitlines()) if len(row) >= fields]


def split_user(text: str) -> tuple[str, str]:
    """The user of `USER[:GROUP]`, root when there is none, and the group, empty when there is none. Raises
    EnvletError(INVALID_PARAMS) for what no passwd and group files can hold."""
    name, _, group = text.partition(":")
    if not text.isprintable() or ":" in group or any(part.isdigit() and _number(part) is None for part in (name, group)):
        message = f"expected USER[:GROUP], received {text!r}; use a number up to {_ID_MAX}, or a name"
        raise EnvletError(errors.INVALID_PARAMS, message)
    return name or "0", group


def resolve_user(text: str, passwd: str, group: str) -> User:
    """The user that `text` means. A number need not be listed; a name must. Raises EnvletError(INVALID_PARAMS)."""
    name, group_name = split_user(text)
    row = next((row for row in _rows(passwd, 6) if row[0] == name), None)
    uid = _number(row[2]) if row else _number(name)
    if uid is None:
        raise EnvletError(errors.INVALID_PARAMS, f"there is no user {name!r} in the environment's /etc/passwd; use a number")
    if row is None:
        row = next((row for row in _rows(passwd, 6) if _number(row[2]) == uid), None)
    gid = (_number(row[3]) if row else None) or 0
    groups: tuple[int, ...] = ()
    if group_name:
        listed = next((found[2] for found in _rows(group, 3) if found[0] == group_name), group_name)
        chosen = _number(listed)
        if chosen is None:
            raise EnvletError(errors.INVALID_PARAMS, f"there is no group {group_name!r} in the environment's /etc/group; use a number")
        gid = chosen
    elif row:
        numbers = (_number(found[2]) for found in _rows(group, 4) if row[0] in found[3].split(","))
        groups = tuple(sorted({number for number in numbers if number is not None}))
    default_home = "/root" if uid == 0 else "/"
    return User(uid, gid, groups, (row[5] if row else "") or default_home)
