"""The simulation of many nodes: it plays what was recorded, all of it, and by the decisions of weefs the registry sends it once."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import start_trace
from bench.peers_simulation import Piece, Simulation, Size, plan_of
from weefs.placement import GROUP_CHUNKS


def chunks_of(plan: dict[Piece, Size]) -> list[int]:
    return [group * GROUP_CHUNKS + i for group, bits in plan for i in range(GROUP_CHUNKS) if bits >> i & 1]


def test_a_plan_has_each_chunk_that_was_read_once() -> None:
    trace = start_trace.load(start_trace.RECORDED)
    read = sorted(chunk for chunk, *_ in trace.chunks)
    assert len(set(read)) == len(read) > 100
    for pieces in (trace.with_a_profile(), trace.on_demand()):
        plan = plan_of(pieces)
        assert sorted(chunks_of(plan)) == read
        assert sum(size.stored for size in plan.values()) == sum(stored for _, _, stored, _ in trace.chunks)
        assert sum(size.raw for size in plan.values()) == sum(raw for *_, raw in trace.chunks)
    assert chunks_of(plan_of(trace.on_demand()))[0] == trace.chunks[0][0]


def test_a_trace_is_written_as_it_is_read(tmp_path: Path) -> None:
    trace = start_trace.load(start_trace.RECORDED)
    start_trace.save(trace, tmp_path / "trace")
    assert (tmp_path / "trace").read_bytes() == start_trace.RECORDED.read_bytes()


@pytest.mark.parametrize("nodes", [1, 4, 40])
def test_the_registry_sends_the_plan_about_once(nodes: int) -> None:
    plan = plan_of(start_trace.load(start_trace.RECORDED).with_a_profile())
    outcome = Simulation(nodes, plan, at_once=8, within_s=1.0, link_bytes_s=125e6, seed=2).run()
    assert outcome.plan_bytes <= outcome.registry_bytes <= 1.2 * outcome.plan_bytes
    assert len(outcome.took_s) == nodes
    if nodes == 1:
        assert outcome.sent == [0]
    else:
        assert sum(outcome.sent) >= (nodes - 1) * 0.9 * outcome.raw_bytes


def test_a_thousand_that_want_the_same_in_the_same_moment_find_each_other() -> None:
    """As nodes do that start on demand one after the other: each catches up with the first, which waits for the registry."""
    plan = plan_of(start_trace.load(start_trace.RECORDED).on_demand()[:12])
    outcome = Simulation(1000, plan, at_once=1, within_s=0.0, link_bytes_s=1.25e9, seed=1).run()
    assert outcome.registry_bytes <= 1.2 * outcome.plan_bytes
