"""Layers against a second opinion: what was put in is what the decoder shows, by every way in, and comes out as the
same tar.
"""

from __future__ import annotations

import io
import os
import stat
import subprocess
import tempfile
from pathlib import Path

import strategies
from hypothesis import given, reject
from hypothesis import strategies as st
from layer_model import Row, described, expected
from strategies import DIALECTS, SMALL_CHUNK, encode_layer, write_pax

from layerformat import Layer, UnsupportedEntry, encode, export_tar, open_source, read_tar


def decode(blob: bytes) -> Layer:
    return Layer.open(io.BytesIO(blob))


def encode_tar(archive: bytes, *, chunk_size: int = SMALL_CHUNK) -> bytes:
    file = io.BytesIO()
    encode(read_tar(io.BytesIO(archive)), file, chunk_size=chunk_size)
    return file.getvalue()


def exported(layer: Layer) -> bytes:
    file = io.BytesIO()
    export_tar(layer, file)
    return file.getvalue()


@given(strategies.layer_stacks())
def test_decoder_equals_model(stack: list[strategies.Layer]) -> None:
    for members in stack:
        layer = decode(encode_layer(members))
        assert layer.verify() == []
        assert described(layer) == expected(members)


@given(strategies.layer_stacks(), strategies.dialects())
def test_every_dialect_says_the_same(stack: list[strategies.Layer], dialect: str) -> None:
    write, weaken = DIALECTS[dialect]
    for members in stack:
        assert described(decode(encode_tar(write(members)))) == expected(weaken(members))


@given(strategies.layer_stacks())
def test_export_of_a_layer_is_the_layer_again(stack: list[strategies.Layer]) -> None:
    for members in stack:
        layer = decode(encode_layer(members))
        try:
            archive = exported(layer)
        except UnsupportedEntry as error:
            if "a tar has no order" not in error.why:
                raise
            reject()
        assert described(decode(encode_tar(archive))) == described(layer)


@given(strategies.layers(max_entries=30), st.sampled_from([4096, 8192, 131072]))
def test_same_bytes_for_every_number_of_workers(members: strategies.Layer, chunk_size: int) -> None:
    first = encode_layer(members, jobs=1, chunk_size=chunk_size)
    assert encode_layer(members, jobs=2, chunk_size=chunk_size) == first
    assert encode_layer(members, jobs=4, chunk_size=chunk_size) == first


@given(strategies.layers(), st.data())
def test_ranges_equal_slices(members: strategies.Layer, data: st.DataObject) -> None:
    layer = decode(encode_layer(members, chunk_size=4096))
    for path, row in expected(members).items():
        if row.kind == "regular" and row.size:
            number = layer.lookup(path)
            assert number is not None
            offset = data.draw(st.integers(0, row.size + 10))
            size = data.draw(st.integers(0, row.size + 10))
            assert layer.read(number, offset, size) == row.content[offset : offset + size]


def extract(archive: bytes, directory: str) -> None:
    options = ["--xattrs", "--xattrs-include=*", "--numeric-owner", "-p", "--delay-directory-restore"]
    done = subprocess.run(["tar", "-x", *options, "-C", directory], input=archive, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")


def tree_of(directory: str, *, implicit: frozenset[bytes] = frozenset()) -> dict[bytes, Row]:
    """Every path below a directory with all that lstat says but ctime and atime; nothing of IMPLICIT directories
    but their mode.
    """
    root = os.fsencode(directory)
    groups: dict[int, list[bytes]] = {}
    rows: dict[bytes, tuple[os.stat_result, dict[str, object]]] = {}
    paths = [b""]
    while paths:
        path = paths.pop()
        full = os.path.join(root, path)
        status = os.lstat(full)
        kind = stat.S_IFMT(status.st_mode)
        # A directory that extraction makes on its own inherits the set-group-id bit.
        values: dict[str, object] = {"mode": status.st_mode & ~stat.S_ISGID if path in implicit else status.st_mode}
        if path not in implicit:
            values |= {"uid": status.st_uid, "gid": status.st_gid, "mtime_ns": status.st_mtime_ns}
        names = sorted(os.listxattr(full, follow_symlinks=False))
        values["xattrs"] = tuple((os.fsencode(name), os.getxattr(full, name, follow_symlinks=False)) for name in names)
        if kind == stat.S_IFDIR:
            paths += [os.path.join(path, name) for name in os.listdir(full)]
        else:
            groups.setdefault(status.st_ino, []).append(path)
            values |= {"rdev": status.st_rdev, "size": status.st_size}
        if kind == stat.S_IFLNK:
            values["target"] = os.readlink(full)
        if kind == stat.S_IFREG:
            values["content"] = Path(os.fsdecode(full)).read_bytes()
        rows[path] = status, values
    return {
        path: Row("", group=tuple(sorted(groups.get(status.st_ino, ()))), **values)  # type: ignore[arg-type]
        for path, (status, values) in rows.items()
    }


def implicit_paths(layer: Layer) -> frozenset[bytes]:
    return frozenset(path for path, row in described(layer).items() if row.implicit)


@given(strategies.layers(extractable=True, one_spelling=True, whiteouts=False), strategies.dialects())
def test_gnu_tar_extracts_the_export_as_the_original(members: strategies.Layer, dialect: str) -> None:
    original = DIALECTS[dialect][0](members)
    layer = decode(encode_tar(original))
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        for directory, archive in ((one, original), (two, exported(layer))):
            os.chmod(directory, 0o755)
            extract(archive, directory)
        implicit = implicit_paths(layer)
        assert tree_of(two, implicit=implicit) == tree_of(one, implicit=implicit)


@given(strategies.layers(extractable=True, whiteouts=False))
def test_a_directory_comes_back(members: strategies.Layer) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        extract(write_pax(members), one)
        before = tree_of(one)
        file = io.BytesIO()
        with open_source(one) as source:
            encode(source.entries(), file, chunk_size=SMALL_CHUNK)
            assert source.warnings.texts() == ()
        layer = decode(file.getvalue())
        assert layer.verify() == []
        extract(exported(layer), two)
        assert tree_of(two) == before
