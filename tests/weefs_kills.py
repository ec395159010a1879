"""The exercise: a weefs that is killed again and again under readers that compare everything. Used by the tests, and with more kills by
`python -m bench.recovery`.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import attrs
from strategies import Member, encode_layer, make_content
from weefs_keeper import Keeper, Source, expected_of, keeper, readers, run_source, wait_until

from layerformat import Entry, Kind

CHUNK = 8192
DIRECTORIES = 16
MIN_PARKED = 6
"""Readers that wait for chunks when the process is killed, as long as there are absent ones."""


@attrs.define
class Counted:
    """Times in seconds."""

    kills: int = 0
    kills_while_starting: int = 0
    waiting_at_kill: int = 0
    """Reads that waited for chunks when their process was killed, summed."""
    operations: int = 0
    bytes: int = 0
    errors: list[str] = attrs.field(factory=list)
    longest_s: float = 0.0
    recovery_s: list[float] = attrs.field(factory=list)
    """From a kill to the next answer of a metadata request that waited."""

    def lines(self) -> list[str]:
        median = statistics.median(self.recovery_s) if self.recovery_s else float("nan")
        worst = max(self.recovery_s, default=float("nan"))
        return [
            f"kills                    {self.kills}, and {self.kills_while_starting} while starting",
            f"operations completed     {self.operations} ({self.bytes >> 20} MiB compared)",
            f"reads waiting at a kill  {self.waiting_at_kill}",
            f"errors                   {len(self.errors)}",
            f"longest stall            {self.longest_s:.2f} s",
            f"kill to serving          {median:.2f} s median, {worst:.2f} s at most",
        ]


def tree_layer(files: dict[str, bytes]) -> bytes:
    directories = sorted({name.rpartition("/")[0] for name in files})
    members = [Member(Entry(path=name.encode(), kind=Kind.DIRECTORY, mode=0o755)) for name in directories]
    for name, data in sorted(files.items()):
        members.append(Member(Entry(path=name.encode(), kind=Kind.REGULAR, mode=0o640, size=len(data), mtime_ns=len(data)), data))
    return encode_layer(members, chunk_size=CHUNK)


def make_files(count: int, seed: int) -> dict[str, bytes]:
    """About 40 KiB each, no two alike."""
    return {f"d{i % DIRECTORIES}/{seed}-{i}": make_content(CHUNK * 5 + i, seed * 100000 + i, False) for i in range(count)}


def _statted(path: Path) -> threading.Thread:
    """Looks up something of which the kernel knows nothing."""
    thread = threading.Thread(target=lambda: subprocess.run(["stat", path], stdout=subprocess.DEVNULL, check=True))
    thread.start()
    return thread


def exercise(directory: Path, *, resend: bool, kills: int, files: int, delay_s: float, seed: int = 1, overlay: bool = True) -> Counted:
    """`kills` kills under 8 readers, half of them through an overlay. Every third kill is followed by one of the successor while it
    starts. Layers and plans come and go meanwhile.
    """
    counted = Counted()
    chance = random.Random(seed)
    with run_source(delay_s) as source, keeper(directory / "keeper", resend=resend) as kept:
        contents = make_files(files, seed) | make_files(files, seed + 1)
        layers = [source.add(tree_layer({n: d for n, d in contents.items() if f"/{s}-" in n})) for s in (seed, seed + 1)]
        kept.start()
        plan = kept.connect().add_plan(layers)
        root = kept.mountpoint / plan
        expected = directory / "expected.json"
        merged = directory / "overlay"
        for name in ("upper", "work", "overlay"):
            (directory / name).mkdir()
        options = f"lowerdir={root},upperdir={directory / 'upper'},workdir={directory / 'work'}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, merged], check=True)
        try:
            expected.write_text(json.dumps(expected_of(contents, root)))
            with readers([root, merged] * 4, expected) as reading:
                for number in range(kills):
                    _one_kill(kept, source, counted, chance, number)
                for one in reading.stop():
                    counted.operations += one["operations"]
                    counted.bytes += one["bytes"]
                    counted.errors += one["errors"]
                    counted.longest_s = max(counted.longest_s, one["longest_s"])
        finally:
            subprocess.run(["umount", merged], check=True)
    return counted


def _one_kill(kept: Keeper, source: Source, counted: Counted, chance: random.Random, number: int) -> None:
    connection = kept.connect()
    fresh = source.add(tree_layer(make_files(3, 1000 + number)))
    plan = connection.add_plan([fresh])
    _wait_for_readers(kept, connection)
    counted.waiting_at_kill += kept.parked()
    begin = time.monotonic()
    kept.kill()
    connection.close()
    counted.kills += 1
    looking = _statted(kept.mountpoint / plan / f"d0/{1000 + number}-0")
    assert looking.is_alive(), "nobody is there to answer it"
    kept.start()
    if number % 3 == 2:
        # At any moment of its start: imports, journal, taking over.
        assert kept.process is not None
        try:
            kept.process.wait(chance.uniform(0.0, 0.3))
        except subprocess.TimeoutExpired:
            kept.kill()
        counted.kills_while_starting += 1
        begin = time.monotonic()
        kept.start()
    looking.join()
    counted.recovery_s.append(time.monotonic() - begin)
    connection = kept.connect()
    connection.call(_remove, plan_id=plan)
    connection.close()


def _remove(**parameters: Any) -> Any:
    from weefs.protocol import RemovePlan

    return RemovePlan(**parameters)


def _wait_for_readers(kept: Keeper, connection: Any) -> None:
    """Until many wait; or until nothing is left to wait for."""
    from weefs.protocol import GetStatistics

    def everything_is_there() -> bool:
        layers = connection.call(GetStatistics)["layers"].values()
        return sum(one["present_bytes"] < one["stored_bytes"] for one in layers) <= 1

    wait_until(lambda: kept.parked() >= MIN_PARKED or everything_is_there(), "readers that wait")
