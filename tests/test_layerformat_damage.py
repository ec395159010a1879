"""Damage: no flipped bit and no missing byte of a layer is ever shown as something else; refusals name the table and
the record.
"""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from collections.abc import Callable

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from layer_model import Row, described
from strategies import Member, encode_layer, make_content

from layerformat import Entry, FormatError, Kind, Layer, Toc, decode_footer, open_toc, restore_toc, spec

SAMPLE = [
    Member(Entry(path=b"d/big", kind=Kind.REGULAR, size=9000), make_content(9000, 1, True)),
    Member(Entry(path=b"d/noise", kind=Kind.REGULAR, size=600, xattrs={b"user.a": b"1", b"user.b": b"2"}), make_content(600, 2, False)),
    Member(Entry(path=b"d/link", kind=Kind.HARD_LINK, target=b"d/noise")),
    Member(Entry(path=b"below", kind=Kind.HARD_LINK, target=b"usr/lower")),
    Member(Entry(path=b"sym", kind=Kind.SYMLINK, target=b"d/big")),
    Member(Entry(path=b"null", kind=Kind.CHARACTER, rdev=0x103)),
    Member(Entry(path=b"holes", kind=Kind.REGULAR, size=20000, sparse=((4096, 512), (10000, 100))), make_content(612, 3, True)),
    Member(Entry(path=b".wh.gone", kind=Kind.REGULAR)),
    Member(Entry(path=b"d/.wh..wh..opq", kind=Kind.REGULAR)),
]


def shown(blob: bytes) -> dict[bytes, Row] | None:
    """What a reader shows of a layer, or None when it refuses."""
    try:
        with Layer.open(io.BytesIO(blob)) as layer:
            rows = described(layer)
            assert layer.verify() == []
            return rows
    except FormatError:
        return None


def test_every_flipped_bit_is_refused_or_harmless() -> None:
    blob = encode_layer(SAMPLE)
    right = shown(blob)
    assert right is not None
    refused = 0
    for index in range(len(blob)):
        for bit in range(8):
            damaged = bytearray(blob)
            damaged[index] ^= 1 << bit
            result = shown(bytes(damaged))
            # zstd has bits that do not matter; what is shown must then be the very same.
            assert result is None or result == right, (index, bit)
            refused += result is None
    assert refused > 0.99 * 8 * len(blob)


def test_every_truncation_is_refused() -> None:
    blob = encode_layer(SAMPLE)
    for size in range(len(blob)):
        assert shown(blob[:size]) is None, size
        assert shown(blob[len(blob) - size :]) is None, size


def raw_toc(blob: bytes) -> bytes:
    footer = decode_footer(blob[-spec.FOOTER_SIZE :], blob_size=len(blob))
    return restore_toc(blob[footer.toc_offset : -spec.FOOTER_SIZE], footer.toc_raw_size)


def test_every_flipped_bit_of_a_raw_toc_parses_or_is_refused() -> None:
    """Without the digest in front: the parser itself raises nothing but FormatError, and walks whatever it accepts."""
    raw = raw_toc(encode_layer(SAMPLE))
    refused = 0
    for index in range(len(raw)):
        for bit in range(8):
            damaged = bytearray(raw)
            damaged[index] ^= 1 << bit
            try:
                toc = Toc.parse(bytes(damaged))
            except FormatError:
                refused += 1
                continue
            for path, number in toc.walk():
                assert toc.lookup(path) == number
    assert refused > 0


