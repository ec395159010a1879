"""`weenv layer …` and `weenv mount`: results, exit statuses, and sentences of refusal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from weefs_harness import tree_rows

WEENV = Path(sys.executable).with_name("weenv")


def run(*arguments: str | Path, status: int = 0) -> subprocess.CompletedProcess[bytes]:
    result = subprocess.run([WEENV, *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True)
    assert result.returncode == status, result.stderr.decode()
    assert b"Traceback" not in result.stderr
    return result


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tree with one of each kind, and enough bytes for several chunks."""
    root = tmp_path_factory.mktemp("tree")
    (root / "dir/below").mkdir(parents=True)
    (root / "dir/large").write_bytes(os.urandom(1 << 20))
    (root / "dir/below/text").write_text("some text\n")
    (root / "link").symlink_to("dir/large")
    os.link(root / "dir/below/text", root / "same")
    os.mkfifo(root / "fifo")
    os.mknod(root / "null", 0o20666, os.makedev(1, 3))
    os.setxattr(root / "dir", "user.note", b"\x00\xff")
    with (root / "sparse").open("wb") as file:
        file.seek(1 << 22)
        file.write(b"end")
    os.utime(root / "same", ns=(1, 1_234_567_890_123_456_789))
    return root


@pytest.fixture(scope="module")
def layer(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layer") / "layer.weenv"
    run("layer", "convert", tree, path)
    return path


@pytest.mark.parametrize("packed", [None, "gzip", "zstd"])
def test_convert_takes_tars_as_they_come_and_gives_the_same_layer(
    tree: Path, tmp_path: Path, packed: str | None
) -> None:
    tar = tmp_path / "tree.tar"
    subprocess.run(
        ["tar", "--sort=name", "--xattrs", "--sparse", "--format=pax", "-C", tree, "-cf", tar, "."], check=True
    )
    source = tar
    if packed:
        source = tmp_path / f"tree.{packed}"
        with source.open("wb") as file:
            subprocess.run([packed, "-c", tar], stdout=file, check=True)
    digests = []
    for jobs in ("1", "2"):
        report = json.loads(
            run("layer", "convert", "--format", "json", "-j", jobs, source, tmp_path / f"l{jobs}").stdout
        )
        assert report["bytes_out"] == (tmp_path / f"l{jobs}").stat().st_size
        digests.append(report["blob_digest"])
    assert digests[0] == digests[1]
    listed = json.loads(run("layer", "ls", "--format", "json", tmp_path / "l1").stdout)
    kinds = {row["path"]: row["type"] for row in listed}
    assert (kinds["fifo"], kinds["null"], kinds["dir/below"]) == ("fifos and sockets", "devices", "directories")


def test_what_is_printed_can_be_used(layer: Path, tree: Path) -> None:
    assert run("layer", "cat", layer, "/dir/below/text").stdout == b"some text\n"
    assert run("layer", "cat", layer, "dir/large").stdout == (tree / "dir/large").read_bytes()
    listing = run("layer", "ls", layer, "/dir").stdout.decode()
    assert "dir/below/text" in listing
    assert "sparse" not in listing
    assert "link -> dir/large" in run("layer", "ls", layer).stdout.decode()
    inspected = json.loads(run("layer", "inspect", "--format", "json", layer).stdout)
    assert inspected["inodes"]["symlinks"] == 1
    assert "chunk size" in run("layer", "inspect", layer).stdout.decode()
    assert b"all whole" in run("layer", "verify", layer).stdout


def test_totar_extracts_to_the_original(layer: Path, tree: Path, tmp_path: Path) -> None:
    tar = tmp_path / "out.tar"
    tar.write_bytes(run("layer", "totar", layer).stdout)
    with tarfile.open(tar) as archive:
        assert "./dir/large" in archive.getnames() or "dir/large" in archive.getnames()
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "--xattrs", "--xattrs-include=*", "-C", tmp_path / "out", "-xpf", tar], check=True)
    assert tree_rows(tmp_path / "out") == tree_rows(tree)


def test_verify_says_what_is_damaged_and_where(layer: Path, tmp_path: Path) -> None:
    damaged = bytearray(layer.read_bytes())
    damaged[100] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    result = run("layer", "verify", tmp_path / "damaged", status=5)
    assert b"chunk 0 at byte 0" in result.stdout
    assert b"dir/large" in result.stdout
    assert b"1 of" in result.stderr


@pytest.mark.parametrize("cut", [1, 50, 500])
def test_a_truncated_layer_is_refused_everywhere(layer: Path, tmp_path: Path, cut: int) -> None:
    (tmp_path / "cut").write_bytes(layer.read_bytes()[:-cut])
    for command in (("verify",), ("inspect",), ("ls",), ("totar",)):
        result = run("layer", *command, tmp_path / "cut", status=5)
        assert b"expected" in result.stderr
        assert b"received" in result.stderr
    result = run("group", "push", f"oci:{tmp_path}/layout:x", "--layer", tmp_path / "cut", status=5)
    assert result.stdout == b""


