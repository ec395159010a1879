"""Recipes beside published layers: the tar comes back, byte for byte, from wherever the group is; and nobody else fetches them."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from merge_corners import directory, file, link, whiteout
from oci_image import digest
from registry_fixture import PYTHON, Proxy
from strategies import make_content, write_pax
from weenv_cli import NOT_FOUND, OK, USAGE, Weenv

from registry import resolve_group
from registry.extend import extend_group
from registry.manifest import RECIPE_TYPE, recipes_of

TARS = [
    write_pax([directory(b"d"), file(b"d/big", make_content(600_000, 1, False)), file(b"d/gone", b"x"), file(b"d/gone", b"y")]),
    write_pax([whiteout(b"d/gone"), link(b"e", b"d/big"), file(b"f", make_content(5000, 2, True))]) + b"and what stands behind",
]


@pytest.fixture
def tars(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "0.tar.gz", tmp_path / "1.tar"]
    for path, data in zip(paths, (gzip.compress(TARS[0]), TARS[1]), strict=True):
        path.write_bytes(data)
    return paths


@pytest.fixture
def totar(tmp_path: Path) -> Callable[..., bytes]:
    """What `weenv group totar` writes, by the real program: it writes bytes."""

    def run(*argv: object) -> bytes:
        command = [PYTHON, "-c", "from tools.cli import main; main()", "group", "totar", *map(str, argv)]
        return subprocess.run(command, check=True, capture_output=True, env=os.environ | {"HOME": str(tmp_path)}).stdout

    return run


@pytest.mark.parametrize("kind", ["registry", "layout"])
def test_a_tar_comes_back(
    weenv: Weenv, proxy: Proxy, tars: list[Path], totar: Callable[..., bytes], tmp_path: Path, kind: str
) -> None:
    reference = f"{proxy.host}/recipes:{kind}" if kind == "registry" else f"oci:{tmp_path}/layout:t"
    pushed = weenv("group", "push", reference, "--tar", tars[0], "--tar", tars[1], "--recipe")
    assert pushed.status == OK, pushed.err
    for number, data in enumerate(TARS):
        assert totar(reference, "--layer", number, "--recipe") == data
    assert totar(reference, "--layer", 1) != TARS[1]

    proxy.seen.clear()
    again = weenv("group", "push", reference, "--tar", tars[0], "--tar", tars[1], "--recipe")
    assert (again.status, again.out) == (OK, pushed.out)
    assert [one.method for one in proxy.seen if one.method not in ("GET", "HEAD")] == []


def test_only_who_wants_it_fetches_a_recipe(weenv: Weenv, proxy: Proxy, tars: list[Path], totar: Callable[..., bytes]) -> None:
    reference = f"{proxy.host}/recipes:reads"
    assert weenv("group", "push", reference, "--tar", tars[0], "--recipe").status == OK
    (recipe,) = recipes_of(one.origin for one in resolve_group(reference).conversions)
    proxy.seen.clear()
    totar(reference)
    assert not any(recipe.digest in one.path for one in proxy.seen)
    totar(reference, "--recipe")
    assert sum(recipe.digest in one.path and one.method == "GET" for one in proxy.seen) == 1


def test_a_recipe_is_made_when_it_is_asked_for_and_stays(
    weenv: Weenv, tars: list[Path], totar: Callable[..., bytes], tmp_path: Path
) -> None:
    """A push without keeps the one that is there; a push with makes the one that is not."""
    reference = f"oci:{tmp_path}/layout:t"
    without = weenv("group", "push", reference, "--tar", tars[0])
    with pytest.raises(subprocess.CalledProcessError) as refused:
        totar(reference, "--recipe")
    assert (refused.value.returncode, b"without a recipe" in refused.value.stderr) == (NOT_FOUND, True)
    with_recipe = weenv("group", "push", reference, "--tar", tars[0], "--recipe")
    assert with_recipe.out != without.out
    assert totar(reference, "--recipe") == TARS[0]
    assert weenv("group", "push", reference, "--tar", tars[0]).out == with_recipe.out
    assert totar(reference, "--recipe") == TARS[0]


def test_a_push_that_was_cut_off_keeps_layer_and_recipe(
    weenv: Weenv, proxy: Proxy, tars: list[Path], totar: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = f"{proxy.host}/recipes-cut:t"
    with monkeypatch.context() as patch:
        patch.setattr("registry.remote.Remote.upload_file", lambda *_: (_ for _ in ()).throw(ConnectionError("cut off")))
        assert weenv("group", "push", reference, "--tar", tars[0], "--recipe").status != OK
    finished = weenv("group", "push", reference, "--tar", tars[0], "--recipe")
    assert (finished.status, "converted before" in finished.err) == (OK, True), finished.err
    assert totar(reference, "--recipe") == TARS[0]


def test_an_extended_group_keeps_its_recipes(weenv: Weenv, tars: list[Path], totar: Callable[..., bytes], tmp_path: Path) -> None:
    assert weenv("group", "push", f"oci:{tmp_path}/one:t", "--tar", tars[0], "--recipe").status == OK
    assert weenv("layer", "convert", tars[1], tmp_path / "more.weenv").status == OK
    group = resolve_group(f"oci:{tmp_path}/one:t")
    extended = extend_group(group, f"oci:{tmp_path}/other:t", [tmp_path / "more.weenv"])
    assert totar(extended, "--layer", 0, "--recipe") == TARS[0]
    manifest = json.loads((tmp_path / "other/blobs/sha256" / extended.rpartition("sha256:")[2]).read_bytes())
    assert [one["mediaType"] for one in manifest["layers"]][2:] == [RECIPE_TYPE]
    config = (tmp_path / "other/blobs/sha256" / manifest["config"]["digest"].removeprefix("sha256:")).read_bytes()
    assert digest(config) == manifest["config"]["digest"]
    assert json.loads(config)["rootfs"]["diff_ids"] == [one["digest"] for one in manifest["layers"]]


def test_which_layer_must_be_said(weenv: Weenv, tars: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    reference = f"oci:{tmp_path}/layout:t"
    assert weenv("group", "push", reference, "--tar", tars[0], "--tar", tars[1]).status == OK
    missing, beyond = weenv("group", "totar", reference), weenv("group", "totar", reference, "--layer", 2)
    assert (missing.status, beyond.status) == (USAGE, NOT_FOUND)
    assert "expected --layer 0 to 1" in missing.err
    assert "received 2" in beyond.err
