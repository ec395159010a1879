"""A registry that fails: every reader gets the right bytes or EIO with a fault, and it works again by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from outages import Outage, a_layer, exercise, failures, outages

from weefs.protocol import Layer

DEADLINE_S = 2.0
"""Of a chunk. An outage that passes takes a quarter of it."""


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Layer, bytes, bytes]:
    return a_layer(tmp_path_factory.mktemp("layer"))


@pytest.mark.parametrize("outage", [*outages()], ids=lambda outage: outage.name.replace(" ", "-"))
def test_readers_get_the_right_bytes_or_a_fault(tmp_path: Path, layer: tuple[Layer, bytes, bytes], outage: Outage) -> None:
    seen = exercise(tmp_path / "m", *layer, outage, deadline_s=DEADLINE_S)
    assert failures(outage, seen) == []
