"""Real trees: Debian's essential packages as mmdebstrap unpacks them, and this machine's Python packages, converted to
layers, mounted, and compared with the directories that they were made of, every entry and every byte.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from weefs_harness import MountedCore, Row, mounted_core, tree_rows

from layerformat import convert

BUILD = Path(__file__).resolve().parent.parent / "build"
PYTHON_PACKAGES = Path("/usr/lib/python3")


@pytest.fixture(scope="module")
def mounted() -> Iterator[MountedCore]:
    with mounted_core() as mounted:
        yield mounted


@pytest.fixture(scope="module")
def debian_root() -> Path:
    """The root, made once and kept for the next run."""
    root = BUILD / "test-root"
    if not root.exists():
        unfinished = BUILD / "test-root.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        BUILD.mkdir(exist_ok=True)
        subprocess.run(["mmdebstrap", "--quiet", "--variant=essential", _suite(), unfinished], check=True)
        unfinished.rename(root)
    return root


def _suite() -> str:
    """The distribution of this machine, whose mirrors and keys it has."""
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.partition("=")[2].strip('"')
    raise RuntimeError("/etc/os-release: expected VERSION_CODENAME")


def layer_of(source: Path, directory: Path) -> bytes:
    convert(source, directory / "layer", jobs=2, level=1)
    return (directory / "layer").read_bytes()


def assert_equal_trees(source: Path, shown: Path) -> dict[bytes, Row]:
    """The rows of both; contents are compared file by file."""
    expected, rows = tree_rows(source, contents=False), tree_rows(shown, contents=False)
    assert rows.keys() == expected.keys()
    for path, row in expected.items():
        assert rows[path] == row, path
        if stat.S_ISREG(row.mode):
            assert (shown / os.fsdecode(path)).read_bytes() == (source / os.fsdecode(path)).read_bytes(), path
    return rows


def test_a_debian_root(mounted: MountedCore, debian_root: Path, tmp_path: Path) -> None:
    slot, shown = mounted.add_plan([layer_of(debian_root, tmp_path)])
    rows = assert_equal_trees(debian_root, shown)
    mounted.core.remove_plan(slot)
    assert len(rows) > 3000
    kinds = {row.mode >> 12 for row in rows.values()}
    assert kinds >= {stat.S_IFREG >> 12, stat.S_IFDIR >> 12, stat.S_IFLNK >> 12, stat.S_IFCHR >> 12}
    assert any(row.group for row in rows.values())
    assert any(row.mode & stat.S_ISUID for row in rows.values())


def test_python_packages_over_a_debian_root(mounted: MountedCore, debian_root: Path, tmp_path: Path) -> None:
    """Two layers: the packages, packed as they lie in a root, leave the base as it is and show themselves whole."""
    archive = str(tmp_path / "packages.tar")
    command = ["tar", "-c", "--format=posix", "--xattrs", "-C", "/", "-f", archive, "usr/lib/python3"]
    subprocess.run(command, check=True)
    layers = []
    for number, source in enumerate((debian_root, tmp_path / "packages.tar")):
        (tmp_path / str(number)).mkdir()
        layers.append(layer_of(source, tmp_path / str(number)))
    slot, shown = mounted.add_plan(layers)
    packages = assert_equal_trees(PYTHON_PACKAGES, shown / "usr/lib/python3")
    rows = tree_rows(shown, contents=False)
    mounted.core.remove_plan(slot)
    assert len(packages) > 100
    below = {path: row for path, row in rows.items() if not (path + b"/").startswith(b"usr/lib/python3/")}
    expected = tree_rows(debian_root, contents=False)
    library = expected[b"usr/lib"]
    expected[b"usr/lib"] = attrs.evolve(library, nlink=library.nlink + 1)
    assert below == expected
