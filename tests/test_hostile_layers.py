"""Archives and layers that are made to hurt: a clear refusal or the right result, in bounded memory and time, and never a crash.

What leaves the root or bombs a decompressor goes through the converter; hand-made TOCs go to both validators, which must judge
alike. The same at sizes that take minutes: `python -m bench.hostile`.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import zstandard
from layer_model import described
from merge_corners import CHUNK_SIZE, converted, directory, file, link, opaque, symlink, whiteout
from raw_tars import END, archive, global_pax, header, padded, pax
from raw_tars import file as tar_file
from strategies import Layer, Member, encode_layer
from strategies import write_pax as tar_of
from test_weefs_toc import agree, c_accepts, python_accepts, raw_toc
from weefs_harness import MountedCore, mounted_core, open_layers, tree_rows

from layerformat import (
    Entry,
    Kind,
    LayerTree,
    SourceError,
    Toc,
    UnsupportedEntry,
    convert,
    encode,
    export_tar,
    read_tar,
    restore_toc,
    spec,
)
from layerformat import Layer as LayerFile
from layerformat.storedtoc import store_toc
from weefs.core import CoreError
from weefs.merge import PlanRefused, View

MIB = 1 << 20


@pytest.fixture(scope="module")
def mounted() -> Iterator[MountedCore]:
    with mounted_core() as mounted:
        yield mounted


# Out of the root


@pytest.mark.parametrize("target", [b"{outside}", b"../../../../../../../../{outside}", b"d/../..{outside}", b"/proc/self/root/{outside}"])
def test_symlinks_lead_nowhere_but_into_the_root(mounted: MountedCore, tmp_path: Path, target: bytes) -> None:
    """What lies behind a symlink is looked for in the layers below, from their root, also when the machine has such a path."""
    (tmp_path / "secret").write_bytes(b"of the machine")
    outside = os.fsencode(tmp_path)
    target = target.replace(b"{outside}", outside)
    below = [directory(b"d"), symlink(b"s", target)]
    for above, name in (([file(b"s/new")], "s"), ([whiteout(b"s/secret")], "s"), ([link(b"l", b"s/secret")], "s/secret")):
        blobs = [encode_layer(below), encode_layer(above)]
        with pytest.raises(CoreError, match=f"'{name}'"):
            mounted.add_plan(blobs)
        with pytest.raises(PlanRefused, match=f"'{name}'"):
            View(open_layers(blobs))
    if b"proc" not in target:
        inside = outside.lstrip(b"/")
        blobs = [encode_layer([*below, directory(inside), file(inside + b"/secret", b"of the image")]), encode_layer([file(b"s/new")])]
        slot, path = mounted.add_plan([*blobs, encode_layer([link(b"l", b"s/secret")])])
        rows = tree_rows(path)
        mounted.core.remove_plan(slot)
        assert inside + b"/new" in rows
        assert rows[b"l"].content == b"of the image"
    assert sorted(os.listdir(tmp_path)) == ["secret"]


def test_a_path_that_grows_by_symlinks_has_the_limit_of_a_path() -> None:
    deep = b"/".join([b"x" * 250] * 15)
    members = [directory(deep), symlink(b"s", deep), symlink(b"t", b"s")]
    assert encode_layer([*members, file(b"t/" + b"y" * 200)])
    with pytest.raises(UnsupportedEntry, match="symlinks followed"):
        encode_layer([*members, file(b"t/" + b"y" * 200 + b"/" + b"z" * 200)])


def test_forty_symlinks_are_followed_and_no_more() -> None:
    chain = [symlink(b"s%d" % number, b"s%d" % (number + 1)) for number in range(39)]
    end = [directory(b"d"), symlink(b"s39", b"d")]
    assert encode_layer([*chain, *end, file(b"s0/f")])
    with pytest.raises(UnsupportedEntry, match="more than 40 symlinks"):
        encode_layer([*chain, *end, symlink(b"first", b"s0"), file(b"first/f")])


# Bombs


@attrs.frozen
class Ran:
    """A conversion in a process of its own: what it said and its peak memory, bytes."""

    report: dict[str, object]
    error: str
    peak: int


# The peak is the process's own: what wait4 tells includes the pages of the process that it was forked from.
_CONVERT = """
import json, re, sys
from pathlib import Path
import attrs
from layerformat import LayerError, convert
said = {}
try:
    said["report"] = attrs.asdict(convert(sys.argv[1], sys.argv[2]).layer)
except LayerError as error:
    said["error"] = f"{type(error).__name__}: {error}"
