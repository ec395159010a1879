"""Which ranges are asked for: every miss in exactly one, contiguous, bounded, the earliest first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weefs.coalesce import MAX_RANGE_BYTES, coalesce
from weefs.core import ChunkIndex, LayerSlot, Miss


@st.composite
def blobs(draw: st.DrawFn) -> list[Miss]:
    """The chunks of up to three layers, back to back in each blob."""
    chunks = []
    for layer in range(draw(st.integers(1, 3))):
        offset = 0
        for number, size in enumerate(draw(st.lists(st.integers(1, 100), min_size=1, max_size=12))):
            chunks.append(Miss(LayerSlot(layer), ChunkIndex(number), offset, size, 2 * size))
            offset += size
    return chunks


misses = blobs().flatmap(lambda chunks: st.lists(st.sampled_from(chunks), max_size=30))
bounds = st.integers(1, 500)


@given(misses, bounds)
def test_every_miss_is_in_exactly_one_range(wanted: list[Miss], bound: int) -> None:
    found = [miss for one in coalesce(wanted, bound) for miss in one.misses]
    assert len(found) == len(set(found))
    assert set(found) == set(wanted)


@given(misses, bounds)
def test_a_range_is_contiguous_of_one_layer_and_bounded(wanted: list[Miss], bound: int) -> None:
    for one in coalesce(wanted, bound):
        position = one.offset
        for miss in one.misses:
            assert (miss.layer, miss.blob_offset) == (one.layer, position)
            position += miss.stored_size
        assert one.size == position - one.offset
        assert one.size <= bound or len(one.misses) == 1


@given(misses, bounds)
def test_neighbours_are_apart_only_where_the_bound_says_so(wanted: list[Miss], bound: int) -> None:
    ranges = coalesce(wanted, bound)
    for one in ranges:
        for other in ranges:
            if one.layer == other.layer and one.offset + one.size == other.offset:
                assert one.size + other.misses[0].stored_size > bound


@given(misses, bounds)
def test_the_earliest_miss_is_in_the_first_range(wanted: list[Miss], bound: int) -> None:
    ranges = coalesce(wanted, bound)
    firsts = [min(wanted.index(miss) for miss in one.misses) for one in ranges]
    assert firsts == sorted(firsts)


def test_nothing_needs_no_range() -> None:
    assert coalesce([]) == []


def test_a_chunk_larger_than_the_bound_goes_alone() -> None:
    sizes = (10, MAX_RANGE_BYTES + 1, 10)
    offsets = (0, 10, MAX_RANGE_BYTES + 11)
    chunks = [
        Miss(LayerSlot(0), ChunkIndex(i), offset, size, size)
        for i, (offset, size) in enumerate(zip(offsets, sizes, strict=True))
    ]
    assert [one.misses for one in coalesce(chunks)] == [(chunk,) for chunk in chunks]
