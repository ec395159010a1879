"""Every command of the documents with tours, run as it stands there, and its output compared with what they show."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import attrs
import pytest

from tools import readme
from tools.demo import groups
from tools.output import parse_size
from tools.settings import NodeSettings

ROOT = readme.ROOT


@pytest.fixture(scope="module")
def demo() -> str:
    """`make demo` with fewer environments; what it printed. It leaves the roots that the tour uses."""
    result = subprocess.run(
        ["make", "demo", "DEMO_ARGS=--environments 4"], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def test_make_demo(demo: str) -> None:
    assert re.search(r"^rewards: (1|0)( (1|0)){3}; mean", demo, re.MULTILINE)
    assert re.search(r"^\{\"reward\": 1\.0", demo, re.MULTILINE)
    assert re.search(r"^total +[\d.]+ m?s +[\d.]+ m?s +[\d.]+ m?s$", demo, re.MULTILINE)
    assert "nothing is left" in demo
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if "weenv-demo" in line]


@pytest.mark.parametrize("document", ["README.md", "docs/packaging.md", "docs/recipes.md", "docs/catalog.md"])
def test_the_tour_shows_what_happens(demo: str, tmp_path: Path, document: str) -> None:
    assert (ROOT / "build/demo/base").is_dir()
    text = (ROOT / document).read_text()
    outputs = readme.run_examples(text, tmp_path)
    assert readme.differences(readme.examples_of(text), outputs) == []
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if str(tmp_path) in line]


def test_differences_are_seen() -> None:
    """The comparison itself: a changed word is seen, a changed number is not."""
    examples = [readme.Example("x", "5 files, 12.3 MB of base\n")]
    assert readme.differences(examples, [(0, "17 files, 1.0 kB of base\n")]) == []
    assert readme.differences(examples, [(0, "17 files, 1.0 kB of task\n")]) != []
    assert readme.differences(examples, [(1, "5 files, 12.3 MB of base\n")]) != []


def test_links_lead_somewhere() -> None:
    for document in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_documents_name_files_that_exist() -> None:
    pattern = r"`((?:csrc|weefs|envlet|registry|layerformat|tools|tests)/[\w./-]*\w)`"
    for document in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for name in re.findall(pattern, document.read_text()):
            assert (ROOT / name).exists(), f"{document.name}: {name}"


def test_every_key_of_a_node_is_told() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", (ROOT / "docs/node.md").read_text(), re.MULTILINE))
    defaults = {field.name: field.default for field in attrs.fields(NodeSettings)}
    assert list(rows) == list(dict.fromkeys([*rows, *defaults]))
    for name, default in defaults.items():
        if isinstance(default, bool):
            assert rows[name] == str(default).lower()
        elif name in ("memory", "cache_free_min"):
            assert parse_size(rows[name].strip('"')) == default
        elif default is not None:
            assert rows[name] == str(default)


def test_make_targets_exist() -> None:
    for target in re.findall(r"`?make ([a-z]+)", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def test_the_demos_suite_is_this_machines() -> None:
    assert re.fullmatch(r"[a-z]+", groups.suite())
