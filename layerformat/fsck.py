"""What is wrong with a layer file, and what can still be believed of it: the examination behind `weenv layer fsck`.

`Layer.open` refuses a layer at the first broken rule. Here the question is another one: which structure is damaged and
where, which files that costs, and which are whole. So every step goes on after a damage as far as it honestly can:

1.  The footer. When it is damaged, or does not fit the size of the file, the TOC is looked for without it.
2.  The TOC. Tried where the footer says, then where it would be if bytes were added or lost before it, then by scanning
    back for a zstd frame whose contents begin as a TOC and state their own length. A TOC found without an intact digest
    is used but not `PROVEN`: it keeps every rule of §3, and nothing says that it is the one that was written.
3.  The chunks, one at a time, each where its record says and, when the chunk is not there, where it would be if the
    bytes that are too many or too few lie before it (`DISPLACED`). A displaced chunk is explained, but it is damage:
    readers look where the record says.
4.  The files: one is whole when every chunk that holds a byte of it is.

Memory: the TOC and one chunk.
"""

from __future__ import annotations

import bisect
import contextlib
import enum
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import zstandard
from attrs import evolve, field, frozen

from . import spec
from .decoder import decode_chunk
from .errors import FormatError
from .storedtoc import from_columns, restore_toc
from .toc import Chunk, Footer, Toc, decode_footer

_FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_DIGEST = range(24, 56)
"""Of the footer, §1."""
_SCAN_BYTES = 1 << 20
_FEED_BYTES = 1 << 10
"""A zstd frame can make 128 KiB of four bytes: small feeds bound what one makes at once."""
RECOVERY = "fetch the layer again, or convert it again from its source"


class TocState(enum.Enum):
    """What is known of the TOC."""

    PROVEN = "proven"
    """It has the digest that a footer states."""
    UNPROVEN = "unproven"
    """It keeps every rule, but its digest is lost or is another."""
    BROKEN = "broken"
    """It is there and breaks a rule: chunks can be judged at most, files cannot."""
    LOST = "lost"


