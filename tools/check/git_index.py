"""git's index file, as far as it says what the work tree looked like: stat data is read and replaced, in place.

Every field that changes has a fixed width, so nothing else in the file moves, and versions 2 to 4 with any extension
keep what they say. (A library that writes a whole index anew would have to understand every extension, or drop it.)
The layout is that of git's `Documentation/gitformat-index.txt`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

from attrs import frozen

_HEADER = struct.Struct(">4sII")
_STAT = struct.Struct(">10I")  # ctime s, ns; mtime s, ns; dev, ino, mode, uid, gid, size
_EXTENSION = struct.Struct(">4sI")
_EXTENDED, _ASSUME_VALID, _STAGE = 0x4000, 0x8000, 0x3000
_SKIP_WORKTREE, _INTENT_TO_ADD = 0x4000, 0x2000
_U32 = 0xFFFFFFFF
NS_PER_S = 1_000_000_000


class IndexDamaged(Exception):
    """Not an index, or one that is cut off or does not have its checksum."""


@frozen
class IndexEntry:
    """`at` is its offset in the file. `mtime_s` and `size` are cut to 32 bits, as git does."""

    at: int
    path: bytes
    mode: int
    oid: str
    mtime_s: int
    size: int
    stage: int
    assume_valid: bool
    skip_worktree: bool
    intent_to_add: bool

    @property
    def is_checked(self) -> bool:
        """Whether `git status` compares it with a file or symlink of the work tree."""
        kind = self.mode >> 12
        return kind in (0o10, 0o12) and not (self.stage or self.assume_valid or self.skip_worktree or self.intent_to_add)


class GitIndex:
    """One index file, in memory. `hash_name`: sha1 or sha256, as the repository's objects. Raises IndexDamaged."""

    def __init__(self, data: bytes, hash_name: str) -> None:
        self._hash = hash_name
        self._hash_size = hashlib.new(hash_name).digest_size
        self._data = bytearray(data)
        self._check_checksum()
        try:
            signature, self.version, count = _HEADER.unpack_from(data)
            if signature != b"DIRC" or self.version not in (2, 3, 4):
                raise IndexDamaged(f"expected DIRC of version 2 to 4, received {signature!r} of version {self.version}")
            end = _HEADER.size
            entries: list[IndexEntry] = []
            for _ in range(count):
                entry, end = self._parse_entry(end, entries[-1].path if entries else b"")
                entries.append(entry)
            self.entries = tuple(entries)
            self.extensions = frozenset(self._parse_extensions(end))
        except (struct.error, ValueError, IndexError) as error:
            raise IndexDamaged(f"expected {len(data)} bytes of index, received something that is cut off: {error}") from None

    @property
    def is_split(self) -> bool:
        """Its entries are in another file."""
        return b"link" in self.extensions

    def set_stat(self, entry: IndexEntry, *, mtime_ns: int, size: int, uid: int, gid: int) -> None:
        """Replaces the stat data of an entry. Device and inode number become 0: no node has the same ones."""
        seconds, nanoseconds = divmod(mtime_ns, NS_PER_S)
        time = (seconds & _U32, nanoseconds)
        _STAT.pack_into(self._data, entry.at, *time, *time, 0, 0, entry.mode, uid & _U32, gid & _U32, size & _U32)

    def to_bytes(self) -> bytes:
        """The whole file, with its checksum; without one if it had none (`index.skipHash`)."""
        body = bytes(self._data[: -self._hash_size])
        trailer = bytes(self._data[-self._hash_size :])
        return body + (hashlib.new(self._hash, body).digest() if any(trailer) else trailer)

    def _check_checksum(self) -> None:
        body, trailer = self._data[: -self._hash_size], self._data[-self._hash_size :]
        if len(self._data) < _HEADER.size + self._hash_size:
            raise IndexDamaged(f"expected at least {_HEADER.size + self._hash_size} bytes, received {len(self._data)}")
        if any(trailer) and hashlib.new(self._hash, body).digest() != trailer:
            raise IndexDamaged(f"expected a checksum of its {len(body)} bytes at its end, received {trailer.hex()}")

    def _parse_entry(self, at: int, before: bytes) -> tuple[IndexEntry, int]:
        """An entry and where the next begins. ValueError, IndexError or struct.error when it leaves the file."""
        _, _, mtime_s, _, _, _, mode, _, _, size = _STAT.unpack_from(self._data, at)
        position = at + _STAT.size
        oid = self._data[position : position + self._hash_size].hex()
        position += self._hash_size
        (flags,) = struct.unpack_from(">H", self._data, position)
        position += 2
        more = 0
        if flags & _EXTENDED:
            (more,) = struct.unpack_from(">H", self._data, position)
            position += 2
        path = b""
        if self.version == 4:
            drop, position = self._varint(position)
            path = before[: max(0, len(before) - drop)]
        end = self._data.index(0, position)
        path += self._data[position:end]
        following = end + 1 if self.version == 4 else at + (end - at + 8 & ~7)
        entry = IndexEntry(
            at=at,
            path=path,
            mode=mode,
            oid=oid,
            mtime_s=mtime_s,
            size=size,
            stage=(flags & _STAGE) >> 12,
            assume_valid=bool(flags & _ASSUME_VALID),
            skip_worktree=bool(more & _SKIP_WORKTREE),
            intent_to_add=bool(more & _INTENT_TO_ADD),
        )
        return entry, following

    def _varint(self, position: int) -> tuple[int, int]:
        byte = self._data[position]
        value = byte & 127
        while byte & 128:
            position += 1
            byte = self._data[position]
            value = (value + 1 << 7) + (byte & 127)
        return value, position + 1

    def _parse_extensions(self, position: int) -> Iterator[bytes]:
        end = len(self._data) - self._hash_size
        while position < end:
            name, size = _EXTENSION.unpack_from(self._data, position)
            yield name
            position += _EXTENSION.size + size
        if position != end:
            raise IndexDamaged(f"expected extensions that end at byte {end}, received {position}")
