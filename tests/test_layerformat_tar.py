"""The tar reader against what other programs write, what is broken, and what a layer refuses by name."""

from __future__ import annotations

import base64
import gzip
import io
import os
import subprocess
import tarfile
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from attrs import evolve
from raw_tars import END, header, padded, pax
from strategies import Member, encode_layer, make_content, write_pax

from layerformat import (
    Entry,
    Kind,
    Layer,
    LayerTree,
    SourceError,
    TarWriter,
    UnsupportedEntry,
    convert,
    encode,
    export_tar,
    open_source,
    read_tar,
)
from layerformat.tree import Directory


def read_all(archive: bytes) -> list[tuple[Entry, bytes]]:
    return [(entry, data.read(entry.data_size)) for entry, data in read_tar(io.BytesIO(archive))]


@pytest.fixture
def sparse_tree(tmp_path: Path) -> Path:
    """A directory with files that are sparse in several ways, one with more segments than an old GNU header holds."""
    root = tmp_path / "tree"
    root.mkdir()
    for name, size, places in (
        ("none", 3 << 20, []),
        ("few", 1 << 20, [0, 300_000]),
        ("many", 4 << 20, range(65_536, 4 << 20, 131_072)),
        ("end", (1 << 20) + 100, [(1 << 20) - 4096]),
    ):
        with open(root / name, "wb") as file:
            file.truncate(size)
            for place in places:
                file.seek(place)
                file.write(make_content(4096, place, True))
    (root / ("long" * 40)).write_bytes(b"x")
    (root / "plain").write_bytes(make_content(5000, 1, False))
    os.utime(root / "plain", ns=(0, 1_700_000_000_123_456_789))
    os.utime(root / "few", ns=(0, -1_500_000_000))
    return root


@pytest.mark.parametrize(
    "options",
    [
        ["--format=gnu"],
        ["--format=gnu", "--sparse"],
        ["--format=oldgnu", "--sparse"],
        ["--format=posix"],
        ["--format=posix", "--sparse", "--sparse-version=0.0"],
        ["--format=posix", "--sparse", "--sparse-version=0.1"],
        ["--format=posix", "--sparse", "--sparse-version=1.0"],
    ],
    ids=" ".join,
)
def test_gnu_tar_archives_equal_the_directory(sparse_tree: Path, options: list[str]) -> None:
    command = ["tar", "-c", *options, "--sort=name", "--numeric-owner", "-C", str(sparse_tree), "."]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    entries = {os.path.normpath(entry.path): (entry, data) for entry, data in read_all(archive)}
    assert len(entries) == 7
    for name, (entry, data) in entries.items():
        status = os.stat(sparse_tree / os.fsdecode(name))
        exact = "--format=posix" in options
        assert entry.mtime_ns == (status.st_mtime_ns if exact else status.st_mtime_ns // 10**9 * 10**9)
        assert (entry.mode, entry.uid) == (status.st_mode & 0o7777, status.st_uid)
        if entry.kind is Kind.REGULAR:
            assert Member(entry, data).content() == (sparse_tree / os.fsdecode(name)).read_bytes()
            assert (entry.sparse is not None) == ("--sparse" in options and name in (b"none", b"few", b"many", b"end"))


def test_ustar_prefix_and_old_headers() -> None:
    prefix = b"p" * 150
    old = header(b"old/", b"\0", magic=bytes(8))
    entries = read_all(header(b"name", rest=prefix.ljust(155, b"\0") + bytes(12)) + old + END)
    assert entries[0][0].path == prefix + b"/name"
    assert (entries[1][0].path, entries[1][0].kind) == (b"old/", Kind.DIRECTORY)


def test_base_256_numbers() -> None:
    block = header(
        b"f",
        uid=b"\x80" + (1 << 31).to_bytes(7, "big"),
        mtime=(-5 & (1 << 96) - 1).to_bytes(12, "big"),
        size=b"\x80" + (3).to_bytes(11, "big"),
    )
    ((entry, data),) = read_all(block + padded(b"abc") + END)
    assert (entry.uid, entry.mtime_ns, data) == (1 << 31, -5 * 10**9, b"abc")


def test_signed_checksums_are_accepted() -> None:
    block = bytearray(header(b"\xff\xfe"))
    total = sum(byte if byte < 128 else byte - 256 for byte in block[:148] + b" " * 8 + block[156:])
    block[148:156] = b"%06o\0 " % total
    assert read_all(bytes(block) + END)[0][0].path == b"\xff\xfe"


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        (b"1.5", 1_500_000_000),
        (b"1700000000.123456789", 1_700_000_000_123_456_789),
        (b"-1.5", -1_500_000_000),
        (b"-0.000000001", -1),
        (b"0.9999999999", 999_999_999),
        (b"-0.0000000001", -1),
        (b"7", 7_000_000_000),
        (b"7.", 7_000_000_000),
    ],
)
def test_pax_times_are_exact(text: bytes, ns: int) -> None:
    assert read_all(pax((b"mtime", text)) + header(b"f") + END)[0][0].mtime_ns == ns


