"""Four nodes that start one plan at once, each on a host of its own: what leaves the registry, with peers off and on.

The hosts are network namespaces (hosts.py); a node is the whole daemon, and a start an environment with a program in it. The distance is
that of proxies: one on each node's loopback, through which it reaches the registry, so that a reference means the same on all of them and
plain HTTP is allowed; and one in front of each node's own port for peers. The rate is that of the hosts' links.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from bench.cold_start import run_in
from bench.hosts import Host, connected_hosts, registry_on
from bench.measure import WEENV
from bench.served import AHEAD, served_node
from bench.shaping import shaping
from tools.output import print_table, size

NODES = 4
REGISTRY_PORT = 5000
PEERS_PORT = 9465
NEAR_PEERS_PORT = 9466
"""On the node's own loopback, behind the proxy at PEERS_PORT."""


@attrs.frozen
class Started:
    """By all nodes together. `registry_bytes`: towards them, with HTTP's own; the others are of contents and TOCs."""

    took_s: float
    registry_bytes: int
    peer_bytes: int
    hedges: int
    reads_failed: int


@attrs.frozen
class Cluster:
    """Where nodes are started. `distance`: round trips in seconds, to the registry and to a peer."""

    scratch: Path
    hosts: Sequence[Host]
    registry: str
    reference: str
    program: str
    distance: tuple[float, float] = (0.0, 0.0)

    def start(self, n: int, *, peers: bool) -> Started:
        """The plan on `n` nodes that have nothing, at once."""
        hosts = self.hosts[:n]
        with contextlib.ExitStack() as stack:
            proxies = [
                stack.enter_context(
                    shaping(self.registry, self.distance[0], None, listen=f"127.0.0.1:{REGISTRY_PORT}", enter=host.enter)
                )
                for host in hosts
            ]
            if peers:
                for host in hosts:
                    far = f"{host.address}:{PEERS_PORT}"
                    stack.enter_context(
                        shaping(f"127.0.0.1:{NEAR_PEERS_PORT}", self.distance[1], None, listen=far, enter=host.enter)
                    )
            nodes = [
                stack.enter_context(served_node(self.scratch, "auto", self._settings(host) if peers else AHEAD, enter=host.enter))
                for host in hosts
            ]
            for node in nodes if peers else ():
                until(lambda node=node: bool(node.data_plane()["peers"]["listening"]), "a node serves its peers")
            begin = time.perf_counter()
            with ThreadPoolExecutor(n) as pool:
                environments = [*pool.map(lambda node: run_in(node, self.reference, self.program)[1], nodes)]
            took_s = time.perf_counter() - begin
            planes = [node.data_plane() for node in nodes]
            sent = sum(proxy.passed_bytes() for proxy in proxies)
            for node, environment in zip(nodes, environments, strict=True):
                node.weenv("env", "rm", environment)
        return Started(
            took_s,
            sent,
            sum(plane["peers"]["received_bytes"] for plane in planes) if peers else 0,
            sum(plane["peers"]["hedges"] for plane in planes) if peers else 0,
            sum(plane["fuse"]["reads_failed"] for plane in planes),
        )

    def _settings(self, host: Host) -> str:
        members = ", ".join(f'"{each.address}:{PEERS_PORT}"' for each in self.hosts)
        return (
            f'{AHEAD}peers_listen = "127.0.0.1:{NEAR_PEERS_PORT}"\npeers_name = "{host.address}:{PEERS_PORT}"\n'
            f'peers = [{members}]\npeers_token_file = "{self.scratch}/token"\n'
        )


def until(condition: Callable[[], bool], what: str) -> None:
    """SystemExit: not within half a minute."""
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"expected within 30 s: {what}")
        time.sleep(0.05)


def four_nodes(root: Path, scratch: Path, program: str, distances: Sequence[tuple[float, float]], bytes_per_s: float) -> None:
    """Prints the table. `distances`: see Cluster."""
    directory = Path(tempfile.mkdtemp(prefix="peers-nodes-", dir=scratch.absolute()))
    try:
        with connected_hosts(1 + NODES, bytes_per_s) as (far, *hosts):
            (directory / "registry").mkdir()
            (directory / "token").write_text(secrets.token_hex())
            (directory / "token").chmod(0o600)
            with registry_on(far, directory / "registry", REGISTRY_PORT) as registry:
                reference = far.run(WEENV, "group", "push", f"127.0.0.1:{REGISTRY_PORT}/bench/root:1", "--rootfs", root)
                cluster = Cluster(directory, hosts, registry, reference, program)
                rows = [row for distance in distances for row in _rows(attrs.evolve(cluster, distance=distance))]
        headers = ("TO REGISTRY", "TO PEER", "NODES", "PEERS", "FROM REGISTRY", "× ONE'S", "FROM PEERS", "HEDGES", "FAILED", "ALL AFTER")
        print_table(headers, rows)
    finally:
        shutil.rmtree(directory)


def _rows(cluster: Cluster) -> list[tuple[Any, ...]]:
    to_registry, to_peer = (f"{1000 * each:g} ms" for each in cluster.distance)
    rows: list[tuple[Any, ...]] = []
    one = None
    for n, peers in ((1, False), (NODES, False), (NODES, True)):
        started = cluster.start(n, peers=peers)
        one = one or started.registry_bytes
        rows.append(
            (
                to_registry, to_peer, n, "on" if peers else "off", size(started.registry_bytes), f"{started.registry_bytes / one:.2f}",
                size(started.peer_bytes), started.hedges, started.reads_failed, f"{started.took_s:.1f} s",
            )
        )  # fmt: skip
    return rows
