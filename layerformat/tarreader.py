"""Reads a tar stream exactly: every name is bytes, every time is whole nanoseconds, every hole stays one.

Ours and not the standard library's, because that one decodes names, loses nanoseconds in floats and sparse maps in
reading, and cannot tell a truncated archive from a short one. Understood: v7, ustar, star prefixes, GNU (long names,
base-256 numbers, old sparse files) and PAX (local and global headers, sparse 0.0, 0.1 and 1.0, both ways to write
extended attributes). Where tools differ, docs/decisions/0007 decides: a global header applies until the next one, of
several local ones before an entry the last alone, and a regular entry whose name ends in `/` is a directory.

Guarantees: bounded memory whatever the archive says (extended headers up to 16 MiB, and so what global ones add up to; sparse
maps up to 2^20 segments); data that the consumer leaves unread is skipped; the stream is read to its end, so that a decompressor
behind it checks its checksum; an archive that ends inside an entry is an error that names it.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

from . import paxrecords
from .errors import SourceError, UnsupportedEntry, printable
from .model import NO_DATA, Data, Entry, Kind, NoData, Segment, normalise_segments
from .paxrecords import Pax, Record

BLOCK = 512
MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_SEGMENTS = 1 << 20
_SKIP_BYTES = 1024 * 1024
_ZERO_BLOCK = bytes(BLOCK)

_KINDS = {
    b"0": Kind.REGULAR,
    b"\0": Kind.REGULAR,
    b"7": Kind.REGULAR,
    b"S": Kind.REGULAR,
    b"1": Kind.HARD_LINK,
    b"2": Kind.SYMLINK,
    b"3": Kind.CHARACTER,
    b"4": Kind.BLOCK,
    b"5": Kind.DIRECTORY,
    b"6": Kind.FIFO,
}
_GNU_LONG = {b"L": "path", b"K": "target"}
_PAX_LOCAL = (b"x", b"X")
_PAX_GLOBAL = b"g"
_GNU_VOLUME_LABEL = b"V"


Literal = Callable[[bytes], None]
"""Receives, in order, the bytes of an archive that are not read as an entry's data: headers, padding, what is passed by."""


class _Stream:
    """The archive's bytes with their position; every read is exact or an error."""

    def __init__(self, file: BinaryIO, source: str, literal: Literal | None) -> None:
        self._file = file
        self._literal = literal
        self.source = source
        self.offset = 0

    def error(self, what: str, name: bytes | None = None) -> SourceError:
        return SourceError(self.source, what, name=name, offset=self.offset)

    def read_block(self) -> bytes:
        """The next block, or nothing at the end of the stream."""
        return self._counted(self._file.read(BLOCK))

    def _counted(self, block: bytes) -> bytes:
        if block and len(block) < BLOCK:
            raise self.error(f"expected a header of {BLOCK} bytes, received {len(block)}: the archive is truncated")
        self.offset += len(block)
        if self._literal is not None:
            self._literal(block)
        return block

    def read_first_block(self) -> bytes:
        """The first block. SourceError: whatever this is, it is no archive, so that it is not one that is damaged either."""
        block = self._file.read(BLOCK)
        whole = len(block) == BLOCK
        if block and block != _ZERO_BLOCK and block[257:262] != b"ustar" and not (whole and _has_checksum(block)):
            raise SourceError(self.source, "expected a tar, received neither a tar nor a gzip- or zstd-compressed one")
        return self._counted(block)

    def read_exact(self, size: int, name: bytes | None) -> bytes:
        data = self.read_data(size, name)
        if self._literal is not None:
            self._literal(data)
        return data

    def read_data(self, size: int, name: bytes | None) -> bytes:
        """As `read_exact`, of an entry's data."""
        data = self._file.read(size)
        if len(data) < size:
            self.offset += len(data)
            raise self.error(f"expected {size - len(data)} more bytes, received the end: the archive is truncated", name)
        self.offset += size
        return data

    def skip(self, size: int, name: bytes | None) -> None:
        while size > 0:
            size -= len(self.read_exact(min(size, _SKIP_BYTES), name))

    def drain(self) -> None:
        while data := self._file.read(_SKIP_BYTES):
            self.offset += len(data)
            if self._literal is not None:
                self._literal(data)


