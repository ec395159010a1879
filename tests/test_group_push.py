"""`weenv group push` and what it does not do twice: conversions, uploads, after a success, a failure, a signal."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import lzma
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zstandard
from aiohttp import web
from merge_corners import directory, file
from oci_image import digest
from registry_fixture import PYTHON, Proxy, RegistryServer, make_layer
from strategies import make_content, write_pax
from weenv_cli import CAPACITY, ERROR, INTEGRITY, NOT_FOUND, OK, USAGE, Ran, Weenv

import layerformat
from layerformat import Layer, Progress
from registry import GroupConfig, LayerDescriptor, push_group, resolve_group
from registry.conversions import Conversions
from registry.manifest import Conversion, Origin
from registry.publish import Encoding

TARS = [
    write_pax(
        [directory(b"d")]
        + [file(b"d/%d-%d" % (layer, number), make_content(70_000, 10 * layer + number, True)) for number in range(6)]
    )
    for layer in range(3)
]
TERMINATED = 128 + signal.SIGTERM


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Where the command line keeps conversions."""
    return tmp_path / "home/.cache/weenv/convert"


@pytest.fixture
def tars(tmp_path: Path) -> list[Path]:
    """Three archives, compressed in three ways."""
    paths = [tmp_path / name for name in ("0.tar.gz", "1.tar.zst", "2.tar")]
    for path, data in zip(paths, (gzip.compress(TARS[0], mtime=0), zstandard.compress(TARS[1]), TARS[2]), strict=True):
        path.write_bytes(data)
    return paths


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was converted so far, by name."""
    names: list[str] = []
    real = layerformat.convert

    def convert(source: Any, destination: Any, **options: Any) -> layerformat.ConvertReport:
        names.append(str(getattr(source, "name", source)).rpartition("/")[2])
        return real(source, destination, **options)

    monkeypatch.setattr(layerformat, "convert", convert)
    return names


def push(weenv: Weenv, reference: str, tars: list[Path], *options: str) -> Ran:
    return weenv("group", "push", reference, *(word for tar in tars for word in ("--tar", tar)), "-j", 1, *options)


def writes(proxy: Proxy) -> list[str]:
    return [f"{one.method} {one.path}" for one in proxy.seen if one.method not in ("GET", "HEAD")]


def left(state: Path) -> dict[str, int]:
    """How many files of each kind the state directory holds."""
    names = [path.suffix for path in state.rglob("*") if path.is_file()]
    return {suffix: names.count(suffix) for suffix in sorted(set(names))}


# ---- once is enough ----


@pytest.mark.parametrize("kind", ["registry", "layout"])
def test_a_second_push_converts_and_sends_nothing(
    weenv: Weenv, proxy: Proxy, tars: list[Path], converted: list[str], state: Path, tmp_path: Path, kind: str
) -> None:
    reference = f"{proxy.host}/push/twice:t" if kind == "registry" else f"oci:{tmp_path}/layout:t"
    first = push(weenv, reference, tars)
    assert (first.status, converted) == (OK, ["0.tar.gz", "1.tar.zst", "2.tar"]), first.err
    assert left(state) == {".json": 3}
    proxy.seen.clear()
    again = push(weenv, reference, tars)
    assert (again.out, len(converted)) == (first.out, 3)
    assert [line.split(", ")[0] for line in again.err.splitlines()] == [f"{tar}: already there" for tar in tars]
    assert writes(proxy) == []
    assert proxy.blob_reads() == [] or len(proxy.blob_reads()) == 1  # the configuration

    for record in state.iterdir():
        record.unlink()  # what this machine knows is not needed: the manifest says it
    assert (push(weenv, reference, tars).out, len(converted), writes(proxy)) == (first.out, 3, [])
    assert left(state) == {}


def test_the_manifest_says_what_its_layers_were_made_of(weenv: Weenv, tars: list[Path], tmp_path: Path) -> None:
    pinned = push(weenv, f"oci:{tmp_path}/layout:t", tars, "--role", "task").out.strip()
    group = resolve_group(pinned)
    origins = [Origin(digest(tar.read_bytes()), str(Encoding()), digest(data)) for tar, data in zip(tars, TARS, strict=True)]
    assert group.conversions == tuple(map(Conversion, group.layers, origins))
    manifest = json.loads((tmp_path / "layout/blobs/sha256" / group.digest.removeprefix("sha256:")).read_bytes())
    assert manifest["layers"][0]["annotations"]["dev.weenv.source"] == digest(tars[0].read_bytes())
    told = json.loads(weenv("group", "resolve", pinned, "--format", "json").out)
    assert [layer["origin"]["diff_id"] for layer in told["layers"]] == list(map(digest, TARS))


def test_the_diff_id_is_that_of_the_whole_archive(weenv: Weenv, tmp_path: Path) -> None:
    """Also of what stands behind the end of the archive."""
    data = write_pax([file(b"f")]) + bytes(20480) + b"trailing" * 100
    (tmp_path / "x.tar").write_bytes(data)
    assert push(weenv, f"oci:{tmp_path}/l:t", [tmp_path / "x.tar"]).status == OK
    assert [one.origin.diff_id for one in resolve_group(f"oci:{tmp_path}/l:t").conversions] == [digest(data)]


def test_other_parameters_are_another_conversion(weenv: Weenv, tars: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = f"oci:{tmp_path}/layout:t"
    push(weenv, reference, tars[:1])
    monkeypatch.setattr("registry.publish.ENCODER", "weenv-next")
    assert "already there" not in push(weenv, reference, tars[:1]).err
    assert resolve_group(reference).conversions[0].origin.encoder.startswith("weenv-next ")


def test_an_annotation_that_promises_a_blob_that_is_gone_is_not_believed(
    weenv: Weenv, tars: list[Path], converted: list[str], tmp_path: Path
) -> None:
    reference = f"oci:{tmp_path}/layout:t"
    pinned = push(weenv, reference, tars).out
    blob = tmp_path / "layout/blobs/sha256" / resolve_group(reference).layers[1].digest.removeprefix("sha256:")
    blob.write_bytes(blob.read_bytes()[:-1])
    assert push(weenv, reference, tars).out == pinned
    assert converted[3:] == ["1.tar.zst"]
    with Layer.open(blob) as layer:
        assert layer.verify(f"sha256:{blob.name}") == []


def test_another_target_converts_again_and_a_target_that_has_the_layers_does_not(
    weenv: Weenv, tars: list[Path], converted: list[str], tmp_path: Path
) -> None:
    push(weenv, f"oci:{tmp_path}/one:t", tars)
    moved = push(weenv, f"oci:{tmp_path}/one:another", tars)
    assert (moved.err.count("already there"), len(converted)) == (3, 3)
    push(weenv, f"oci:{tmp_path}/two:t", tars)
    assert len(converted) == 6


# ---- cut off ----


def refuse_uploads_after(count: int) -> Callable[[web.Request], Any]:
    """A registry that takes `count` layers and refuses the next upload."""
    taken: list[str] = []

    async def fault(request: web.Request) -> web.Response | None:
        if request.method == "POST" and "/blobs/uploads/" in request.path:
            if len(taken) >= count:
                return web.Response(status=400, text="the disk is full")
            taken.append(request.path)
        return None

    return fault


def test_a_push_that_was_cut_off_goes_on(
    weenv: Weenv, proxy: Proxy, tars: list[Path], converted: list[str], state: Path
) -> None:
    reference = f"{proxy.host}/push/cut:t"
    proxy.fault = refuse_uploads_after(1)
    failed = push(weenv, reference, tars)
    assert failed.status != OK
    assert "the disk is full" in failed.err
    assert weenv("group", "resolve", reference).status == NOT_FOUND
    done = len(converted)
    assert left(state) == {".json": done, ".weenv": done}

    proxy.fault = None
    proxy.seen.clear()
    ran = push(weenv, reference, tars)
    assert ran.status == OK, ran.err
    assert converted == ["0.tar.gz", "1.tar.zst", "2.tar"]
    lines = ran.err.splitlines()
    assert lines[0].startswith(f"{tars[0]}: already there, ")
    assert lines[1].startswith(f"{tars[1]}: converted before, ")
    assert sum(one.startswith("POST") for one in writes(proxy)) == 3  # two layers and the configuration
    assert left(state) == {".json": 3}


def test_whichever_request_fails_the_next_push_goes_on(
    weenv: Weenv, proxy: Proxy, tars: list[Path], converted: list[str], state: Path, tmp_path: Path
) -> None:
    """Refuses the 1st, 2nd, … request, until a push meets no refusal."""
    pinned = resolve_group(push(weenv, f"oci:{tmp_path}/layout:t", tars[:2]).out.strip()).digest
    failures = 0
    for refused in itertools.count():
        for path in state.iterdir():
            path.unlink()
        converted.clear()
        reference = f"{proxy.host}/push/refused-{refused}:t"
        requests = itertools.count()

        async def refuse(_request: web.Request, requests: Iterator[int] = requests, refused: int = refused) -> web.Response | None:
            return web.Response(status=400, text="refused") if next(requests) == refused else None

        proxy.fault = refuse
        ran = push(weenv, reference, tars[:2])
        proxy.fault = None
        if ran.status != OK:
            failures += 1
            assert ran.out == ""
            assert weenv("group", "resolve", reference).status == NOT_FOUND
            ran = push(weenv, reference, tars[:2])
        assert ran.out.strip() == f"{reference}@{pinned}"
        assert converted == ["0.tar.gz", "1.tar.zst"]
        assert left(state) == {".json": 2}
        if next(requests) <= refused:
            break
    assert failures > 8


def test_a_signal_leaves_no_part_of_a_layer(
    weenv: Weenv, tars: list[Path], state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = layerformat.convert

    def terminate_in(number: int, source: Any, destination: Path, *, progress: Any = None, **options: Any) -> Any:
        """SIGTERM arrives in the middle of a conversion, when a part of the layer is written."""

        def strike(_state: Progress) -> None:
            if str(number) in destination.name:
                assert list(destination.parent.glob(".*.partial"))
                os.kill(os.getpid(), signal.SIGTERM)

        return real(source, destination, progress=strike, **options)

    monkeypatch.setattr(layerformat, "convert", partial(terminate_in, 2))
    reference = f"oci:{tmp_path}/layout:t"
    before = signal.getsignal(signal.SIGTERM)
    assert push(weenv, reference, tars).status == TERMINATED
    assert signal.getsignal(signal.SIGTERM) is before
    assert left(state) == {".json": 1, ".weenv": 1}
    assert sorted(path.suffix for path in state.iterdir()) == [".json", ".weenv"]

    (tmp_path / "root").mkdir()
    (tmp_path / "root/file").write_bytes(b"data")
    monkeypatch.setattr(layerformat, "convert", partial(terminate_in, 1))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert weenv("group", "push", reference, "--rootfs", tmp_path / "root").status == TERMINATED
    assert not list(tmp_path.glob("weenv-push-*"))
    monkeypatch.setattr(layerformat, "convert", real)
    ran = push(weenv, reference, tars)
    assert (ran.status, "converted before" in ran.err or "already there" in ran.err.splitlines()[0]) == (OK, True)


def test_a_signal_does_not_wait_for_an_upload_that_hangs(proxy: Proxy, tars: list[Path], state: Path, tmp_path: Path) -> None:
    started = threading.Event()

    async def hang(request: web.Request) -> web.Response | None:
        if request.method == "POST":
            started.set()
            await asyncio.sleep(60)
        return None

    proxy.fault = hang
    program = [PYTHON, "-c", "from tools.cli import main; main()"]
    push = subprocess.Popen(
        [*program, "group", "push", f"{proxy.host}/push/hang:t", "--tar", tars[0]],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": ""},
    )
    assert started.wait(60)
    push.terminate()
    assert push.wait(20) == TERMINATED  # requests would wait for 30 s
    assert left(state) == {".json": 1, ".weenv": 1}
    assert not list(state.glob(".work-*"))


def test_what_a_killed_push_left_is_removed_and_what_a_living_one_needs_is_not(
    weenv: Weenv, tars: list[Path], state: Path, tmp_path: Path
) -> None:
    conversions = Conversions(state)
    with conversions.workspace() as living:
        (living / "part").write_bytes(b"x")
        dead = state / ".work-dead"
        dead.mkdir()
        (dead / "1.weenv").write_bytes(b"x")
        assert push(weenv, f"oci:{tmp_path}/layout:t", tars).status == OK
        assert (living / "part").exists()
        assert not dead.exists()
    assert not living.exists()


# ---- bounds ----


def described(number: int, size: int) -> Conversion:
    layer = LayerDescriptor(digest(b"%d" % number), size, None, None, None, None)
    return Conversion(layer, Origin(digest(b"source %d" % number), "encoder", digest(b"diff")))


def test_conversions_are_bounded_and_the_oldest_goes_first(tmp_path: Path) -> None:
    conversions = Conversions(tmp_path / "state", max_layer_bytes=250, max_descriptors=4)
    origins = []
    for number in range(6):
        conversion = described(number, 100)
        origins.append(conversion.origin)
        with conversions.workspace() as work:
            (work / "layer").write_bytes(b"x" * 100)
            kept = conversions.add(work / "layer", None, conversion)
        assert kept.path is not None
        os.utime(kept.path, ns=(number, number))
        os.utime(kept.path.with_suffix(".json"), ns=(number, number))
        if number == 1:
            in_use = kept
        else:
            kept.close()
    found = [conversions.find(origin.source, origin.encoder) for origin in origins]
    assert [one is not None for one in found] == [False, False, True, True, True, True]
    assert [one.path is not None for one in found if one] == [False, False, False, True]
    assert len(list((tmp_path / "state").glob("*.weenv"))) == 2  # the newest, and the one that is in use
    assert in_use.path is not None
    assert in_use.path.exists()
    conversions.release(in_use)
    assert not in_use.path.exists()


def test_a_record_that_is_damaged_or_of_another_size_is_not_used(tmp_path: Path) -> None:
    conversions = Conversions(tmp_path)
    conversion = described(1, 3)
    with conversions.workspace() as work:
        (work / "layer").write_bytes(b"abc")
        conversions.add(work / "layer", None, conversion).close()
    origin = conversion.origin
    found = conversions.find(origin.source, origin.encoder)
    assert found is not None
    assert found.conversion == conversion
    assert found.path is not None
    found.close()
    found.path.write_bytes(b"ab")
    cut = conversions.find(origin.source, origin.encoder)
    assert cut is not None
    assert cut.path is None
    found.path.with_suffix(".json").write_bytes(b"{")
    assert conversions.find(origin.source, origin.encoder) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"toc_offset":', b'"toc_offset":1'), (b'"checksum":"', b'"checksum":"0'), (b'"diff_id":"sha256:', b'"diff_id":"sha512:')],
)
def test_a_record_that_was_changed_is_none(
    weenv: Weenv, tars: list[Path], converted: list[str], state: Path, tmp_path: Path, old: bytes, new: bytes
) -> None:
    expected = resolve_group(push(weenv, f"oci:{tmp_path}/layout:t", tars[:1]).out.strip()).layers
    (record,) = state.glob("*.json")
    assert old in record.read_bytes()
    record.write_bytes(record.read_bytes().replace(old, new))
    again = push(weenv, f"oci:{tmp_path}/layout:u", tars[:1])
    assert again.status == OK
    assert resolve_group(again.out.strip()).layers == expected
    assert len(converted) == 2
    assert push(weenv, f"oci:{tmp_path}/layout:v", tars[:1]).status == OK
    assert len(converted) == 2  # what was converted again is known again


@pytest.mark.parametrize("kind", [".weenv", ".recipe"])
def test_a_kept_file_of_other_bytes_is_made_again(
    weenv: Weenv, proxy: Proxy, tars: list[Path], converted: list[str], state: Path, kind: str
) -> None:
    reference = f"{proxy.host}/push/damaged{kind}:t"
    proxy.fault = refuse_uploads_after(0)
    assert push(weenv, reference, tars[:1], "--recipe").status != OK
    proxy.fault = None
    (kept,) = state.glob(f"*{kind}")
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    kept.write_bytes(data)
    ran = push(weenv, reference, tars[:1], "--recipe")
    assert (ran.status, len(converted)) == (OK, 2), ran.err
    assert left(state) == {".json": 1}


# ---- what is pushed ----


def test_layers_and_tars_keep_their_order(weenv: Weenv, tars: list[Path], tmp_path: Path) -> None:
    ready = make_layer(tmp_path, "ready", {"f": b"ready"})
    xz = tmp_path / "2.tar.xz"
    xz.write_bytes(lzma.compress(TARS[2]))
    ran = weenv("group", "push", f"oci:{tmp_path}/l:t", "--tar", tars[0], "--layer", ready, "--tar", xz)
    assert ran.status == OK, ran.err
    group = resolve_group(f"oci:{tmp_path}/l:t")
    blobs = tmp_path / "l/blobs/sha256"
    firsts = []
    for layer in group.layers:
        with Layer.open(blobs / layer.digest.removeprefix("sha256:")) as opened:
            firsts.append([path for path, _ in opened.walk()][-1])
    assert firsts == [b"d/0-5", b"f", b"d/2-5"]
    assert [line.partition(": ")[0] for line in ran.err.splitlines()] == [str(tars[0]), str(ready), str(xz)]


def test_what_cannot_be_pushed_is_refused(weenv: Weenv, tars: list[Path], tmp_path: Path) -> None:
    reference = f"oci:{tmp_path}/l:t"
    assert weenv("group", "push", reference, "--tar", tmp_path / "absent.tar").status == NOT_FOUND
    assert weenv("group", "push", reference, "--tar", tars[0], "--rootfs", tmp_path).status == USAGE
    assert weenv("group", "push", reference, "--tar", tars[0], "-j", "0").status == USAGE
    for words, said in (
        (("--user", "a:b:c"), "expected USER[:GROUP], received 'a:b:c'"),
        (("--user", "4294967295"), "use a number up to 4294967294"),
        (("--user", "1:99999999999"), "use a number up to 4294967294"),
        (("--user", "a\nb"), "expected USER[:GROUP]"),
        (("--user", ""), "expected USER[:GROUP], received nothing"),
        (("--workdir", "rel"), "an absolute path"),
        (("--workdir", ""), "an absolute path"),
    ):
        ran = weenv("group", "push", reference, "--tar", tars[0], *words)
        assert (ran.status, said in ran.err) == (USAGE, True), (words, ran.err)
    for words in (("--rootfs", tmp_path), ("--layer", make_layer(tmp_path, "ready", {}))):
        ran = weenv("group", "push", reference, *words, "--recipe")
        assert (ran.status, "--recipe: expected --tar" in ran.err) == (USAGE, True)
    (tmp_path / "cut.tar.gz").write_bytes(tars[0].read_bytes()[:-20])
    ran = weenv("group", "push", reference, "--tar", tmp_path / "cut.tar.gz")
    assert (ran.status == OK, "truncated" in ran.err) == (False, True)
    assert not (tmp_path / "l/blobs").exists() or weenv("group", "resolve", reference).status == NOT_FOUND


def test_users_that_can_be_are_pushed(weenv: Weenv, tars: list[Path], tmp_path: Path) -> None:
    for user in ("app", "1000", "1000:0", "app:staff", ":5", "4294967294"):
        pinned = push(weenv, f"oci:{tmp_path}/layout:t", tars[:1], "--user", user, "--workdir", "/w").out.strip()
        assert (resolve_group(pinned).config.user, resolve_group(pinned).config.workdir) == (user, "/w")


def test_contents_that_are_refused_are_named_with_their_source(weenv: Weenv, tmp_path: Path) -> None:
    (tmp_path / "up.tar").write_bytes(write_pax([file(b"../up")]))
    ran = push(weenv, f"oci:{tmp_path}/l:t", [tmp_path / "up.tar"])
    assert (ran.status, ran.err.startswith(f"weenv: {tmp_path}/up.tar: ../up: ")) == (ERROR, True)
    (tmp_path / "root").mkdir()
    (tmp_path / "root/.wh.x").touch()
    ran = weenv("group", "push", f"oci:{tmp_path}/l:t", "--rootfs", tmp_path / "root")
    assert (ran.status, ran.err.startswith(f"weenv: {tmp_path}/root: .wh.x: ")) == (ERROR, True)


@pytest.mark.parametrize(("source", "variable"), [("--tar", "XDG_CACHE_HOME"), ("--rootfs", "TMPDIR")])
def test_a_full_disk_is_said_with_what_changes_it(
    weenv: Weenv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, variable: str
) -> None:
    """A real one: 64 KiB for 1 MiB that does not compress."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root/f").write_bytes(make_content(1 << 20, 1, False))
    (tmp_path / "f.tar").write_bytes(write_pax([file(b"f", make_content(1 << 20, 1, False))]))
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", full], check=True)
    try:
        monkeypatch.setenv(variable, str(full))
        monkeypatch.setattr(tempfile, "tempdir", None)
        ran = weenv("group", "push", f"oci:{tmp_path}/l:t", source, tmp_path / ("f.tar" if source == "--tar" else "root"))
        assert (ran.status, ran.out) == (CAPACITY, "")
        assert re.fullmatch(rf"weenv: {full}\S*: No space left on device; make room there, or set \${variable} to .*\n", ran.err), ran.err
        assert [path for path in full.rglob("*") if path.is_file()] == []
    finally:
        subprocess.run(["umount", full], check=True)


