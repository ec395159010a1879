"""What a source says: one `Entry` per member of an archive or file of a directory, before it is applied to a tree.

Names and targets are bytes throughout: neither tar nor Linux says that they are text.
"""

from __future__ import annotations

import enum
from typing import Protocol

from attrs import field, frozen

Segment = tuple[int, int]
"""Offset in the file and length, bytes, of a run of data in a sparse file."""


class Kind(enum.IntEnum):
    """The type of an entry; the values are those of `d_type`, so that `kind << 12` is the type in `st_mode`."""

    HARD_LINK = 0
    FIFO = 1
    CHARACTER = 2
    DIRECTORY = 4
    BLOCK = 6
    REGULAR = 8
    SYMLINK = 10
    SOCKET = 12


class Data(Protocol):
    """A file's data bytes, in order; of a sparse file the segments back to back."""

    def read(self, size: int, /) -> bytes:
        """Exactly `size` bytes, or what is left of the file when that is less. Raises SourceError if it cannot."""
        ...


class NoData:
    """The data of an entry that has none."""

    def read(self, size: int, /) -> bytes:
        return b""


NO_DATA = NoData()


@frozen(slots=True)
class Entry:
    """One entry as a source states it. Whiteouts are entries named `.wh.…`, as in an OCI layer.

    path      as the source spells it (`/a`, `./a/`, `a//b` are all allowed)
    mode      permission bits, 0–0o7777
    mtime_ns  nanoseconds since the epoch, may be negative
    rdev      devices: as `os.makedev` packs it
    size      regular files: the apparent size in bytes
    target    symlinks: what they hold; hard links: the path of the other name
    sparse    None, or the data segments: ascending, disjoint, not touching, none empty
    """

    path: bytes
    kind: Kind
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    rdev: int = 0
    size: int = 0
    target: bytes = b""
    xattrs: dict[bytes, bytes] = field(factory=dict)
    sparse: tuple[Segment, ...] | None = None

    @property
    def data_size(self) -> int:
        """Bytes of data that accompany the entry."""
        if self.sparse is None:
            return self.size
        return sum(length for _, length in self.sparse)


def normalise_segments(segments: list[Segment], size: int) -> tuple[Segment, ...] | None:
    """Drops empty segments and joins touching ones; None when nothing of the file is a hole.

    ValueError when they do not ascend, overlap, or leave the file.
    """
    result: list[Segment] = []
    end = 0
    for offset, length in segments:
        if offset < end or length < 0 or offset + length > size:
            raise ValueError(f"segment at {offset} of {length} bytes after byte {end} in a file of {size} bytes")
        if length:
            if result and offset == end:
                result[-1] = (result[-1][0], result[-1][1] + length)
            else:
                result.append((offset, length))
        end = offset + length
    if result == [(0, size)] or size == 0:
        return None
    return tuple(result)
