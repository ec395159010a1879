"""Two whole nodes as peers: settings to figures, and a data plane that dies while others ask it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from node_process import Groups, Node, create, run_node
from registry_fixture import free_port


def data_plane(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(node("node", "info", "--format", "json"))["statistics"]["data_plane"]
    return found


def metric(node: Node, sample: str) -> float:
    (line,) = (line for line in node("node", "metrics").splitlines() if line.startswith(sample + " "))
    return float(line.rsplit(" ", 1)[1])


def read_all(node: Node, environment: str) -> None:
    node("env", "exec", environment, "--", "sh", "-c", "cat /usr/share/large /bin/busybox > /dev/null")


def wait_until_it_listens(node: Node, but: int) -> None:
    """A process of the data plane other than `but`."""
    deadline_s = time.monotonic() + 60
    while True:
        found = data_plane(node)
        if found["serving"] and found["process"]["pid"] != but and found["peers"]["listening"]:
            return
        assert time.monotonic() < deadline_s


def test_a_node_takes_from_its_peer_what_that_has(groups: Groups, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-both-nodes\n")
    (tmp_path / "token").chmod(0o600)
    first, second = (f"127.0.0.1:{free_port()}" for _ in range(2))
    common = f'peers_token_file = "{tmp_path}/token"\npeers = ["{first}"]\n'
    with run_node(tmp_path / "1", settings=f'{common}peers_listen = "{first}"\n') as one:
        read_all(one, create(one, groups.base))
        assert data_plane(one)["peers"]["is_member"]
        with run_node(tmp_path / "2", settings=f'{common}peers_listen = "{second}"\n') as two:
            environment = create(two, groups.base)
            read_all(two, environment)
            found = data_plane(two)
            assert found["sources"]["peer"]["misses"] > 0
            assert found["sources"]["registry"]["requests"] == 0
            assert found["fuse"]["reads_failed"] == 0
            assert metric(two, 'weenv_fetch_bytes_total{source="peer",what="contents"}') > 3 << 20
            assert metric(two, 'weenv_peers{state="up"}') == 1
            assert metric(one, "weenv_peer_served_bytes_total") == found["peers"]["received_bytes"]
            assert "peers         1 of 1 up (0 down, 0 left out); " in two("node", "info")
            assert "a-token-of-both-nodes" not in Path(f"/proc/{found['process']['pid']}/cmdline").read_text()

            pid = data_plane(one)["process"]["pid"]
            os.kill(pid, signal.SIGKILL)
            wait_until_it_listens(one, pid)
            before = metric(two, 'weenv_fetch_chunks_total{reason="miss",source="peer"}')
            other = create(two, groups.base, groups.task)
            two("env", "exec", other, "--", "sh", "-c", "cat /work/answer.txt > /dev/null")
            assert data_plane(two)["fuse"]["reads_failed"] == 0
            assert metric(two, 'weenv_fetch_chunks_total{reason="miss",source="peer"}') > before
