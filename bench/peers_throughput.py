"""`python -m bench.peers throughput`: a node takes a whole layer, as a fill does, from a registry and from a peer on loopback, beside
`curl` taking the same ranges, as many at once.

The node also compares digests (and decompresses what comes from the registry), and what it takes is in its cache afterwards; curl writes to
files, which are hashed or not, and once more to /dev/null.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import msgspec

from bench.lazy import registry
from bench.peer_node import Brought, Start
from layerformat import Layer as LayerFile
from layerformat import convert
from registry import Group, push_group, resolve_group
from tools.output import print_table, size
from weefs.peerconfig import PeersConfig
from weefs.placement import group_of
from weefs.protocol import Layer

AT_ONCE = 8


@attrs.frozen
class Node:
    """A bench.peer_node."""

    process: subprocess.Popen[str]

    def send(self, **command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Brought:
        assert self.process.stdout is not None
        return msgspec.json.decode(self.process.stdout.readline(), type=Brought)

    def ask(self, **command: object) -> Brought:
        self.send(**command)
        return self.receive()


@contextlib.contextmanager
def running_node(scratch: Path, layer: Layer, peers: PeersConfig | None) -> Iterator[Node]:
    cache = Path(tempfile.mkdtemp(prefix="cache-", dir=scratch))
    process = subprocess.Popen([sys.executable, "-m", "bench.peer_node"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(Start(cache=str(cache), layer=layer, peers=peers, groups_at_once=AT_ONCE)).decode() + "\n")
        process.stdin.flush()
        if process.stdout.readline() != "ready\n":
            raise SystemExit("a node did not start")
        yield Node(process)
    finally:
        process.stdin.close()
        process.wait()
        shutil.rmtree(cache)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def make_layer(scratch: Path, content_bytes: int) -> Path:
    """Of incompressible files of 32 MiB, in chunks of 256 KiB."""
    tree, file = scratch / "tree", scratch / "layer.weenv"
    tree.mkdir()
    for number in range(max(1, content_bytes >> 25)):
        (tree / f"f{number}").write_bytes(os.urandom(32 << 20))
    convert(tree, file, chunk_size=256 << 10)
    shutil.rmtree(tree)
    return file


def only_layer(group: Group) -> Layer:
    return Layer(source=group.source, **attrs.asdict(group.layers[0]))


@attrs.frozen
class Source:
    """Where the layer comes from: its ranges' URL, the ranges (first and last byte), and how a node is told to use it."""

    name: str
    url: str
    ranges: list[tuple[int, int]]
    peers: PeersConfig | None


@attrs.frozen
class Taken:
    """Seconds; of CPU, of whoever took it."""

    took_s: float
    cpu_s: float


def throughput(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-peers-", dir=arguments.scratch) as directory, contextlib.ExitStack() as stack:
        scratch = Path(directory)
        (scratch / "registry").mkdir()
        file = make_layer(scratch, arguments.size)
        host = stack.enter_context(registry(scratch / "registry"))
        push_group(f"{host}/repo:t", [file])
        layer = only_layer(resolve_group(f"{host}/repo:t"))
        holder = f"127.0.0.1:{free_port()}"
        holding = stack.enter_context(running_node(scratch, layer, PeersConfig(listen=holder)))
        with LayerFile.open(file) as opened:
            chunks = [*opened.toc.chunks]
        holding.ask(bring=[*range(len(chunks))])
        groups = [[chunks[number] for number in group] for _, group in itertools.groupby(range(len(chunks)), group_of)]
        sources = [
            Source(
                "registry",
                f"http://{host}/v2/repo/blobs/{layer.digest}",
                [(group[0].blob_offset, group[-1].blob_offset + group[-1].stored_size - 1) for group in groups],
                None,
            ),
            Source(
                "peer",
                f"http://{holder}/v1/layers/{layer.digest}/stream",
                [(group[0].stream_offset, group[-1].stream_offset + group[-1].raw_size - 1) for group in groups],
                PeersConfig(listen=f"127.0.0.1:{free_port()}", members=[holder]),
            ),
        ]
        rows = [row for source in sources for row in _compare(scratch, layer, source, len(chunks), arguments.times)]
    print_table(("from", "who takes it", "MB/s", "its CPU, s/GB", "x curl to /dev/null", "to files", "and hashed"), rows)


def _compare(scratch: Path, layer: Layer, source: Source, n_chunks: int, times: int) -> list[tuple[object, ...]]:
    """Side by side; medians, and of the ratios, too."""
    takers = {
        "curl to /dev/null": lambda: _by_curl(scratch, source, to_files=False),
        "curl to files": lambda: _by_curl(scratch, source, to_files=True),
        "curl to files, hashed": lambda: _by_curl(scratch, source, to_files=True, hashed=True),
        "a node": lambda: _by_node(scratch, layer, source, n_chunks),
    }
    rounds = [{name: take() for name, take in takers.items()} for _ in range(times)]
    whole = sum(last - first + 1 for first, last in source.ranges)

    def median(name: str, what: str) -> float:
        return statistics.median(getattr(each[name], what) for each in rounds)

    def ratio(name: str, to: str) -> str:
        return f"{statistics.median(each[to].took_s / each[name].took_s for each in rounds):.2f}"

    return [
        (
            f"{source.name}, {size(whole)}",
            name,
            f"{whole / median(name, 'took_s') / 1e6:.0f}",
            f"{median(name, 'cpu_s') / whole * 1e9:.2f}",
            ratio(name, "curl to /dev/null"),
            ratio(name, "curl to files"),
            ratio(name, "curl to files, hashed"),
        )
        for name in takers
    ]


def _by_node(scratch: Path, layer: Layer, source: Source, n_chunks: int) -> Taken:
    with running_node(scratch, layer, source.peers) as node:
        before_s = node.ask().cpu_s
        brought = node.ask(bring=[*range(n_chunks)])
    came = brought.figures["sources"][source.name]["misses"]
    if came != n_chunks:
        raise SystemExit(f"expected {n_chunks} chunks from the {source.name}, received {came}")
    return Taken(brought.took_s, brought.cpu_s - before_s)


def _by_curl(scratch: Path, source: Source, *, to_files: bool, hashed: bool = False) -> Taken:
    """`hashed`: two at once, when all is there."""
    directory = scratch / "taken"
    directory.mkdir()
    lines = [
        f'url = "{source.url}"\nrange = "{first}-{last}"\noutput = "{directory / str(number) if to_files else "/dev/null"}"\n'
        for number, (first, last) in enumerate(source.ranges)
    ]
    (scratch / "curl").write_text("next\n".join(lines))
    side_by_side = ("--parallel", "--parallel-max", str(AT_ONCE))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin_s = time.perf_counter()
    subprocess.run(["curl", "--no-progress-meter", "-f", *side_by_side, "-K", scratch / "curl"], check=True)
    if hashed:
        command = ["xargs", "-0", "-n", "8", "-P", "2", "openssl", "dgst", "-sha256"]
        subprocess.run(command, input="\0".join(map(str, directory.iterdir())), text=True, check=True, stdout=subprocess.DEVNULL)
    took_s = time.perf_counter() - begin_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(directory)
    return Taken(took_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
