"""The figures of a node as its operator has them: `weenv node info` of one that hangs, and what Prometheus is told."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_process import Groups, Node, create, refusal, run_node, wait_until
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from envlet.metrics import METRICS

COUNTERS_OF_THE_DATA_PLANE = [one for one in METRICS[[m.name for m in METRICS].index("weenv_fuse_requests") :] if one.kind == "counter"]


def info(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(node("node", "info", "--format", "json"))
    return found


def parsed(text: str) -> dict[str, Metric]:
    """As Prometheus reads it; by name without `_total`."""
    return {family.name: family for family in text_string_to_metric_families(text + "\n")}


def values(families: dict[str, Metric]) -> dict[tuple[str, ...], float]:
    """Every sample by its name and labels."""
    return {
        (sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in families.values()
        for sample in family.samples
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that hangs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_info_of_a_node_whose_data_plane_hangs(groups: Groups, tmp_path: Path) -> None:
    with run_node(tmp_path / "node") as node:
        environment = create(node, groups.base)
        pid = info(node)["statistics"]["data_plane"]["process"]["pid"]
        with stopped(pid):
            hanging = info(node)
            shown = node("node", "info")
            told = parsed(node("node", "metrics"))
        assert hanging["environments"] == {"ready": 1}
        assert hanging["statistics"]["created"] == 1
        plane = hanging["statistics"]["data_plane"]
        assert (plane["serving"], plane["process"]["pid"], "fuse" in plane) == (False, pid, False)
        assert "data plane    does not answer" in shown
        assert values(told)[("weenv_data_plane_serving",)] == 0
        assert "weenv_fuse_requests" not in [name for name, family in told.items() if family.samples]
        assert node("env", "exec", environment, "--", "cat", "/etc/passwd").startswith("root:")
        assert info(node)["statistics"]["data_plane"]["serving"]
        assert values(parsed(node("node", "metrics")))[("weenv_data_plane_serving",)] == 1


def test_a_data_plane_that_hangs_for_long_is_not_asked_for_ever(groups: Groups, tmp_path: Path) -> None:
    """More questions than it can be asked, at once; afterwards it is understood."""
    with run_node(tmp_path / "node") as node:
        create(node, groups.base)
        pid = info(node)["statistics"]["data_plane"]["process"]["pid"]
        serving: list[bool] = []

        def ask() -> None:
            serving.append(info(node)["statistics"]["data_plane"]["serving"])

        with stopped(pid):
            asking = [threading.Thread(target=ask) for _ in range(20)]
            for thread in asking:
                thread.start()
            for thread in asking:
                thread.join()
        assert serving == [False] * 20
        wait_until(lambda: bool(info(node)["statistics"]["data_plane"]["serving"]), "the data plane answers again")
        process = info(node)["statistics"]["data_plane"]["process"]
        assert (process["pid"], process["successors"]) == (pid, 0)


def test_info_for_people(groups: Groups, tmp_path: Path) -> None:
    with run_node(tmp_path / "node") as node:
        environment = create(node, groups.base)
        node("env", "exec", environment, "--", "sh", "-c", "cat /usr/share/large > /dev/null")
        shown = node("node", "info")
        assert re.search(r"^reads +\d+ from the cache, [1-9]\d* waited, 0 failed$", shown, re.MULTILINE)
        assert re.search(r"^misses +[1-9]\d* from registry \(chunks\); \d+ more ahead", shown, re.MULTILINE)
        assert re.search(r"^requests +0 waiting$", shown, re.MULTILINE)
        assert re.search(r"^OPERATION +COUNT +ERRORS +P50 +P99$", shown, re.MULTILINE)
        for row in ("lookup", "read", "read, waited", "fetch, registry"):
            assert re.search(rf"^{row} +[1-9]\d* +0 +[\d.]+ (µs|ms|s) +[\d.]+ (µs|ms|s)$", shown, re.MULTILINE), shown
        assert re.search(r"^fetch, layout +0 +0$", shown, re.MULTILINE)


def test_metrics_are_what_they_are_said_to_be(groups: Groups, tmp_path: Path) -> None:
    with run_node(tmp_path / "node") as node:
        create(node, groups.base)
        text = node("node", "metrics")
        figures = info(node)
    families = parsed(text)
    assert list(families) == [one.name for one in METRICS]
    for one in METRICS:
        family = families[one.name]
        assert (family.type, family.documentation) == (one.kind, one.meaning)
        assert f"# HELP {one.shown_name} " in text
        assert f"# TYPE {one.shown_name} {one.kind}\n" in text
        assert re.fullmatch(r"weenv_[a-z_]+", one.name)
        assert not re.search(r"_(ms|us|kb|mb|count|sum|bucket|total)$", one.name)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(one.labels)
            assert not any(re.search(r"sha256|[0-9a-f]{12}", value) for value in sample.labels.values())
    told = values(families)
    assert told[("weenv_environments", "state=ready")] == figures["environments"]["ready"] == 1
    assert told[("weenv_layers",)] == len(figures["statistics"]["data_plane"]["layers"]) == 1
    assert told[("weenv_fetch_bytes_total", "source=registry", "what=metadata")] > 0
    for (name, *labels), value in told.items():  # a histogram's buckets rise up to its count
        if name == "weenv_fuse_request_duration_seconds_count":
            operation = labels[0]
            steps = [
                (float(label.removeprefix("le=")), count)
                for (other, *others), count in told.items()
                if other == "weenv_fuse_request_duration_seconds_bucket" and operation in others
                for label in others
                if label.startswith("le=")
            ]
            counts = [count for _, count in sorted(steps)]
            assert len(steps) == 32
            assert counts == sorted(counts)
            assert counts[-1] == value


def test_counters_do_not_fall_when_processes_are_killed(groups: Groups, tmp_path: Path) -> None:
    """Those of the data plane: neither when it is killed, nor when the daemon is replaced as well."""
    with run_node(tmp_path / "node") as node:
        environment = create(node, groups.base)
        seen: dict[tuple[str, ...], float] = {}
        for step in ("nothing", "data plane", "data plane", "both"):
            if step == "data plane":
                os.kill(info(node)["statistics"]["data_plane"]["process"]["pid"], signal.SIGKILL)
            elif step == "both":
                node("node", "restart")
            node("env", "exec", environment, "--", "sh", "-c", "cat /usr/share/large > /dev/null")
            families = parsed(node("node", "metrics"))
            told = values({one.name: families[one.name] for one in COUNTERS_OF_THE_DATA_PLANE})
            assert {key: (value, told.get(key)) for key, value in seen.items() if told.get(key, -1) < value} == {}
            assert told[("weenv_fuse_requests_total", "operation=read")] > 0
            seen = told


def test_metrics_over_http(groups: Groups, tmp_path: Path) -> None:
    port = free_port()
    with run_node(tmp_path / "node", settings=f'metrics_listen = "127.0.0.1:{port}"\n') as node:
        create(node, groups.base)

        def ask(path: str, method: str = "GET") -> tuple[int, bytes, str]:
            request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return answer.status, answer.read(), answer.headers["Content-Type"]
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read(), error.headers["Content-Type"]

        status, body, kind = ask("/metrics")
        assert (status, kind.partition(";")[0]) == (200, "text/plain")
        assert list(parsed(body.decode())) == [one.name for one in METRICS]
        assert values(parsed(body.decode()))[("weenv_environments", "state=ready")] == 1
        assert ask("/metrics?x=1")[0] == 200
        assert (ask("/metrics", "HEAD")[:2], ask("/")[0], ask("/metrics", "POST")[0]) == ((200, b""), 404, 405)
        with socket.create_connection(("127.0.0.1", port)) as connection:  # one connection, many requests, as a scraper has it
            connection.settimeout(60)
            for _ in range(3):
                connection.sendall(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
                answer = b""
                while not answer.endswith(b"nothing else\n"):
                    answer += connection.recv(4096)
                assert answer.startswith(b"HTTP/1.1 404 ")
        with socket.create_connection(("127.0.0.1", port)) as connection:  # no HTTP: closed, and nothing else happens
            connection.settimeout(60)
            connection.sendall(b"\x00\x01\x02\r\n\r\n")
            assert connection.recv(4096) == b""
        with socket.create_connection(("127.0.0.1", port)) as held:  # one that says nothing keeps nobody
            assert ask("/metrics")[0] == 200
            held.close()
        node("node", "restart")
        assert values(parsed(ask("/metrics")[1].decode()))[("weenv_environments_adopted_total",)] == 1
        config = tmp_path / "second.toml"
        config.write_text(
            f'state_dir = "{tmp_path}/2/state"\nrun_dir = "{tmp_path}/2/run"\ncgroup_parent = "/weenv-test-second-{os.getpid()}"\n'
            f'metrics_listen = "127.0.0.1:{port}"\n'
        )
        assert f"received 127.0.0.1:{port}" in refusal("node", "serve", "--config", config, status=1).splitlines()[-1]


@pytest.mark.parametrize("value", ['":9464"', '"localhost"', '"localhost:0"', '"localhost:65536"', '"::1:9464"', "9464", '"a b:1"'])
def test_an_address_that_is_none(tmp_path: Path, value: str) -> None:
    config = tmp_path / "node.toml"
    config.write_text(f"metrics_listen = {value}\n")
    assert "metrics_listen: expected " in refusal("node", "serve", "--config", config, status=2)
