"""The reference reader of a layer: opens the file, reads files and verifies chunks; slow, obvious, and believed.

Every chunk is checked against its SHA-256 before a byte of it is shown. `Toc` (toc.py) says what the TOC means; here is
the way to it and to the contents.
"""

from __future__ import annotations

import bisect
import errno
import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO

from attrs import frozen

from . import spec
from .errors import FormatError, printable
from .storedtoc import decompress_frame, restore_toc
from .toc import Chunk, Dirent, Footer, Inode, Toc, decode_footer

_CACHED_CHUNKS = 4
_COPY_BYTES = 1024 * 1024


@frozen
class Problem:
    """Something that `verify` found. `chunk` and `blob_offset` say where, `files` which paths show it (at most 100)."""

    what: str
    chunk: int | None = None
    blob_offset: int | None = None
    files: tuple[bytes, ...] = ()

    def __str__(self) -> str:
        if self.chunk is None:
            return self.what
        names = ", ".join(printable(name) for name in self.files[:3]) or "no file"
        more = f" and {len(self.files) - 3} more" if len(self.files) > 3 else ""
        return f"chunk {self.chunk} at byte {self.blob_offset}: {self.what}; affects {names}{more}"


def open_toc(stored: bytes, *, raw_size: int, digest: bytes) -> Toc:
    """A TOC from its stored bytes, as a manifest's annotations or the footer describe it.

    raw_size  bytes after decompression
    digest    SHA-256 of the raw bytes, 32 bytes

    FormatError when anything about it is wrong.
    """
    if not spec.HEADER_SIZE <= raw_size <= spec.MAX_TOC_RAW_SIZE:
        raise FormatError("toc", None, f"a TOC of {spec.HEADER_SIZE} to {spec.MAX_TOC_RAW_SIZE} bytes", raw_size)
    try:
        raw = restore_toc(stored, raw_size)
    except ValueError as error:
        raise FormatError("toc", None, f"a zstd frame of {raw_size} bytes with a TOC", error) from None
    received = hashlib.sha256(raw).digest()
    if received != digest:
        raise FormatError("toc", None, f"sha256:{digest.hex()}", f"sha256:{received.hex()}")
    return Toc.parse(raw)


