"""Directories as sources: holes, hard links, sockets, files that change, and the upper directory of an overlay."""

from __future__ import annotations

import io
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from layer_model import Row, described

from layerformat import Kind, Layer, SourceError, UnsupportedEntry, convert, encode, open_source, printable


def layer_of(path: Path, *, upper: bool = False) -> tuple[dict[bytes, Row], tuple[str, ...]]:
    file = io.BytesIO()
    with open_source(path, upper=upper) as source:
        encode(source.entries(), file, chunk_size=8192)
        warnings = source.warnings.texts()
    with Layer.open(io.BytesIO(file.getvalue())) as layer:
        return described(layer), warnings


def test_holes_links_and_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with open(tmp_path / "b" / "sparse", "wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"data" * 1024)
    os.link(tmp_path / "b" / "sparse", tmp_path / "a")
    os.symlink("b", tmp_path / "link")
    os.link(tmp_path / "link", tmp_path / "link2", follow_symlinks=False)
    with open_source(tmp_path) as source:
        entries = [entry for entry, _ in source.entries()]
    assert [entry.path for entry in entries] == [b"./", b"a", b"b", b"b/sparse", b"link", b"link2"]
    assert (entries[3].kind, entries[3].target) == (Kind.HARD_LINK, b"a")
    assert (entries[5].kind, entries[5].target) == (Kind.HARD_LINK, b"link")
    assert entries[1].sparse is not None
    rows, _ = layer_of(tmp_path)
    assert rows[b"a"].content == (tmp_path / "a").read_bytes()
    assert rows[b"a"].group == (b"a", b"b/sparse")
    assert rows[b"link"].group == (b"link", b"link2")


def test_sockets_are_left_out_and_reported(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        rows, warnings = layer_of(tmp_path)
    assert set(rows) == {b""}
    assert warnings == ("s: a socket, left out",)


def test_names_and_devices_that_a_layer_cannot_say(tmp_path: Path) -> None:
    (tmp_path / ".wh.x").touch()
    with pytest.raises(UnsupportedEntry, match="whiteout"):
        layer_of(tmp_path)
    (tmp_path / ".wh.x").unlink()
    os.mknod(tmp_path / "zero", 0o020600, os.makedev(0, 0))
    with pytest.raises(UnsupportedEntry, match="0:0"):
        layer_of(tmp_path)


@pytest.mark.parametrize("change", ["longer", "shorter", "other contents"])
def test_a_file_that_changes_is_an_error_that_names_it(tmp_path: Path, change: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 10_000)
    os.utime(path, ns=(0, 0))
    with open_source(tmp_path) as source:
        entries: Iterator[object] = source.entries()
        next(entries)
        entry, data = next(entries)  # type: ignore[misc]
        if change == "longer":
            with open(path, "ab") as file:
                file.write(b"more")
        elif change == "shorter":
            os.truncate(path, 10)
        else:
            with open(path, "r+b") as file:
                file.write(b"y")

        def read_on() -> None:
            data.read(entry.data_size)
            data.read(1)
            next(entries)

        with pytest.raises(SourceError, match=r"entry log.*changed while it was read"):
            read_on()


def test_nothing_is_left_of_a_failed_conversion(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_bytes(b"fine")
    (source / "b.wh").write_bytes(b"fine")
    (source / ".wh.c").touch()
    destination = tmp_path / "out"
    destination.mkdir()
    (destination / "layer").write_bytes(b"the old one")
    with pytest.raises(UnsupportedEntry):
        convert(source, destination / "layer")
    assert [path.name for path in destination.iterdir()] == ["layer"]
    assert (destination / "layer").read_bytes() == b"the old one"


def test_progress_and_report(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for index in range(40):
        (source / f"f{index}").write_bytes(os.urandom(100_000))
    seen = []
    report = convert(source, tmp_path / "layer", jobs=2, progress=seen.append)
    assert report.bytes_in == 4_000_000
    assert report.bytes_out == report.layer.blob_size == (tmp_path / "layer").stat().st_size
    assert (report.layer.entries, report.layer.inodes, report.layer.content_size) == (41, 41, 4_000_000)
    assert [progress.written_bytes for progress in seen] == sorted(progress.written_bytes for progress in seen)
    assert len(seen) > 2
    with Layer.open(tmp_path / "layer") as layer:
        assert layer.verify(report.layer.blob_digest) == []
        assert layer.footer.toc_offset == report.layer.toc_offset
        assert "sha256:" + layer.footer.toc_sha256.hex() == report.layer.toc_digest


def test_upper_directory_of_an_overlay(tmp_path: Path) -> None:
    """Marks made by hand as overlayfs makes them."""
    os.mknod(tmp_path / "gone", 0o020600, os.makedev(0, 0))
    os.mknod(tmp_path / "null", 0o020600, os.makedev(1, 3))
    (tmp_path / "new").mkdir()
    os.setxattr(tmp_path / "new", "trusted.overlay.opaque", b"y")
    os.setxattr(tmp_path / "new", "trusted.overlay.origin", b"\0\xfb")
    os.setxattr(tmp_path / "new", "trusted.overlay.overlay.opaque", b"escaped")
    os.setxattr(tmp_path / "new", "user.kept", b"1")
    rows, warnings = layer_of(tmp_path, upper=True)
    assert rows[b"gone"] == Row("whiteout")
    assert rows[b"null"].kind == "character"
    assert rows[b"new"].opaque
    assert rows[b"new"].xattrs == ((b"trusted.overlay.opaque", b"escaped"), (b"user.kept", b"1"))
    assert warnings == ()
    os.setxattr(tmp_path / "new", "trusted.overlay.redirect", b"elsewhere")
    with pytest.raises(UnsupportedEntry, match="redirect_dir=off"):
        layer_of(tmp_path, upper=True)


def test_upper_is_for_directories(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceError, match="upper directory"):
        open_source(tmp_path / "file", upper=True)


def deep_tree(root: Path, names: int) -> bytes:
    """Directories of 255-byte names in each other, a file and a symlink in the last; the path of the last."""
    path = os.open(root, os.O_RDONLY)
    for _ in range(names):
        os.mkdir(b"d" * 255, dir_fd=path)
        inner = os.open(b"d" * 255, os.O_RDONLY, dir_fd=path)
        os.close(path)
        path = inner
    with open(os.open(b"f" * 255, os.O_WRONLY | os.O_CREAT, dir_fd=path), "wb") as file:
        file.write(b"deep")
        os.setxattr(file.fileno(), "user.deep", b"1")
    os.symlink("f", b"s" * 255, dir_fd=path)
    os.close(path)
    return b"/".join([b"d" * 255] * names)


def test_the_longest_path_that_a_layer_can_say(tmp_path: Path) -> None:
    last = deep_tree(tmp_path, 15)
    (tmp_path / "zz").touch()
    rows, _ = layer_of(tmp_path)
    assert len(last + b"/" + b"f" * 255) == 4095
    assert rows[last + b"/" + b"f" * 255].content == b"deep"
    assert rows[last + b"/" + b"f" * 255].xattrs == ((b"user.deep", b"1"),)
    assert rows[last + b"/" + b"s" * 255].kind == "symlink"
    assert len(rows) == 1 + 15 + 2 + 1
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("names", [16, 40])
def test_a_longer_path_is_refused_as_what_it_is(tmp_path: Path, names: int) -> None:
    deep_tree(tmp_path, names)
    with pytest.raises(UnsupportedEntry, match=r"^d{100} … [dfs]{100}: a path of more than 4,095 bytes$") as refused:
        layer_of(tmp_path)
    assert len(refused.value.name) > 4095
    shutil.rmtree(tmp_path)


def test_many_levels_need_few_descriptors(tmp_path: Path) -> None:
    path = os.open(tmp_path, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir(b"d", dir_fd=path)
        inner = os.open(b"d", os.O_RDONLY, dir_fd=path)
        os.close(path)
        path = inner
    os.close(path)
    with open_source(tmp_path) as source:
        opened = {len(os.listdir("/proc/self/fd")) for _ in source.entries()}
    assert max(opened) - min(opened) <= 1
    _remove_deep(tmp_path)


def _remove_deep(root: Path) -> None:
    """Level by level from the top: the standard library's removal recurses."""
    while (root / "d").exists():
        below = root / "d/d"
        if below.exists():
            below.rename(root / "next")
        (root / "d").rmdir()
        if (root / "next").exists():
            (root / "next").rename(root / "d")


def test_a_directory_that_is_exchanged_is_an_error(tmp_path: Path) -> None:
    for name in ("a/b", "other/b"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a/c").touch()
    with open_source(tmp_path) as source:
        entries = source.entries()
        assert [next(entries)[0].path for _ in range(3)] == [b"./", b"a", b"a/b"]
        (tmp_path / "a").rename(tmp_path / "moved")
        (tmp_path / "other").rename(tmp_path / "a")
        with pytest.raises(SourceError, match="entry a/b: another directory took its place"):
            list(entries)


def test_long_names_are_cut_between_characters() -> None:
    assert printable(b"n" * 200) == "n" * 200
    assert printable(b"a" * 150 + b"b" * 150) == "a" * 100 + " … " + "b" * 100
    assert printable(("x" + "é" * 150).encode()) == "x" + "é" * 49 + " … " + "é" * 50
    assert printable(b"\xff" * 201) == "\\xff" * 100 + " … " + "\\xff" * 100
    assert printable(b"n" * 300, whole=True) == "n" * 300
