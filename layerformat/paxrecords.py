"""PAX extended headers: the records as they are parsed, and what they mean for an entry."""

from __future__ import annotations

import base64
import binascii
import re
import urllib.parse
from typing import Any

from attrs import evolve, field, frozen

from .model import Segment

SCHILY_XATTR = b"SCHILY.xattr."
LIBARCHIVE_XATTR = b"LIBARCHIVE.xattr."
_NS_PER_S = 1_000_000_000
_MAX_DIGITS = 20
_TIME = re.compile(rb"(-?)(\d{1,20})(?:\.(\d*))?")
_DROPPED = (b"SCHILY.acl.", b"RHT.security.selinux")

Record = tuple[bytes, bytes]


def parse(body: bytes) -> list[Record]:
    """The records of a header, in order: each `LENGTH KEY=VALUE\\n`, where the length counts itself. ValueError if they are not."""
    records: list[Record] = []
    position = 0
    while position < len(body):
        space = body.find(b" ", position, position + _MAX_DIGITS)
        digits = body[position:space] if space > 0 else b""
        if not digits.isdigit():
            raise ValueError(f"no record's length at byte {position}")
        end = position + int(digits)
        if end > len(body) or end <= space + 1 or body[end - 1] != 0x0A:
            raise ValueError(f"the record at byte {position} does not end where its length says")
        key, equals, value = body[space + 1 : end - 1].partition(b"=")
        if not equals or not key:
            raise ValueError(f"the record at byte {position} has no key and value")
        records.append((key, value))
        position = end
    return records


def _parse_time(value: bytes) -> int:
    """Decimal seconds as whole nanoseconds, towards the past; exact, where a float would not be."""
    match = _TIME.fullmatch(value)
    if match is None:
        raise ValueError(f"the time {value[:40]!r}")
    sign, seconds, fraction = match.groups(b"")
    ns = int(seconds) * _NS_PER_S + int(fraction[:9].ljust(9, b"0"))
    if sign:
        return -ns - (1 if fraction[9:].strip(b"0") else 0)
    return ns


def _parse_integer(value: bytes) -> int:
    digits = value.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > _MAX_DIGITS:
        raise ValueError(f"the number {value[:40]!r}")
    return int(value)


def _parse_map(value: bytes) -> list[Segment]:
    numbers = [_parse_integer(part) for part in value.split(b",")] if value else []
    if len(numbers) % 2:
        raise ValueError("a sparse map with an offset that has no length")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


_INTEGERS = {
    b"size": "size",
    b"uid": "uid",
    b"gid": "gid",
    b"GNU.sparse.size": "sparse_size",
    b"GNU.sparse.realsize": "sparse_size",
}
_UNKEPT = (b"atime", b"ctime")
_NAMES = {b"path": "path", b"linkpath": "target", b"GNU.sparse.name": "sparse_name"}


@frozen
class Pax:
    """What extended headers say about an entry; None where they say nothing. `dropped` names what a layer has no place for."""

    path: bytes | None = None
    target: bytes | None = None
    size: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None
    sparse: bool = False
    sparse_name: bytes | None = None
    sparse_size: int | None = None
    sparse_map: list[Segment] | None = None
    schily: dict[bytes, bytes] = field(factory=dict)
    libarchive: dict[bytes, bytes] = field(factory=dict)
    dropped: frozenset[str] = frozenset()

    def updated(self, records: list[Record]) -> Pax:
        """With the records of one more header applied: an empty value takes back what an earlier one said. ValueError as `parse`."""
        changes: dict[str, Any] = {}
        schily, libarchive = dict(self.schily), dict(self.libarchive)
        dropped = set(self.dropped)
        segments: list[Segment] = []
        offset: int | None = None
        for key, value in records:
            if key in _UNKEPT:
                continue
            if key in _INTEGERS:
                changes[_INTEGERS[key]] = _parse_integer(value) if value else None
            elif key in _NAMES:
                changes[_NAMES[key]] = value or None
            elif key == b"mtime":
                changes["mtime_ns"] = _parse_time(value) if value else None
            elif key.startswith(SCHILY_XATTR):
                schily[_decode_keyword(key[len(SCHILY_XATTR) :])] = value
            elif key.startswith(LIBARCHIVE_XATTR):
                libarchive[urllib.parse.unquote_to_bytes(key[len(LIBARCHIVE_XATTR) :])] = _decode_base64(value)
            elif key == b"GNU.sparse.map":
                changes["sparse_map"] = _parse_map(value)
            elif key == b"GNU.sparse.offset":
                offset = _parse_integer(value)
            elif key == b"GNU.sparse.numbytes":
                if offset is None:
                    raise ValueError("the length of a sparse segment without its offset")
                segments.append((offset, _parse_integer(value)))
                offset = None
            elif key.startswith(_DROPPED):
                dropped.add(key.decode("ascii", "backslashreplace"))
            if key.startswith(b"GNU.sparse."):
                changes["sparse"] = True
        if segments:
            changes["sparse_map"] = segments
        said = changes | {"schily": schily, "libarchive": libarchive, "dropped": frozenset(dropped)}
        return Pax(**said) if self is NOTHING else evolve(self, **said)

    def xattrs(self) -> dict[bytes, bytes]:
        """Extended attributes; where both spellings name one, the exact one counts."""
        if self.libarchive:
            return self.libarchive | self.schily
        return self.schily

    def attribute_bytes(self) -> int:
        """Bytes of the names and values of all extended attributes."""
        return sum(len(name) + len(value) for some in (self.schily, self.libarchive) for name, value in some.items())


NOTHING = Pax()
"""No header at all."""


def _decode_keyword(keyword: bytes) -> bytes:
    """GNU tar writes `=` and `%` in an attribute's name as %3D and %25."""
    return keyword.replace(b"%3D", b"=").replace(b"%25", b"%") if b"%" in keyword else keyword


def encode_keyword(name: bytes) -> bytes:
    """The reverse of what is done in reading."""
    return name.replace(b"%", b"%25").replace(b"=", b"%3D")


def _decode_base64(value: bytes) -> bytes:
    """libarchive's base64: without line breaks, often without the padding."""
    try:
        return base64.b64decode(value.rstrip(b"=") + b"=" * (-len(value.rstrip(b"=")) % 4), validate=True)
    except binascii.Error:
        raise ValueError("an attribute that is not base64") from None
