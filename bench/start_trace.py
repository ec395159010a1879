"""What a real task reads, in which order: recorded from its first start on a node, for simulations (peers_simulation.py).

start_trace.json is such a recording: `import pandas, scipy.stats, sklearn.linear_model` in an environment of bench.real_root. The record is
the layer's profile, which a node writes down anyway (docs/fill.md), with the places and sizes of its chunks."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.cold_start import run_in
from bench.served import push, served_node
from layerformat import Layer as LayerFile
from weefs.core import ChunkIndex, LayerSlot, Miss
from weefs.link import Link
from weefs.peering import pieces_of
from weefs.prefetch import plan_ranges
from weefs.profiles import Profile

RECORDED = Path(__file__).with_name("start_trace.json")
RECORDS_A_LINE = 6
SLOT = LayerSlot(0)


class Trace(msgspec.Struct, kw_only=True):
    """`chunks`, by their first read: number, offset in the blob, stored size, raw size; bytes."""

    program: str
    layer_chunks: int
    chunks: list[tuple[int, int, int, int]]

    def misses(self) -> list[Miss]:
        """As the core would name them."""
        return [Miss(SLOT, ChunkIndex(chunk), offset, stored, raw) for chunk, offset, stored, raw in self.chunks]

    def with_a_profile(self) -> list[tuple[Miss, ...]]:
        """Pieces as a node asks its peers for them that knows the profile. What lies between is not in the trace, and left out."""
        return [piece for one in plan_ranges(self.misses(), Link()) for piece in pieces_of(one.misses)]

    def on_demand(self) -> list[tuple[Miss, ...]]:
        """The same for one that does not: only chunks that are read one after the other come together."""
        runs: list[list[Miss]] = []
        for miss in self.misses():
            if runs and miss.chunk == runs[-1][-1].chunk + 1:
                runs[-1].append(miss)
            else:
                runs.append([miss])
        return [piece for run in runs for piece in pieces_of(run)]


def load(path: Path) -> Trace:
    return msgspec.json.decode(path.read_bytes(), type=Trace)


def save(trace: Trace, path: Path) -> None:
    """In lines that a person can look at."""
    records = [msgspec.json.encode(record).decode() for record in trace.chunks]
    lines = [", ".join(records[i : i + RECORDS_A_LINE]) for i in range(0, len(records), RECORDS_A_LINE)]
    program = msgspec.json.encode(trace.program).decode()
    body = ",\n".join(lines)
    path.write_text(f'{{"program": {program}, "layer_chunks": {trace.layer_chunks}, "chunks": [\n{body}\n]}}\n')


def record(root: Path, program: str, scratch: Path) -> Trace:
    """Starts the program once, in an environment of a node that has nothing."""
    directory = Path(tempfile.mkdtemp(prefix="start-trace-", dir=scratch.absolute()))
    try:
        reference = push(directory, "root", root)
        with served_node(directory, "auto", 'fill = "off"\n') as node:
            _, environment = run_in(node, reference, program)
            node.weenv("env", "rm", environment)
            # The node writes it when it ends, and takes its directory along.
            node.process.terminate()
            node.process.wait()
            (written,) = (node.directory / "state/cache/profiles").glob("*.json")
            profile = msgspec.json.decode(written.read_bytes(), type=Profile)
        blob = directory / "groups/blobs/sha256" / profile.layer.removeprefix("sha256:")
        with LayerFile.open(blob) as layer:
            return Trace(program=program, layer_chunks=profile.layer_chunks, chunks=_places(layer, profile.chunks))
    finally:
        shutil.rmtree(directory)


def _places(layer: LayerFile, chunks: Sequence[int]) -> list[tuple[int, int, int, int]]:
    known = layer.toc.chunks
    return [(chunk, known[chunk].blob_offset, known[chunk].stored_size, known[chunk].raw_size) for chunk in chunks]