def test_global_headers_apply_until_replaced_and_local_ones_win() -> None:
    archive = (
        pax((b"uid", b"77"), (b"mtime", b"3"), (b"comment", b"x"), kind=b"g")
        + header(b"one")
        + pax((b"uid", b"5"), (b"SCHILY.xattr.user.a", b"v"))
        + header(b"two")
        + pax((b"uid", b""), kind=b"g")
        + header(b"three")
        + END
    )
    one, two, three = (entry for entry, _ in read_all(archive))
    assert (one.uid, one.mtime_ns, one.xattrs) == (77, 3 * 10**9, {})
    assert (two.uid, two.mtime_ns, two.xattrs) == (5, 3 * 10**9, {b"user.a": b"v"})
    assert (three.uid, three.mtime_ns) == (0, 3 * 10**9)


def test_attributes_in_both_spellings() -> None:
    encoded = base64.b64encode(b"\0value").rstrip(b"=")
    archive = pax(
        (b"LIBARCHIVE.xattr.user.%C3%A9", encoded),
        (b"LIBARCHIVE.xattr.user.b", encoded),
        (b"SCHILY.xattr.user.b", b"exact\n\0"),
        (b"SCHILY.xattr.user.a%3Db%25", b"="),
    )
    entry = read_all(archive + header(b"f") + END)[0][0]
    assert entry.xattrs == {"user.é".encode(): b"\0value", b"user.b": b"exact\n\0", b"user.a=b%": b"="}


def test_links_have_no_data_whatever_their_size_says() -> None:
    target = b"a".ljust(100, b"\0")
    archive = header(b"l", b"1", size=700, target=target) + header(b"a", size=1) + padded(b"x") + END
    assert [(entry.path, data) for entry, data in read_all(archive)] == [(b"l", b""), (b"a", b"x")]


def test_unread_data_is_skipped_and_the_stream_is_read_to_its_end() -> None:
    file = io.BytesIO(header(b"a", size=700) + padded(b"x" * 700) + header(b"b") + END + bytes(9000))
    entries = []
    for entry, data in read_tar(file):
        entries.append(entry.path)
        data.read(3)
    assert entries == [b"a", b"b"]
    assert file.read() == b""


