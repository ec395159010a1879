"""`weenv node doctor`: it does what the node does, and says what of it does not work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from node_process import create, make_groups, run_node
from registry_fixture import run_registry


def checks(text: str) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(text)["checks"]}


def test_a_node_that_is_well_and_one_whose_registry_is_gone(tmp_path: Path) -> None:
    with run_node(tmp_path / "n") as node:
        with run_registry(tmp_path / "registry") as registry:
            groups = make_groups(tmp_path / "groups", f"{registry.host}/demo/")
            create(node, groups.base)
            found = checks(node("node", "doctor", "--format", "json"))
            assert all(check["ok"] for check in found.values()), found
            assert {"daemon", "view", "runtime", "cache", "descriptors"} < set(found)
            (source,) = [check for name, check in found.items() if name.startswith("source ")]
            assert source["name"] == f"source http://{registry.host}/demo/base"
            assert "the last 80 bytes of sha256:" in source["detail"]
            assert node("node", "doctor").splitlines()[1].split()[:2] == ["ok", "daemon"]
        text = node("node", "doctor", status=1)
        (line,) = [line for line in text.splitlines() if line.startswith("WRONG")]
        assert f"source http://{registry.host}/demo/base" in line
        assert "is the registry running?" in line


def test_a_cache_without_room_is_wrong(tmp_path: Path) -> None:
    with run_node(tmp_path / "n", settings='cache_free_min = "1000000G"\n') as node:
        found = checks(node("node", "doctor", "--format", "json", status=1))
        assert not found["cache"]["ok"]
        assert "no room" in found["cache"]["detail"]
