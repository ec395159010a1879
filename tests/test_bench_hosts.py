"""Hosts of measurements: they reach each other through their links, and nothing is left of them however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from node_process import wait_until

from bench.hosts import connected_hosts
from bench.shaping import shaping

ROOT = Path(__file__).parent.parent
SERVER = "import http.server; http.server.test(http.server.SimpleHTTPRequestHandler, bind='0.0.0.0', port=8000)"
HOLDING = """
import subprocess
from bench.hosts import connected_hosts
with connected_hosts(2) as hosts:
    sleeping = subprocess.Popen([*hosts[1].enter, "sleep", "1000"])
    print(*(host.keeper for host in hosts), sleeping.pid, flush=True)
    sleeping.wait()
"""


def devices() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def is_gone(pid: int) -> Callable[[], bool]:
    return lambda: not Path(f"/proc/{pid}").exists()


def test_hosts_reach_each_other_at_a_distance(tmp_path: Path) -> None:
    before = devices()
    content = os.urandom(300_000)
    (tmp_path / "file").write_bytes(content)
    with connected_hosts(2) as (far, near):
        assert devices() == before
        rates = [host.run("tc", "qdisc", "show", "dev", "link0") for host in (far, near)]
        assert all("tbf" in rate and "rate 1Gbit" in rate for rate in rates)
        serve = [*far.enter, sys.executable, "-c", SERVER]
        server = subprocess.Popen(serve, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with shaping(f"{far.address}:8000", 0.02, None, listen="127.0.0.1:5000", enter=near.enter) as proxy:
                fetch = ("curl", "-sf", "--retry", "50", "--retry-all-errors", "--retry-delay", "0", "-o", tmp_path / "got")
                near.run(*fetch, "http://127.0.0.1:5000/file")
                assert (tmp_path / "got").read_bytes() == content
                assert len(content) < proxy.passed_bytes() < len(content) + 4096
                assert near.run("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "http://127.0.0.1:5000/none") == "404"
        finally:
            server.terminate()
            server.wait()
    assert devices() == before
    assert is_gone(far.keeper)()
    assert is_gone(near.keeper)()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_hosts_whose_holder_was_killed(how: signal.Signals) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDING], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert holder.stdout is not None
    with holder.stdout:
        pids = [int(word) for word in holder.stdout.readline().split()]
    assert len(pids) == 3
    assert not any(is_gone(pid)() for pid in pids)
    holder.send_signal(how)
    assert holder.wait() != 0
    for pid in pids:
        wait_until(is_gone(pid), f"the end of {pid}")


def test_a_failure_leaves_no_host() -> None:
    found = []

    def fail() -> None:
        with connected_hosts(2) as hosts:
            found.extend(host.keeper for host in hosts)
            hosts[0].run("sh", "-c", "exit 7")

    with pytest.raises(SystemExit, match="status 7"):
        fail()
    assert len(found) == 2
    assert all(is_gone(pid)() for pid in found)