@given(strategies.layers(), st.data())
def test_mutated_tocs_raise_only_format_errors(members: strategies.Layer, data: st.DataObject) -> None:
    raw = bytearray(raw_toc(encode_layer(members)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        value = data.draw(st.sampled_from([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\1", b"\xff\xff\xff\xff\xff\xff\xff\xff", b"/"]))
        raw[at : at + len(value)] = value[: len(raw) - at]
    try:
        toc = Toc.parse(bytes(raw))
    except FormatError:
        return
    assert sum(1 for _ in toc.walk()) == len(toc.dirents) + 1


def patched(table: str, index: int, field_offset: int, value: bytes) -> bytes:
    """The sample's TOC with a field of one record replaced."""
    raw = bytearray(raw_toc(encode_layer(SAMPLE)))
    which = spec.TABLES.index(table)
    start = struct.unpack_from("<Q", raw, 72 + 16 * which)[0] + index * spec.RECORD_SIZES[which] + field_offset
    raw[start : start + len(value)] = value
    return bytes(raw)


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("table", "index", "offset", "value", "expected"),
    [
        ("inodes", 0, 0, u32(0o100644), "a directory as the root"),
        ("inodes", 0, 12, u32(9), "nlink"),
        ("inodes", 6, 0, u32(0o644), "a file type"),
        ("inodes", 1, 24, u32(10**9), "nanoseconds below"),
        ("inodes", 1, 58, b"\x10\0", "reserved flags"),
        ("inodes", 6, 58, b"\x01\0", "OPAQUE and IMPLICIT on directories only"),
        ("inodes", 1, 58, b"\x0c\0", "no other flag on a lower link"),
        ("inodes", 1, 60, u32(5), "a name in the directory that is its parent"),
        ("dirents", 0, 4, u32(500), "an inode below"),
        ("dirents", 0, 4, u32(2), "type 4 of inode 2"),
        ("dirents", 0, 8, b"\0\0", "a name of 1 to 255"),
        ("dirents", 0, 0, u32(0xFFFFFF00), "a string within the strings"),
        ("dirents", 0, 11, b"\1", "reserved bytes"),
        ("xattrs", 0, 14, b"\1", "reserved bytes"),
        ("xattrs", 0, 8, u32(65537), "a value of up to"),
        ("extents", 0, 16, u64(0), "a length"),
        ("extents", 1, 0, u64(0), "file_offset from"),
        ("extents", 0, 8, u64(1 << 63), "data within the stream"),
        ("chunks", 0, 0, u64(4096), "stream_offset 0"),
        ("chunks", 1, 8, u64(1), "blob_offset"),
        ("chunks", 0, 16, u32(0), "stored_size"),
        ("chunks", 0, 20, u32(8193), "raw_size"),
        ("chunks", 0, 56, u32(2), "reserved bits"),
    ],
)
def test_refusals_name_the_record(table: str, index: int, offset: int, value: bytes, expected: str) -> None:
    with pytest.raises(FormatError, match=expected) as caught:
        Toc.parse(patched(table, index, offset, value))
    assert (caught.value.table, caught.value.index) == (table, index)
    assert "fetch it again" in str(caught.value)


def test_unknown_incompatible_feature_is_refused_and_compatible_is_not() -> None:
    raw = bytearray(raw_toc(encode_layer(SAMPLE)))
    raw[24] = 1
    assert Toc.parse(bytes(raw)).header.compat == 1
    raw[16] = 1
    with pytest.raises(FormatError, match="incompatible"):
        Toc.parse(bytes(raw))


def with_footer(change: Callable[[list[object]], None]) -> bytes:
    blob = encode_layer(SAMPLE)
    values = list(spec.FOOTER.unpack(blob[-spec.FOOTER_SIZE :]))
    change(values)
    values[6] = zlib.crc32(spec.FOOTER.pack(*values)[: spec.FOOTER_CRC_RANGE])
    return blob[: -spec.FOOTER_SIZE] + spec.FOOTER.pack(*values)


@pytest.mark.parametrize(("index", "value"), [(0, 1), (1, 1), (2, 1 << 40), (2, 200), (3, bytes(32)), (4, 2), (5, 1), (7, 1)])
def test_footers_that_do_not_fit_are_refused(index: int, value: object) -> None:
    def change(values: list[object]) -> None:
        values[index] = value

    with pytest.raises(FormatError):
        Layer.open(io.BytesIO(with_footer(change)))


def test_toc_opens_from_what_annotations_say() -> None:
    blob = encode_layer(SAMPLE)
    footer = decode_footer(blob[-spec.FOOTER_SIZE :])
    stored = blob[footer.toc_offset : footer.toc_offset + footer.toc_stored_size]
    toc = open_toc(stored, raw_size=footer.toc_raw_size, digest=footer.toc_sha256)
    assert toc.lookup(b"d/noise") == toc.lookup(b"d/link")
    with pytest.raises(FormatError, match="sha256"):
        open_toc(stored, raw_size=footer.toc_raw_size, digest=bytes(32))
    with pytest.raises(FormatError, match="zstd frame"):
        open_toc(stored, raw_size=footer.toc_raw_size - 1, digest=footer.toc_sha256)


def test_verify_names_chunk_offset_and_files() -> None:
    blob = bytearray(encode_layer(SAMPLE))
    with Layer.open(io.BytesIO(bytes(blob))) as layer:
        chunk = layer.toc.chunks[-1]
        assert layer.verify("sha256:" + hashlib.sha256(blob).hexdigest()) == []
    blob[chunk.blob_offset + chunk.stored_size // 2] ^= 0xFF
    with Layer.open(io.BytesIO(bytes(blob))) as layer:
        problem, whole = layer.verify("sha256:" + hashlib.sha256(b"another").hexdigest())
    assert problem.chunk == len(layer.toc.chunks) - 1
    assert problem.blob_offset == chunk.blob_offset
    assert set(problem.files) == {b"d/noise", b"d/link", b"holes"}
    assert "d/link" in str(problem)
    assert "fetch it again" in str(whole)
