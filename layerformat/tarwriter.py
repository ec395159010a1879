"""Writes entries as a PAX tar that GNU tar, umoci and our own reader understand alike; streaming, and the same bytes
each time.

What fits a ustar header is said there, byte for byte; a PAX header precedes an entry only for what does not: long
names, big numbers, fractions of a second, negative times, extended attributes, sparse maps (version 1.0, which every
reader of sparse files knows). Names that are not UTF-8 stand as they are, with `hdrcharset=BINARY`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import BinaryIO

from attrs import evolve

from .errors import UnsupportedEntry
from .model import Entry, Kind, Segment
from .paxrecords import SCHILY_XATTR, encode_keyword
from .spec import align

_BLOCK = 512
_RECORD = 20 * _BLOCK
_NS_PER_S = 1_000_000_000
_NAME_BYTES = 100
_PREFIX_BYTES = 155
_PAX_NAME = b"././@PaxHeader"
_SPARSE_NAME = b"GNUSparseFile.0/"

_TYPES = {
    Kind.REGULAR: b"0",
    Kind.HARD_LINK: b"1",
    Kind.SYMLINK: b"2",
    Kind.CHARACTER: b"3",
    Kind.BLOCK: b"4",
    Kind.DIRECTORY: b"5",
    Kind.FIFO: b"6",
}


class TarWriter:
    """Writes to `file`, front to back. A context manager that ends the archive unless an exception passes through it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._written = 0

    def add(self, entry: Entry, data: Iterable[bytes] = ()) -> None:
        """Writes an entry and its data: `entry.data_size` bytes in pieces of any size.

        UnsupportedEntry for what a tar cannot say (sockets); ValueError when the data have another size.
        """
        if entry.kind not in _TYPES:
            raise UnsupportedEntry(entry.path, "a socket, which a tar cannot hold")
        path = entry.path
        if entry.kind is Kind.DIRECTORY:
            path = path.rstrip(b"/") + b"/"
        sparse_map = b""
        if entry.sparse is not None:
            regions, fills = _whole_blocks(entry.sparse, entry.size)
            if any(fills):
                data = _filled(data, entry.sparse, fills)
                entry = evolve(entry, sparse=tuple(regions))
            sparse_map = _sparse_map(regions, entry.size)
        stored = len(sparse_map) + entry.data_size if entry.kind is Kind.REGULAR else 0
        records, name, prefix, target = self._records(entry, path, stored)
        if records:
            body = b"".join(_record(key, value) for key, value in records)
            self._write(_header(_PAX_NAME, b"", b"x", size=len(body)))
            self._write_padded(body)
        major, minor = (os.major(entry.rdev), os.minor(entry.rdev)) if entry.rdev else (0, 0)
        self._write(
            _header(
                name,
                prefix,
                _TYPES[entry.kind],
                mode=entry.mode,
                uid=entry.uid,
                gid=entry.gid,
                size=stored,
                mtime_s=entry.mtime_ns // _NS_PER_S,
                target=target,
                major=major,
                minor=minor,
            )
        )
        self._write(sparse_map)
        self._write_data(entry, data if entry.kind is Kind.REGULAR else ())

    def close(self) -> None:
        """Ends the archive; the file stays open."""
        end = 2 * _BLOCK
        self._write(bytes(end + -(self._written + end) % _RECORD))

    def __enter__(self) -> TarWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is None:
            self.close()

    def _records(self, entry: Entry, path: bytes, stored: int) -> tuple[list[tuple[bytes, bytes]], bytes, bytes, bytes]:
        """The PAX records that the entry needs; then name, prefix and link target for its header."""
        records: list[tuple[bytes, bytes]] = []
        split = _split_name(path)
        if entry.sparse is not None:
            records += [
                (b"GNU.sparse.major", b"1"),
                (b"GNU.sparse.minor", b"0"),
                (b"GNU.sparse.name", path),
                (b"GNU.sparse.realsize", b"%d" % entry.size),
            ]
            split = b"", _SPARSE_NAME + path[-(_NAME_BYTES - len(_SPARSE_NAME)) :].lstrip(b"/")
        elif split is None:
            records.append((b"path", path))
            split = b"", path[:_NAME_BYTES].rstrip(b"/")
        if len(entry.target) > _NAME_BYTES:
            records.append((b"linkpath", entry.target))
        if any(not _is_utf8(value) for _, value in records):
            records.insert(0, (b"hdrcharset", b"BINARY"))
        if not _fits(stored, 12):
            records.append((b"size", b"%d" % stored))
        for key, number in ((b"uid", entry.uid), (b"gid", entry.gid)):
            if not _fits(number, 8):
                records.append((key, b"%d" % number))
        seconds, ns = divmod(entry.mtime_ns, _NS_PER_S)
        if ns or not _fits(seconds, 12):
            records.append((b"mtime", _time(entry.mtime_ns)))
        records += [(SCHILY_XATTR + encode_keyword(key), entry.xattrs[key]) for key in sorted(entry.xattrs)]
        prefix, name = split
        return records, name, prefix, entry.target[:_NAME_BYTES]

    def _write_data(self, entry: Entry, data: Iterable[bytes]) -> None:
        expected = entry.data_size if entry.kind is Kind.REGULAR else 0
        received = 0
        for piece in data:
            received += len(piece)
            if received > expected:
                break
            self._write(piece)
        if received != expected:
            raise ValueError(f"data of {entry.path!r}: expected {expected} bytes, received {received} or more")
        self._write(bytes(-received % _BLOCK))

    def _write_padded(self, body: bytes) -> None:
        self._write(body)
        self._write(bytes(-len(body) % _BLOCK))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._written += len(data)


