"""`weenv layer fsck`: whatever happens to a layer's bytes, what it calls whole can be read and what it calls affected cannot."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from strategies import Member, encode_layer, make_content

from layerformat import Entry, FormatError, Kind, Layer, spec
from layerformat.fsck import ChunkState, Report, TocState, fsck
from layerformat.storedtoc import restore_toc, store_toc
from layerformat.tocwriter import build_footer

WEENV = Path(sys.executable).with_name("weenv")
Change = Callable[[bytes], bytes]

SAMPLE = [
    Member(Entry(path=b"big", kind=Kind.REGULAR, size=20_000), make_content(20_000, 1, False)),
    Member(Entry(path=b"d/small", kind=Kind.REGULAR, size=600), make_content(600, 2, False)),
    Member(Entry(path=b"d/link", kind=Kind.HARD_LINK, target=b"d/small")),
    Member(Entry(path=b"holes", kind=Kind.REGULAR, size=20_000, sparse=((4096, 512), (10_000, 100))), make_content(612, 3, False)),
    Member(Entry(path=b"empty", kind=Kind.REGULAR)),
    Member(Entry(path=b"sym", kind=Kind.SYMLINK, target=b"big")),
]
FILES = {b"big", b"d/small", b"d/link", b"holes", b"empty"}


def examined(blob: bytes) -> Report:
    return fsck(io.BytesIO(blob))


def accepted(blob: bytes) -> bool:
    """Whether the reader finds nothing wrong."""
    try:
        with Layer.open(io.BytesIO(blob)) as layer:
            return layer.verify() == []
    except FormatError:
        return False


def readable(original: Layer, blob: bytes) -> dict[bytes, bool]:
    """The oracle: per path of a regular file, whether the original's TOC still gives the original's bytes from `blob`."""
    damaged = Layer(io.BytesIO(blob), original.toc, original.footer, source="damaged", owns_file=False)
    result = {}
    for path, number in original.walk():
        if number is not None and original.inode(number).is_regular:
            size = original.inode(number).size
            try:
                result[path] = damaged.read(number, 0, size) == original.read(number, 0, size)
            except FormatError:
                result[path] = False
    return result


@st.composite
def changes(draw: st.DrawFn, size: int) -> list[tuple[str, int, bytes]]:
    """Flips, cuts and insertions, anywhere; the ends, where footer and TOC are, more often than by chance."""
    places = st.one_of(st.integers(0, size), st.integers(max(0, size - 300), size), st.sampled_from([0, size]))
    edit = st.tuples(st.sampled_from(["flip", "cut", "insert"]), places, st.binary(min_size=1, max_size=200))
    return draw(st.lists(edit, min_size=0, max_size=3))


def changed(blob: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    for kind, at, data in edits:
        if kind == "flip" and at < len(blob):
            blob = blob[:at] + bytes([blob[at] ^ (data[0] or 1)]) + blob[at + 1 :]
        elif kind == "cut":
            blob = blob[:at] + blob[at + len(data) :]
        elif kind == "insert":
            blob = blob[:at] + data + blob[at:]
    return blob


@given(strategies.layers(), st.data())
def test_what_is_called_whole_reads_and_what_is_called_affected_does_not(members: strategies.Layer, data: st.DataObject) -> None:
    blob = encode_layer(members)
    damaged = changed(blob, data.draw(changes(len(blob))))
    report = examined(damaged)
    assert report.is_whole == accepted(damaged)
    assert all(damage.expected and damage.received for damage in report.damages)
    with Layer.open(io.BytesIO(blob)) as original:
        toc_survives = blob[original.footer.toc_offset : -spec.FOOTER_SIZE] in damaged
        if toc_survives:
            assert report.files_known
        if report.toc is TocState.PROVEN or toc_survives:
            expected = readable(original, damaged)
            assert dict.fromkeys(report.whole, True) | dict.fromkeys(report.affected, False) == expected
            assert len(report.chunks) == len(original.toc.chunks)


def sample() -> bytes:
    return encode_layer(SAMPLE)


def test_a_whole_layer_is_whole() -> None:
    report = examined(sample())
    assert (report.is_whole, report.toc, set(report.whole)) == (True, TocState.PROVEN, FILES)
    assert examined(encode_layer([])).is_whole


def test_a_damaged_chunk_costs_the_files_that_have_bytes_in_it_by_every_name() -> None:
    blob = bytearray(sample())
    with Layer.open(io.BytesIO(bytes(blob))) as layer:
        last = layer.toc.chunks[-1]
    blob[last.blob_offset] ^= 0xFF
    report = examined(bytes(blob))
    (damage,) = report.damages
    assert (damage.structure, damage.index, damage.blob_offset) == ("chunks", len(report.chunks) - 1, last.blob_offset)
    assert damage.expected == f"contents with sha256 {last.sha256.hex()}"
    assert damage.files == len(report.affected) == 3
    assert set(report.affected) == {b"d/small", b"d/link", b"holes"}
    assert "3 files affected" in str(damage)


@pytest.mark.parametrize(
    ("change", "structure", "sentence"),
    [
        (lambda blob: blob + b"trailing", "file", "8 too many"),
        (lambda blob: blob[:-3], "footer", "magic"),
        (lambda blob: blob[: -spec.FOOTER_SIZE], "file", f"{spec.FOOTER_SIZE} too few"),
        (lambda blob: blob[:-70] + bytes([blob[-70] ^ 1]) + blob[-69:], "footer", "the checksum"),
        (lambda blob: blob[: -spec.FOOTER_SIZE] + b"between" + blob[-spec.FOOTER_SIZE :], "file", "7 too many"),
    ],
)
def test_damage_behind_the_toc_costs_no_file(change: Change, structure: str, sentence: str) -> None:
    report = examined(change(sample()))
    assert report.toc in (TocState.PROVEN, TocState.UNPROVEN)
    assert (set(report.whole), report.affected) == (FILES, ())
    assert any(damage.structure == structure and sentence in str(damage) for damage in report.damages), report.damages


@pytest.mark.parametrize("extra", [-100, -1, 1, 100])
def test_bytes_too_many_or_too_few_at_the_front_displace_the_chunks(extra: int) -> None:
    blob = sample()
    report = examined(b"x" * extra + blob if extra > 0 else blob[-extra:])
    assert report.toc is TocState.PROVEN
    assert set(report.whole) == {b"empty"}
    first = ChunkState.DISPLACED if extra > 0 else ChunkState.DAMAGED
    assert report.chunks == (first, *(ChunkState.DISPLACED,) * (len(report.chunks) - 1))
    assert any(f"{abs(extra)} bytes too {'many' if extra > 0 else 'few'} before it" in str(damage) for damage in report.damages)


def test_of_bytes_lost_in_the_middle_only_the_chunk_with_them_is_gone() -> None:
    blob = sample()
    with Layer.open(io.BytesIO(blob)) as layer:
        second = layer.toc.chunks[1]
    report = examined(blob[: second.blob_offset + 10] + blob[second.blob_offset + 60 :])
    rest = (ChunkState.DISPLACED,) * (len(report.chunks) - 2)
    assert report.chunks == (ChunkState.WHOLE, ChunkState.DAMAGED, *rest)


def test_without_a_toc_nothing_is_judged_and_the_way_out_is_said() -> None:
    blob = sample()
    with Layer.open(io.BytesIO(blob)) as layer:
        toc_offset = layer.footer.toc_offset
    for lost in (blob[:toc_offset], blob[: toc_offset + 20], b"", b"noise" * 1000):
        report = examined(lost)
        assert report.toc is TocState.LOST
        assert not report.files_known
        assert (report.chunks, report.whole, report.affected) == ((), (), ())
        assert "convert it again" in report.verdict


def rewritten(change: Callable[[bytearray], None], *, digest: bool) -> bytes:
    """The sample with another TOC; with `digest`, under a footer that vouches for it."""
    blob = sample()
    with Layer.open(io.BytesIO(blob)) as layer:
        offset = layer.footer.toc_offset
    raw = bytearray(restore_toc(blob[offset : -spec.FOOTER_SIZE], layer.footer.toc_raw_size))
    change(raw)
    toc = store_toc(bytes(raw))
    footer = build_footer(toc, offset)
    if not digest:
        before = blob[-spec.FOOTER_SIZE :]
        values = list(spec.FOOTER.unpack(footer))
        values[3] = spec.FOOTER.unpack(before)[3]
        footer = with_checksum(values)
    return blob[:offset] + toc.stored + footer


def with_checksum(values: list[object]) -> bytes:
    values[6] = zlib.crc32(spec.FOOTER.pack(*values)[: spec.FOOTER_CRC_RANGE])
    return spec.FOOTER.pack(*values)


def test_a_broken_rule_names_the_record_and_the_chunks_are_still_judged() -> None:
    def break_nlink(raw: bytearray) -> None:
        at = spec.HEADER_SIZE + 2 * spec.INODE.size + 12
        raw[at] += 1

    report = examined(rewritten(break_nlink, digest=True))
    (damage,) = report.damages
    assert (report.toc, damage.structure, damage.index) == (TocState.BROKEN, "inodes", 2)
    assert damage.toc_offset == spec.HEADER_SIZE + 2 * spec.INODE.size
    assert "nlink" in damage.expected
    assert set(report.chunks) == {ChunkState.WHOLE}
    assert (report.whole, report.affected) == ((), ())
    assert "cannot be judged" in report.verdict


def test_a_toc_that_keeps_the_rules_without_its_digest_is_not_believed_silently() -> None:
    def other_time(raw: bytearray) -> None:
        raw[spec.HEADER_SIZE + spec.INODE.size + 16] ^= 1

    report = examined(rewritten(other_time, digest=False))
    (damage,) = report.damages
    assert (report.toc, damage.structure) == (TocState.UNPROVEN, "toc")
    assert set(report.whole) == FILES
    assert "without its digest" in report.verdict


def test_a_layer_inside_a_layer_does_not_stand_in_for_the_outer_one() -> None:
    inner = sample()
    outer = encode_layer([Member(Entry(path=b"inner.weenv", kind=Kind.REGULAR, size=len(inner)), inner)])
    report = examined(outer[:-1])
    assert set(report.whole) == {b"inner.weenv"}


def test_the_command_explains_and_ends_with_a_verdict(tmp_path: Path) -> None:
    path = tmp_path / "layer"
    path.write_bytes(sample())

    def run(*arguments: str, status: int) -> str:
        result = subprocess.run([WEENV, "layer", "fsck", path, *arguments], capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (status, "")
        return result.stdout

    assert run(status=0).startswith(f"{path}: whole: ")
    damaged = bytearray(sample())
    damaged[0] ^= 1
    path.write_bytes(damaged)
    lines = run("--all", status=5).splitlines()
    assert lines[0].startswith("chunks[0] at byte 0: expected contents with sha256 ")
    assert "affected  big" in lines
    assert "whole     d/link" in lines
    assert lines[-1].startswith(f"{path}: damaged: 1 of ")
    described = json.loads(run("--format", "json", status=5))
    assert described["files"]["affected_paths"] == ["big"]
    assert described["files"]["whole_paths"] is None
    assert described["damages"][0]["blob_offset"] == 0
    assert described["chunks"]["damaged"] == 1


def test_a_file_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    result = subprocess.run([WEENV, "layer", "fsck", tmp_path / "none"], capture_output=True)
    assert result.returncode == 3