def test_a_tar_that_changes_meanwhile_is_refused(
    weenv: Weenv, tars: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = layerformat.convert

    def convert(source: Any, destination: Any, **options: Any) -> Any:
        report = real(source, destination, **options)
        with tars[2].open("ab") as file:
            file.write(bytes(10240))
        return report

    monkeypatch.setattr(layerformat, "convert", convert)
    ran = push(weenv, f"oci:{tmp_path}/l:t", tars)
    assert (ran.status, str(tars[2]) in ran.err) == (INTEGRITY, True)


def test_shared_chunks_are_counted_against_the_tag_before(
    weenv: Weenv, server: RegistryServer, proxy: Proxy, tmp_path: Path
) -> None:
    contents = [make_content(300_000, number, False) for number in range(4)]

    def archive(name: str, numbers: list[int]) -> Path:
        path = tmp_path / name
        path.write_bytes(write_pax([file(b"%d" % number, contents[number]) for number in numbers]))
        return path

    reference = f"{proxy.host}/push/shared:t"
    first = push(weenv, reference, [archive("one.tar", [0, 1, 2])])
    assert "tag before" not in first.err
    old = resolve_group(reference)
    proxy.seen.clear()
    second = push(weenv, reference, [archive("two.tar", [0, 2, 3])])
    stored = []
    for group in (old, resolve_group(reference)):
        with Layer.open(server.blob_file(group.layers[0].digest)) as layer:
            stored.append({chunk.sha256: chunk.stored_size for chunk in layer.toc.chunks})
    common = stored[0].keys() & stored[1].keys()
    assert 0 < len(common) < len(stored[1])
    assert f"{len(common)} of {len(stored[1])} chunks (" in second.err
    reads = [one for one in proxy.blob_reads() if old.layers[0].digest in one.path and one.range]
    assert [one.received_bytes for one in reads] == [old.layers[0].toc_size_bytes]


# ---- entrypoint and command ----


@pytest.mark.parametrize(
    "config",
    [
        GroupConfig(entrypoint=("/run", "a b"), cmd=("x",)),
        GroupConfig(env=("A=1",), entrypoint=(), cmd=()),
        GroupConfig(workdir="/w", user="1:1"),
    ],
)
def test_entrypoint_and_command_are_kept_and_shown(weenv: Weenv, tmp_path: Path, config: GroupConfig) -> None:
    layer = make_layer(tmp_path, "layer", {"f": b""})
    pinned = push_group(f"oci:{tmp_path}/l:t", [layer], config=config)
    assert resolve_group(pinned).config == config
    told = json.loads(weenv("group", "tree", pinned, "--format", "json").out)["config"]
    assert (told["entrypoint"], told["cmd"]) == (
        None if config.entrypoint is None else list(config.entrypoint),
        None if config.cmd is None else list(config.cmd),
    )
    tree = weenv("group", "tree", pinned).out
    if config.entrypoint is not None:
        assert ("entrypoint /run 'a b'" if config.entrypoint else "entrypoint none") in tree
        assert ("cmd x" if config.cmd else "cmd none") in tree
    else:
        assert "─ entrypoint" not in tree


def test_a_damaged_layer_is_not_published(weenv: Weenv, tmp_path: Path) -> None:
    layer = make_layer(tmp_path, "layer", {"f": make_content(200_000, 1, False)})
    data = bytearray(layer.read_bytes())
    data[1000] ^= 1
    layer.write_bytes(data)
    ran = weenv("group", "push", f"oci:{tmp_path}/layout:t", "--layer", layer)
    assert (ran.status, ran.out) == (INTEGRITY, "")
    assert "chunk 0 at byte 0" in ran.err
    assert weenv("group", "resolve", f"oci:{tmp_path}/layout:t").status == NOT_FOUND
