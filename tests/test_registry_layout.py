"""The local layout: writers at the same time, writers that die, damage, and what other tools wrote."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
from pathlib import Path

import pytest
from registry_fixture import PYTHON, make_layer

from registry import GroupConfig, IntegrityError, InvalidReference, NoSpace, NotFound, RegistryError, push_group, resolve_group
from registry.layout import Layout
from registry.manifest import digest_of

PUSH = """
import sys; from pathlib import Path; from registry import push_group
push_group(sys.argv[1], [Path(sys.argv[2])])
"""


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    return make_layer(tmp_path, "layer", {"f": b"f" * 100_000})


def test_sixteen_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    layers = [
        make_layer(tmp_path, f"l{i}", {"f": b"%d" % (i // 2)}) for i in range(16)
    ]  # each twice: blobs collide, too
    layout = tmp_path / "layout"
    context = multiprocessing.get_context("fork")
    together = context.Barrier(16)

    def push(number: int) -> None:
        together.wait()
        push_group(f"oci:{layout}:t{number}", [layers[number]])

    pushers = [context.Process(target=push, args=(number,)) for number in range(16)]
    for process in pushers:
        process.start()
    for process in pushers:
        process.join()
    assert [process.exitcode for process in pushers] == [0] * 16
    digests = [resolve_group(f"oci:{layout}:t{i}").layers[0].digest for i in range(16)]
    assert digests == [digest_of(layer.read_bytes()) for layer in layers]
    assert len(json.loads((layout / "index.json").read_bytes())["manifests"]) == 16
    assert not list(layout.rglob(".unfinished-*"))


def test_a_pusher_killed_midway_leaves_a_readable_layout(tmp_path: Path, layer: Path) -> None:
    """Killed at each of its renames in turn, until one run meets no death (the kill is in the pusher itself)."""
    layout = tmp_path / "layout"
    push_group(f"oci:{layout}:before", [layer])
    program = (
        "import os, signal, sys; from pathlib import Path; import registry.layout as layout\n"
        "left, real = [int(sys.argv[3])], Path.replace\n"
        "def replace(self, target):\n"
        "    left[0] -= 1\n"
        "    if left[0] == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(self, target)\n"
        "Path.replace = replace\n" + PUSH
    )
    deaths = 0
    for number in range(1, 20):
        other = make_layer(tmp_path, f"other{number}", {"f": b"%d" % number})
        killed = subprocess.run([PYTHON, "-c", program, f"oci:{layout}:new{number}", other, str(number)], check=False)
        assert resolve_group(f"oci:{layout}:before").layers[0].size_bytes == layer.stat().st_size
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL
        deaths += 1
        assert len(list(layout.rglob(".unfinished-*"))) == 1
        with pytest.raises(NotFound):
            resolve_group(f"oci:{layout}:new{number}")
        push_group(f"oci:{layout}:new{number}", [other])  # nothing is locked, and the leftover goes
        assert not list(layout.rglob(".unfinished-*"))
    assert deaths == 4  # layer, configuration, manifest, index
    for number in range(1, 6):
        resolve_group(f"oci:{layout}:new{number}")


def test_what_is_being_written_is_no_leftover(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.create()
    blobs = tmp_path / "blobs/sha256"
    with (blobs / ".unfinished-alive").open("xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (blobs / ".unfinished-dead").touch()
        layout.create()
        assert os.listdir(blobs) == [".unfinished-alive"]


def test_pushing_again_mends_a_damaged_blob(tmp_path: Path, layer: Path) -> None:
    reference = f"oci:{tmp_path / 'layout'}:t"
    pinned = push_group(reference, [layer])
    layout = Layout(tmp_path / "layout")
    for path in (layout.directory / "blobs/sha256").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(IntegrityError, match="push the group again"):
        resolve_group(reference)
    assert push_group(reference, [layer]) == pinned
    group = resolve_group(reference)
    assert layout.blob_path(group.layers[0].digest).read_bytes() == layer.read_bytes()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff", b'{"schemaVersion":2}', b'{"schemaVersion":2,"manifests":[{"digest":5}]}'],
)
def test_a_damaged_index_is_named_and_not_written_over(tmp_path: Path, layer: Path, content: bytes) -> None:
    push_group(f"oci:{tmp_path}/layout:t", [layer])
    index = tmp_path / "layout/index.json"
    index.write_bytes(content)
    with pytest.raises(IntegrityError) as caught:
        resolve_group(f"oci:{tmp_path}/layout:t")
    assert str(caught.value).startswith(f"{index}: expected an OCI image index")
    if b"digest" not in content:
        with pytest.raises(IntegrityError, match="expected an OCI image index"):
            push_group(f"oci:{tmp_path}/layout:u", [layer])
        assert index.read_bytes() == content


def test_a_directory_that_is_no_layout_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(NotFound, match=r"expected an OCI image layout, index\.json is missing"):
            resolve_group(f"oci:{directory}:t")


@pytest.mark.parametrize("names", [["src/main.py"], ["index.json"], ["blobs/x", "README"], [".git/HEAD"], ["a", "b", "c", "d"]])
def test_a_directory_of_something_else_stays_as_it_is(tmp_path: Path, layer: Path, names: list[str]) -> None:
    directory = tmp_path / "project"
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text('{"name": "a project"}')
    before = sorted(directory.rglob("*"))
    with pytest.raises(InvalidReference, match=r"expected an OCI image layout, an empty directory or none, received a directory with '"):
        push_group(f"oci:{directory}:t", [layer])
    assert sorted(directory.rglob("*")) == before
    push_group(f"oci:{directory}/groups:t", [layer])
    assert resolve_group(f"oci:{directory}/groups:t").layers


@pytest.mark.parametrize("names", [[], [".lock"], ["blobs/sha256/.unfinished-1", ".unfinished-2"], ["oci-layout", "README"]])
def test_an_empty_directory_or_one_that_was_begun_becomes_a_layout(tmp_path: Path, layer: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / "layout" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "layout" / name).touch()
    push_group(f"oci:{tmp_path}/layout:t", [layer])
    assert resolve_group(f"oci:{tmp_path}/layout:t").layers


def test_a_full_disk_is_said_with_its_place(tmp_path: Path, layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(NoSpace, match=f"oci:{tmp_path}/layout: cannot create the layout: No space left on device; make room there"):
        push_group(f"oci:{tmp_path}/layout:t", [layer])


def test_where_nothing_can_be_written_the_error_says_so(tmp_path: Path, layer: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RegistryError, match="cannot create the layout: Not a directory"):
        push_group(f"oci:{tmp_path / 'file' / 'layout'}:t", [layer])


def test_what_others_wrote_into_the_index_is_kept(tmp_path: Path, layer: Path) -> None:
    theirs = {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "digest": f"sha256:{'2' * 64}",
        "size": 5,
        "platform": {"architecture": "arm64", "os": "linux"},
        "annotations": {"org.opencontainers.image.ref.name": "theirs", "x": "y"},
    }
    index = {"schemaVersion": 2, "manifests": [theirs], "annotations": {"made": "by hand"}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    push_group(f"oci:{tmp_path}:ours", [layer])
    push_group(f"oci:{tmp_path}:ours", [layer], config=GroupConfig(user="1"))
    written = json.loads((tmp_path / "index.json").read_bytes())
    assert written["annotations"] == {"made": "by hand"}
    assert written["manifests"][0] == theirs
    assert len(written["manifests"]) == 2


def test_a_file_that_changes_while_it_is_pushed_is_not_published(tmp_path: Path, layer: Path) -> None:
    layout = Layout(tmp_path / "layout")
    layout.create()
    digest = digest_of(layer.read_bytes())
    layer.write_bytes(layer.read_bytes()[:-1] + b"x")
    with pytest.raises(IntegrityError, match="did it change meanwhile"):
        layout.add_file(layer, digest)
    assert os.listdir(layout.directory / "blobs/sha256") == []