class MemberData:
    """The data of the entry just read; valid until the next one is."""

    __slots__ = ("_name", "_remaining", "_stream")

    def __init__(self, stream: _Stream, size: int, name: bytes) -> None:
        self._stream = stream
        self._remaining = size
        self._name = name

    def read(self, size: int, /) -> bytes:
        size = min(size, self._remaining)
        if size <= 0:
            return b""
        data = self._stream.read_data(size, self._name)
        self._remaining -= size
        return data

    def skip(self) -> None:
        """Passes by what was not read."""
        self._stream.skip(self._remaining, self._name)
        self._remaining = 0


def read_tar(
    file: BinaryIO,
    source: str = "archive",
    *,
    warn: Callable[[str], None] | None = None,
    literal: Literal | None = None,
) -> Iterator[tuple[Entry, Data]]:
    """Yields each entry with its data. `file` gives exactly what `read(n)` asks for until its end.

    SourceError for a damaged or truncated archive, UnsupportedEntry for a type that is not known. `warn` receives what
    is odd but harmless, `literal` everything that the consumer does not read as data.
    """
    return _Reader(_Stream(file, source, literal), warn or (lambda text: None)).entries()


class _Reader:
    """State that lasts longer than one entry: the PAX global header and the prefixes that precede a header."""

    def __init__(self, stream: _Stream, warn: Callable[[str], None]) -> None:
        self._stream = stream
        self._warn = warn
        self._globals = paxrecords.NOTHING
        self._long: dict[str, bytes] = {}
        self._local: list[Record] | None = None  # of the next entry's own header: the last, if there are several

    def entries(self) -> Iterator[tuple[Entry, Data]]:
        stream = self._stream
        while True:
            start = stream.offset
            block = stream.read_first_block() if start == 0 else stream.read_block()
            if not block:
                self._check_end()
                self._warn(f"{stream.source}: no end-of-archive marker at byte {start}")
                return
            if block == _ZERO_BLOCK:
                self._finish(start)
                return
            _check_sum(stream, block)
            kind = block[156:157]
            if kind in _GNU_LONG or kind in _PAX_LOCAL or kind == _PAX_GLOBAL:
                self._read_prefix(kind, block)
                continue
            member = self._read_member(kind, block)
            self._long = {}
            self._local = None
            if member is None:
                continue
            entry, data, padding = member
            yield entry, data
            if isinstance(data, MemberData):
                data.skip()
                stream.skip(padding, entry.path)

    def _check_end(self) -> None:
        if self._long or self._local is not None:
            raise self._stream.error("expected an entry after an extended header, received the end: the archive is truncated")

    def _finish(self, start: int) -> None:
        """After the first zero block: the second, and then whatever fills the last record."""
        self._check_end()
        second = self._stream.read_block()
        if second and second != _ZERO_BLOCK:
            raise SourceError(
                self._stream.source,
                "expected two zero blocks at the end, received one and then data: the archive is damaged",
                offset=start,
            )
        self._stream.drain()

    # What precedes an entry

    def _read_prefix(self, kind: bytes, block: bytes) -> None:
        stream = self._stream
        size = _number(stream, block[124:136], "size")
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise stream.error(f"an extended header of {size} bytes; at most {MAX_HEADER_BYTES} are read")
        body = stream.read_exact(size, None)
        stream.skip(-size % BLOCK, None)
        if kind in _GNU_LONG:
            self._long[_GNU_LONG[kind]] = body.partition(b"\0")[0]
            return
        try:
            records = paxrecords.parse(body)
            if kind == _PAX_GLOBAL:
                self._globals = self._globals.updated(records)
                if self._globals.attribute_bytes() > MAX_HEADER_BYTES:
                    raise ValueError(f"global headers with more than {MAX_HEADER_BYTES} bytes of extended attributes")
            else:
                self._local = records
        except ValueError as error:
            raise self._pax_error(error) from None

    def _pax_error(self, error: ValueError) -> SourceError:
        return self._stream.error(f"a PAX header that cannot be read: {error}")

    # An entry

    def _read_member(self, type_flag: bytes, block: bytes) -> tuple[Entry, Data, int] | None:
        stream = self._stream
        pax = self._globals
        if self._local:
            try:
                pax = pax.updated(self._local)
            except ValueError as error:
                raise self._pax_error(error) from None
        path = self._long.get("path", _header_name(block)) if pax.path is None else pax.path
        stored = _number(stream, block[124:136], "size") if pax.size is None else pax.size
        if stored < 0:
            raise stream.error(f"a size of {stored} bytes", path)
        kind = _KINDS.get(type_flag)
        if kind is None:
            if type_flag == _GNU_VOLUME_LABEL:
                stream.skip(stored + -stored % BLOCK, path)
                return None
            raise UnsupportedEntry(path, f"an entry of type {printable(type_flag)!r}, which is not known; remove it from the archive")
        padding = -stored % BLOCK
        size = stored
        sparse: tuple[Segment, ...] | None = None
        if kind is Kind.REGULAR:
            if type_flag == b"S":
                size, stored, sparse = self._gnu_sparse(block, stored, path)
            elif pax.sparse:
                path = pax.sparse_name or path
                size, stored, sparse = self._pax_sparse(pax, stored, path)
            elif path.endswith(b"/"):
                kind = Kind.DIRECTORY
                stream.skip(stored + padding, path)
        data: MemberData | NoData = NO_DATA
        if kind is Kind.REGULAR:
            data = MemberData(stream, stored, path)
        else:
            size = 0
        target = b""
        if kind in (Kind.HARD_LINK, Kind.SYMLINK):
            target = self._long.get("target", _text(block[157:257])) if pax.target is None else pax.target
        for what in pax.dropped:
            self._warn(f"{printable(path)}: {what} is not carried over; store it as an extended attribute")
        entry = Entry(
            path=path,
            kind=kind,
            mode=_number(stream, block[100:108], "mode", path) & 0o7777,
            uid=_number(stream, block[108:116], "uid", path) if pax.uid is None else pax.uid,
            gid=_number(stream, block[116:124], "gid", path) if pax.gid is None else pax.gid,
            mtime_ns=_number(stream, block[136:148], "mtime", path) * 1_000_000_000 if pax.mtime_ns is None else pax.mtime_ns,
            rdev=self._rdev(block, path) if kind in (Kind.CHARACTER, Kind.BLOCK) else 0,
            size=size,
            target=target,
            xattrs=pax.xattrs(),
            sparse=sparse,
        )
        return entry, data, padding

    def _rdev(self, block: bytes, path: bytes) -> int:
        major = _number(self._stream, block[329:337], "device major", path)
        minor = _number(self._stream, block[337:345], "device minor", path)
        if not (0 <= major < 1 << 31 and 0 <= minor < 1 << 31):
            raise UnsupportedEntry(path, f"device {major}:{minor}, which Linux cannot have")
        return os.makedev(major, minor)

    # Sparse files

    def _gnu_sparse(self, block: bytes, stored: int, path: bytes) -> tuple[int, int, tuple[Segment, ...] | None]:
        stream = self._stream
        segments: list[Segment] = []
        size = _number(stream, block[483:495], "real size", path)
        self._gnu_segments(block[386:482], segments, path)
        extended = block[482] != 0
        while extended:
            block = stream.read_exact(BLOCK, path)
            self._gnu_segments(block[:504], segments, path)
            extended = block[504] != 0
            if len(segments) > MAX_SEGMENTS:
                raise UnsupportedEntry(path, f"more than {MAX_SEGMENTS} segments of a sparse file")
        return size, stored, self._checked_map(segments, size, stored, path)

    def _gnu_segments(self, table: bytes, segments: list[Segment], path: bytes) -> None:
        for at in range(0, len(table), 24):
            if table[at] == 0 and table[at + 12] == 0:
                return
            offset = _number(self._stream, table[at : at + 12], "offset of a segment", path)
            segments.append((offset, _number(self._stream, table[at + 12 : at + 24], "length of a segment", path)))

    def _pax_sparse(self, pax: Pax, stored: int, path: bytes) -> tuple[int, int, tuple[Segment, ...] | None]:
        """Real size, bytes of data and map; the map of version 1.0 stands before the data."""
        size = pax.sparse_size
        if size is None:
            raise self._stream.error("a sparse file without its real size", path)
        segments = pax.sparse_map
        if segments is None:
            segments, used = self._sparse_1_0(stored, path)
            stored -= used
        if len(segments) > MAX_SEGMENTS:
            raise UnsupportedEntry(path, f"more than {MAX_SEGMENTS} segments of a sparse file")
        return size, stored, self._checked_map(segments, size, stored, path)

    def _sparse_1_0(self, stored: int, path: bytes) -> tuple[list[Segment], int]:
        """The map at the start of the data: a count, then offsets and lengths, each a line; padded to whole blocks."""
        text = bytearray()
        lines = 0
        wanted = 1
        while lines < wanted:
            if len(text) + BLOCK > min(stored, MAX_HEADER_BYTES):
                raise self._stream.error("a sparse map that does not end", path)
            block = self._stream.read_exact(BLOCK, path)
            text += block
            lines += block.count(b"\n")
            if wanted == 1 and lines:
                wanted += 2 * self._decimal(bytes(text.partition(b"\n")[0]), path)
        numbers = [self._decimal(line, path) for line in bytes(text).split(b"\n")[1:wanted]]
        return list(zip(numbers[::2], numbers[1::2], strict=True)), len(text)

    def _decimal(self, text: bytes, path: bytes) -> int:
        if not text.isdigit() or len(text) > 20:
            raise self._stream.error(f"expected a decimal number in a sparse map, received {printable(text[:40])!r}", path)
        return int(text)

    def _checked_map(self, segments: list[Segment], size: int, stored: int, path: bytes) -> tuple[Segment, ...] | None:
        if sum(length for _, length in segments) != stored:
            raise self._stream.error(f"a sparse map that does not add up to the {stored} bytes of data", path)
        try:
            return normalise_segments(segments, size)
        except ValueError as error:
            raise self._stream.error(f"a sparse map out of order: {error}", path) from None


