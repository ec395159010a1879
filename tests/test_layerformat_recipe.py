"""A recipe and its layer give back the tar, whatever wrote it and whatever it holds; anything else is an error."""

from __future__ import annotations

import gzip
import hashlib
import io
import random
from pathlib import Path

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from strategies import DIALECTS, SMALL_CHUNK, Member, make_content, write_pax

from layerformat import Entry, FormatError, Kind, Layer, Recipe, RecipeWriter, SourceError, convert, encode, read_tar
from layerformat.recipe import HEADER


def encoded(archive: bytes) -> tuple[bytes, bytes]:
    """Layer and recipe of an archive."""
    layer, recipe = io.BytesIO(), io.BytesIO()
    writer = RecipeWriter(recipe)
    report = encode(read_tar(io.BytesIO(archive), literal=writer.literal), layer, chunk_size=SMALL_CHUNK, recipe=writer)
    written = writer.finish(bytes.fromhex(report.toc_digest.removeprefix("sha256:")), hashlib.sha256(archive).digest())
    assert (written.tar_size, written.size) == (len(archive), len(recipe.getvalue()))
    return layer.getvalue(), recipe.getvalue()


def cooked(layer: bytes, recipe: bytes) -> bytes:
    file = io.BytesIO()
    Recipe(io.BytesIO(recipe), "recipe").write_tar(Layer.open(io.BytesIO(layer)), file)
    return file.getvalue()


@given(strategies.layer_stacks(), strategies.dialects(), st.integers(0, 3000), st.integers(0, 5))
def test_every_tar_comes_back(stack: list[strategies.Layer], dialect: str, trailing: int, seed: int) -> None:
    """With whatever stands behind its end."""
    for members in stack:
        archive = DIALECTS[dialect][0](members) + make_content(trailing, seed, False)
        assert cooked(*encoded(archive)) == archive


def test_data_that_no_file_keeps_comes_back(tmp_path: Path) -> None:
    """Of replaced files, whiteouts with contents, links with data, equal files."""
    big = make_content(3 * SMALL_CHUNK + 5, 1, False)
    members = [
        Member(Entry(path=b"a", kind=Kind.REGULAR, size=len(big)), big),
        Member(Entry(path=b"a", kind=Kind.REGULAR, size=5), b"other"),
        Member(Entry(path=b"b", kind=Kind.REGULAR, size=len(big)), big),
        Member(Entry(path=b"c", kind=Kind.REGULAR, size=5), b"other"),
        Member(Entry(path=b".wh.d", kind=Kind.REGULAR, size=7), b"ignored"),
        Member(Entry(path=b".wh..wh.plnk/x", kind=Kind.REGULAR, size=9), b"not kept!"),
    ]
    archive = bytearray(write_pax(members))
    assert cooked(*encoded(bytes(archive))) == archive
    (tmp_path / "source").write_bytes(gzip.compress(archive))
    report = convert(tmp_path / "source", tmp_path / "layer", recipe=tmp_path / "recipe")
    assert report.diff_id == "sha256:" + hashlib.sha256(archive).hexdigest()
    assert report.recipe is not None
    assert report.recipe.diff_id == report.diff_id
    with Layer.open(tmp_path / "layer") as layer, Recipe.open(tmp_path / "recipe") as recipe, open(tmp_path / "tar", "wb") as file:
        recipe.write_tar(layer, file)
    assert (tmp_path / "tar").read_bytes() == archive


def test_a_directory_has_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(SourceError, match="received a directory"):
        convert(tmp_path / "source", tmp_path / "layer", recipe=tmp_path / "recipe")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_recipe_of_another_layer_is_refused() -> None:
    one, other = (encoded(write_pax([Member(Entry(path=name, kind=Kind.REGULAR, size=1), b"x")])) for name in (b"a", b"b"))
    with pytest.raises(FormatError, match=r"recipe header: expected the recipe of TOC .*another layer's"):
        cooked(one[0], other[1])


def test_damage_never_looks_like_a_tar() -> None:
    members = [
        Member(Entry(path=b"f%d" % number, kind=Kind.REGULAR, size=size), make_content(size, number, bool(number % 2)))
        for number, size in enumerate((0, 1, 5000, 20_000, 300))
    ]
    archive = write_pax(members)
    layer, recipe = encoded(archive)
    chance = random.Random(1)
    for _ in range(400):
        damaged = bytearray(recipe)
        position = chance.randrange(len(damaged))
        match chance.randrange(3):
            case 0:
                damaged[position] ^= 1 << chance.randrange(8)
            case 1:
                del damaged[position:]
            case 2:
                damaged[position:position] = chance.randbytes(3)
        try:
            received = cooked(layer, bytes(damaged))
        except FormatError:
            continue
        assert received == archive


def test_sizes_of_a_hostile_recipe_are_not_believed() -> None:
    layer, recipe = encoded(write_pax([Member(Entry(path=b"a", kind=Kind.REGULAR, size=1), b"x")]))
    fields = list(HEADER.unpack_from(recipe))
    for index in (5, 6, 7, 8):
        for value in (0, 1 << 26, (1 << 64) - 1):
            changed = [*fields[:index], value, *fields[index + 1 :]]
            if changed == fields:
                continue
            with pytest.raises(FormatError):
                cooked(layer, HEADER.pack(*changed) + recipe[HEADER.size :])
