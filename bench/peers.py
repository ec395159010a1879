"""`python -m bench.peers simulate|record|throughput|nodes`: what peers save, and what they cost.

simulate     1,000 and 10,000 nodes that start one plan within ten seconds (peers_simulation.py): bytes from the registry, load of the
             busiest peer, membership traffic. They read what a real task was recorded to read (start_trace.py).
record       makes that recording anew.
throughput   one node takes a layer from a peer on loopback, beside `curl` taking the same ranges of the same peer: MB/s, and CPU time of
             all who take part. The node also compares digests and writes its cache, curl does not.
nodes        four nodes start one plan at once (peers_nodes.py): daemons in network namespaces, with a registry that is far away. Bytes
             that leave it, with peers off and on."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import msgspec

from bench import start_trace
from bench.lazy import IMPORTS
from bench.peer_node import Brought, Start
from bench.peers_nodes import four_nodes
from bench.peers_simulation import Outcome, Simulation, membership_bytes_s, plan_of, quantile
from bench.real_root import make_real_root
from layerformat import Layer as LayerFile
from layerformat import convert
from registry import Group, push_group, resolve_group
from tools.demo import groups
from tools.output import parse_size, print_table, size
from weefs.peerconfig import PeersConfig
from weefs.placement import group_of
from weefs.prefetch import REQUESTS_AT_ONCE
from weefs.protocol import Layer

# simulate


def simulate(arguments: argparse.Namespace) -> None:
    trace = start_trace.load(arguments.trace)
    kinds = {"profile": (trace.with_a_profile, REQUESTS_AT_ONCE), "demand": (trace.on_demand, 1)}
    print(f"trace: {trace.program}: {len(trace.chunks)} of {trace.layer_chunks} chunks")
    rows = []
    for kind in arguments.order:
        pieces, at_once = kinds[kind]
        plan = plan_of(pieces())
        for nodes in arguments.nodes:
            begin_s = time.perf_counter()
            simulation = Simulation(
                nodes, plan, at_once=at_once, within_s=arguments.within, link_bytes_s=arguments.link_gbit * 125e6, seed=arguments.seed
            )  # fmt: skip
            rows.append((kind, *_row(simulation.run(), time.perf_counter() - begin_s)))
    headers = (
        "order", "nodes", "pieces", "a node's plan", "registry, off", "registry, on", "x one node", "most for a piece",
        "busiest peer sends", "x plan", "median peer", "asks a piece", "start p50/p99/max s", "simulated in s",
    )  # fmt: skip
    print_table(headers, rows)
    print()
    traffic = []
    for nodes in arguments.nodes:
        # HTTP headers, and 30 or 90 bytes of JSON for the answer to "what is new" or for each name. A records: 16 bytes each.
        quiet = membership_bytes_s(nodes, lambda n: 600, 5)
        whole = membership_bytes_s(nodes, lambda n: 600 + 165 * n, 5)
        dns = membership_bytes_s(nodes, lambda n: 100 + 16 * n, 30)
        traffic.append((nodes, f"{size(int(quiet))}/s", f"{size(int(whole))}/s", f"{size(int(dns))}/s"))
    print_table(("nodes", "etcd, all nodes together", "(if each read the whole list)", "DNS, A records"), traffic)


def record(arguments: argparse.Namespace) -> None:
    root = groups.made_once(arguments.root.absolute(), make_real_root)
    trace = start_trace.record(root, arguments.program, arguments.scratch)
    start_trace.save(trace, arguments.output)
    print(f"{arguments.output}: {len(trace.chunks)} of {trace.layer_chunks} chunks, {size(sum(raw for *_, raw in trace.chunks))}")


def _row(outcome: Outcome, took_s: float) -> tuple[object, ...]:
    busiest, times = outcome.sent[-1], outcome.took_s
    return (
        outcome.nodes,
        outcome.pieces,
        f"{size(outcome.plan_bytes)} ({size(outcome.raw_bytes)} raw)",
        size(outcome.plan_bytes * outcome.nodes),
        size(outcome.registry_bytes),
        f"{outcome.registry_bytes / outcome.plan_bytes:.2f}",
        max(outcome.registry_times),
        size(busiest),
        f"{busiest / outcome.raw_bytes:.2f}",
        size(quantile(outcome.sent, 0.5)),
        f"{outcome.asks / (outcome.nodes * outcome.pieces):.2f}",
        f"{quantile(times, 0.5):.2f} / {quantile(times, 0.99):.2f} / {times[-1]:.2f}",
        f"{took_s:.0f}",
    )


# nodes in processes


@attrs.frozen
class Node:
    """A bench.peer_node."""

    process: subprocess.Popen[str]
    address: str

    def send(self, **command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Brought:
        assert self.process.stdout is not None
        return msgspec.json.decode(self.process.stdout.readline(), type=Brought)


@contextlib.contextmanager
def running_node(scratch: Path, layer: Layer, peers: PeersConfig | None) -> Iterator[Node]:
    cache = Path(tempfile.mkdtemp(prefix="cache-", dir=scratch))
    process = subprocess.Popen([sys.executable, "-m", "bench.peer_node"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(Start(cache=str(cache), layer=layer, peers=peers)).decode() + "\n")
        process.stdin.flush()
        if process.stdout.readline() != "ready\n":
            raise SystemExit("a node did not start")
        yield Node(process, peers.listen if peers is not None else "")
    finally:
        process.stdin.close()
        process.wait()
        shutil.rmtree(cache)


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
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


# throughput


def throughput(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-peers-", dir=arguments.scratch) as directory:
        scratch = Path(directory)
        file = make_layer(scratch, arguments.size)
        with LayerFile.open(file) as opened:
            chunks = [(chunk.stream_offset, chunk.raw_size) for chunk in opened.toc.chunks]
        push_group(f"oci:{scratch}/layout:t", [file])
        layer = only_layer(resolve_group(f"oci:{scratch}/layout:t"))
        holder_at, rows = f"127.0.0.1:{free_port()}", []
        with running_node(scratch, layer, PeersConfig(listen=holder_at)) as holder:
            holder.send(bring=[*range(len(chunks))])
            whole = sum(raw for _, raw in chunks)
            before = holder.receive().cpu_s
            for _ in range(arguments.times):
                for name, take in (("curl", _by_curl), ("a node", _by_node)):
                    took_s, cpu_s = take(scratch, layer, holder_at, chunks)
                    holder.send()
                    after = holder.receive().cpu_s
                    rows.append((name, whole / took_s, cpu_s, after - before))
                    before = after
        best = {name: max(rate for each, rate, *_ in rows if each == name) for name, *_ in rows}
        print_table(
            ("who takes", "MB/s", "its CPU, s/GB", "the peer's CPU, s/GB"),
            [(name, f"{rate / 1e6:.0f}", f"{own / whole * 1e9:.2f}", f"{peer / whole * 1e9:.2f}") for name, rate, own, peer in rows],
        )
        print(f"\n{size(whole)}; the best: a node {best['a node'] / best['curl']:.2f} x curl")


def _by_node(scratch: Path, layer: Layer, holder: str, chunks: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Seconds, and of CPU."""
    with running_node(scratch, layer, PeersConfig(listen=f"127.0.0.1:{free_port()}", members=[holder])) as node:
        node.send()
        begun = node.receive().cpu_s
        node.send(bring=[*range(len(chunks))])
        brought = node.receive()
    from_peer = brought.figures["sources"]["peer"]["misses"]
    if from_peer != len(chunks):
        raise SystemExit(f"expected {len(chunks)} chunks from the peer, received {from_peer}")
    return brought.took_s, brought.cpu_s - begun