def _header_name(block: bytes) -> bytes:
    """The name in a header, with the prefix of the dialects that have one."""
    name = _text(block[0:100])
    if block[257:263] != b"ustar\0":
        return name
    is_star = block[508:512] == b"tar\0" and block[475] == 0
    prefix = _text(block[345:475] if is_star else block[345:500])
    return prefix + b"/" + name if prefix else name


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _number(stream: _Stream, field: bytes, what: str, name: bytes | None = None) -> int:
    """A number of a header, or an error that says which one it is."""
    value = _parse_number(field)
    if value is None:
        raise stream.error(f"expected an octal {what}, received {printable(field)!r}: the archive is damaged", name)
    return value


@functools.lru_cache(maxsize=4096)
def _parse_number(field: bytes) -> int | None:
    """Octal text, or base-256 in two's complement when the first bit is set. Cached: modes and ids repeat."""
    if field[0] & 0x80:
        bits = 8 * len(field) - 1
        value = int.from_bytes(field, "big") & ((1 << bits) - 1)
        return value - (1 << bits) if field[0] & 0x40 else value
    text = field.partition(b"\0")[0].strip(b" ")
    if not text:
        return 0
    if not text.isdigit() or b"8" in text or b"9" in text:
        return None
    return int(text, 8)


def _check_sum(stream: _Stream, block: bytes) -> None:
    expected = _number(stream, block[148:156], "checksum")
    if expected not in _sums(block):
        raise stream.error(f"expected a header with checksum {next(_sums(block))}, received {expected}: not a tar archive, or damaged")


def _has_checksum(block: bytes) -> bool:
    """Whether this is a header of the oldest format, which has no magic number."""
    digits = block[148:156].strip(b" \0")
    return digits.isdigit() and not digits.strip(b"01234567") and int(digits, 8) in _sums(block)


def _sum(block: bytes) -> int:
    """The sum of a header's bytes. Adler-32's low half is one more than the sum modulo 65,521, and half a block's is below
    that: a third of the time of `sum`.
    """
    half = BLOCK // 2
    return (zlib.adler32(block[:half]) & 0xFFFF) + (zlib.adler32(block[half:]) & 0xFFFF) - 2


def _sums(block: bytes) -> Iterator[int]:
    """A header's checksum, over unsigned bytes; then over signed ones, as some old archives have it."""
    unsigned = _sum(block) - sum(block[148:156]) + 8 * 32
    yield unsigned
    yield unsigned - 256 * sum(1 for index, byte in enumerate(block) if byte > 127 and not 148 <= index < 156)