class Layer:
    """An open layer. A context manager; not safe for several threads at once."""

    def __init__(self, file: BinaryIO, toc: Toc, footer: Footer, *, source: str, owns_file: bool) -> None:
        self.toc = toc
        self.footer = footer
        self._file = file
        self._source = source
        self._owns_file = owns_file
        self._starts = [chunk.stream_offset for chunk in toc.chunks]
        self._cache: OrderedDict[int, bytes] = OrderedDict()

    @classmethod
    def open(cls, source: str | os.PathLike[str] | BinaryIO) -> Layer:
        """Opens a layer from a path or a seekable file; footer and TOC are checked whole. FormatError, OSError."""
        if isinstance(source, (str, os.PathLike)):
            file: BinaryIO = open(source, "rb")  # noqa: SIM115 - the layer owns it
            try:
                if not file.seekable():
                    raise OSError(errno.ESPIPE, "expected a file that can be read at any place, received a pipe", os.fspath(source))
                return cls._open(file, os.fspath(source), owns_file=True)
            except BaseException:
                file.close()
                raise
        return cls._open(source, str(getattr(source, "name", "layer")), owns_file=False)

    @classmethod
    def _open(cls, file: BinaryIO, source: str, *, owns_file: bool) -> Layer:
        try:
            size = file.seek(0, os.SEEK_END)
            if size < spec.FOOTER_SIZE:
                raise FormatError("footer", None, f"at least {spec.FOOTER_SIZE} bytes", size)
            file.seek(size - spec.FOOTER_SIZE)
            footer = decode_footer(file.read(spec.FOOTER_SIZE), blob_size=size)
            file.seek(footer.toc_offset)
            stored = file.read(footer.toc_stored_size)
            toc = open_toc(stored, raw_size=footer.toc_raw_size, digest=footer.toc_sha256)
            if toc.header.chunks_end != footer.toc_offset:
                raise FormatError("header", None, f"chunks_end {footer.toc_offset}, where the TOC begins", toc.header.chunks_end)
        except FormatError as error:
            error.source = source
            raise
        return cls(file, toc, footer, source=source, owns_file=owns_file)

    def close(self) -> None:
        """Closes the file if `open` opened it."""
        if self._owns_file:
            self._file.close()

    def __enter__(self) -> Layer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    # Metadata

    def lookup(self, path: bytes) -> int | None:
        """The inode at a path from the root, symlinks not followed; None when this layer does not hold it."""
        return self.toc.lookup(path)

    def listdir(self, number: int) -> tuple[Dirent, ...]:
        """The entries of a directory, whiteouts included, names ascending."""
        return self.toc.listdir(number)

    def inode(self, number: int) -> Inode:
        """An inode's record."""
        return self.toc.inodes[number]

    def walk(self) -> Iterator[tuple[bytes, int | None]]:
        """As `Toc.walk`."""
        return self.toc.walk()

    # Contents

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Up to `size` bytes of a regular file from `offset`, fewer only at its end. FormatError for a damaged chunk."""
        inode = self.inode(number)
        if not inode.is_regular:
            raise ValueError(f"inode {number} is not a regular file")
        if offset < 0 or size < 0:
            raise ValueError(f"offset and size: expected 0 or more, received {offset} and {size}")
        end = min(offset + size, inode.size)
        result = bytearray(max(0, end - offset))
        for segment in self.toc.segments(number):
            start = max(offset, segment.file_offset)
            stop = min(end, segment.file_offset + segment.length)
            if start < stop:
                data = self.read_stream(segment.stream_offset + start - segment.file_offset, stop - start)
                result[start - offset : stop - offset] = data
        return bytes(result)

    def read_file(self, number: int) -> Iterator[bytes]:
        """All of a regular file, a piece at a time."""
        for offset in range(0, self.inode(number).size, _COPY_BYTES):
            yield self.read(number, offset, _COPY_BYTES)

    def read_stream(self, offset: int, size: int) -> bytes:
        """A range of the logical stream; what no chunk holds is zero."""
        result = bytearray(size)
        end = offset + size
        index = max(0, bisect.bisect_right(self._starts, offset) - 1)
        while index < len(self._starts) and self._starts[index] < end:
            chunk = self.toc.chunks[index]
            start = max(offset, chunk.stream_offset)
            stop = min(end, chunk.stream_offset + chunk.raw_size)
            if start < stop:
                raw = self.read_chunk(index)
                result[start - offset : stop - offset] = raw[start - chunk.stream_offset : stop - chunk.stream_offset]
            index += 1
        return bytes(result)

    def read_chunk(self, index: int) -> bytes:
        """The raw bytes of a chunk, checked. FormatError when they are not what the TOC says."""
        raw = self._cache.get(index)
        if raw is None:
            chunk = self.toc.chunks[index]
            self._file.seek(chunk.blob_offset)
            raw = decode_chunk(chunk, index, self._file.read(chunk.stored_size), source=self._source)
            if len(self._cache) >= _CACHED_CHUNKS:
                self._cache.popitem(last=False)
        self._cache[index] = raw
        self._cache.move_to_end(index)
        return raw

    # Verification

    def verify(self, blob_digest: str | None = None) -> list[Problem]:
        """Every chunk against its digest, and the whole blob against `blob_digest` (`sha256:` + hex) if given. Empty: all is well."""
        problems: list[Problem] = []
        for index, chunk in enumerate(self.toc.chunks):
            try:
                self.read_chunk(index)
            except FormatError as error:
                problems.append(Problem(error.finding, index, chunk.blob_offset, self._affected(chunk)))
        if blob_digest is not None:
            received = self._digest()
            if received != blob_digest:
                problems.append(Problem(f"expected a blob with digest {blob_digest}, received {received}: fetch it again"))
        return problems

    def _affected(self, chunk: Chunk) -> tuple[bytes, ...]:
        """The paths with data in a chunk."""
        start, end = chunk.stream_offset, chunk.stream_offset + chunk.raw_size
        paths: list[bytes] = []
        for path, number in self.walk():
            if number is not None and len(paths) < 100:
                segments = self.toc.segments(number)
                if any(part.stream_offset < end and start < part.stream_offset + part.length for part in segments):
                    paths.append(path)
        return tuple(paths)

    def _digest(self) -> str:
        digest = hashlib.sha256()
        self._file.seek(0)
        while data := self._file.read(_COPY_BYTES):
            digest.update(data)
        return "sha256:" + digest.hexdigest()


def decode_chunk(chunk: Chunk, index: int, stored: bytes, *, source: str | None = None) -> bytes:
    """The raw bytes of a chunk from its stored ones, checked as §5 says. FormatError."""

    def check(condition: bool, expected: object, received: object) -> None:
        if not condition:
            raise FormatError("chunks", index, expected, received, source=source)

    check(len(stored) == chunk.stored_size, f"{chunk.stored_size} stored bytes", len(stored))
    raw = stored
    if chunk.flags & spec.CHUNK_ZSTD:
        try:
            raw = decompress_frame(stored, chunk.raw_size)
        except ValueError as error:
            check(False, f"a zstd frame of {chunk.raw_size} bytes", error)
    received = hashlib.sha256(raw).digest()
    check(received == chunk.sha256, f"contents with sha256 {chunk.sha256.hex()}", received.hex())
    return raw