said["peak"] = 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
print(json.dumps(said))
"""


def run_convert(source: Path, layer: Path) -> Ran:
    done = subprocess.run([sys.executable, "-c", _CONVERT, source, layer], check=True, stdout=subprocess.PIPE)
    said = json.loads(done.stdout)
    return Ran(said.get("report", {}), said.get("error", ""), said["peak"])


def zeros_as_gzip(head: bytes, mib: int) -> bytes:
    """gzip of an archive of one file of zeros: a member each for the header, every 64 MiB, and the end."""
    piece = gzip.compress(bytes(64 * MIB), 1)
    return gzip.compress(head) + piece * (mib // 64) + gzip.compress(END)


def test_a_file_of_zeros_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "bomb").write_bytes(zeros_as_gzip(header(b"f", size=1024 * MIB), 1024))
    ran = run_convert(tmp_path / "bomb", tmp_path / "layer")
    assert (ran.report["content_size"], ran.error) == (1024 * MIB, "")
    assert ran.peak < 300 * MIB


def test_files_of_eight_exbibytes(mounted: MountedCore) -> None:
    """One hole of 2^63 - 1 bytes costs nothing, and is read at its end; three of them add up to more than a layer can say."""
    hole = Member(Entry(path=b"f", kind=Kind.REGULAR, size=spec.MAX_FILE_SIZE, sparse=()))
    tail = Member(Entry(path=b"g", kind=Kind.REGULAR, size=spec.MAX_FILE_SIZE, sparse=((spec.MAX_FILE_SIZE - 3, 3),)), b"end")
    tar = tar_of([hole, tail])
    slot, path = mounted.add_plan([converted(tar)])
    for name, end in (("f", bytes(10)), ("g", bytes(7) + b"end")):
        descriptor = os.open(path / name, os.O_RDONLY)
        assert os.fstat(descriptor).st_size == spec.MAX_FILE_SIZE
        assert os.pread(descriptor, 10, spec.MAX_FILE_SIZE - 10) == end
        os.close(descriptor)
    mounted.core.remove_plan(slot)
    with pytest.raises(UnsupportedEntry, match="18446744073709551615 bytes together"):
        encode_layer([hole, tail, Member(attrs.evolve(hole.entry, path=b"h"))])


def test_headers_that_are_too_large_are_not_read() -> None:
    for kind in (b"x", b"g", b"L", b"K"):
        with pytest.raises(SourceError, match="an extended header of 104857600 bytes"):
            list(read_tar(io.BytesIO(header(b"big", kind, size=100 * MIB))))


def test_global_headers_do_not_add_up() -> None:
    """Each may have 16 MiB, all of them together no more."""

    class Endless(io.RawIOBase):
        def __init__(self) -> None:
            self.pending = b""
            self.headers = 0

        def read(self, size: int = -1, /) -> bytes:
            while len(self.pending) < size:
                self.headers += 1
                self.pending += global_pax((b"SCHILY.xattr.user.%d" % self.headers, bytes(3 * MIB)))
            data, self.pending = self.pending[:size], self.pending[size:]
            return data

    endless = Endless()
    with pytest.raises(SourceError, match="global headers with more than"):
        list(read_tar(endless))  # type: ignore[arg-type]
    assert endless.headers <= 7


def test_attributes_are_refused_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the TOC is written: a thousandth of their size, compressed, may have brought them. Equal ones count once."""
    monkeypatch.setattr(spec, "MAX_STRINGS", 10_000)
    tree = LayerTree()
    for number in range(100):
        tree.apply(file(b"%d" % number, xattrs={b"user.same": bytes(1000)}).entry)
    for number in range(8):
        tree.apply(file(b"%d" % number, xattrs={b"user.%d" % number: bytes(1000)}).entry)
    with pytest.raises(UnsupportedEntry, match="more than 10000 bytes of extended attributes"):
        tree.apply(file(b"last", xattrs={b"user.last": bytes(1000)}).entry)


