"""`weenv cache …` as an operator uses it: beside a daemon that serves from the cache, and without one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from node_process import WEENV, Groups, Node, create, make_groups, refusal, run_node, wait_until, weenv
from registry_fixture import Proxy, RegistryServer, run_proxy, run_registry


def cache_of(node: Node) -> Path:
    return node.directory / "state/cache"


def listed(cache: Path) -> dict[str, dict[str, Any]]:
    """By digest."""
    return {layer["digest"]: layer for layer in json.loads(weenv("cache", "ls", "--cache", cache, "--format", "json"))}


def layers_of(reference: str) -> set[str]:
    shown = json.loads(weenv("group", "resolve", reference, "--format", "json"))
    return {layer["digest"] for layer in shown["layers"]}


def damage(layer: Path) -> None:
    """The first chunk that is there."""
    fd = os.open(layer / "data", os.O_RDWR)
    os.pwrite(fd, b"damaged", os.lseek(fd, 0, os.SEEK_DATA))
    os.close(fd)


def test_what_is_damaged_is_found_and_dropped(groups: Groups, tmp_path: Path) -> None:
    with run_node(tmp_path / "n") as node:
        environment = create(node, groups.base)
        node("env", "exec", environment, "--", "sh", "-c", "cat /usr/share/large > /dev/null")
        (layer,) = (cache_of(node) / "layers").iterdir()
        digest = layer.name.replace("-", ":")
        shown = weenv("cache", "verify", "--cache", cache_of(node), "--socket", node.socket)
        assert shown.splitlines()[1].split() == [digest[:19], str(listed(cache_of(node))[digest]["present_chunks"]), "0"]
        damage(layer)
        arguments = ("cache", "verify", digest[:15], "--cache", cache_of(node), "--socket", node.socket, "--format", "json")
        (found,) = json.loads(weenv(*arguments, status=5))
        assert (found["digest"], found["damaged"]) == (digest, 1)
        assert "weenv_cache_damaged_chunks_total 1.0" in node("node", "metrics").splitlines()
        (found,) = json.loads(weenv(*arguments))
        assert found["damaged"] == 0
    damage(layer)
    (found,) = json.loads(weenv("cache", "verify", "--cache", cache_of(node), "--format", "json", status=5))
    assert found["damaged"] == 1, "without a daemon"


def test_layers_in_use_and_pinned_ones_are_not_collected(groups: Groups, tmp_path: Path) -> None:
    with run_node(tmp_path / "n") as node:
        node("env", "rm", create(node, groups.base, groups.task, groups.harness))
        create(node, groups.base)
        cache = cache_of(node)
        gc = ("cache", "gc", "--cache", cache, "--socket", node.socket, "--format", "json")
        base, task, harness = (layers_of(reference) for reference in (groups.base, groups.task, groups.harness))
        assert set(listed(cache)) == base | task | harness
        assert json.loads(weenv(*gc)) == [], "a plan stays for a while when nobody uses it any more"
    (pinned,) = weenv("cache", "pin", groups.task, "--cache", cache).splitlines()
    assert {pinned} == task
    assert [digest for digest, layer in listed(cache).items() if layer["pinned"]] == [pinned]
    with run_node(tmp_path / "n") as node:
        create(node, groups.base)
        assert "weenv_cache_pinned_bytes 0.0" not in node("node", "metrics").splitlines(), "of the pinned task"
        would = json.loads(weenv(*gc, "--dry-run"))
        assert {layer["digest"] for layer in would} == harness
        assert set(listed(cache)) == base | task | harness
        assert json.loads(weenv(*gc)) == would
        assert set(listed(cache)) == base | task
    weenv("cache", "unpin", pinned[7:20], "--cache", cache)
    text = weenv("cache", "gc", "--cache", cache)
    assert text.splitlines()[0].split() == ["LAYER", "ON", "DISK", "USED", "AGO", "SOURCE"]
    assert text.endswith(" are free")
    assert listed(cache) == {}


def test_the_table_of_df_is_dockers(groups: Groups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_node(tmp_path / "n") as node:
        create(node, groups.base)
        cache = cache_of(node)
        monkeypatch.setenv("WEENV_SOCKET", str(node.socket))
        header, layers, images = weenv("cache", "df", "--cache", cache).splitlines()
        assert header.split() == ["TYPE", "TOTAL", "ACTIVE", "SIZE", "RECLAIMABLE"]
        assert layers.startswith("Layers ")
        assert layers.endswith("0 B (0.0 %)")
        assert images.startswith("Images of metadata ")
        shown = json.loads(weenv("cache", "df", "--cache", cache, "--format", "json"))
        assert (shown["layers"], shown["layers_served"], shown["reclaimable_bytes"]) == (1, 1, 0)
    shown = json.loads(weenv("cache", "df", "--cache", cache, "--format", "json"))
    assert shown["layers_served"] == 0
    assert shown["reclaimable_bytes"] == shown["disk_bytes"] > 0


def test_a_bound_of_the_configuration_is_held(groups: Groups, tmp_path: Path) -> None:
    with run_node(tmp_path / "n", settings='cache_size = "64M"\n') as node:
        create(node, groups.base)
        info = json.loads(node("node", "info", "--format", "json"))["statistics"]["data_plane"]["cache"]
        assert info["capacity_bytes"] == 64 << 20
        assert "of 67.1 MB" in node("node", "info")


@pytest.mark.parametrize("value", ["-5", '"much"', "true"])
@pytest.mark.parametrize("key", ["cache_size", "cache_free_min", "memory"])
def test_a_size_that_makes_no_sense_is_refused(tmp_path: Path, key: str, value: str) -> None:
    (tmp_path / "node.toml").write_text(f"{key} = {value}\n")
    said = refusal("node", "serve", "--config", tmp_path / "node.toml", status=2)
    assert f"{key}: " in said
    assert "expected" in said


def test_what_is_not_in_the_cache_cannot_be_named(groups: Groups, tmp_path: Path) -> None:
    with run_node(tmp_path / "n") as node:
        create(node, groups.base)
        cache = cache_of(node)
        assert "beginning of one layer's digest" in refusal("cache", "verify", "sha256:00", "--cache", cache, status=3)
        assert "is not in the cache" in refusal("cache", "pin", groups.task, "--cache", cache, status=3)
        with run_node(tmp_path / "other") as other:
            create(other, groups.base)
            assert "serves from it" in refusal("cache", "gc", "--cache", cache, "--socket", other.socket, status=1)


# prefetch


@pytest.fixture
def groups_and_proxy(server: RegistryServer, tmp_path: Path) -> Iterator[tuple[Groups, Proxy]]:
    with run_proxy(server.host) as proxy:
        yield make_groups(tmp_path / "groups", f"{proxy.host}/prefetch/"), proxy


def test_a_node_that_prefetched_starts_without_its_registry(tmp_path: Path) -> None:
    with run_node(tmp_path / "n") as node:
        with run_registry(tmp_path / "registry") as registry:
            groups = make_groups(tmp_path / "groups", f"{registry.host}/demo/")
            wanted = (groups.base, groups.task, groups.evaluator)
            text = node("cache", "prefetch", *wanted)
            assert text.splitlines()[0].split() == ["LAYER", "BY", "PRESENT", "SOURCE"]
            assert {line.split()[1] for line in text.splitlines()[1:]} == {"all"}
            found = json.loads(node("cache", "prefetch", *wanted, "--format", "json"))
            assert found["done_bytes"] == found["wanted_bytes"] > 3 << 20
            assert {layer["digest"] for layer in found["layers"]} == set().union(*(layers_of(one) for one in wanted))
            assert all(layer["present_chunks"] == layer["chunks"] for layer in listed(cache_of(node)).values())
        environment = create(node, groups.base, groups.task)
        assert node("env", "exec", environment, "--", "sh", "-c", "cat /usr/share/large | wc -c; cat /work/answer.txt").split()[-1] == "42"
        assert json.loads(node("cache", "prefetch", *wanted, "--format", "json")) == found, "nothing is left to be fetched"
        said = node.refused("cache", "prefetch", groups.harness, status=1)
        assert "demo/harness" in said


def test_what_is_prefetched_must_fit(groups: Groups, tmp_path: Path) -> None:
    with run_node(tmp_path / "n", settings='cache_free_min = "1000000G"\n') as node:
        said = node.refused("cache", "prefetch", groups.base, status=6)
        assert "expected room for " in said
        assert "received 0" in said


def test_prefetch_needs_a_daemon_and_a_profile_if_it_is_to_be_one(groups: Groups, tmp_path: Path) -> None:
    said = refusal("cache", "prefetch", groups.base, "--socket", tmp_path / "none.sock", status=1)
    assert "start one with `weenv node serve`" in said
    with run_node(tmp_path / "n") as node:
        assert "no layer has a profile" in node.refused("cache", "prefetch", "--profile", groups.base, status=1)


def test_progress_comes_and_an_interrupt_ends_it(groups_and_proxy: tuple[Groups, Proxy], tmp_path: Path) -> None:
    groups, proxy = groups_and_proxy
    asked, gate = threading.Event(), threading.Event()
    (digest,) = layers_of(groups.base)

    async def hold(request: web.Request) -> web.StreamResponse | None:
        if digest in request.path and request.headers.get("Range", "").startswith("bytes=0-"):
            asked.set()
            await asyncio.to_thread(gate.wait, 30)
        return None

    def prefetches(node: Node) -> int:
        return int(json.loads(node("node", "info", "--format", "json"))["statistics"]["data_plane"]["prefetches"]["jobs"])

    with run_node(tmp_path / "n") as node:
        proxy.fault = hold
        command = [WEENV, "cache", "prefetch", groups.base, "--format", "json", "--socket", node.socket]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert asked.wait(30)
            progress = json.loads(process.stderr.readline())
            assert 0 <= progress["done_bytes"] <= progress["wanted_bytes"]
            assert prefetches(node) == 1
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        wait_until(lambda: prefetches(node) == 0, "the end of the prefetch")
        gate.set()
        proxy.fault = None
        found = json.loads(node("cache", "prefetch", groups.base, "--format", "json"))
        assert found["done_bytes"] == found["wanted_bytes"]


def test_a_data_plane_that_dies_does_not_end_a_prefetch(groups_and_proxy: tuple[Groups, Proxy], tmp_path: Path) -> None:
    groups, proxy = groups_and_proxy
    asked, gate = threading.Event(), threading.Event()
    (digest,) = layers_of(groups.base)

    async def hold(request: web.Request) -> web.StreamResponse | None:
        if digest in request.path and request.headers.get("Range", "").startswith("bytes=0-") and not gate.is_set():
            asked.set()
            await asyncio.to_thread(gate.wait, 30)
        return None

    with run_node(tmp_path / "n") as node:
        proxy.fault = hold
        command = [WEENV, "cache", "prefetch", groups.base, "--format", "json", "--socket", node.socket]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert asked.wait(30)
            pid = json.loads(node("node", "info", "--format", "json"))["statistics"]["data_plane"]["process"]["pid"]
            os.kill(pid, signal.SIGKILL)
            gate.set()
            assert process.stdout is not None
            found = json.loads(process.stdout.read())
            assert process.wait(30) == 0
        assert found["done_bytes"] == found["wanted_bytes"]