def test_refusals(layer: Path, tree: Path, tmp_path: Path) -> None:
    run("layer", "convert", tree, status=2)
    run("layer", "frobnicate", status=2)
    assert b"more" in run("layer", "convert", "-j", "0", tree, tmp_path / "x", status=2).stderr
    run("layer", "convert", tmp_path / "nothing", tmp_path / "x", status=3)
    run("layer", "inspect", tmp_path / "nothing", status=3)
    assert b"does not hold it" in run("layer", "cat", layer, "/nothing", status=3).stderr
    assert b"expected a regular file" in run("layer", "cat", layer, "/dir", status=1).stderr
    (tmp_path / "noise").write_bytes(os.urandom(5000))
    run("layer", "convert", tmp_path / "noise", tmp_path / "x", status=1)
    assert not (tmp_path / "x").exists()
    assert list(tmp_path.glob("*.tmp*")) == []
    assert b"belongs to `weenv env exec`" in run("layer", "ls", layer, "--", "x", status=2).stderr


@contextlib.contextmanager
def mounted(mountpoint: Path, *references: str) -> Iterator[subprocess.Popen[str]]:
    """`weenv mount` of groups, ended with ^C."""
    mountpoint.mkdir(exist_ok=True)
    process = subprocess.Popen([WEENV, "mount", *references, mountpoint], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    first = process.stderr.readline()
    try:
        assert first.startswith(f"mounted on {mountpoint}"), first + process.stderr.read()
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
        process.stderr.close()
    assert process.returncode == 0
    assert str(mountpoint) not in Path("/proc/mounts").read_text()


def test_mount_shows_the_tree_and_ends_with_an_interrupt(layer: Path, tree: Path, tmp_path: Path) -> None:
    reference = run("group", "push", f"oci:{tmp_path}/layout:base", "--layer", layer).stdout.decode().strip()
    with mounted(tmp_path / "mnt", reference):
        assert tree_rows(tmp_path / "mnt") == tree_rows(tree)


def test_mount_of_two_groups_shows_the_upper_over_the_lower(layer: Path, tmp_path: Path) -> None:
    (tmp_path / "top/dir").mkdir(parents=True)
    (tmp_path / "top/dir/below").write_text("a file now\n")
    layout = f"oci:{tmp_path}/layout"
    run("group", "push", f"{layout}:base", "--layer", layer)
    run("group", "push", f"{layout}:top", "--rootfs", tmp_path / "top")
    with mounted(tmp_path / "mnt", f"{layout}:base", f"{layout}:top"):
        assert (tmp_path / "mnt/dir/below").read_text() == "a file now\n"
        assert (tmp_path / "mnt/dir/large").stat().st_size == 1 << 20


def test_mount_ends_when_somebody_else_unmounts(layer: Path, tmp_path: Path) -> None:
    run("group", "push", f"oci:{tmp_path}/layout:base", "--layer", layer)
    (tmp_path / "mnt").mkdir()
    process = subprocess.Popen(
        [WEENV, "mount", f"oci:{tmp_path}/layout:base", tmp_path / "mnt"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    process.stderr.readline()
    subprocess.run(["umount", tmp_path / "mnt"], check=True)
    assert process.wait(30) == 0
    process.stderr.close()


def test_mount_refuses_a_damaged_toc_and_a_damaged_chunk_gives_eio(layer: Path, tmp_path: Path) -> None:
    run("group", "push", f"oci:{tmp_path}/layout:base", "--layer", layer)
    (blob,) = [
        path for path in (tmp_path / "layout/blobs/sha256").iterdir() if path.stat().st_size == layer.stat().st_size
    ]
    original = blob.read_bytes()
    toc_offset = json.loads(run("layer", "inspect", "--format", "json", layer).stdout)["toc_offset"]
    (tmp_path / "mnt").mkdir()
    blob.write_bytes(original[:toc_offset] + bytes([original[toc_offset] ^ 0xFF]) + original[toc_offset + 1 :])
    result = run("mount", f"oci:{tmp_path}/layout:base", tmp_path / "mnt", status=5)
    assert b"TOC" in result.stderr
    blob.write_bytes(original[: toc_offset + 10])
    run("mount", f"oci:{tmp_path}/layout:base", tmp_path / "mnt", status=5)
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    blob.write_bytes(bytes([original[0] ^ 1]) + original[1:])
    with mounted(tmp_path / "mnt", f"oci:{tmp_path}/layout:base"):
        begin = time.monotonic()
        with pytest.raises(OSError, match="Input/output error"):
            (tmp_path / "mnt/dir/large").read_bytes()
        assert time.monotonic() - begin < 25, "damage is not waited for"
        assert (tmp_path / "mnt/same").read_text() == "some text\n"
