"""`python -m bench.effort [TAR]`: what each way to make a layer smaller buys and costs, on a sample: zstd levels, a dictionary,
storing equal files once. The choices are docs/decisions/0005.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zstandard

from layerformat import Entry, LayerTree, open_source
from layerformat.chunker import Chunker
from layerformat.model import Data
from layerformat.tree import Node
from tools.output import print_table

CHUNK_SIZE = 256 * 1024
SAMPLE = 4  # one chunk of so many
DICTIONARY_BYTES = 112 * 1024
Parameters = zstandard.ZstdCompressionParameters


class Sampler:
    """A sink that keeps every fourth chunk of each kind, and counts all."""

    def __init__(self) -> None:
        self.kept: dict[bool, list[bytes]] = {False: [], True: []}
        self.raw_bytes = {False: 0, True: 0}
        self._count = {False: 0, True: 0}

    def put(self, stream_offset: int, raw: bytes | bytearray, *, large: bool) -> int:
        self.raw_bytes[large] += len(raw)
        if self._count[large] % SAMPLE == 0:
            self.kept[large].append(bytes(raw))
        self._count[large] += 1
        return sum(self._count.values()) - 1

    def digests(self, first: int, count: int) -> list[bytes]:
        return []  # large files are not compared here


def files(tar: Path) -> Iterator[tuple[Entry, Node, Data]]:
    tree = LayerTree()
    with open_source(tar) as source:
        for entry, data in source.entries():
            node = tree.apply(entry)
            if node is not None:
                yield entry, node, data


def gathered(tar: Path) -> tuple[Sampler, int]:
    """Chunks as a layer has them, and the bytes of small files that were there already."""
    sampler = Sampler()
    chunker = Chunker(CHUNK_SIZE, sampler)
    for entry, node, data in files(tar):
        chunker.add(node, data, entry.data_size)
    chunker.finish()
    return sampler, chunker.shared_bytes


def measure(name: str, sampler: Sampler, large: bool, compress: Callable[[bytes], bytes]) -> list[str]:
    chunks = sampler.kept[large]
    scale = sampler.raw_bytes[large] / sum(map(len, chunks))
    begin = time.process_time()
    size = sum(min(len(compress(chunk)), len(chunk)) for chunk in chunks)
    cpu_s = time.process_time() - begin
    return ["large files" if large else "gathers", name, f"{size * scale / 1e6:.1f} MB", f"{cpu_s * scale:.1f} s"]


def with_dictionary(sampler: Sampler, level: int) -> Callable[[bytes], bytes]:
    """Trained on pieces of the sample itself, which flatters it."""
    pieces = [chunk[at : at + 8192] for chunk in sampler.kept[False] for at in range(0, len(chunk), 8192)]
    dictionary = zstandard.train_dictionary(DICTIONARY_BYTES, pieces[: 100 * DICTIONARY_BYTES // 8192], level=level, k=256, d=8)
    compress: Callable[[bytes], bytes] = zstandard.ZstdCompressor(level=level, dict_data=dictionary).compress
    return compress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tar", type=Path, nargs="?", default=Path("build/bench/root.tar.gz"))
    arguments = parser.parse_args()
    sampler, shared = gathered(arguments.tar)
    rows = []
    for large in (False, True):
        for level in (3, 4, 5, 6, 7, 8, 9):
            rows.append(measure(f"level {level}", sampler, large, zstandard.ZstdCompressor(level=level).compress))
    for level in (4, 5, 6):
        parameters = Parameters.from_level(level, source_size=CHUNK_SIZE, min_match=4)
        compress = zstandard.ZstdCompressor(compression_params=parameters).compress
        rows.append(measure(f"level {level}, matches of 4", sampler, True, compress))
    for level in (3, 7):
        name = f"level {level}, a dictionary of 112 KiB"
        rows.append(measure(name, sampler, False, with_dictionary(sampler, level)))
    print_table(["chunks", "", "stored", "CPU"], rows)
    print(f"small files that were there already: {shared / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
