"""Layers of version 1 that every later reader reads: those that were ever written read as listed, and checked-in archives encode to the
bytes of the last of them.

Per name in `assets/golden/`: NAME.tar, the source; NAME.1.layer, NAME.2.layer, …, what encoders have made of it, in the order of their
time; NAME.txt, what each shows; NAME.recipe, of the last layer. When the encoder has a reason to write other bytes, its layers get the
next number and none is removed. A difference in what a layer shows means that the format has changed, and needs a version or a feature bit.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import attrs
import pytest
from layer_model import described

from layerformat import Layer, Recipe, RecipeWriter, encode, read_tar

GOLDEN = Path(__file__).parent / "assets" / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.tar"))
LAYERS = sorted(path.name for path in GOLDEN.glob("*.layer"))
CHUNK_SIZE = 8192


def listing(blob: bytes) -> str:
    """One line per path: everything that the layer says of it, contents by digest."""
    lines = []
    with Layer.open(io.BytesIO(blob)) as layer:
        for path, row in sorted(described(layer).items()):
            values = {name: value for name, value in attrs.asdict(row).items() if value not in (0, b"", (), False, None)}
            if "content" in values:
                values["content"] = "sha256:" + hashlib.sha256(row.content).hexdigest()
            lines.append(f"{path!r} {json.dumps(values, default=repr)}")
    return "\n".join(lines) + "\n"


def encoded(archive: bytes) -> tuple[bytes, bytes]:
    """The layer and the recipe of an archive."""
    layer, recipe = io.BytesIO(), io.BytesIO()
    writer = RecipeWriter(recipe)
    report = encode(read_tar(io.BytesIO(archive), literal=writer.literal), layer, chunk_size=CHUNK_SIZE, recipe=writer)
    writer.finish(bytes.fromhex(report.toc_digest.removeprefix("sha256:")), hashlib.sha256(archive).digest())
    return layer.getvalue(), recipe.getvalue()


def last(name: str) -> Path:
    return max(GOLDEN.glob(f"{name}.*.layer"), key=lambda path: int(path.suffixes[0][1:]))


def test_there_are_golden_files() -> None:
    assert NAMES == ["empty", "everything", "shared", "upper"]
    assert LAYERS == [
        "empty.1.layer", "empty.2.layer", "everything.1.layer", "everything.2.layer", "shared.1.layer", "upper.1.layer", "upper.2.layer",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_archive_encodes_to_the_same_bytes(name: str) -> None:
    layer, recipe = encoded((GOLDEN / f"{name}.tar").read_bytes())
    assert layer == last(name).read_bytes()
    assert recipe == (GOLDEN / f"{name}.recipe").read_bytes()


@pytest.mark.parametrize("name", LAYERS)
def test_layer_reads_as_listed(name: str) -> None:
    blob = (GOLDEN / name).read_bytes()
    assert listing(blob) == (GOLDEN / f"{name.partition('.')[0]}.txt").read_text()
    with Layer.open(io.BytesIO(blob)) as layer:
        assert layer.verify() == []


@pytest.mark.parametrize("name", NAMES)
def test_recipe_gives_the_archive_back(name: str) -> None:
    file = io.BytesIO()
    with Layer.open(last(name)) as layer, Recipe.open(GOLDEN / f"{name}.recipe") as recipe:
        recipe.write_tar(layer, file)
    assert file.getvalue() == (GOLDEN / f"{name}.tar").read_bytes()
