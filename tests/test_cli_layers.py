"""`weenv layer …` and `weenv mount`: results, exit statuses, and sentences of refusal."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from merge_corners import file
from strategies import make_content, write_pax
from weefs_harness import tree_rows

from envlet import errors
from envlet.errors import EnvletError
from tools import cli, env_commands, exits, output

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
    assert (kinds["fifo"], kinds["null"], kinds["dir/below"]) == ("fifo", "character device", "directory")


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
    assert result.stdout.count(b"\n") == 1
    assert b"again" not in result.stdout
    assert b"1 of" in result.stderr
    assert result.stderr.count(b"fetch the layer again, or convert it again from its source") == 1


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
    assert b"/dir: expected a regular file, it is a directory" in run("layer", "cat", layer, "/dir", status=1).stderr
    assert b"it is a character device" in run("layer", "cat", layer, "/null", status=1).stderr
    for noise in (os.urandom(5000), b"short", b"#!/bin/sh\n" * 100):
        (tmp_path / "noise").write_bytes(noise)
        result = run("layer", "convert", tmp_path / "noise", tmp_path / "x", status=1)
        assert b"neither a tar nor a gzip- or zstd-compressed one" in result.stderr
    missing = run("layer", "convert", tree, tmp_path / "no/x", status=3).stderr.decode()
    assert missing == f"weenv: {tmp_path}/no/x: No such file or directory; no layer can be written there\n"
    (tmp_path / "taken").mkdir()
    assert f"{tmp_path}/taken: expected the name of a file" in run("layer", "convert", tree, tmp_path / "taken", status=1).stderr.decode()
    assert not list(tmp_path.glob("**/*.partial"))
    assert not (tmp_path / "x").exists()
    assert list(tmp_path.glob("*.tmp*")) == []
    assert b"belongs to `weenv env exec`" in run("layer", "ls", layer, "--", "x", status=2).stderr


def test_a_recipe_gives_the_tar_back(tmp_path: Path, layer: Path) -> None:
    archive = write_pax([file(b"f", make_content(600_000, 1, False)), file(b"f", b"replaced")]) + b"behind the end"
    (tmp_path / "tar").write_bytes(archive)
    told = run("layer", "convert", tmp_path / "tar", tmp_path / "made", "--recipe", tmp_path / "recipe", "--format", "json")
    assert json.loads(told.stdout)["diff_id"] == f"sha256:{hashlib.sha256(archive).hexdigest()}"
    assert run("layer", "totar", tmp_path / "made", "--recipe", tmp_path / "recipe").stdout == archive
    assert run("layer", "totar", tmp_path / "made").stdout != archive
    refused = run("layer", "totar", layer, "--recipe", tmp_path / "recipe", status=exits.INTEGRITY).stderr.decode()
    assert "recipe header: expected the recipe of TOC sha256:" in refused
    (tmp_path / "d").mkdir()
    no_tar = run("layer", "convert", tmp_path / "d", tmp_path / "x", "--recipe", tmp_path / "y", status=1).stderr.decode()
    assert "received a directory" in no_tar


def test_nothing_but_a_file_is_replaced(tmp_path: Path) -> None:
    """A device, a pipe, a directory, the source itself, by whatever name; a symlink is followed."""
    archive = write_pax([file(b"f", b"x")])
    tar = tmp_path / "tar"
    tar.write_bytes(archive)
    os.mkfifo(tmp_path / "pipe")
    os.mknod(tmp_path / "null", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    os.link(tar, tmp_path / "same")
    (tmp_path / "d").mkdir()
    (tmp_path / "link").symlink_to("where it leads")
    before = sorted(os.listdir(tmp_path))
    for destination, said in {
        "pipe": "received a device, pipe or socket", "null": "received a device, pipe or socket", "tar": "another file than the source",
        "same": "another file than the source", "d": "received a directory", ".": "received a directory",
    }.items():  # fmt: skip
        assert said in run("layer", "convert", tar, tmp_path / destination, status=1).stderr.decode()
        assert said in run("layer", "convert", tar, tmp_path / "new", "--recipe", tmp_path / destination, status=1).stderr.decode()
    twice = run("layer", "convert", tar, tmp_path / "n", "--recipe", tmp_path / "n", status=1).stderr.decode()
    assert "for the recipe than for the layer" in twice
    assert "outside of the directory" in run("layer", "convert", tmp_path, tmp_path / "d/new", status=1).stderr.decode()
    assert "does not go to stdout" in run("layer", "convert", tar, "-", status=2).stderr.decode()
    assert (sorted(os.listdir(tmp_path)), tar.read_bytes()) == (before, archive)
    run("layer", "convert", tar, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert run("layer", "cat", tmp_path / "where it leads", "f").stdout == b"x"


def test_a_full_disk_is_named_and_is_capacity(tmp_path: Path) -> None:
    (tmp_path / "tar").write_bytes(write_pax([file(b"f", make_content(1 << 20, 1, False))]))
    (tmp_path / "full").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path / "full"], check=True)
    try:
        said = run("layer", "convert", tmp_path / "tar", tmp_path / "full/layer", status=exits.CAPACITY).stderr.decode()
        assert said == f"weenv: {tmp_path}/full/layer: No space left on device\n"
        assert os.listdir(tmp_path / "full") == []
    finally:
        subprocess.run(["umount", tmp_path / "full"], check=True)


def test_names_are_printed_whatever_the_locale_says(tmp_path: Path) -> None:
    (tmp_path / "tar").write_bytes(write_pax([file("größe".encode(), b"x"), file(b"\xff", b"y")]))
    run("layer", "convert", tmp_path / "tar", tmp_path / "layer")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    listed = subprocess.run([WEENV, "layer", "ls", tmp_path / "layer"], env=environment, capture_output=True, check=True)
    assert "größe".encode() in listed.stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_streams_that_are_closed(layer: Path, closed: str) -> None:
    ended = subprocess.run(f"{WEENV} layer ls {layer} {closed}", shell=True, capture_output=True)
    assert ended.returncode == 0
    assert b"Traceback" not in ended.stderr


def test_an_empty_pipe_is_no_archive(tmp_path: Path) -> None:
    """What should have filled it has failed, and that must not look like a layer."""
    assert "received nothing" in run("layer", "convert", "-", tmp_path / "layer", status=1).stderr.decode()
    assert os.listdir(tmp_path) == []


def test_a_pipe_is_no_layer() -> None:
    program = f"cat /dev/null | {WEENV} layer verify /dev/stdin"
    assert b"/dev/stdin: expected a file that can be read at any place" in subprocess.run(program, shell=True, capture_output=True).stderr


def convert_until(tmp_path: Path, number: int, disposition: signal.Handlers) -> tuple[subprocess.Popen[bytes], bytes]:
    """A conversion in the middle: its source is a pipe that stops when some of the layer is written; and the rest of the source."""
    archive = write_pax([file(b"f", make_content(32 << 20, 1, False)), file(b"g", make_content(3 << 20, 2, False))])
    process = subprocess.Popen(
        [WEENV, "layer", "convert", "-", tmp_path / "layer", "--recipe", tmp_path / "recipe"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, disposition),
    )
    assert process.stdin is not None
    given = 0
    while not any(path.stat().st_size for path in tmp_path.glob(".layer.*.partial")):
        assert given < 32 << 20
        process.stdin.write(archive[given : given + (1 << 20)])
        process.stdin.flush()
        given += 1 << 20
    return process, archive[given:]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_convert_leaves_nothing_when_it_is_interrupted(tmp_path: Path, number: int) -> None:
    process, _rest = convert_until(tmp_path, number, signal.SIG_DFL)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert b"Traceback" not in errors
    assert os.listdir(tmp_path) == []


def test_a_command_that_ignores_a_closed_session_goes_on(tmp_path: Path) -> None:
    """As nohup has it."""
    process, rest = convert_until(tmp_path, signal.SIGHUP, signal.SIG_IGN)
    process.send_signal(signal.SIGHUP)
    process.communicate(rest, timeout=30)
    assert process.returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["layer", "recipe"]


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_cleaning_is_not_broken_off_by_a_second_signal(first: int) -> None:
    cleaned = []

    def clean() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        cleaned.append(True)

    def end() -> None:
        with exits.terminable(), contextlib.ExitStack() as stack:
            stack.callback(clean)
            os.kill(os.getpid(), first)

    before = signal.getsignal(signal.SIGHUP)
    with pytest.raises(exits.Terminated) as raised:
        end()
    assert (raised.value.code, cleaned) == (128 + first, [True])
    assert signal.getsignal(signal.SIGHUP) is before


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


def scratch_of(tmp_path: Path) -> dict[str, str]:
    """An environment whose temporary directory is an empty one, so that what is left there shows."""
    (tmp_path / "scratch").mkdir()
    return {**os.environ, "TMPDIR": str(tmp_path / "scratch")}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["manifest", "layer", "mounted"])
def test_mount_leaves_nothing_whenever_it_is_interrupted(layer: Path, tmp_path: Path, number: int, moment: str) -> None:
    reference = f"oci:{tmp_path}/layout:base"
    run("group", "push", reference, "--layer", layer)
    asked, go_on = threading.Event(), threading.Event()
    with stalling_registry(tmp_path / "layout", layer.stat().st_size, moment, asked, go_on) as address:
        (tmp_path / "mnt").mkdir()
        process = subprocess.Popen(
            [WEENV, "mount", f"{address}/base:base" if moment != "mounted" else reference, tmp_path / "mnt"],
            stderr=subprocess.PIPE,
            env=scratch_of(tmp_path),
            # A shell that runs the tests in the background has them, and what they start, ignore an interrupt.
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
        )
        assert process.stderr is not None
        if moment == "mounted":
            assert process.stderr.readline().startswith(b"mounted on")
        else:
            assert asked.wait(30)
        process.send_signal(number)
        status = process.wait(30)
        go_on.set()
        assert b"Traceback" not in process.stderr.read()
        process.stderr.close()
    assert status in ((0,) if moment == "mounted" else (128 + number, -number))
    assert os.listdir(tmp_path / "scratch") == []
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


@contextlib.contextmanager
def stalling_registry(
    layout: Path, layer_bytes: int, moment: str, asked: threading.Event, go_on: threading.Event
) -> Iterator[str]:
    """A layout over HTTP that does not answer when the manifest or the layer is asked for, until `go_on`."""
    index = json.loads((layout / "index.json").read_bytes())

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, _, name = self.path.rpartition("/")
            if self.path == "/v2/":
                self.answer(b"{}", "application/json")
                return
            digest = name if name.startswith("sha256:") else index["manifests"][0]["digest"]
            data = (layout / "blobs/sha256" / digest.partition(":")[2]).read_bytes()
            if (moment == "manifest" and kind.endswith("manifests")) or (moment == "layer" and len(data) == layer_bytes):
                asked.set()
                go_on.wait(60)
                return
            self.answer(data, json.loads(data).get("mediaType", "") if kind.endswith("manifests") else "application/octet-stream")

        do_HEAD = do_GET

        def answer(self, data: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Content-Type", kind)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Not a word."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_mount_hides_nothing(layer: Path, tmp_path: Path) -> None:
    run("group", "push", f"oci:{tmp_path}/layout:base", "--layer", layer)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    assert b"full: expected an empty directory" in run("mount", f"oci:{tmp_path}/layout:base", tmp_path / "full", status=1).stderr
    with mounted(tmp_path / "a mount", f"oci:{tmp_path}/layout:base"):
        result = run("mount", f"oci:{tmp_path}/layout:base", tmp_path / "a mount", status=1)
    assert b"a mount: something is mounted there" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["env", "exec", "x", "--", "printf", "%s", b"\xff"], 125),
        (["env", "exec", "x", "--env", b"A=\xff", "--", "true"], 125),
        (["env", "create", "--group", "oci:x:y", "--init", b"echo \xff"], 2),
        (["env", "rm", b"\xff"], 2),
        (["group", "resolve", b"oci:\xff:x"], 2),
        (["mount", b"oci:\xff:x", "/mnt"], 2),
    ],
)
def test_what_json_cannot_carry_is_refused(arguments: list[str | bytes], status: int) -> None:
    result = subprocess.run([WEENV, *arguments], stdin=subprocess.DEVNULL, capture_output=True)
    assert (result.returncode, result.stdout) == (status, b"")
    assert b"expected UTF-8, received" in result.stderr
    assert b"\\xff" in result.stderr
    assert b"Traceback" not in result.stderr


def test_a_layer_may_have_a_name_of_any_bytes(tree: Path, tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff.weenv"
    made = subprocess.run([WEENV, "layer", "convert", tree, name], capture_output=True, check=True)
    assert made.stdout.endswith(name + b"\n")
    shown = subprocess.run([WEENV, "layer", "inspect", "--format", "json", name], capture_output=True, check=True)
    assert os.fsencode(json.loads(shown.stdout)["file"]) == name


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--memory", "1M", "4M or more was expected"),
        ("--cpu", "0", "more than 0 and at most 4096 cores"),
        ("--cpu", "two", "a number of cores"),
        ("--cpu", "nan", "more than 0 and at most 4096 cores"),
        ("--ttl", "-1", "more than 0 seconds"),
        ("--ttl", "inf", "more than 0 seconds"),
        ("--workdir", "work", "an absolute path"),
    ],
)
def test_limits_are_refused_where_they_are_typed(option: str, value: str, sentence: str) -> None:
    result = run("env", "create", "--group", "oci:x:y", f"{option}={value}", status=2)
    assert f"argument {option}: {sentence}" in result.stderr.decode()


def test_a_command_line_for_exec_is_refused_where_it_is_typed() -> None:
    assert b"argument --timeout: more than 0 seconds" in run("env", "exec", "--timeout=0", "x", "--", "true", status=2).stderr
    assert b"argument --workdir: an absolute path" in run("env", "exec", "--workdir=x", "x", "--", "true", status=2).stderr


@pytest.mark.parametrize("command", ["ls", "df"])
def test_a_directory_that_is_no_cache_is_refused(command: str, tmp_path: Path) -> None:
    missing = run("cache", command, "--cache", tmp_path / "no", status=3)
    assert b"received no directory" in missing.stderr
    assert b"a directory without it" in run("cache", command, "--cache", tmp_path, status=3).stderr
    (tmp_path / "layers").mkdir()
    run("cache", command, "--cache", tmp_path)
    environment = {**os.environ, "WEENV_SOCKET": "/elsewhere/envlet.sock"}
    result = subprocess.run([WEENV, "cache", command], env=environment, capture_output=True)
    assert (result.returncode, result.stdout) == (2, b"")
    assert b"say which with --cache DIR" in result.stderr
    subprocess.run([WEENV, "cache", command], env={**environment, "WEENV_CACHE": str(tmp_path)}, check=True)


def test_long_and_repeated_texts_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert output.clip("short", 60) == "short"
    assert output.clip("x" * 61, 60) == "x" * 59 + "…"
    assert output.clip("first\nsecond", 60) == "first…"
    failed = EnvletError(errors.INIT_FAILED, "init command 1 failed", {"output_tail": "why\n"})
    assert exits.describe(failed).count("why") == 1
    told = EnvletError(errors.INIT_FAILED, "init command 1 failed:\nwhy", {"output_tail": "why\n"})
    assert exits.describe(told).count("why") == 1


def test_a_diff_with_devices_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    env_commands._warn_of_devices(types.SimpleNamespace(devices=["/a", "/b"]))
    assert capsys.readouterr().err == "weenv: the diff holds devices, which `weenv env create --apply` refuses, among them /a, /b\n"
    env_commands._warn_of_devices(types.SimpleNamespace())
    assert capsys.readouterr().err == ""


def test_a_listing_for_programs_says_what_each_entry_is(layer: Path) -> None:
    rows = {row["path"]: row for row in json.loads(run("layer", "ls", "--format", "json", layer).stdout)}
    assert {path: row["type"] for path, row in rows.items() if "/" not in path[1:]} == {
        "/": "directory", "dir": "directory", "fifo": "fifo", "link": "symlink",
        "null": "character device", "same": "file", "sparse": "file",
    }  # fmt: skip
    assert rows["same"]["mtime"] == "2009-02-13T23:31:30.123456789Z"
    assert "  2009-02-13T23:31:30  same\n" in run("layer", "ls", layer).stdout.decode()


@pytest.mark.parametrize("packed", [None, "gzip", "zstd"])
def test_convert_reads_a_pipe(tree: Path, tmp_path: Path, packed: str | None) -> None:
    command = ["tar", "--sort=name", *([f"--use-compress-program={packed}"] if packed else []), "-C", tree, "-cf", "-", "."]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as tar:
        report = subprocess.run(
            [WEENV, "layer", "convert", "--format", "json", "-", tmp_path / "x"], stdin=tar.stdout, capture_output=True, check=True
        )
    assert json.loads(report.stdout)["source"] == {None: "tar", "gzip": "tar.gz", "zstd": "tar.zst"}[packed]
    assert run("layer", "cat", tmp_path / "x", "/dir/below/text").stdout == b"some text\n"
    with subprocess.Popen(["head", "-c", "700", "/dev/urandom"], stdout=subprocess.PIPE) as noise:
        refused = subprocess.run([WEENV, "layer", "convert", "-", tmp_path / "y"], stdin=noise.stdout, capture_output=True)
    assert (refused.returncode, refused.stdout) == (1, b"")
    assert refused.stderr.startswith(b"weenv: standard input: expected a tar")


def test_an_interrupt_while_modules_are_imported_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_parser", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