class ChunkState(enum.Enum):
    """What is known of a chunk."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    DISPLACED = "displaced"
    """Its bytes are whole, at another offset than its record says."""
    MISSING = "missing"
    """The file ends before its last byte."""


@frozen
class Damage:
    """One thing that is not as docs/format.md wants it.

    structure    file, footer, toc (the stored frame), header, inodes, dirents, xattrs, extents, chunks, strings
    index        of the record in its table; None when it is about the whole structure
    blob_offset  where in the file the structure begins, bytes
    toc_offset   where in the decompressed TOC the structure or the record begins, bytes
    files        for a chunk: how many paths have bytes in it; None where no path can be named
    """

    structure: str
    expected: str
    received: str
    index: int | None = None
    blob_offset: int | None = None
    toc_offset: int | None = None
    files: int | None = None

    def __str__(self) -> str:
        where = self.structure if self.index is None else f"{self.structure}[{self.index}]"
        if self.blob_offset is not None:
            where += f" at byte {self.blob_offset}"
        if self.toc_offset is not None:
            where += f" at byte {self.toc_offset} of the TOC"
        cost = "" if self.files is None else f"; {self.files} file{'' if self.files == 1 else 's'} affected"
        return f"{where}: expected {self.expected}, received {self.received}{cost}"


@frozen
class Report:
    """The result. Paths are those of regular files, every name of a hard link by itself, in the order of a walk.

    toc_offset  blob offset of the TOC's frame, where it was found; None when it is lost
    chunks      state of each chunk; empty when their table is lost
    affected    paths that have bytes in a chunk that is not whole
    whole       the other paths; those of a TOC that is not PROVEN are whole as far as it can be believed
    """

    size_bytes: int
    toc: TocState
    toc_offset: int | None = None
    damages: tuple[Damage, ...] = ()
    chunks: tuple[ChunkState, ...] = ()
    affected: tuple[bytes, ...] = field(default=(), repr=False)
    whole: tuple[bytes, ...] = field(default=(), repr=False)

    @property
    def is_whole(self) -> bool:
        """Nothing at all was found."""
        return not self.damages

    @property
    def files_known(self) -> bool:
        """Whether files could be judged."""
        return self.toc in (TocState.PROVEN, TocState.UNPROVEN)

    @property
    def verdict(self) -> str:
        """One line."""
        files = len(self.affected) + len(self.whole)
        bad = sum(state is not ChunkState.WHOLE for state in self.chunks)
        if self.is_whole:
            return f"whole: {len(self.chunks)} chunks, {files} files"
        if self.toc is TocState.LOST:
            return f"damaged: the TOC is lost, so nothing can be judged; {RECOVERY}"
        chunks = f"{bad} of {len(self.chunks)} chunks"
        if self.toc is TocState.BROKEN:
            told = f"{chunks} are damaged" if self.chunks else "their chunks neither"
            return f"damaged: the TOC breaks a rule, so files cannot be judged, {told}; {RECOVERY}"
        trust = "" if self.toc is TocState.PROVEN else ", as far as a TOC without its digest can be believed"
        return f"damaged: {chunks}, {len(self.affected)} of {files} files affected, {len(self.whole)} whole{trust}; {RECOVERY}"


@frozen
class _Found:
    """A TOC, decompressed. `end` is the blob offset behind its frame."""

    offset: int
    end: int
    raw: bytes = field(repr=False)
    proven: bool


def fsck(file: BinaryIO) -> Report:
    """Examines a layer: any seekable file of any bytes. Raises OSError only."""
    return _Examination(file).run()


class _Examination:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = file.seek(0, os.SEEK_END)
        self._damages: list[Damage] = []

    def run(self) -> Report:
        footer = self._read_footer()
        found = self._find_toc(footer)
        if found is None:
            return self._report(TocState.LOST)
        footer = self._account_for_ends(found, footer)
        toc = self._parse(found)
        if toc is None:
            return self._judge_chunks_alone(found)
        if footer is not None and footer.toc_offset != toc.header.chunks_end:
            self._damage("footer", f"toc_offset {toc.header.chunks_end}, the end of the chunks", footer.toc_offset)
        return self._judge_files(found, toc, TocState.PROVEN if found.proven else TocState.UNPROVEN)

    def _report(self, state: TocState) -> Report:
        return Report(size_bytes=self._size, toc=state, damages=tuple(self._damages))

    def _damage(self, structure: str, expected: object, received: object, **where: int | None) -> None:
        self._damages.append(Damage(structure, str(expected), str(received), **where))

    def _read(self, offset: int, size: int) -> bytes:
        """Fewer bytes where the file ends, none before it begins."""
        if offset < 0 or size <= 0:
            return b""
        self._file.seek(offset)
        return self._file.read(size)

    # The footer

    def _read_footer(self) -> Footer | None:
        """The last 80 bytes, if they are a footer at all; whether it fits the file is seen when the TOC is found."""
        if self._size < spec.FOOTER_SIZE:
            self._damage("file", f"at least {spec.FOOTER_SIZE} bytes", self._size, blob_offset=0)
            return None
        at = self._size - spec.FOOTER_SIZE
        try:
            return decode_footer(self._read(at, spec.FOOTER_SIZE))
        except FormatError as error:
            self._damage("footer", error.expected, error.received, blob_offset=at)
            return None

    def _account_for_ends(self, found: _Found, footer: Footer | None) -> Footer | None:
        """Says what is too much or missing behind the TOC; returns the footer that belongs to it, which is not the last
        80 bytes of the file when others follow it.
        """
        expected = found.end + spec.FOOTER_SIZE
        if footer is None and expected < self._size:
            with contextlib.suppress(FormatError):
                footer = decode_footer(self._read(found.end, spec.FOOTER_SIZE))
                self._damages = [damage for damage in self._damages if damage.structure != "footer"]
        if expected != self._size:
            self._damage(
                "file",
                f"its end at byte {expected}, {spec.FOOTER_SIZE} bytes of footer behind the TOC",
                f"{self._size} bytes, {abs(self._size - expected)} too {'many' if self._size > expected else 'few'}",
                blob_offset=min(found.end, self._size),
            )
        return footer

    # The TOC

    def _find_toc(self, footer: Footer | None) -> _Found | None:
        digest = footer.toc_sha256 if footer else None
        failure: ValueError | None = None
        if footer:
            length = footer.toc_stored_size
            for offset in dict.fromkeys((footer.toc_offset, self._size - spec.FOOTER_SIZE - length)):
                try:
                    raw = restore_toc(self._read(offset, length), footer.toc_raw_size)
                except ValueError as error:
                    failure = failure or error
                    continue
                found = _Found(offset, offset + length, raw, hashlib.sha256(raw).digest() == digest)
                if found.proven or raw.startswith(spec.TOC_MAGIC):
                    return self._checked(found, digest)
        found_by_scan = self._scan(digest)
        if found_by_scan is not None:
            return self._checked(found_by_scan, digest)
        if footer:
            received = failure or "bytes that are no TOC"
            self._damage("toc", f"a zstd frame of {footer.toc_raw_size} bytes", received, blob_offset=footer.toc_offset)
        else:
            self._damage("toc", "a zstd frame with a TOC", "none in the file")
        return None

    def _checked(self, found: _Found, digest: bytes | None) -> _Found:
        if digest is not None and not found.proven:
            received = hashlib.sha256(found.raw).hexdigest()
            self._damage("toc", f"sha256:{digest.hex()}", f"sha256:{received}", blob_offset=found.offset)
        return found

    def _scan(self, digest: bytes | None) -> _Found | None:
        """The last frame that is a TOC by itself; with a digest, one that has it is preferred to all others."""
        best: _Found | None = None
        for offset in self._frames_backwards():
            found = self._toc_at(offset, digest)
            if found is None:
                continue
            if digest is None or found.proven:
                return found
            best = best or found
        return best

    def _frames_backwards(self) -> Iterator[int]:
        """Every offset at which a zstd frame may begin, the last first."""
        end = self._size
        while end > 0:
            start = max(0, end - _SCAN_BYTES)
            data = self._read(start, end - start + len(_FRAME_MAGIC) - 1)
            at = data.rfind(_FRAME_MAGIC)
            while at >= 0:
                yield start + at
                at = data.rfind(_FRAME_MAGIC, 0, at + len(_FRAME_MAGIC) - 1)
            end = start

    def _toc_at(self, offset: int, digest: bytes | None) -> _Found | None:
        """A frame whose contents begin as a TOC and have the length that they state; None for any other frame."""
        raw = bytearray()
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        position, stated = offset, spec.HEADER_SIZE
        while not decompressor.eof and len(raw) <= stated:
            data = self._read(position, _FEED_BYTES)
            if not data:
                return None
            try:
                raw += decompressor.decompress(data)
            except zstandard.ZstdError:
                return None
            position += len(data)
            if len(raw) >= spec.HEADER_SIZE and stated == spec.HEADER_SIZE:
                header = spec.HEADER.unpack_from(raw)
                stated = header[5]
                if header[0] not in (spec.TOC_MAGIC, spec.COLUMNS_MAGIC) or not spec.HEADER_SIZE <= stated <= spec.MAX_TOC_RAW_SIZE:
                    return None
        if not decompressor.eof or len(raw) != stated:
            return None
        try:
            toc = from_columns(bytes(raw))
        except ValueError:
            return None
        end = position - len(decompressor.unused_data)
        if digest is None:  # of a damaged footer, or of one that other bytes follow, the digest may be what is whole
            digest = self._read(end + _DIGEST.start, _DIGEST.stop - _DIGEST.start)
        return _Found(offset, end, toc, hashlib.sha256(toc).digest() == digest)

    def _parse(self, found: _Found) -> Toc | None:
        try:
            return Toc.parse(found.raw)
        except FormatError as error:
            self._damage(
                error.table,
                error.expected,
                error.received,
                index=error.index,
                toc_offset=_toc_offset(found.raw, error.table, error.index),
            )
            return None

    # Chunks and files

    def _judge_chunks_alone(self, found: _Found) -> Report:
        """Of a TOC that breaks a rule: the chunks, if their table is one."""
        states, _ = self._judge_chunks(_chunk_table(found.raw), found.offset)
        return evolve(self._report(TocState.BROKEN), toc_offset=found.offset, chunks=tuple(states))

    def _judge_files(self, found: _Found, toc: Toc, state: TocState) -> Report:
        states, damages = self._judge_chunks(toc.chunks, found.offset)
        bad = [index for index, state_of in enumerate(states) if state_of is not ChunkState.WHOLE]
        affected, whole, files = _judge_paths(toc, bad)
        counted = {id(damage): evolve(damage, files=files.get(damage.index or 0, 0)) for damage in damages}
        damaged = tuple(counted.get(id(damage), damage) for damage in self._damages)
        return Report(
            size_bytes=self._size,
            toc=state,
            toc_offset=found.offset,
            damages=damaged,
            chunks=tuple(states),
            affected=tuple(affected),
            whole=tuple(whole),
        )

    def _judge_chunks(self, chunks: Sequence[Chunk], toc_at: int) -> tuple[list[ChunkState], list[Damage]]:
        """The state of each chunk, and the damages that say it."""
        shift = toc_at - (chunks[-1].blob_offset + chunks[-1].stored_size if chunks else 0)
        self._say_shift(shift, toc_at)
        before = len(self._damages)
        states = [self._judge_chunk(index, chunk, shift) for index, chunk in enumerate(chunks)]
        return states, self._damages[before:]

    def _say_shift(self, shift: int, toc_at: int) -> None:
        if shift:
            kind = "many" if shift > 0 else "few"
            self._damage("toc", f"its frame at byte {toc_at - shift}, where the chunks end", f"{abs(shift)} bytes too {kind} before it",
                         blob_offset=toc_at)  # fmt: skip

    def _judge_chunk(self, index: int, chunk: Chunk, shift: int) -> ChunkState:
        stored = self._read(chunk.blob_offset, chunk.stored_size)
        try:
            decode_chunk(chunk, index, stored)
            return ChunkState.WHOLE
        except FormatError as error:
            if shift and self._is_chunk(index, chunk, chunk.blob_offset + shift):
                state, received = ChunkState.DISPLACED, f"it whole at byte {chunk.blob_offset + shift}"
            elif len(stored) < chunk.stored_size:
                state, received = ChunkState.MISSING, f"{len(stored)} of them: the file ends at byte {self._size}"
            else:
                state, received = ChunkState.DAMAGED, str(error.received)
            self._damage("chunks", error.expected, received, index=index, blob_offset=chunk.blob_offset)
            return state

    def _is_chunk(self, index: int, chunk: Chunk, offset: int) -> bool:
        try:
            decode_chunk(chunk, index, self._read(offset, chunk.stored_size))
        except FormatError:
            return False
        return True


def _judge_paths(toc: Toc, bad: Sequence[int]) -> tuple[list[bytes], list[bytes], dict[int, int]]:
    """The paths with bytes in one of the `bad` chunks (numbers ascending), the other paths, and per bad chunk how many
    paths it affects.
    """
    starts = [chunk.stream_offset for chunk in toc.chunks]
    hit: dict[int, set[int]] = {}
    for number in range(len(toc.inodes)) if bad else ():
        for segment in toc.segments(number):
            first = max(0, bisect.bisect_right(starts, segment.stream_offset) - 1)
            last = bisect.bisect_left(starts, segment.stream_offset + segment.length)
            for index in bad[bisect.bisect_left(bad, first) : bisect.bisect_left(bad, last)]:
                chunk = toc.chunks[index]
                if segment.stream_offset < chunk.stream_offset + chunk.raw_size:
                    hit.setdefault(number, set()).add(index)
    affected: list[bytes] = []
    whole: list[bytes] = []
    files: dict[int, int] = {}
    for path, found in toc.walk():
        if found is None or not toc.inodes[found].is_regular:
            continue
        (affected if found in hit else whole).append(path)
        for index in hit.get(found, ()):
            files[index] = files.get(index, 0) + 1
    return affected, whole, files


def _tables(raw: bytes) -> dict[str, tuple[int, int]]:
    """Offset and count of each table as the header states them, unchecked."""
    numbers = spec.HEADER.unpack_from(raw)[11:23]
    return dict(zip(spec.TABLES, zip(numbers[::2], numbers[1::2], strict=True), strict=True))


def _toc_offset(raw: bytes, table: str, index: int | None) -> int | None:
    """Where a table, or a record of it, begins in the TOC; None when the header does not say."""
    if table == "header":
        return 0
    if len(raw) < spec.HEADER_SIZE or table not in spec.TABLES:
        return None
    return _tables(raw)[table][0] + (index or 0) * spec.RECORD_SIZES[spec.TABLES.index(table)]


def _chunk_table(raw: bytes) -> list[Chunk]:
    """The chunks of a TOC that breaks a rule elsewhere; none when it is their own table that does."""
    if len(raw) < spec.HEADER_SIZE:
        return []
    offset, count = _tables(raw)["chunks"]
    if count * spec.CHUNK.size > len(raw) - offset:
        return []
    records = spec.CHUNK.iter_unpack(raw[offset : offset + count * spec.CHUNK.size])
    chunks = [Chunk(*record[:6]) for record in records]
    end = 0
    for chunk in chunks:
        sizes = 1 <= chunk.stored_size <= chunk.raw_size <= spec.MAX_CHUNK_SIZE
        if chunk.blob_offset != end or not sizes:
            return []
        end += chunk.stored_size
    return chunks
