"""Decompression of sources against the compressors themselves: however the bytes arrive, whatever the headers say, the right bytes or
an error.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import os
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from strategies import make_content

from layerformat import SourceError
from layerformat.compression import CountingFile, open_decompressed


class Trickle:
    """A file whose reads come up short, as a pipe's do."""

    def __init__(self, data: bytes, step: int) -> None:
        self._file = io.BytesIO(data)
        self._step = step

    def read(self, size: int) -> bytes:
        return self._file.read(min(size, self._step))

    def fileno(self) -> int:
        raise io.UnsupportedOperation

    def close(self) -> None:
        pass


def decompressed(data: bytes, step: int = 1 << 20) -> tuple[str, bytes]:
    kind, file = open_decompressed(CountingFile(cast(BinaryIO, Trickle(data, step))), "source")
    with file:
        return kind, file.read()


def gzip_member(data: bytes, *, level: int, flags: int) -> bytes:
    """A member with every optional part of the header that `flags` names."""
    header = b"\x1f\x8b\x08" + bytes([flags]) + bytes(4) + b"\0\xff"
    if flags & 4:
        header += struct.pack("<H", 6) + b"ab\2\0cd"
    if flags & 8:
        header += b"a name\0"
    if flags & 16:
        header += b"a comment\0"
    if flags & 2:
        header += struct.pack("<H", zlib.crc32(header) & 0xFFFF)
    compressor = zlib.compressobj(level, zlib.DEFLATED, -15)
    return header + compressor.compress(data) + compressor.flush() + struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)


def pieces() -> st.SearchStrategy[list[bytes]]:
    sizes = st.one_of(st.sampled_from([0, 1, 100, 65_535, 65_536, 300_000]), st.integers(0, 5000))
    piece = st.builds(make_content, sizes, st.integers(0, 5), st.booleans())
    return st.lists(piece, min_size=1, max_size=4)


STEPS = st.sampled_from([1, 2, 7, 100, 4096, 1 << 20])


@given(pieces(), STEPS, st.data())
def test_gzip_members(parts: list[bytes], step: int, data: st.DataObject) -> None:
    flags = st.integers(0, 15).map(lambda bits: bits << 1)
    members = [gzip_member(part, level=data.draw(st.sampled_from([0, 1, 6, 9])), flags=data.draw(flags)) for part in parts]
    source = b"".join(members) + bytes(data.draw(st.sampled_from([0, 1, 600])))
    assert decompressed(source, max(step, len(source) // 5000)) == ("tar.gz", b"".join(parts))


@given(pieces(), STEPS, st.data())
def test_xz_streams(parts: list[bytes], step: int, data: st.DataObject) -> None:
    checks = st.sampled_from([lzma.CHECK_NONE, lzma.CHECK_CRC32, lzma.CHECK_CRC64, lzma.CHECK_SHA256])
    paddings = st.sampled_from([0, 4, 512])
    source = b"".join(lzma.compress(part, check=data.draw(checks), preset=0) + bytes(data.draw(paddings)) for part in parts)
    assert decompressed(source, max(step, len(source) // 5000)) == ("tar.xz", b"".join(parts))


@given(pieces(), STEPS, st.booleans())
def test_zstd_frames(parts: list[bytes], step: int, checksum: bool) -> None:
    compress = zstandard.ZstdCompressor(level=1, write_checksum=checksum).compress
    source = b"".join(map(compress, parts))
    assert decompressed(source, max(step, len(source) // 5000)) == ("tar.zst", b"".join(parts))


CONTENT = make_content(3000, 1, True) + make_content(3000, 2, False)
FORMS: dict[str, Callable[[], bytes]] = {
    "gzip": lambda: gzip_member(CONTENT, level=6, flags=0x1E) + gzip.compress(CONTENT),
    "xz": lambda: lzma.compress(CONTENT) + bytes(8) + lzma.compress(CONTENT),
    "zstd": lambda: zstandard.ZstdCompressor(write_checksum=True).compress(CONTENT) * 2,
}


@pytest.mark.parametrize("form", FORMS)
def test_truncated_anywhere_is_an_error(form: str) -> None:
    """But between two members, where what is left is a whole file."""
    source = FORMS[form]()
    whole = [size for size in range(6, len(source)) if _survives(source[:size])]
    assert all(decompressed(source[:size])[1] == CONTENT for size in whole)
    assert len(whole) == (3 if form == "xz" else 1)  # at the first one's end; of xz also after 4 and 8 bytes of padding


def _survives(source: bytes) -> bool:
    try:
        decompressed(source)
    except SourceError:
        return False
    return True


@pytest.mark.parametrize("form", FORMS)
def test_a_flipped_bit_is_an_error_or_changes_nothing(form: str) -> None:
    """Some bits say nothing of the contents: a time in a gzip header, a name without its checksum."""
    source = FORMS[form]()
    silent = 0
    for bit in range(48, 8 * len(source), 37):
        damaged = bytearray(source)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            received = decompressed(bytes(damaged))[1]
        except SourceError:
            continue
        assert received == 2 * CONTENT
        silent += 1
    assert silent < 5


@pytest.mark.parametrize("garbage", [b"g", b"garbage", bytes(100) + b"garbage and more"])
def test_what_is_appended_to_gzip_is_named(garbage: bytes) -> None:
    with pytest.raises(SourceError, match="expected the end, zeros or another gzip member, received 67"):
        decompressed(gzip.compress(CONTENT) + garbage)


def test_a_gzip_header_that_does_not_end_takes_no_memory() -> None:
    with pytest.raises(SourceError, match="name or comment of more than"):
        decompressed(b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * (4 << 20))


def test_xz_that_needs_much_memory_is_refused() -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    with pytest.raises(SourceError, match="too much memory"):
        decompressed(lzma.compress(b"text", filters=filters))


def test_xz_padding_comes_in_fours() -> None:
    with pytest.raises(SourceError, match="padding of a multiple of 4"):
        decompressed(lzma.compress(b"text") + bytes(3))


def test_a_file_is_read_ahead_and_the_thread_ends(tmp_path: Path) -> None:
    """Whole, in part, and up to an error: no thread is left, and the digest is that of the whole."""
    content = os.urandom(1 << 20) * 20
    good = gzip.compress(content, 1)
    for name, data in {"good": good, "cut": good[:-4]}.items():
        (tmp_path / name).write_bytes(data)
    before = threading.active_count()
    digest = hashlib.sha256()
    with open_decompressed(CountingFile(open(tmp_path / "good", "rb", buffering=0)), "good", digest)[1] as file:
        assert file.read() == content
    assert digest.digest() == hashlib.sha256(content).digest()
    with open_decompressed(CountingFile(open(tmp_path / "good", "rb", buffering=0)), "good")[1] as file:
        assert file.read(100) == content[:100]
    with open_decompressed(CountingFile(open(tmp_path / "cut", "rb", buffering=0)), "cut")[1] as file:
        with pytest.raises(SourceError, match="truncated"):
            file.read()
        assert file.read() == b""
    assert threading.active_count() == before