def _by_curl(scratch: Path, layer: Layer, holder: str, chunks: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """The ranges that a node asks for, as many at once."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for number, chunk in enumerate(chunks):
        groups.setdefault(group_of(number), []).append(chunk)
    lines = []
    for group in groups.values():
        begin, end = group[0][0], group[-1][0] + group[-1][1]
        lines.append(f'url = "http://{holder}/v1/layers/{layer.digest}/stream"\nrange = "{begin}-{end - 1}"\noutput = "/dev/null"\n')
    (scratch / "curl").write_text("next\n".join(lines))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin_s = time.perf_counter()
    subprocess.run(["curl", "--no-progress-meter", "-f", "--parallel", "--parallel-max", "8", "-K", scratch / "curl"], check=True)
    took_s = time.perf_counter() - begin_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return took_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# four nodes


def nodes(arguments: argparse.Namespace) -> None:
    root = groups.made_once(arguments.root.absolute(), make_real_root)
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    to_peers = [to_peer / 1e3 for to_peer in arguments.peer_rtt_ms or arguments.rtt_ms]
    distances = [*zip([to_registry / 1e3 for to_registry in arguments.rtt_ms], to_peers, strict=True)]
    four_nodes(root, arguments.scratch, arguments.program, distances, arguments.gbit * 125e6)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__, formatter_class=formatter)
    sub = parser.add_subparsers(required=True)

    simulated = sub.add_parser("simulate")
    simulated.add_argument("--nodes", type=int, nargs="+", default=[1000, 10_000])
    simulated.add_argument("--trace", type=Path, default=start_trace.RECORDED)
    orders = ["profile", "demand"]
    simulated.add_argument("--order", nargs="+", choices=orders, default=orders, help="whether nodes know the profile")
    simulated.add_argument("--within", type=float, default=10.0, metavar="S")
    simulated.add_argument("--link-gbit", type=float, default=10.0)
    simulated.add_argument("--seed", type=int, default=1)
    simulated.set_defaults(run=simulate)

    recorded = sub.add_parser("record")
    recorded.add_argument("--output", type=Path, default=start_trace.RECORDED)
    recorded.set_defaults(run=record)

    measured = sub.add_parser("throughput")
    measured.add_argument("--size", type=parse_size, default=512 << 20)
    measured.add_argument("--times", type=int, default=3)
    measured.set_defaults(run=throughput)

    measured.add_argument("--scratch", type=Path, default=Path("/tmp"))

    four = sub.add_parser("nodes")
    four.add_argument("--rtt-ms", type=float, nargs="+", default=[1, 20], help="to the registry")
    four.add_argument("--peer-rtt-ms", type=float, nargs="+", help="to a peer, one for each of --rtt-ms; default: the same")
    four.add_argument("--gbit", type=float, default=1.0, help="of each host's link, a second")
    four.set_defaults(run=nodes)

    for each in (recorded, four):
        each.add_argument("root", type=Path, nargs="?", default=Path("build/bench/root"))
        each.add_argument("--scratch", type=Path, default=Path("build/bench"))
        each.add_argument("--program", default=IMPORTS[0])

    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
