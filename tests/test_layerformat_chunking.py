"""Where contents are cut: a change costs the chunks around it, equal files cost nothing, and what is held in memory is bounded."""

from __future__ import annotations

import io
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Member, encode_layer, make_content

from layerformat import Entry, Kind, Layer, LayerTree
from layerformat.chunker import MAX_COMPARED_BYTES, Chunker

CHUNK = 64 * 1024


def regular(path: str, data: bytes) -> Member:
    return Member(Entry(path=path.encode(), kind=Kind.REGULAR, size=len(data)), data)


def tree_of(count: int, seed: int) -> dict[str, bytes]:
    """Small files of sizes as they are in source trees, a few large ones between."""
    chance = random.Random(seed)
    sizes = [int(chance.lognormvariate(8, 1.3)) for _ in range(count)]
    files = {f"d{number // 40}/f{number:05}": chance.randbytes(min(size, CHUNK - 1)) for number, size in enumerate(sizes)}
    files |= {f"d{number}/large{number}": chance.randbytes(3 * CHUNK + number) for number in range(3)}
    return files


def encoded(files: dict[str, bytes]) -> Layer:
    blob = encode_layer([regular(path, data) for path, data in sorted(files.items())], chunk_size=CHUNK)
    return Layer.open(io.BytesIO(blob))


def stored(layer: Layer) -> dict[bytes, int]:
    return {chunk.sha256: chunk.stored_size for chunk in layer.toc.chunks}


FILES = tree_of(1500, 1)
BEFORE = stored(encoded(FILES))


@given(st.integers(0, len(FILES) - 1), st.sampled_from(["change", "grow", "remove", "add"]), st.randoms(use_true_random=False))
def test_a_small_change_costs_a_few_chunks(number: int, how: str, chance: random.Random) -> None:
    """Of a tree of 9 MB in 64 KiB chunks: never more than the gather that it is in and those up to the next cut."""
    files = dict(FILES)
    path = sorted(files)[number]
    if how == "remove":
        del files[path]
    elif how == "add":
        files[path + "-new"] = chance.randbytes(2000)
    else:
        data = bytearray(files[path] or b"x")
        data[len(data) // 2 : len(data) // 2 + (how == "change")] = b"\0\1"
        files[path] = bytes(data)
    new = [digest for digest in stored(encoded(files)) if digest not in BEFORE]
    assert len(new) <= 12
    assert len(BEFORE) > 100


def test_such_a_change_costs_two_chunks_on_average() -> None:
    chance = random.Random(2)
    costs = []
    for path in chance.sample(sorted(FILES), 20):
        files = FILES | {path: FILES[path] + b"one line more\n"}
        costs.append(sum(digest not in BEFORE for digest in stored(encoded(files))))
    assert sum(costs) <= 2.5 * len(costs), costs


def test_the_order_of_large_files_and_gathers_does_not_matter_to_chunks() -> None:
    """A large file passes an open gather by: with it or without, the small ones around it are cut alike."""
    small_only = {path: data for path, data in FILES.items() if len(data) < CHUNK}
    assert set(stored(encoded(small_only))) <= set(BEFORE)


# ---- equal files ----


def test_equal_files_are_stored_once() -> None:
    big, text = random.Random(3).randbytes(5 * CHUNK + 17), make_content(3000, 1, True)
    files = {f"{number}/{name}": data for number in range(5) for name, data in (("big", big), ("text", text))}
    layer = encoded(files)
    assert sum(chunk.raw_size for chunk in layer.toc.chunks) == len(big) + len(text)
    assert layer.toc.header.content_size == 5 * (len(big) + len(text))
    for path, data in files.items():
        number = layer.lookup(path.encode())
        assert number is not None
        assert layer.read(number, 0, len(data) + 1) == data


@pytest.mark.parametrize("at", [0, CHUNK, 2 * CHUNK - 1, 4 * CHUNK])
def test_large_files_that_begin_alike_are_told_apart(at: int) -> None:
    """Also when they differ in the last chunk only."""
    one = random.Random(4).randbytes(4 * CHUNK + 1)
    other = bytearray(one)
    other[at] ^= 1
    layer = encoded({"a": one, "b": bytes(other), "c": one, "d": bytes(other)})
    assert sum(chunk.raw_size for chunk in layer.toc.chunks) == 2 * len(one)
    for path, data in ((b"a", one), (b"b", other), (b"c", one), (b"d", other)):
        number = layer.lookup(path)
        assert number is not None
        assert layer.read(number, 0, len(one)) == data


class CountingSink:
    """Keeps nothing; counts chunks, and how often they were compared."""

    def __init__(self) -> None:
        self.chunks = 0
        self.compared = 0

    def put(self, stream_offset: int, raw: bytes | bytearray, *, large: bool) -> int:
        self.chunks += 1
        return self.chunks - 1

    def digests(self, first: int, count: int) -> list[bytes]:
        self.compared += 1
        return []


class Zeros:
    """The data of a file of zeros."""

    def __init__(self, size: int) -> None:
        self._left = size

    def read(self, size: int, /) -> bytes:
        size = min(size, self._left)
        self._left -= size
        return bytes(size)


def test_files_that_are_too_large_to_hold_are_not_compared() -> None:
    """Two of equal size and beginning: up to the limit they are held and compared, beyond it they stream."""
    for size, compared in ((CHUNK * 3, 1), (MAX_COMPARED_BYTES, 1), (MAX_COMPARED_BYTES + 1, 0)):
        sink = CountingSink()
        chunker = Chunker(1024 * 1024 if size > CHUNK * 3 else CHUNK, sink)
        for name in (b"a", b"b"):
            node = LayerTree().apply(Entry(path=name, kind=Kind.REGULAR, size=size))
            assert node is not None
            chunker.add(node, Zeros(size), size)
        chunker.finish()
        assert sink.compared == compared