def test_every_truncation_is_an_error_or_ends_between_entries() -> None:
    archive = write_pax([Member(Entry(path=b"name" * 30, kind=Kind.REGULAR, size=600), b"x" * 600), Member(Entry(b"b", Kind.FIFO))])
    whole = [entry for entry, _ in read_all(archive)]
    for size in range(0, len(archive) - 10240 + 3 * 512, 7):
        try:
            got = [entry for entry, _ in read_all(archive[:size])]
        except SourceError as error:
            truncated = "truncated" in str(error) and error.offset is not None
            if not truncated and not (size < 262 and "neither a tar" in str(error)):  # before the magic number nothing says tar
                raise
        else:
            assert size % 512 == 0
            assert got == whole[: len(got)]


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (b"not a tar archive" * 100, "neither a tar nor a gzip- or zstd-compressed one$"),
        (header(b"f", size=0)[:-1] + b"\1" + END, "checksum"),
        (header(b"f", size=600) + b"x" * 300, "entry f.*truncated"),
        (header(b"f") + bytes(512) + header(b"g") + END, "two zero blocks"),
        (header(b"f", uid=b"zzzzzzz\0") + END, "octal uid"),
        (pax((b"mtime", b"now")) + header(b"f") + END, "PAX header"),
        (header(b"pax", b"x", size=4) + padded(b"9 a\n") + header(b"f") + END, "PAX header"),
        (header(b"pax", b"x", size=1 << 30), "extended header of"),
        (pax((b"uid", b"1")), "truncated"),
        (pax((b"GNU.sparse.size", b"9"), (b"GNU.sparse.map", b"5,2,1,2")) + header(b"f", size=4) + padded(b"abcd") + END, "out of order"),
        (pax((b"GNU.sparse.size", b"9"), (b"GNU.sparse.map", b"1,2")) + header(b"f", size=4) + padded(b"abcd") + END, "add up"),
    ],
)
def test_broken_archives_are_named(archive: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read_all(archive)


def test_compressed_sources(tmp_path: Path) -> None:
    tar = write_pax([Member(Entry(path=b"f", kind=Kind.REGULAR, size=300_000), make_content(300_000, 1, True))])
    half = len(tar) // 2
    compress = zstandard.ZstdCompressor(write_checksum=True).compress
    skippable = b"\x50\x2a\x4d\x18\3\0\0\0abc"
    forms = {
        "tar": tar,
        "tar.gz": gzip.compress(tar[:half]) + gzip.compress(tar[half:]) + bytes(100),
        "tar.zst": skippable + compress(tar[:half]) + skippable + compress(tar[half:]),
    }
    blobs = set()
    for kind, data in forms.items():
        (tmp_path / "source").write_bytes(data)
        report = convert(tmp_path / "source", tmp_path / "layer")
        assert (report.source_kind, report.bytes_in, report.warnings) == (kind, len(data), ())
        blobs.add((tmp_path / "layer").read_bytes())
        if kind != "tar":
            for damaged in (data[: len(data) * 3 // 4], data[:-200] if kind == "tar.gz" else data[:-1], data + b"rubbish"):
                (tmp_path / "source").write_bytes(damaged)
                with pytest.raises(SourceError):
                    convert(tmp_path / "source", tmp_path / "never")
    assert len(blobs) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layer", "source"]


def test_other_compressions_are_named(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"BZh9rest")
    with pytest.raises(SourceError, match="received bzip2"):
        open_source(tmp_path / "source")


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (Entry(path=b"a/../b", kind=Kind.REGULAR), r"\.\."),
        (Entry(path=b"n" * 256, kind=Kind.REGULAR), "256 bytes"),
        (Entry(path=b"/".join([b"p" * 200] * 21), kind=Kind.REGULAR), "4,095"),
        (Entry(path=b"zero", kind=Kind.CHARACTER), "0:0"),
        (Entry(path=b"dev", kind=Kind.BLOCK, rdev=os.makedev(4096, 0)), "4096:0"),
        (Entry(path=b"dev", kind=Kind.BLOCK, rdev=os.makedev(0, 1 << 20)), "0:1048576"),
        (Entry(path=b"s", kind=Kind.SYMLINK, target=b""), "target of 0"),
        (Entry(path=b"s", kind=Kind.SYMLINK, target=b"t" * 4096), "target of 4096"),
        (Entry(path=b"s", kind=Kind.SOCKET), "socket"),
        (Entry(path=b".wh.", kind=Kind.REGULAR), "whiteout must name"),
        (Entry(path=b".wh.a/b", kind=Kind.REGULAR), "nothing below"),
        (Entry(path=b"", kind=Kind.REGULAR), "root"),
        (Entry(path=b"f", kind=Kind.REGULAR, uid=1 << 32), "user id"),
        (Entry(path=b"f", kind=Kind.REGULAR, gid=-1), "group id"),
        (Entry(path=b"f", kind=Kind.REGULAR, mtime_ns=1 << 94), "64-bit"),
        (Entry(path=b"f", kind=Kind.REGULAR, xattrs={b"": b""}), "name of 0 bytes"),
        (Entry(path=b"f", kind=Kind.REGULAR, xattrs={b"user." + b"n" * 251: b""}), "256 bytes"),
        (Entry(path=b"f", kind=Kind.REGULAR, xattrs={b"user.a": bytes(65537)}), "65537 bytes"),
        (Entry(path=b"l", kind=Kind.HARD_LINK, target=b"/"), "root"),
        (Entry(path=b"l", kind=Kind.HARD_LINK, target=b"x/.wh.f"), "whiteout"),
        (Entry(path=b"nul\0name", kind=Kind.REGULAR), "NUL"),
    ],
)
def test_limits_are_refused_by_name(entry: Entry, why: str) -> None:
    with pytest.raises(UnsupportedEntry, match=why) as caught:
        LayerTree().apply(entry)
    assert caught.value.name == entry.path


def test_structure_is_refused_by_name() -> None:
    tree = LayerTree()
    tree.apply(Entry(path=b"file", kind=Kind.REGULAR))
    tree.apply(Entry(path=b"dir", kind=Kind.DIRECTORY))
    tree.apply(Entry(path=b"loop", kind=Kind.SYMLINK, target=b"loop"))
    for entry, why in (
        (Entry(path=b"file/below", kind=Kind.REGULAR), "not a directory"),
        (Entry(path=b"link", kind=Kind.HARD_LINK, target=b"dir"), "directory"),
        (Entry(path=b"loop/x", kind=Kind.REGULAR), "loop"),
    ):
        with pytest.raises(UnsupportedEntry, match=why):
            tree.apply(entry)
    with pytest.raises(UnsupportedEntry, match="type"):
        read_all(header(b"f", b"Z") + END)


def test_parents_through_symlinks_stay_inside() -> None:
    members = [
        Member(Entry(path=b"lib", kind=Kind.SYMLINK, target=b"/usr/lib")),
        Member(Entry(path=b"up", kind=Kind.SYMLINK, target=b"../../../etc")),
        Member(Entry(path=b"lib/f", kind=Kind.REGULAR, size=1), b"1"),
        Member(Entry(path=b"up/g", kind=Kind.REGULAR, size=1), b"2"),
        Member(Entry(path=b"h", kind=Kind.HARD_LINK, target=b"lib/f")),
        Member(Entry(path=b"k", kind=Kind.HARD_LINK, target=b"lib/below/x")),
    ]
    with Layer.open(io.BytesIO(encode_layer(members))) as layer:
        paths = dict(layer.walk())
        assert set(paths) == {b"", b"lib", b"up", b"usr", b"usr/lib", b"usr/lib/f", b"etc", b"etc/g", b"h", b"k"}
        assert paths[b"h"] == paths[b"usr/lib/f"]
        assert layer.toc.target(paths[b"k"] or 0) == b"usr/lib/below/x"


def test_the_tree_stays_small() -> None:
    """50,000 entries below 60 MB of Python objects."""
    tracemalloc.start()
    tree = LayerTree()
    for index in range(50_000):
        tree.apply(Entry(path=b"usr/lib/d%d/file-%d.py" % (index // 50, index), kind=Kind.REGULAR, mtime_ns=index, size=index))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(tree.root, Directory)
    assert used < 60_000_000


def test_writer_refuses_data_of_another_size() -> None:
    entry = Entry(path=b"f", kind=Kind.REGULAR, size=5)
    for data in ([b"abc"], [b"abc", b"def"], []):
        with pytest.raises(ValueError, match="expected 5 bytes"):
            TarWriter(io.BytesIO()).add(entry, data)
    with pytest.raises(UnsupportedEntry, match="socket"):
        TarWriter(io.BytesIO()).add(evolve(entry, kind=Kind.SOCKET))


def test_sparse_files_with_odd_segments_are_widened_for_every_reader(tmp_path: Path) -> None:
    entry = Entry(path=b"f", kind=Kind.REGULAR, size=9000, sparse=((10, 5), (300, 700), (1500, 3), (8000, 1)))
    member = Member(entry, make_content(709, 4, False))
    archive = write_pax([member, Member(Entry(path=b"after", kind=Kind.FIFO))])
    (got, data), after = read_all(archive)
    assert Member(got, data).content() == member.content()
    assert after[0].kind is Kind.FIFO
    subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=archive, check=True)
    assert (tmp_path / "f").read_bytes() == member.content()
    with tarfile.open(fileobj=io.BytesIO(archive)) as other:
        extracted = other.extractfile("f")
        assert extracted is not None
        assert extracted.read() == member.content()


class FailingData:
    def read(self, size: int, /) -> bytes:
        raise SourceError("source", "it broke")


@pytest.mark.parametrize("jobs", [1, 4])
def test_a_failing_reader_ends_the_encoder(jobs: int) -> None:
    def entries() -> object:
        for index in range(300):
            yield Entry(path=b"%d" % index, kind=Kind.REGULAR, size=8192), io.BytesIO(bytes(8192))
        yield Entry(path=b"bad", kind=Kind.REGULAR, size=8192), FailingData()

    with pytest.raises(SourceError, match="it broke"):
        encode(entries(), io.BytesIO(), jobs=jobs, chunk_size=8192)  # type: ignore[arg-type]


class FullDisk(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: object, /) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("jobs", [1, 4])
def test_a_failing_writer_ends_the_encoder(jobs: int) -> None:
    entries = ((Entry(path=b"%d" % index, kind=Kind.REGULAR, size=8192), io.BytesIO(bytes(8192))) for index in range(2000))
    with pytest.raises(OSError, match="No space"):
        encode(entries, FullDisk(), jobs=jobs, chunk_size=8192)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"jobs": 0}, {"level": 0}, {"level": 23}, {"chunk_size": 1000}, {"chunk_size": 1 << 25}])
