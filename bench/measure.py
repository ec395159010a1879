"""Runs commands side by side and keeps what the kernel says of each: wall time, CPU time, peak memory."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

WEENV = Path(sys.executable).with_name("weenv")


@attrs.frozen
class Run:
    """Times in seconds, memory in bytes (of the largest process of the command)."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


def run(command: Sequence[str | Path], stdout: int | None = subprocess.DEVNULL) -> Run:
    """One run; a command that fails ends the measurement."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = process.stderr.read()
    _pid, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}: status {process.returncode}: {errors.decode()}")
    return Run(time.perf_counter() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def side_by_side(commands: dict[str, Callable[[], Run]], runs: int) -> dict[str, list[Run]]:
    """Each command in turn, `runs` times: what drifts on the machine drifts for all of them."""
    results: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, call in commands.items():
            results[name].append(call())
    return results


def median_wall(runs: Sequence[Run]) -> float:
    return statistics.median(one.wall_s for one in runs)


def drop_caches() -> None:
    """What the kernel holds of files, dentries and inodes: as on a machine that has just started."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