def _whole_blocks(segments: Sequence[Segment], size: int) -> tuple[list[Segment], list[int]]:
    """Segments widened to whole blocks of data, and the zero bytes that follow each of the given ones for that.

    GNU tar begins each segment's data at a block of the archive, others do not; they agree when none but the last ends
    inside one.
    """
    regions: list[Segment] = []
    fills: list[int] = []
    for index, (offset, length) in enumerate(segments):
        start = regions.pop()[0] if regions and sum(regions[-1]) == offset else offset
        following = segments[index + 1][0] if index + 1 < len(segments) else size
        end = min(start + align(offset + length - start, _BLOCK), following)
        regions.append((start, end - start))
        fills.append(end - offset - length)
    return regions, fills


def _filled(data: Iterable[bytes], segments: Sequence[Segment], fills: Sequence[int]) -> Iterator[bytes]:
    """The data of the segments with the zero bytes after each; data beyond the last come through, to be complained of."""
    lengths = iter([length for _, length in segments])
    zeros = iter(fills)
    left = next(lengths, 0)
    for piece in data:
        rest = memoryview(piece)
        while rest:
            if left == 0:
                left = next(lengths, len(rest))
            yield bytes(rest[:left])
            used = min(left, len(rest))
            rest = rest[used:]
            left -= used
            if left == 0:
                yield bytes(next(zeros, 0))


def _sparse_map(segments: Sequence[Segment], size: int) -> bytes:
    """The map before the data. An empty segment at the end of a last hole tells GNU tar how long the file is."""
    if not segments or sum(segments[-1]) < size:
        segments = (*segments, (size, 0))
    body = b"%d\n" % len(segments) + b"".join(b"%d\n%d\n" % segment for segment in segments)
    return body + bytes(-len(body) % _BLOCK)


def _fits(number: int, field_bytes: int) -> bool:
    """Whether a number can be said in octal in a field with its terminator."""
    return 0 <= number < 1 << 3 * (field_bytes - 1)


def _octal(number: int, field_bytes: int) -> bytes:
    """Octal with a terminator; 0 for what does not fit and is said in a PAX record."""
    return b"%0*o\0" % (field_bytes - 1, number if _fits(number, field_bytes) else 0)


def _time(mtime_ns: int) -> bytes:
    seconds, ns = divmod(abs(mtime_ns), _NS_PER_S)
    text = b"%d.%09d" % (seconds, ns) if ns else b"%d" % seconds
    return b"-" + text if mtime_ns < 0 else text


def _record(key: bytes, value: bytes) -> bytes:
    """A PAX record; its length counts its own digits."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    if len(str(length)) > len(str(rest)):
        length += 1
    return b"%d %s=%s\n" % (length, key, value)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _split_name(path: bytes) -> tuple[bytes, bytes] | None:
    """Prefix and name of a ustar header, or None when the path fits neither way."""
    if len(path) <= _NAME_BYTES:
        return b"", path
    slash = path.rfind(b"/", 0, min(_PREFIX_BYTES + 1, len(path) - 1))
    if slash <= 0 or len(path) - slash - 1 > _NAME_BYTES:
        return None
    return path[:slash], path[slash + 1 :]


def _header(
    name: bytes,
    prefix: bytes,
    type_flag: bytes,
    *,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    size: int = 0,
    mtime_s: int = 0,
    target: bytes = b"",
    major: int = 0,
    minor: int = 0,
) -> bytes:
    parts = (
        name.ljust(100, b"\0"),
        _octal(mode, 8),
        _octal(uid, 8),
        _octal(gid, 8),
        _octal(size, 12),
        _octal(mtime_s, 12),
        b" " * 8,
        type_flag,
        target.ljust(100, b"\0"),
        b"ustar\x0000",
        bytes(64),
        _octal(major, 8),
        _octal(minor, 8),
        prefix.ljust(155, b"\0"),
        bytes(12),
    )
    block = b"".join(parts)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]
