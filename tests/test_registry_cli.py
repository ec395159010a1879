"""`weenv group …` against a real registry: what stands on stdout, and the exit status of each kind of failure."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from registry_fixture import PYTHON, RegistryServer, auth_file, free_port, make_layer, run_registry
from weenv_cli import AUTHENTICATION, ERROR, INTEGRITY, NOT_FOUND, OK, USAGE, Weenv

from registry import describe_layer


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    """One that wants a password."""
    with run_registry(tmp_path_factory.mktemp("locked"), password_file=True) as server:
        yield server


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("layers")
    return [make_layer(directory, name, {name: name.encode() * 1000}) for name in ("lower", "upper")]


def test_push_prints_the_pinned_reference_and_nothing_else(
    weenv: Weenv, server: RegistryServer, layers: list[Path]
) -> None:
    reference = f"{server.host}/cli/push:v1"
    pushed = weenv("group", "push", reference, "--layer", layers[0], "--layer", layers[1], "--role", "task")
    assert pushed.status == OK
    assert re.fullmatch(rf"{re.escape(reference)}@sha256:[0-9a-f]{{64}}\n", pushed.out)
    assert [line.partition(": ")[0] for line in pushed.err.splitlines()] == [str(layer) for layer in layers]


def test_a_directory_is_converted_and_published(weenv: Weenv, server: RegistryServer, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "file").write_bytes(b"content")
    pushed = weenv("group", "push", f"{server.host}/cli/rootfs", "--rootfs", tmp_path / "root", "-j", 1)
    assert (pushed.status, pushed.out.count("\n")) == (OK, 1)
    assert pushed.err.startswith(f"{tmp_path / 'root'}: 7 B in, ")
    assert weenv("group", "resolve", pushed.out.strip()).status == OK


@pytest.mark.parametrize("kind", ["registry", "layout"])
def test_resolve_tells_everything_as_text_and_as_json(
    weenv: Weenv, server: RegistryServer, layers: list[Path], tmp_path: Path, kind: str
) -> None:
    reference = f"{server.host}/cli/resolve:t" if kind == "registry" else f"oci:{tmp_path / 'layout'}:t"
    options = ["--env", "A=b=c", "--workdir", "/w", "--user", "7:8", "--role", "harness"]
    pinned = weenv("group", "push", reference, "--layer", layers[0], *options).out.strip()
    described = describe_layer(layers[0])
    assert weenv("group", "resolve", reference).out == f"{pinned}\n{described.digest}\n"
    told = json.loads(weenv("group", "resolve", reference, "--format", "json").out)
    source = f"http://{server.host}/cli/resolve" if kind == "registry" else f"oci:{tmp_path / 'layout'}"
    assert told == {
        "reference": pinned,
        "digest": pinned.rpartition("@")[2],
        "role": "harness",
        "source": source,
        "size_bytes": described.size_bytes,
        "config": {"env": ["A=b=c"], "workdir": "/w", "user": "7:8", "entrypoint": None, "cmd": None},
        "layers": [attrs.asdict(described)],
    }
    assert json.loads(weenv("group", "tree", pinned, "--format", "json").out) == told
    tree = weenv("group", "tree", reference).out.splitlines()
    assert tree[0].startswith(f"{pinned}  harness")
    assert [line[:3] for line in tree[1:]] == ["├─ "] * (len(tree) - 2) + ["└─ "]
    assert any(described.digest in line for line in tree)


@pytest.mark.parametrize(
    "argv",
    [
        ["push", "oci:x:t"],
        ["push", "oci:x:t", "--layer", "a", "--rootfs", "b"],
        ["push", "oci:x:t", "--layer", "a", "--role", "top"],
        ["push", "not a reference", "--layer", "a"],
        ["push", f"oci:x@sha256:{'0' * 64}", "--layer", "a"],
        ["push", "oci:x:t", "--rootfs", "/etc/passwd"],
        ["resolve"],
        ["resolve", "host/UPPER"],
        ["resolve", "oci:x:t", "--format", "xml"],
        ["tree", "oci:x"],
    ],
)
def test_wrong_usage_is_2(weenv: Weenv, argv: list[str]) -> None:
    ran = weenv("group", *argv)
    assert (ran.status, ran.out) == (USAGE, "")
    assert "expected" in ran.err or "usage:" in ran.err


def test_what_is_not_found_is_3(weenv: Weenv, server: RegistryServer, layers: list[Path], tmp_path: Path) -> None:
    weenv("group", "push", f"{server.host}/cli/there:t", "--layer", layers[0])
    for reference in (
        f"{server.host}/cli/absent",
        f"{server.host}/cli/there:absent",
        f"{server.host}/cli/there@sha256:{'0' * 64}",
        f"oci:{tmp_path}:t",
    ):
        ran = weenv("group", "resolve", reference)
        assert (ran.status, ran.out, ran.err.count("\n")) == (NOT_FOUND, "", 1)
    assert weenv("group", "push", f"{server.host}/cli/x", "--layer", tmp_path / "absent").status == NOT_FOUND


def test_a_password_that_is_missing_or_wrong_is_4_and_the_right_one_is_0(
    weenv: Weenv, locked: RegistryServer, layers: list[Path], tmp_path: Path
) -> None:
    push = ["group", "push", f"{locked.host}/cli/a", "--layer", str(layers[0])]
    ran = weenv(*push)
    assert ran.status == AUTHENTICATION
    assert ran.err == (f"weenv: {locked.host}: the registry asks for user and password; log in with docker or podman\n")
    auth_file(tmp_path / "home/.docker/config.json", locked.host, password="wrong")
    assert weenv(*push).status == AUTHENTICATION
    assert weenv("group", "resolve", f"{locked.host}/cli/a").status == AUTHENTICATION
    auth_file(tmp_path / "home/.docker/config.json", locked.host)
    assert weenv(*push).status == OK
    assert weenv("group", "tree", f"{locked.host}/cli/a").status == OK


def test_what_is_damaged_is_5(weenv: Weenv, server: RegistryServer, layers: list[Path], tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(layers[0].read_bytes()[:-1])
    ran = weenv("group", "push", f"{server.host}/cli/x", "--layer", tmp_path / "broken")
    assert ran.status == INTEGRITY
    assert str(tmp_path / "broken") in ran.err
    pinned = weenv("group", "push", f"oci:{tmp_path / 'l'}:t", "--layer", layers[0], "--role", "base").out.strip()
    manifest = tmp_path / "l/blobs/sha256" / pinned.rpartition(":")[2]
    manifest.write_bytes(manifest.read_bytes().replace(b"base", b"task"))
    ran = weenv("group", "resolve", pinned)
    assert ran.status == INTEGRITY
    assert str(manifest) in ran.err


def test_nobody_there_is_1_and_names_the_address(weenv: Weenv, layers: list[Path]) -> None:
    host = f"127.0.0.1:{free_port()}"
    ran = weenv("group", "resolve", f"{host}/cli/a")
    assert (ran.status, ran.out) == (ERROR, "")
    assert f"http://{host}/v2/cli/a" in ran.err


def test_an_auth_file_that_cannot_be_understood_is_named(weenv: Weenv, server: RegistryServer, tmp_path: Path) -> None:
    path = tmp_path / "home/.docker/config.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    ran = weenv("group", "resolve", f"{server.host}/cli/a")
    assert ran.status == ERROR
    assert ran.err.startswith(f"weenv: {path}: expected docker's auth file")


def test_the_program_itself_ends_with_the_status(server: RegistryServer, tmp_path: Path) -> None:
    program = "from tools.cli import main; main()"
    command = [PYTHON, "-c", program, "group", "resolve", f"{server.host}/cli/absent"]
    ran = subprocess.run(command, capture_output=True, check=False, env=os.environ | {"HOME": str(tmp_path)})
    assert (ran.returncode, ran.stdout) == (NOT_FOUND, b"")
