"""The whole path on a machine with nothing but cgroup version 2, booted for it: limits, ends, delegation, no leftovers.

What is observed in the machine is in cgroup_v2_checks.py; here is what it must be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from machine import CONSOLE_SHOWN_BYTES, Contents, run

CHECKS = Path(__file__).with_name("cgroup_v2_checks.py")
CONTENTS = Contents(
    program=CHECKS,
    programs=("crun", "runc"),
    packages=("envlet", "layerformat", "registry", "tools", "weefs"),
    modules=("overlay", "fuse"),
)
MACHINE_LIMIT_S = 280
"""Twice and more what it takes on two cores that others use, too."""
DAEMONS = ("root", "delegated", "runc")
MEMORY_BYTES = 64 << 20
PIDS_MAX = 40

pytestmark = pytest.mark.timeout(MACHINE_LIMIT_S + 60)


class Report(dict[str, Any]):
    """What the machine saw. pytest shows it with the console when an assertion about it fails."""

    console = ""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    result, console = run(CONTENTS, tmp_path_factory.mktemp("machine"), timeout_s=MACHINE_LIMIT_S)
    made = Report(result)
    made.console = console
    return made


@pytest.fixture(autouse=True)
def console_of_a_failure(report: Report) -> None:
    """Captured output is shown for failures only."""
    print(report.console[-CONSOLE_SHOWN_BYTES:])


def scenario(report: Report, daemon: str, name: str) -> dict[str, Any]:
    """A scenario's observations; its own failure is ours."""
    assert "error" not in report[daemon], report[daemon]["error"]
    part: dict[str, Any] = report[daemon][name]
    assert "error" not in part, part["error"]
    return part


def succeeded(outcome: dict[str, Any]) -> bool:
    assert outcome["status"] == 0, outcome
    return True


def test_the_machine_is_what_it_is_to_be(report: Report) -> None:
    assert [line.split()[2] for line in report["mounted"]] == ["cgroup2"]
    assert report["push"]["stdout"].startswith("oci:/tmp/layout:base@sha256:"), report["push"]
    for daemon in DAEMONS:
        assert "error" not in report[daemon], report[daemon]["error"]
        assert report[daemon]["info"]["cgroups"] == "v2"
    assert report["root"]["info"]["runtime"].startswith("crun ")
    assert report["runc"]["info"]["runtime"].startswith("runc ")


@pytest.mark.parametrize("daemon", DAEMONS)
def test_the_limits_hold_and_the_path_works(report: Report, daemon: str) -> None:
    seen = scenario(report, daemon, "limits")
    files = seen["files"]
    assert files["cpu.max"] == "25000 50000"
    assert files["memory.max"] == str(MEMORY_BYTES)
    assert files["memory.swap.max"] == "0"
    assert files["pids.max"] == str(PIDS_MAX)
    assert {"cpu", "memory", "pids"} <= set(files["cgroup.controllers"].split())
    assert {"cpu", "memory", "pids"} <= set(seen["delegated"])
    assert seen["init"] == [".weenv-init"]
    assert seen["seen_outside"] == [seen["expected_outside"]]
    assert (seen["seen_inside"]["status"], seen["seen_inside"]["stdout"]) == (0, "0::/"), seen["seen_inside"]
    assert seen["status_7"] == 7
    assert succeeded(seen["diff"])
    assert {"etc/new", "etc/.wh.passwd"} <= set(seen["diff_names"])
    assert succeeded(seen["removed"])
    assert seen["group_exists"] is False


@pytest.mark.parametrize("daemon", ["root", "delegated"])
def test_too_much_memory_ends_the_environment_as_oom(report: Report, daemon: str) -> None:
    seen = scenario(report, daemon, "memory_hog")
    assert seen["hog"]["status"] == 125
    assert "ended as oom" in seen["hog"]["stderr"]
    assert seen["state"] == "oom"
    assert str(MEMORY_BYTES) in seen["cause"]
    assert seen["diff_status"] == 0
    assert succeeded(seen["removed"])
    assert seen["group_exists"] is False


def test_a_timeout_kills_all_that_the_command_started(report: Report) -> None:
    seen = scenario(report, "root", "fork_bomb")
    assert seen["timed_out"]["status"] == 124, seen["timed_out"]
    assert seen["left_by_timeout"] == 0


def test_a_fork_bomb_is_bounded_and_ended_by_one_order(report: Report) -> None:
    seen = scenario(report, "root", "fork_bomb")
    assert seen["bomb_met_the_limit"] is True
    assert 10 < seen["most_processes"] <= PIDS_MAX
    assert succeeded(seen["removed"])
    assert seen["kill_writes"] >= 1
    assert seen["bomb_status"] == 125
    assert seen["group_exists"] is False


def test_freezing(report: Report) -> None:
    """cgroup.freeze is used for a diff and undone after it; a frozen group ends like any other."""
    seen = scenario(report, "root", "freeze")
    assert seen["started"] is True
    assert succeeded(seen["diff"])
    assert seen["freeze_writes"] >= 1
    assert seen["frozen_after_diff"] == "0"
    assert succeeded(seen["removed"])
    assert seen["kill_writes"] >= 1
    assert seen["command_status"] == 125
    assert seen["group_exists"] is False


@pytest.mark.parametrize("daemon", DAEMONS)
def test_nothing_is_left(report: Report, daemon: str) -> None:
    """After the end of the daemon, which had one environment still: no mount, control group, process, directory."""
    assert "error" not in report[daemon], report[daemon]["error"]
    part = report[daemon]
    assert part["left_for_the_end"]
    assert part["end"]["status"] == 0, part["end"]
    assert part["end"]["left"] == []
    assert part["new"] == {"mounts": [], "cgroups": [], "processes": []}


def test_a_group_with_processes_is_refused_with_what_to_do(report: Report) -> None:
    """The daemon itself in the group whose controllers it would have to hand down."""
    part = report["internal"]
    assert "error" not in part, part["error"]
    assert part["refused"]["status"] == 1
    assert "/sys/fs/cgroup/bad.service holds processes" in part["refused"]["stderr"]
    assert "DelegateSubgroup=" in part["refused"]["stderr"]
    assert part["environments"]["stdout"] == "[]"
    assert part["end"]["status"] == 0
    assert part["end"]["left"] == part["groups"] == []
