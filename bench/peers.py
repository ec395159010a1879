"""`python -m bench.peers simulate|record|throughput|nodes`: what peers save, and what they cost.

simulate     1,000 and 10,000 nodes that start one plan within ten seconds (peers_simulation.py): bytes from the registry, load of the
             busiest peer, membership traffic. They read what a real task was recorded to read (start_trace.py).
record       makes that recording anew.
throughput   one node takes a layer from a registry and from a peer on loopback, beside `curl` taking the same ranges
             (peers_throughput.py): MB/s and CPU time.
nodes        four nodes start one plan at once (peers_nodes.py): daemons in network namespaces, with a registry that is far away. Bytes
             that leave it, with peers off and on."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from bench import start_trace
from bench.lazy import IMPORTS
from bench.peers_nodes import four_nodes
from bench.peers_simulation import Outcome, Simulation, membership_bytes_s, plan_of, quantile
from bench.peers_throughput import throughput
from bench.real_root import make_real_root
from tools.demo import groups
from tools.output import parse_size, print_table, size
from weefs.prefetch import REQUESTS_AT_ONCE

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
