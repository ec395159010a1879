"""What is counted of requests and fetches: how many, how long, how old, and that no sum falls when a process is replaced."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from strategies import make_content
from weefs_harness import MountedCore, faithful, mounted_core
from weefs_keeper import Source, keeper, run_source, wait_until
from weefs_kills import tree_layer

from weefs import core, protocol
from weefs.traffic import BUCKET_BOUNDS_S, SOURCES, LayerTraffic, quantile_s, source_kind

LARGE = make_content(3 << 20, 1, False)


@pytest.fixture
def mounted() -> Iterator[MountedCore]:
    with mounted_core() as made:
        yield made


@pytest.fixture
def source() -> Iterator[Source]:
    with run_source() as running:
        yield running


def operation(mounted: MountedCore, name: str) -> dict[str, Any]:
    nothing = {"requests": 0, "errors": 0, "answered": {"buckets": [0] * 32, "sum_s": 0.0}}
    found: dict[str, Any] = mounted.core.measurements()["operations"].get(name, nothing)
    return found


def count(histogram: dict[str, Any]) -> int:
    return sum(histogram["buckets"])


@pytest.mark.parametrize(
    ("nanoseconds", "bucket"),
    [
        *((1, 0), (1000, 0), (1001, 1), (2000, 1), (2001, 2), (4000, 2), (4001, 3), (1_000_000, 10), (1_024_000, 10), (1_024_001, 11)),
        *(((1 << 30) * 1000, 30), ((1 << 30) * 1000 + 1, 31), (1 << 55, 31)),
    ],
)
def test_buckets_end_at_powers_of_two(nanoseconds: int, bucket: int) -> None:
    made = core.Core(max_pending=1)
    try:
        made.count_traffic("layout", fetch_s=nanoseconds / 1e9)
        fetches = made.measurements()["sources"]["layout"]["fetches"]
        assert [i for i, n in enumerate(fetches["buckets"]) if n] == [bucket]
        assert fetches["sum_s"] == pytest.approx(nanoseconds / 1e9)
        if bucket < 31:
            assert (BUCKET_BOUNDS_S[bucket - 1] if bucket else 0) < nanoseconds / 1e9 <= BUCKET_BOUNDS_S[bucket]
    finally:
        made.close()


def test_quantiles() -> None:
    assert quantile_s([0] * 32, 0.5) is None
    assert quantile_s([98, 0, 1, 1] + [0] * 28, 0.5) == 1e-6
    assert quantile_s([98, 0, 1, 1] + [0] * 28, 0.99) == 4e-6
    assert quantile_s([0] * 31 + [1], 0.99) == float("inf")
    assert quantile_s([1] + [0] * 30 + [99], 0.0) == 1e-6


def test_each_source_has_its_own_counters() -> None:
    assert [source_kind(text) for text in ("oci:/a", "http://h:1/r", "https://h/r")] == ["layout", "registry", "registry"]
    made = core.Core(max_pending=1)
    try:
        for number, kind in enumerate(SOURCES, 1):
            traffic = LayerTraffic(also=lambda kind=kind, **counts: made.count_traffic(kind, **counts))
            traffic.wanted(number, ahead=False)
            traffic.wanted(10, ahead=True)
            for metadata in (False, True):
                traffic.asked(metadata=metadata)
                traffic.arrived(100 * number, 0.001, metadata=metadata)
            traffic.retried()
            traffic.gave_up()
            assert traffic.counted() == {
                "requests": 1, "bytes": 100 * number, "metadata_requests": 1, "metadata_bytes": 100 * number, "retries": 1,
                "given_up_chunks": 1,
            }  # fmt: skip
        for number, kind in enumerate(SOURCES, 1):
            counted = made.measurements()["sources"][kind]
            assert count(counted.pop("fetches")) == 2
            assert counted == {
                "misses": number, "ahead": 10, "requests": 1, "bytes": 100 * number, "metadata_requests": 1,
                "metadata_bytes": 100 * number, "retries": 1, "given_up": 1,
            }  # fmt: skip
        with pytest.raises(ValueError):
            made.count_traffic("elsewhere", bytes=1)
    finally:
        made.close()


def test_operations_are_counted_and_timed(mounted: MountedCore) -> None:
    _slot, root = mounted.add_plan([tree_layer({"d/f": b"x"})])
    for number in range(20):
        assert not (root / "d" / f"absent{number}").exists()
    (root / "d/f").stat()
    wait_until(lambda: count(operation(mounted, "lookup")["answered"]) == operation(mounted, "lookup")["requests"])
    lookup = operation(mounted, "lookup")
    assert lookup["requests"] == mounted.core.statistics()["requests_lookup"] >= 23
    assert lookup["errors"] == 0  # an absence is none
    assert 0 < lookup["answered"]["sum_s"] < 60


def test_a_read_that_waits_has_an_age_and_then_a_duration(mounted: MountedCore) -> None:
    """It is not in the histogram of those that were answered at once."""
    _slot, root = mounted.add_plan([tree_layer({"f": b"12345", "g": b"12345"})])
    released = threading.Event()

    def hold(blob: bytes, miss: core.Miss) -> bytes:
        released.wait()
        return faithful(blob, miss)

    mounted.answer = hold
    assert mounted.core.measurements()["oldest_waiting_s"] == 0
    reader = subprocess.Popen([sys.executable, "-c", f"assert open({str(root / 'f')!r}, 'rb').read() == b'12345'"])
    try:
        wait_until(lambda: mounted.core.measurements()["oldest_waiting_s"] > 0.05)
        younger, older = (mounted.core.measurements()["oldest_waiting_s"] for _ in range(2))
        assert older > younger
        assert (count(mounted.core.measurements()["reads_waited"]), count(operation(mounted, "read")["answered"])) == (0, 0)
    finally:
        released.set()
        assert reader.wait(60) == 0
    wait_until(lambda: count(mounted.core.measurements()["reads_waited"]) == 1)
    found = mounted.core.measurements()
    assert found["oldest_waiting_s"] == 0
    assert found["reads_waited"]["sum_s"] > 0.05
    waited = mounted.core.statistics()
    assert (waited["reads_waited"], waited["late_read_bytes"], waited["read_bytes"]) == (1, 5, 5)
    assert (root / "g").read_bytes() == b"12345"  # in the chunk of the other
    wait_until(lambda: count(operation(mounted, "read")["answered"]) == 1)
    assert mounted.core.statistics()["read_bytes"] == 10
    assert count(mounted.core.measurements()["reads_waited"]) == 1


def test_errors_are_counted_by_operation(mounted: MountedCore) -> None:
    _slot, root = mounted.add_plan([tree_layer({"f": b"12345"})])
    mounted.answer = lambda _blob, _miss: errno.EIO
    fd = os.open(root / "f", os.O_RDONLY)
    with pytest.raises(OSError) as failed:
        os.read(fd, 5)
    os.close(fd)
    assert failed.value.errno == errno.EIO
    wait_until(lambda: operation(mounted, "read")["errors"] >= 1)
    statistics = mounted.core.statistics()
    assert operation(mounted, "read")["errors"] == statistics["reads_failed"] == count(mounted.core.measurements()["reads_waited"])
    with pytest.raises(OSError):
        os.getxattr(root / "f", "user.absent")
    assert all(operation(mounted, name)["errors"] == 0 for name in ("lookup", "getxattr", "open", "getattr"))


def test_slots_in_use(mounted: MountedCore) -> None:
    before = mounted.core.statistics()
    slot, _root = mounted.add_plan([tree_layer({"f": b"1"}), tree_layer({"g": b"2"})])
    place = mounted.core.reserve_layer()
    during = mounted.core.statistics()
    assert (during["layer_slots"] - before["layer_slots"], during["plan_slots"] - before["plan_slots"]) == (3, 1)
    mounted.core.release_layer(place)
    mounted.core.remove_plan(slot)
    after = mounted.core.statistics()
    assert (after["layer_slots"] - before["layer_slots"], after["plan_slots"]) == (2, before["plan_slots"])


def counters(figures: dict[str, Any]) -> dict[str, float]:
    """Everything of the data plane that may only rise, by name."""
    found: dict[str, float] = {}
    gauges = ("pending", "in_flight", "layer_slots", "plan_slots")

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name}.{key}", inner)
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                add(f"{name}.{number}", inner)
        elif name.rpartition(".")[2] not in gauges:
            found[name] = value

    for part in ("fuse", "operations", "reads_waited", "sources"):
        add(part, figures[part])
    return found


@pytest.mark.parametrize("resend", [True, False])
def test_no_sum_falls_when_the_process_is_killed(tmp_path: Path, source: Source, resend: bool) -> None:
    with keeper(tmp_path / "keeper", resend=resend) as kept:
        kept.start()
        connection = kept.connect()
        name = connection.add_plan([source.add(tree_layer({"large": LARGE, "small": b"1"}))])
        seen: dict[str, float] = {}
        for round_ in range(3):
            fd = os.open(kept.mountpoint / name / "large", os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.pread(fd, 1 << 20, round_ << 20) == LARGE[round_ << 20 : (round_ + 1) << 20]
            os.close(fd)
            counted = counters(connection.call(protocol.GetStatistics))
            assert {key: (value, counted.get(key)) for key, value in seen.items() if counted.get(key, -1) < value} == {}
            assert counted["fuse.read_bytes"] > seen.get("fuse.read_bytes", 0)
            assert counted["sources.registry.bytes"] > seen.get("sources.registry.bytes", 0)
            assert counted["sources.registry.misses"] > seen.get("sources.registry.misses", 0)
            seen = counted
            kept.kill()
            kept.start()
            connection = kept.connect()
        last = counters(connection.call(protocol.GetStatistics))
        assert {key: value for key, value in seen.items() if last[key] < value} == {}


def test_a_read_keeps_its_age_where_the_kernel_does_not_send_it_again(tmp_path: Path, source: Source) -> None:
    with keeper(tmp_path / "keeper", resend=False) as kept:
        kept.start()
        connection = kept.connect()
        name = connection.add_plan([source.add(tree_layer({"f": b"12345"}))])
        source.open.clear()
        reader = subprocess.Popen([sys.executable, "-c", f"assert open({str(kept.mountpoint / name / 'f')!r}, 'rb').read() == b'12345'"])
        try:
            wait_until(lambda: connection.call(protocol.GetStatistics)["oldest_waiting_s"] > 0.2)
            age = connection.call(protocol.GetStatistics)["oldest_waiting_s"]
            kept.kill()
            kept.start()
            connection = kept.connect()
            assert connection.call(protocol.GetStatistics)["oldest_waiting_s"] > age
        finally:
            source.open.set()
            assert reader.wait(60) == 0
        wait_until(lambda: connection.call(protocol.GetStatistics)["oldest_waiting_s"] == 0)
        assert connection.call(protocol.GetStatistics)["reads_waited"]["sum_s"] > age
