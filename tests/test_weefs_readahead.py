"""Reading ahead: the decision, and that it saves requests without fetching what a random reader does not ask for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weefs.core import ChunkIndex, LayerSlot, Miss
from weefs.readahead import ReadAhead

SIZE = 4096


def miss(chunk: int, *, layer: int = 1, raw_size: int = SIZE) -> Miss:
    return Miss(LayerSlot(layer), ChunkIndex(chunk), chunk * SIZE, SIZE, raw_size)


def sequential_read(ahead: ReadAhead, chunks: int) -> tuple[int, set[int]]:
    """Reads a file of `chunks` full chunks; how many misses it had, and what was fetched."""
    present: set[int] = set()
    misses = 0
    for chunk in range(chunks):
        if chunk not in present:
            misses += 1
            present |= {chunk, *ahead.observe(miss(chunk), SIZE)}
    return misses, present


def test_a_sequential_reader_waits_seldom_and_gets_little_that_it_does_not_read() -> None:
    misses, fetched = sequential_read(ReadAhead(max_window=8), 100)
    assert misses < 100 / 5
    assert max(fetched) < 100 + 8


def test_the_window_doubles_up_to_its_bound() -> None:
    ahead = ReadAhead(max_window=8)
    windows, chunk = [], 0
    for _ in range(8):
        claimed = ahead.observe(miss(chunk), SIZE)
        windows.append(len(claimed))
        chunk += 1 + len(claimed)
    assert windows == [0, 0, 0, 2, 4, 8, 8, 8]


@given(st.lists(st.integers(0, 10_000), unique=True))
def test_chunks_without_neighbours_claim_nothing(chunks: list[int]) -> None:
    ahead = ReadAhead()
    for chunk in [chunk * 2 for chunk in chunks]:
        assert not ahead.observe(miss(chunk), SIZE)


def test_the_end_of_a_file_and_gathers_of_small_files_end_a_run() -> None:
    ahead = ReadAhead()
    claims = [ahead.observe(miss(chunk), SIZE) for chunk in range(3)]
    claims.append(ahead.observe(miss(3, raw_size=SIZE - 1), SIZE))
    claims += [ahead.observe(miss(chunk), SIZE) for chunk in range(4, 7)]
    assert not any(claims)
    assert ahead.observe(miss(7), SIZE)


def test_runs_of_layers_are_apart_and_their_number_is_bounded() -> None:
    ahead = ReadAhead(max_runs=4)
    for chunk in range(3):
        ahead.observe(miss(chunk, layer=1), SIZE)
    assert not ahead.observe(miss(3, layer=2), SIZE)
    for chunk in range(100, 200, 2):
        ahead.observe(miss(chunk), SIZE)
    assert not ahead.observe(miss(3, layer=1), SIZE), "it was forgotten, the oldest first"


def test_a_window_of_none_is_none() -> None:
    assert sequential_read(ReadAhead(max_window=0), 20)[0] == 20
