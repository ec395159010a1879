"""`python -m bench.peers simulate|throughput|nodes`: what peers save, and what they cost.

simulate     1,000 and 10,000 nodes that start one plan within ten seconds (peers_simulation.py): bytes from the registry, load of the busiest
             peer, membership traffic.
throughput   one node takes a layer from a peer on loopback, beside `curl` taking the same ranges: MB/s, and CPU time of all who take part.
nodes        four nodes, each in a process and with an address of 127.0.0.x of its own, start one plan at once; the registry is behind a proxy
             with delay and rate of our own. Bytes from the registry with peers off and on."""

from __future__ import annotations

import argparse
import time

from bench.peers_simulation import Outcome, Simulation, chosen_chunks, membership_bytes_s, plan_of, quantile
from tools.output import print_table, size


def simulate(arguments: argparse.Namespace) -> None:
    plan = plan_of(chosen_chunks(arguments.layer_chunks, arguments.runs, 8, arguments.seed))
    rows = []
    for nodes in arguments.nodes:
        begin_s = time.perf_counter()
        simulation = Simulation(
            nodes, plan, chunk_bytes=256 << 10, within_s=arguments.within, link_bytes_s=arguments.link_gbit * 125e6, peers=True,
            seed=arguments.seed,
        )  # fmt: skip
        outcome = simulation.run()
        rows.append(_row(outcome, time.perf_counter() - begin_s))
    headers = (
        "nodes", "a node's plan", "registry, off", "registry, on", "x one node", "most for a chunk", "busiest peer sends", "x plan",
        "median peer", "asks a piece", "start p50/p99/max s", "simulated in s",
    )  # fmt: skip
    print_table(headers, rows)
    print()
    traffic = []
    for nodes in arguments.nodes:
        # kv/range and its answer, headers included: counted on the wire of a real etcd 3.4. Names of 20 bytes.
        quiet = membership_bytes_s(nodes, lambda n: 560, 5)
        whole = membership_bytes_s(nodes, lambda n: 560 + 165 * n, 5)
        dns = membership_bytes_s(nodes, lambda n: 100 + 16 * n, 30)
        traffic.append((nodes, f"{size(int(quiet))}/s", f"{size(int(whole))}/s", f"{size(int(dns))}/s"))
    print_table(("nodes", "etcd, all nodes together", "(if each read the whole list)", "DNS, A records"), traffic)


def _row(outcome: Outcome, took_s: float) -> tuple[object, ...]:
    busiest = outcome.sent[-1]
    times = outcome.took_s
    return (
        outcome.nodes,
        size(outcome.plan_bytes),
        size(outcome.plan_bytes * outcome.nodes),
        size(outcome.registry_bytes),
        f"{outcome.registry_bytes / outcome.plan_bytes:.2f}",
        max(outcome.registry_times),
        size(busiest),
        f"{busiest / outcome.plan_bytes:.2f}",
        size(quantile(outcome.sent, 0.5)),
        f"{outcome.asks / (outcome.nodes * outcome.pieces):.2f}",
        f"{quantile(times, 0.5):.2f} / {quantile(times, 0.99):.2f} / {times[-1]:.2f}",
        f"{took_s:.0f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(required=True)
    simulated = sub.add_parser("simulate")
    simulated.add_argument("--nodes", type=int, nargs="+", default=[1000, 10_000])
    simulated.add_argument("--layer-chunks", type=int, default=20_000, help="of 256 KiB")
    simulated.add_argument("--runs", type=int, default=60, help="places in the layer that the plan reads: 1 to 8 chunks each")
    simulated.add_argument("--within", type=float, default=10.0, metavar="S")
    simulated.add_argument("--link-gbit", type=float, default=10.0)
    simulated.add_argument("--seed", type=int, default=1)
    simulated.set_defaults(run=simulate)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