def test_more_entries_than_allowed_are_refused_by_name() -> None:
    """Also when each replaces the one before: what is bounded is the work, too."""
    tree = LayerTree(max_entries=10)
    for number in range(10):
        tree.apply(Entry(path=b"f%d" % (number // 2), kind=Kind.REGULAR))
    with pytest.raises(UnsupportedEntry, match="more than 10 entries"):
        tree.apply(Entry(path=b"f", kind=Kind.REGULAR))


def test_a_toc_that_no_reader_takes_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "MAX_TOC_RAW_SIZE", 1000)
    members = [Entry(path=b"%d" % number, kind=Kind.FIFO) for number in range(20)]
    with pytest.raises(UnsupportedEntry, match="metadata has more than 1000 bytes"):
        encode(((entry, io.BytesIO()) for entry in members), io.BytesIO())


def test_a_long_sparse_map_is_read_once() -> None:
    """16 MiB of map, in blocks of 512 bytes: looking at all of it again with each block would be 270 GB."""
    count = 1 << 19
    lines = b"%d\n" % count + b"".join(b"%011d\n%011d\n" % (2 * index, 1) for index in range(count))
    size = 2 * count
    head = pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.realsize", b"%d" % size))
    tar = archive(head, tar_file(b"f", padded(lines) + b"x" * count))
    ((entry, data),) = [(entry, data.read(entry.data_size)) for entry, data in read_tar(io.BytesIO(tar))]
    assert entry.sparse is not None
    assert (len(entry.sparse), entry.sparse[-1], len(data)) == (count, (size - 2, 1), count)
    with pytest.raises(SourceError, match="does not end"):
        list(read_tar(io.BytesIO(head + tar_file(b"f", bytes(20 * MIB)))))


def fast_xz(data: bytes) -> bytes:
    return lzma.compress(data, preset=0)


def test_ten_thousand_members(tmp_path: Path) -> None:
    """Of gzip, with a hundred bytes each, and as many empty ones; as many frames of zstd and streams of xz."""
    tar = tar_of([file(b"f", b"data" * 250_000)])
    pieces = [tar[at : at + 100] for at in range(0, len(tar), 100)]
    for name, compress in (("gz", gzip.compress), ("zst", zstandard.ZstdCompressor().compress), ("xz", fast_xz)):
        empty = compress(b"")
        (tmp_path / name).write_bytes(b"".join(compress(piece) + (empty if name != "xz" else b"") for piece in pieces))
        assert convert(tmp_path / name, tmp_path / "layer").layer.content_size == 1_000_000
        with LayerFile.open(tmp_path / "layer") as layer:
            assert described(layer)[b"f"].content == b"data" * 250_000


def wide_zstd() -> bytes:
    """A frame whose window is 2 GiB, with one raw block."""
    return b"\x28\xb5\x2f\xfd" + bytes([0, (31 - 10) << 3]) + (1 | len(END) << 3).to_bytes(3, "little") + END


def wide_xz() -> bytes:
    """A stream whose dictionary is 1 GiB: byte 16 is the filter's property (docs of the .xz format, 5.3.1)."""
    stream = bytearray(lzma.compress(END))
    assert stream[12:16] == b"\x02\x00\x21\x01"
    stream[16] = 36
    stream[20:24] = zlib.crc32(stream[12:20]).to_bytes(4, "little")
    return bytes(stream)


@pytest.mark.parametrize("data", [wide_zstd(), wide_xz()], ids=["zstd", "xz"])
def test_compressors_that_want_much_memory_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "source").write_bytes(data)
    ran = run_convert(tmp_path / "source", tmp_path / "layer")
    assert re.match("SourceError: .* cannot be decompressed", ran.error)
    assert ran.peak < 300 * MIB
    assert not (tmp_path / "layer").exists()


# Many of a thing


def shape(layer: LayerFile) -> dict[bytes, int | None]:
    """The flags of every path; None of a whiteout."""
    return {path: None if number is None else layer.inode(number).flags for path, number in layer.walk()}


def test_the_deepest_path(mounted: MountedCore) -> None:
    """2,048 levels are the most that 4,095 bytes hold; one more is refused by name, and so are 10,000."""
    deepest = b"/".join([b"d"] * 2048)
    blob = encode_layer([file(deepest)])
    slot, path = mounted.add_plan([blob, encode_layer([whiteout(deepest), file(deepest[:-1] + b"e")])])
    at = os.open(path, os.O_PATH)
    for _ in range(2047):
        below = os.open("d", os.O_PATH, dir_fd=at)
        os.close(at)
        at = below
    assert os.stat("e", dir_fd=at).st_size == 4
    with pytest.raises(FileNotFoundError):
        os.stat("d", dir_fd=at)
    os.close(at)
    mounted.core.remove_plan(slot)
    assert dict(View(open_layers([blob, blob])).walk()).keys() == shape(LayerFile.open(io.BytesIO(blob))).keys()
    for members in ([file(deepest)], [whiteout(deepest)], [directory(deepest), opaque(deepest)]):
        exported = io.BytesIO()
        layer = LayerFile.open(io.BytesIO(encode_layer(members)))
        export_tar(layer, exported)
        assert shape(LayerFile.open(io.BytesIO(converted(exported.getvalue())))) == shape(layer)
    for levels in (2049, 10_000):
        with pytest.raises(UnsupportedEntry, match="more than 4,095 bytes"):
            encode_layer([file(b"/".join([b"d"] * levels))])


def test_the_longest_names(mounted: MountedCore) -> None:
    longest = b"/".join([b"n" * 255] * 16)
    slot, path = mounted.add_plan([encode_layer([file(longest)])])
    at = os.open(path, os.O_PATH)
    for _ in range(15):
        at, before = os.open(b"n" * 255, os.O_PATH, dir_fd=at), at
        os.close(before)
    assert os.stat(b"n" * 255, dir_fd=at).st_size == 4
    os.close(at)
    mounted.core.remove_plan(slot)
    with pytest.raises(UnsupportedEntry, match="more than 4,095 bytes"):
        encode_layer([file(b"/".join([b"n" * 255] * 17))])


def test_a_hundred_thousand_names_of_one_file(mounted: MountedCore) -> None:
    count = 100_000
    blob = encode_layer([file(b"0"), *(link(b"%d" % number, b"0") for number in range(1, count))])
    slot, path = mounted.add_plan([blob, encode_layer([whiteout(b"7"), link(b"more", b"99999")])])
    assert os.lstat(path / "more").st_nlink == os.lstat(path / "50000").st_nlink == count
    assert not (path / "7").exists()
    assert len(os.listdir(path)) == count
    mounted.core.remove_plan(slot)


def test_all_the_attributes_that_fit(mounted: MountedCore) -> None:
    """65,535 fit; Linux lists at most 64 KiB of names, but every one can be asked for."""
    attributes = {b"user.%05d" % number: b"%d" % number for number in range(65_535)}
    slot, path = mounted.add_plan([encode_layer([file(b"f", xattrs=attributes)])])
    for number in (0, 30_000, 65_534):
        assert os.getxattr(path / "f", f"user.{number:05}") == b"%d" % number
    with pytest.raises(OSError, match="Argument list too long"):
        os.listxattr(path / "f")
    mounted.core.remove_plan(slot)
    with pytest.raises(UnsupportedEntry, match="65536 extended attributes"):
        encode_layer([file(b"f", xattrs=attributes | {b"user.more": b""})])


def test_a_large_directory(mounted: MountedCore) -> None:
    count = 100_000
    entries = [tar_file(b"d/%d" % number, b"") for number in range(count)]
    blob = converted(archive(*entries))
    slot, path = mounted.add_plan([blob, encode_layer([whiteout(b"d/%d" % number) for number in range(0, count, 1000)])])
    assert len(os.listdir(path / "d")) == count - count // 1000
    assert (path / "d/99999").exists()
    assert not (path / "d/5000").exists()
    mounted.core.remove_plan(slot)


# Hand-made TOCs

VALUES = (0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
RECORDS = (spec.INODE, spec.DIRENT, spec.XATTR, spec.EXTENT, spec.CHUNK)

EVERYTHING: Layer = [
    directory(b".", 0o751),
    directory(b"d", xattrs={b"user.a": b"1", b"user.b": b"2"}),
    file(b"d/large", b"l" * 3 * CHUNK_SIZE),
    file(b"d/small", xattrs={b"user.a": b"3"}),
    file(b"empty", b""),
    link(b"again", b"d/small"),
    link(b"lower", b"below/it"),
    symlink(b"s", b"d/small"),
    whiteout(b"gone"),
    Member(Entry(path=b"c", kind=Kind.CHARACTER, rdev=os.makedev(1, 3))),
    Member(Entry(path=b"p", kind=Kind.FIFO)),
    Member(Entry(path=b"sparse", kind=Kind.REGULAR, size=90_000, sparse=((4096, 512), (40_960, 512))), b"x" * 1024),
    Member(Entry(path=b"hole", kind=Kind.REGULAR, size=90_000, sparse=())),
    directory(b"d/e"),
]


def fields(record: struct.Struct) -> list[tuple[int, int]]:
    """Offset and width of each number of a record, from its format."""
    places = []
    at = 0
    for count, code in re.findall(r"(\d*)([a-zA-Z])", record.format):
        width = struct.calcsize("<" + code)
        if code != "s":
            places += [(at + width * index, width) for index in range(int(count or 1))]
        at += width * int(count or 1)
    assert at == record.size
    return places


def places(toc: bytes) -> Iterator[tuple[str, int, int]]:
    """Every number in a TOC: what it is, where, and its width."""
    for at, width in fields(spec.HEADER):
        yield f"header at {at}", at, width
    tables = struct.unpack_from("<12Q", toc, 72)
    for index, record in enumerate(RECORDS):
        for number in range(tables[2 * index + 1]):
            for at, width in fields(record):
                yield f"{spec.TABLES[index]}[{number}] at {at}", tables[2 * index] + number * record.size + at, width


def replaced(data: bytes, at: int, width: int, value: int) -> bytes:
    return data[:at] + value.to_bytes(width, "little") + data[at + width :]


def test_both_validators_judge_every_extreme_number_alike() -> None:
    toc = raw_toc(EVERYTHING)
    agree(toc)
    tried = accepted = 0
    for _, at, width in places(toc):
        for value in VALUES:
            if value < 1 << 8 * width:
                changed = replaced(toc, at, width, value)
                agree(changed)
                tried += 1
                accepted += c_accepts(changed) is None
    assert tried > 1500
    assert 0 < accepted < tried / 2  # ids and times may be anything


def test_extreme_numbers_in_a_toc_by_columns_are_refused_or_turned_back() -> None:
    """The header decides where the columns lie: whatever it says, a ValueError, or bytes that both validators judge alike."""
    toc = raw_toc(EVERYTHING)
    columns = zstandard.decompress(store_toc(toc).stored)
    assert columns.startswith(spec.COLUMNS_MAGIC)
    compress = zstandard.ZstdCompressor().compress
    refused = 0
    for at, width in fields(spec.HEADER):
        for value in VALUES:
            if value >= 1 << 8 * width:
                continue
            try:
                agree(restore_toc(compress(replaced(columns, at, width, value)), len(toc)))
            except ValueError:
                refused += 1
    assert refused > 50
    for at in range(spec.HEADER_SIZE, len(columns)):
        agree(restore_toc(compress(replaced(columns, at, 1, columns[at] ^ 0x80)), len(toc)))
    for size in (0, 7, 8, 100, spec.HEADER_SIZE - 1):
        with pytest.raises(ValueError, match=r"a TOC by columns of|no zstd frame|a frame"):
            restore_toc(compress(columns[:size]), size + (size < 8))


def table_of(toc: bytes, name: str) -> tuple[int, int]:
    """Where a table begins and its number of records."""
    index = spec.TABLES.index(name)
    start, count = struct.unpack_from("<QQ", toc, 72 + 16 * index)
    return start, count


def test_extents_that_overlap_and_chunks_out_of_place() -> None:
    toc = raw_toc(EVERYTHING)
    start, count = table_of(toc, "extents")
    assert count == 2
    first, second = (start + index * spec.EXTENT.size for index in range(2))
    offset, stream, length = spec.EXTENT.unpack_from(toc, first)
    swapped = (
        toc[:first] + toc[second : second + spec.EXTENT.size] + toc[first : first + spec.EXTENT.size] + toc[second + spec.EXTENT.size :]
    )
    shared = replaced(toc, second + 8, 8, stream)
    for changed, good in (
        (replaced(toc, second, 8, offset + length), True),  # they touch
        (replaced(toc, second, 8, offset + length - 1), False),
        (replaced(toc, second, 8, offset), False),
        (swapped, False),
        (shared, True),  # two places of a file with one range of the stream
        (replaced(toc, second, 8, (1 << 64) - length), False),
        (replaced(toc, second + 8, 8, (1 << 64) - length), False),
        (replaced(toc, second + 16, 8, (1 << 64) - 1), False),
    ):
        agree(changed)
        assert (c_accepts(changed) is None) == good
    assert [(part.file_offset, part.stream_offset) for part in Toc.parse(shared).extents] == [(4096, stream), (40_960, stream)]

    start, count = table_of(toc, "chunks")
    assert count >= 3
    one, two = (start + index * spec.CHUNK.size for index in range(2))
    size = spec.CHUNK.size
    for changed in (
        toc[:one] + toc[two : two + size] + toc[one : one + size] + toc[two + size :],
        toc[:two] + toc[one : one + size] + toc[two + size :],
        replaced(toc, two, 8, 0),
        replaced(toc, two, 8, 1),
        replaced(toc, two + 8, 8, 0),
        replaced(toc, two + 8, 8, int.from_bytes(toc[two + 8 : two + 16], "little") - 1),
        replaced(toc, two + 8, 8, int.from_bytes(toc[two + 8 : two + 16], "little") + 1),
    ):
        agree(changed)
        assert c_accepts(changed) is not None
        assert python_accepts(changed) is not None
