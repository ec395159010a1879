"""Layers of version 1 that every later reader reads: checked-in archives encode to the checked-in bytes, those read as
listed.

Per name in `assets/golden/`: NAME.tar, the source; NAME.layer, what it encodes to; NAME.txt, what that shows. A
difference here means that the format or the encoder's cuts have changed: the first needs a version or a feature bit,
the second a reason in the commit.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import attrs
import pytest
from layer_model import described

from layerformat import Layer, encode, read_tar

GOLDEN = Path(__file__).parent / "assets" / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.tar"))
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


def test_there_are_golden_files() -> None:
    assert NAMES == ["empty", "everything", "upper"]


@pytest.mark.parametrize("name", NAMES)
def test_archive_encodes_to_the_same_bytes(name: str) -> None:
    file = io.BytesIO()
    with open(GOLDEN / f"{name}.tar", "rb") as archive:
        encode(read_tar(archive), file, chunk_size=CHUNK_SIZE)
    assert file.getvalue() == (GOLDEN / f"{name}.layer").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_layer_reads_as_listed(name: str) -> None:
    blob = (GOLDEN / f"{name}.layer").read_bytes()
    assert listing(blob) == (GOLDEN / f"{name}.txt").read_text()
    with Layer.open(io.BytesIO(blob)) as layer:
        assert layer.verify() == []
