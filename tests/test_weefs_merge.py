"""The C core's merged view, as its mount shows it, against the slow merged view over the reference decoder."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import Layer, Member, encode_layer, layer_stacks
from weefs_harness import MountedCore, mounted_core, open_layers, tree_rows, view_rows

from layerformat import Entry, Kind
from weefs.core import CoreError
from weefs.merge import PlanRefused, View


@pytest.fixture(scope="module")
def mounted() -> Iterator[MountedCore]:
    with mounted_core() as mounted:
        yield mounted


def file(path: bytes, data: bytes = b"data", **fields: object) -> Member:
    return Member(Entry(path=path, kind=Kind.REGULAR, mode=0o644, size=len(data), **fields), data)  # type: ignore[arg-type]


def directory(path: bytes, mode: int = 0o755) -> Member:
    return Member(Entry(path=path, kind=Kind.DIRECTORY, mode=mode))


def symlink(path: bytes, target: bytes) -> Member:
    return Member(Entry(path=path, kind=Kind.SYMLINK, mode=0o777, target=target))


def link(path: bytes, target: bytes) -> Member:
    return Member(Entry(path=path, kind=Kind.HARD_LINK, target=target))


def compare(mounted: MountedCore, stack: list[Layer]) -> None:
    blobs = [encode_layer(layer) for layer in stack]
    try:
        expected = view_rows(View(open_layers(blobs)))
    except PlanRefused:
        with pytest.raises(CoreError) as caught:
            mounted.add_plan(blobs)
        assert caught.value.errno == errno.EXDEV
        return
    slot, path = mounted.add_plan(blobs)
    try:
        shown = tree_rows(path)
        assert shown.keys() == expected.keys()
        for name, row in expected.items():
            assert shown[name] == row, name
    finally:
        mounted.core.remove_plan(slot)
    with pytest.raises(FileNotFoundError):
        os.listdir(path)


USRMERGE = [
    [directory(b"usr/lib"), file(b"usr/lib/a"), symlink(b"lib", b"usr/lib")],
    [file(b"lib/b"), file(b"lib/deep/c"), file(b"usr/lib/d")],
    [file(b"lib/b", b"newer"), Member(Entry(path=b"lib/.wh.a", kind=Kind.REGULAR))],
]
LINKS = [
    [file(b"x/a"), link(b"x/b", b"x/a"), file(b"y/c")],
    [link(b"z/d", b"x/a"), link(b"z/e", b"y/c")],
    [Member(Entry(path=b".wh.x", kind=Kind.REGULAR)), link(b"f", b"z/d")],
]
IMPLICIT_OPAQUE = [
    [directory(b"d", 0o700), file(b"d/old")],
    [Member(Entry(path=b"d/.wh..wh..opq", kind=Kind.REGULAR)), file(b"d/new")],
]
SYMLINK_LOOP = [[symlink(b"a", b"b"), symlink(b"b", b"a")], [file(b"a/x")]]
DANGLING_LINK = [[file(b"a")], [link(b"b", b"nowhere")]]
LINK_TO_SYMLINK = [[symlink(b"s", b"t"), directory(b"d")], [link(b"d/hard", b"s")]]


@given(layer_stacks())
@example(USRMERGE)
@example(LINKS)
@example(IMPLICIT_OPAQUE)
@example(SYMLINK_LOOP)
@example(DANGLING_LINK)
@example(LINK_TO_SYMLINK)
def test_mount_equals_the_slow_merged_view(mounted: MountedCore, stack: list[Layer]) -> None:
    compare(mounted, stack)


def test_paths_through_lower_symlinks_land_where_they_lead(mounted: MountedCore) -> None:
    slot, path = mounted.add_plan([encode_layer(layer) for layer in USRMERGE])
    assert sorted(os.listdir(path / "usr/lib")) == ["b", "d", "deep"]
    assert (path / "lib").is_symlink()
    assert (path / "usr/lib/b").read_bytes() == b"newer"
    mounted.core.remove_plan(slot)


def test_link_counts_are_the_names_that_the_plan_shows(mounted: MountedCore) -> None:
    slot, path = mounted.add_plan([encode_layer(layer) for layer in LINKS])
    assert os.lstat(path / "z/d").st_nlink == 2
    assert os.lstat(path / "f").st_ino == os.lstat(path / "z/d").st_ino
    assert os.lstat(path / "y/c").st_nlink == 2
    mounted.core.remove_plan(slot)


def test_a_link_to_nothing_is_refused_by_name(mounted: MountedCore) -> None:
    with pytest.raises(CoreError, match="hard link to 'nowhere', which must be a file of a layer below it"):
        mounted.add_plan([encode_layer(layer) for layer in DANGLING_LINK])


def test_two_plans_share_the_inodes_of_files_and_not_those_of_directories(mounted: MountedCore) -> None:
    base = mounted.add_layer(encode_layer([directory(b"d"), file(b"d/f", b"x" * 20000)]))
    one, two = (mounted.add_layer(encode_layer([file(name)])) for name in (b"one", b"two"))
    first, second = mounted.add_plan_of([base, one]), mounted.add_plan_of([base, two])
    assert os.lstat(first[1] / "d/f").st_ino == os.lstat(second[1] / "d/f").st_ino
    assert os.lstat(first[1] / "d").st_ino != os.lstat(second[1] / "d").st_ino
    (first[1] / "d/f").read_bytes()
    before = mounted.core.statistics()["requests_read"]
    assert (second[1] / "d/f").read_bytes() == b"x" * 20000
    assert mounted.core.statistics()["requests_read"] == before
    for slot, _path in (first, second):
        mounted.core.remove_plan(slot)


@given(st.data())
def test_reads_of_any_range_equal_the_reference_decoder(mounted: MountedCore, data: st.DataObject) -> None:
    stack = data.draw(layer_stacks(max_layers=1))
    blob = encode_layer(stack[0])
    layer = open_layers([blob])[0]
    slot, path = mounted.add_plan([blob])
    try:
        for name, number in layer.walk():
            if number is None or not layer.inode(number).is_regular:
                continue
            size = layer.inode(number).size
            fd = os.open(os.fsencode(path) + b"/" + name, os.O_RDONLY)
            try:
                for _ in range(3):
                    offset, length = data.draw(st.integers(0, size + 10)), data.draw(st.integers(0, size + 10))
                    assert os.pread(fd, length, offset) == layer.read(number, offset, length)
                for whence in (os.SEEK_DATA, os.SEEK_HOLE):
                    offset = data.draw(st.integers(0, size))
                    assert seek(fd, offset, whence) == expected_seek(layer, number, offset, whence)
            finally:
                os.close(fd)
    finally:
        mounted.core.remove_plan(slot)


def seek(fd: int, offset: int, whence: int) -> int | None:
    try:
        return os.lseek(fd, offset, whence)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return None


def expected_seek(layer: object, number: int, offset: int, whence: int) -> int | None:
    inode = layer.inode(number)  # type: ignore[attr-defined]
    if offset >= inode.size:
        return None
    covered = [(part.file_offset, part.file_offset + part.length) for part in layer.toc.segments(number)]  # type: ignore[attr-defined]
    inside = [any(begin <= at < end for begin, end in covered) for at in range(offset, inode.size)]
    wanted = whence == os.SEEK_DATA
    if wanted in inside:
        return offset + inside.index(wanted)
    return None if wanted else int(inode.size)


