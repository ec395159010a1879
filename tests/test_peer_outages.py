"""Peers, members and the registry that fail: readers get the right bytes as long as anybody has them, and it works again by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from outages import a_layer
from peer_outages import PeerOutage, exercise_peers, peer_failures, peer_outages

from weefs.protocol import Layer

DEADLINE_S = 30.0
SHORT_DEADLINE_S = 1.5
"""Where it is reached."""


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Layer, bytes, bytes]:
    return a_layer(tmp_path_factory.mktemp("layer"))


@pytest.mark.parametrize("outage", [*peer_outages()], ids=lambda outage: outage.name.replace(" ", "-"))
def test_no_read_fails_because_of_a_peer(tmp_path: Path, layer: tuple[Layer, bytes, bytes], outage: PeerOutage) -> None:
    seen = exercise_peers(tmp_path / "scene", *layer, outage, deadline_s=SHORT_DEADLINE_S if outage.must_fail else DEADLINE_S)
    assert peer_failures(outage, seen) == []