def test_impossible_parameters(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        encode([], io.BytesIO(), **options)  # type: ignore[arg-type]


def test_a_link_states_the_attributes_of_its_inode(tmp_path: Path) -> None:
    """Extractors that set them from a link's header, as Python's does, leave the same; of a lower link there is nothing to state."""
    entry = Entry(path=b"f", kind=Kind.REGULAR, size=2, mode=0o4751, uid=12, gid=34, mtime_ns=1_000_000_000_000_000_000)
    targets = {b"g": b"f", b"low": b"x", b"too": b"low"}
    links = [Member(Entry(path=path, kind=Kind.HARD_LINK, target=target)) for path, target in targets.items()]
    out = io.BytesIO()
    export_tar(Layer.open(io.BytesIO(encode_layer([Member(entry, b"hi"), *links]))), out)
    exported = {entry.path: entry for entry, _ in read_all(out.getvalue())}
    assert exported[b"g"] == evolve(entry, path=b"g", kind=Kind.HARD_LINK, target=b"f", size=0)
    assert {exported[name].mode for name in (b"low", b"too")} == {0o644}
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as archive:
        archive.extraction_filter = lambda member, path: member  # as it is, where Python has filters
        archive.extractall(tmp_path, [archive.getmember("f"), archive.getmember("g")])
    status = (tmp_path / "f").stat()
    assert (status.st_nlink, status.st_mode & 0o7777, status.st_uid, status.st_gid, status.st_mtime) == (2, 0o4751, 12, 34, 1e9)
