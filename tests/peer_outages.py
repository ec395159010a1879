"""Peers, members and the registry failing in all the ways that they do, under readers that compare every byte: what they saw meanwhile, and
whether it worked again by itself.

Used by tests/test_peer_outages.py, and by bench/faults.py for the table. One node asks; its peers have everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import attrs
import msgspec
from etcd_fixture import run_etcd
from outages import CHUNK, CHUNKS, READS, Failing, Seen, read_chunk
from peer_fronts import (
    TOKEN,
    Fail,
    Front,
    abort,
    cut,
    damaged,
    no_http,
    of_contents,
    other_range,
    refers_to,
    shifted,
    shorter,
    slow,
    stall,
    stall_midway,
    status,
    unless_from,
    wrong_toc,
)
from peer_harness import GONE, addresses, make_certificates, node, peering
from plane_harness import Mounted, wait_until
from registry_fixture import free_port, run_server

from weefs.etcd import EtcdMembers
from weefs.fetch import FetchPolicy
from weefs.members import DnsMembers, Members
from weefs.peerconfig import PeersConfig, tls_contexts
from weefs.protocol import Layer

PEERS = 3
"""Beside the node that asks."""


@attrs.define
class Scene:
    """`asker` reads; `peers` are the nodes at `fronts`, and have everything. `stack`: undone at the end."""

    directory: Path
    layer: Layer
    content: bytes
    registry: Failing
    registry_port: int
    asker: Mounted
    asker_front: Front
    peers: list[Mounted]
    fronts: list[Front]
    stack: contextlib.AsyncExitStack
    registry_up: contextlib.ExitStack
    halves: tuple[set[str], ...] = ()
    """Of a network that is in two."""

    def received_bytes(self) -> int:
        """From peers, by all."""
        return sum(peering(mount).counted.received_bytes for mount in (self.asker, *self.peers))

    def crossed(self) -> int:
        """Ranges that were sent from front to asker, in two halves only those from one to the other."""
        return sum(
            n
            for front in (self.asker_front, *self.fronts)
            for asker, n in front.passed.items()
            if not any({asker, front.address} <= half for half in self.halves)
        )


Step = Callable[[Scene], Awaitable[None]]


async def nothing(scene: Scene) -> None:
    pass


@attrs.frozen
class PeerOutage:
    """`begin` and `end` it. What is declared: readers get their bytes from whoever has them, or EIO when it `must_fail`; `peers_serve`:
    whether peers send anything meanwhile (None: perhaps); `lies`: whoever did it is left out for an hour, so it is not asked again.
    """

    name: str
    begin: Step
    end: Step = nothing
    midway: Step | None = None
    """When readers wait already."""
    prepare: Step = nothing
    """Before anything is read."""
    peers: int = 1
    all_read: bool = False
    """Peers begin with nothing, and read what the asker reads."""
    peers_serve: bool | None = False
    must_fail: bool = False
    lies: bool = False
    from_start: bool = False
    tls: bool = False


@attrs.define
class PeerSeen(Seen):
    """`from_peers`: bytes while it failed. `asked_again`: whoever had failed sent something afterwards. `left_out`: members that lied."""

    from_peers: int = 0
    asked_again: bool = False
    left_out: int = 0


# ---- steps ----


def failing(fail: Fail) -> Step:
    async def begin(scene: Scene) -> None:
        for front in scene.fronts:
            front.fail = fail

    return begin


async def well(scene: Scene) -> None:
    for front in scene.fronts:
        front.fail, front.token = None, None


async def close_fronts(scene: Scene) -> None:
    for front in scene.fronts:
        await front.stop()


async def open_fronts(scene: Scene) -> None:
    for front in scene.fronts:
        await front.start()


async def other_token(scene: Scene) -> None:
    for front in scene.fronts:
        front.token = TOKEN + "-of-others"


async def registry_goes(scene: Scene) -> None:
    await asyncio.to_thread(scene.registry_up.close)


async def registry_comes(scene: Scene) -> None:
    scene.registry_up.enter_context(run_server(scene.registry.handle, scene.registry_port))


async def all_go(scene: Scene) -> None:
    await registry_goes(scene)
    await close_fronts(scene)


async def all_come(scene: Scene) -> None:
    await registry_comes(scene)
    await open_fronts(scene)


def showing(make: Callable[[Path], dict[str, str]]) -> Step:
    """The peer shows the certificate that this makes."""

    async def begin(scene: Scene) -> None:
        made = await asyncio.to_thread(make, scene.directory / "wrong-tls")
        for front in scene.fronts:
            await front.stop()
            front.tls = _serving(made)
            await front.start()

    return begin


async def show_the_right_one(scene: Scene) -> None:
    for front in scene.fronts:
        await front.stop()
        front.tls = _serving(_tls_of(scene.directory))
        await front.start()


async def break_the_disk(scene: Scene) -> None:
    """Of each peer: what it has are zeros, and it does not know."""
    for peer in scene.peers:
        data = peer.plane._cache.directory(scene.layer.digest) / "data"
        data.write_bytes(bytes(data.stat().st_size))


async def evict_all_the_time(scene: Scene) -> None:
    async def evict() -> None:
        while True:
            for peer in scene.peers:
                peer.plane._core.sweep(peer.plane._layers[scene.layer.digest].slot, 1 << 40)
            await asyncio.sleep(0.001)

    task = asyncio.create_task(evict())

    async def end() -> None:
        task.cancel()
        await asyncio.wait([task])

    scene.stack.push_async_callback(end)


async def split(scene: Scene) -> None:
    """The asker and the first peer on one side, the others on another."""
    for half in ((scene.asker_front, scene.fronts[0]), scene.fronts[1:]):
        names = {front.address for front in half}
        scene.halves += (names,)
        for front in half:
            front.fail = unless_from(names, stall)


async def join(scene: Scene) -> None:
    scene.asker_front.fail = None
    await well(scene)


# ---- members ----


async def members_by(scene: Scene, source: EtcdMembers | DnsMembers) -> None:
    """The asker hears of its peers from `source` alone."""
    its = peering(scene.asker)
    its.members = Members([], [source], its._left)
    task = asyncio.create_task(its.members.run())

    async def end() -> None:
        task.cancel()
        await asyncio.wait([task])

    scene.stack.push_async_callback(end)
    await wait_until(lambda: {front.address for front in scene.fronts} <= its.members.names)


def dns_that_fails() -> PeerOutage:
    fails: list[bool] = []
    asked: list[bool] = []

    async def by_dns(scene: Scene) -> None:
        async def resolve(name: str) -> list[str]:
            asked.append(bool(fails))
            if fails:
                raise OSError("no such name")
            return [front.address for front in scene.fronts]

        await members_by(scene, DnsMembers("peers.example", resolve, every_s=0.01))

    async def begin(scene: Scene) -> None:
        fails.append(True)
        asked.clear()
        await wait_until(lambda: any(asked))

    async def end(scene: Scene) -> None:
        fails.clear()

    return PeerOutage("DNS fails", begin, end, prepare=by_dns, peers_serve=True)


def etcd_that_dies() -> PeerOutage:
    up = contextlib.ExitStack()
    port = free_port()

    async def start(scene: Scene) -> None:
        number = len(list(scene.directory.glob("etcd*")))
        up.enter_context(run_etcd(scene.directory / f"etcd{number}", port))  # the second knows nothing of the first one's leases

    async def by_etcd(scene: Scene) -> None:
        scene.stack.callback(up.close)
        await start(scene)
        await members_by(scene, EtcdMembers([f"http://127.0.0.1:{port}"], scene.fronts[0].address, lease_s=3))

    async def begin(scene: Scene) -> None:
        await asyncio.to_thread(up.close)

    return PeerOutage("etcd dies", begin, start, prepare=by_etcd, peers_serve=True)


# ---- a peer in a process of its own ----


def killed_peer() -> PeerOutage:
    """Stopped, so that requests wait in its sockets; then killed with them; then started with its cache."""
    processes: list[asyncio.subprocess.Process] = []

    async def start(scene: Scene) -> None:
        front = scene.fronts[0]
        front.node = addresses(1)[0] if not processes else front.node
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.peer_node", cwd=Path(__file__).parent.parent,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
        )  # fmt: skip
        processes.append(process)
        config = PeersConfig(listen=front.node, token_file=str(scene.directory / "token"))
        cache = str(scene.directory / "process-cache")
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode({"cache": cache, "layer": scene.layer, "peers": config}) + b"\n")
        assert await process.stdout.readline() == b"ready\n"
        process.stdin.write(msgspec.json.encode({"bring": [*range(CHUNKS)]}) + b"\n")
        assert await process.stdout.readline()

    async def prepare(scene: Scene) -> None:
        scene.stack.push_async_callback(kill, scene)
        await start(scene)

    async def begin(scene: Scene) -> None:
        processes[-1].send_signal(signal.SIGSTOP)

    async def kill(scene: Scene) -> None:
        if processes and processes[-1].returncode is None:
            processes[-1].kill()
            await processes[-1].wait()

    return PeerOutage("a peer is killed while it is asked", begin, start, midway=kill, prepare=prepare)


# ---- the kinds ----


def _foreign(directory: Path) -> dict[str, str]:
    return make_certificates(directory)


def _expired(directory: Path) -> dict[str, str]:
    """Of the right CA, or it would be foreign, too."""
    return make_certificates(directory, days=-1, ca_of=directory.parent / "tls")


def peer_outages() -> Iterator[PeerOutage]:
    yield PeerOutage("a peer is gone", close_fronts, open_fronts)
    for name, fail in (
        ("resets connections", abort),
        ("does not speak HTTP", no_http),
        ("stalls before the first byte", stall),
        ("stalls in the middle of a body", stall_midway),
        ("is slow", slow),
        ("cuts bodies in half", cut(lambda body: len(body) // 2)),
        ("closes before the last byte", cut(lambda body: 1)),
        ("sends another range", other_range),
        ("sends less than its range says", shorter),
        ("answers 500", status(500)),
        ("answers 404 without a reason", status(404, b"<html>")),
        ("answers 200 instead of a range", status(200, bytes(CHUNK))),
        ("answers 503", status(503)),
        ("answers 404", status(404)),
        ("refers to nobody and to strangers", refers_to(GONE, "x", "192.0.2.1:1", "127.0.0.1:1")),
    ):
        yield PeerOutage(f"a peer {name}", failing(fail), well)
    yield PeerOutage("a peer sends wrong bytes", failing(of_contents(damaged)), well, lies=True)
    yield PeerOutage("a peer sends bytes of another place", failing(of_contents(shifted)), well, lies=True)
    yield PeerOutage("a peer sends a wrong TOC", failing(wrong_toc), well, lies=True, from_start=True)
    yield PeerOutage("a peer's disk is damaged", break_the_disk, lies=True)
    yield PeerOutage("a peer has another token", other_token, well)
    yield PeerOutage("a peer's certificate has ended", showing(_expired), show_the_right_one, tls=True)
    yield PeerOutage("a peer's certificate is of another CA", showing(_foreign), show_the_right_one, tls=True)
    yield PeerOutage("a peer speaks no TLS", failing(no_http), well, tls=True)
    yield killed_peer()
    yield PeerOutage("a peer evicts while it sends", evict_all_the_time, peers_serve=None)
    yield dns_that_fails()
    yield etcd_that_dies()
    yield PeerOutage("all peers are gone", close_fronts, open_fronts, peers=PEERS)
    yield PeerOutage("all peers stall", failing(stall), well, peers=PEERS)
    yield PeerOutage("all peers lie", failing(of_contents(damaged)), well, peers=PEERS, lies=True)
    yield PeerOutage("the network is in two halves", split, join, peers=PEERS, all_read=True, peers_serve=True)
    yield PeerOutage("the registry is gone", registry_goes, registry_comes, peers=PEERS, peers_serve=True)
    yield PeerOutage("the registry and all peers are gone", all_go, all_come, peers=PEERS, must_fail=True)


# ---- the exercise ----


def _serving(tls: dict[str, str]) -> ssl.SSLContext:
    contexts = tls_contexts(PeersConfig(listen="127.0.0.1:1", **tls))
    assert contexts is not None
    return contexts[0]


def _tls_of(directory: Path) -> dict[str, str]:
    tls = directory / "tls"
    return {"tls_cert": str(tls / "node.pem"), "tls_key": str(tls / "node.key"), "tls_ca": str(tls / "ca.pem")}


@contextlib.asynccontextmanager
async def _scene(directory: Path, layer: Layer, blob: bytes, content: bytes, outage: PeerOutage, deadline_s: float) -> AsyncIterator[Scene]:
    token = directory / "token"
    registry = Failing(blob, f"sha256:{hashlib.sha256(blob).hexdigest()}")
    port = free_port()
    policy = FetchPolicy(deadline_s=deadline_s, read_ahead_chunks=0)
    tls = await asyncio.to_thread(make_certificates, directory / "tls") if outage.tls else {}
    names = addresses(2 * (1 + outage.peers))
    fronts = [Front(front, listen, _serving(tls) if tls else None) for front, listen in zip(names[::2], names[1::2], strict=True)]
    async with contextlib.AsyncExitStack() as stack:
        registry_up = stack.enter_context(contextlib.ExitStack())
        registry_up.enter_context(run_server(registry.handle, port))
        there = [msgspec.structs.replace(layer, source=f"http://127.0.0.1:{port}/repo")]
        common = PeersConfig(listen="", token_file=str(token), members=[front.address for front in fronts] if outage.all_read else [])
        peers = []
        for number, front in enumerate(fronts[1:]):
            config = msgspec.structs.replace(common, listen=front.node, name=front.address)
            peers.append(await stack.enter_async_context(node(directory / f"peer{number}", there, config, policy=policy)))
        for peer in peers if not outage.all_read else ():
            assert await peer.read("f") == content
        for front in fronts:
            await front.start()
            stack.push_async_callback(front.stop)
        for front in fronts if outage.from_start else ():
            front.fail = wrong_toc
        members = [front.address for front in fronts[0 if outage.all_read else 1 :]]
        config = msgspec.structs.replace(common, listen=fronts[0].node, name=fronts[0].address, members=members, **tls)
        asker = await stack.enter_async_context(node(directory / "asker", there, config, policy=policy))
        steps = await stack.enter_async_context(contextlib.AsyncExitStack())
        yield Scene(directory, there[0], content, registry, port, asker, fronts[0], peers, fronts[1:], steps, registry_up)


async def _reads(scene: Scene, outage: PeerOutage, chunks: range, seen: Seen) -> list[bool]:
    """Of all who read, at once."""
    readers = [scene.asker, *(scene.peers if outage.all_read else ())]
    return await asyncio.gather(*(read_chunk(mount, scene.content, chunk, seen) for mount in readers for chunk in chunks))


async def _pauses_end(scene: Scene) -> None:
    """Of peers that are down: whoever reads next, asks them."""
    loop = asyncio.get_running_loop()
    known = [health for mount in (scene.asker, *scene.peers) for health in peering(mount)._health.values()]
    await wait_until(lambda: all(health.state(loop.time()) != "down" or health._until_s <= loop.time() for health in known))


def _states(scene: Scene) -> list[str]:
    """Of the asker's peers, as it sees them."""
    return [member["state"] for member in peering(scene.asker).statistics()["members"]]


async def _exercise(directory: Path, layer: Layer, blob: bytes, content: bytes, outage: PeerOutage, deadline_s: float) -> PeerSeen:
    seen, calm = PeerSeen(), Seen()
    async with _scene(directory, layer, blob, content, outage, deadline_s) as scene:
        await outage.prepare(scene)
        assert all(await _reads(scene, outage, range(READS), calm))
        assert outage.from_start or scene.received_bytes() > 0, "the peers are of no use"
        before = scene.received_bytes()
        await outage.begin(scene)
        reads = asyncio.create_task(_reads(scene, outage, range(READS, 2 * READS), seen))
        if outage.midway is not None:
            await wait_until(lambda: scene.asker.plane.statistics()["sources"]["peer"]["requests"] > 0)
            await outage.midway(scene)
        await reads
        seen.from_peers = scene.received_bytes() - before
        await outage.end(scene)
        before = scene.crossed()
        for chunk in range(2 * READS, CHUNKS):
            await _pauses_end(scene)
            await _reads(scene, outage, range(chunk, chunk + 1), calm)
        seen.asked_again = scene.crossed() > before
        for chunk in range(CHUNKS):
            seen.right_afterwards += await read_chunk(scene.asker, content, chunk, calm)
        seen.wrong += calm.wrong
        seen.faults = sum(len(mount.faults) for mount in (scene.asker, *scene.peers))
        seen.left_out = _states(scene).count("left_out")
    return seen


def exercise_peers(directory: Path, layer: Layer, blob: bytes, content: bytes, outage: PeerOutage, *, deadline_s: float) -> PeerSeen:
    """Reads before, during and after one outage. All is in `directory`, which must not be there. `deadline_s`: of a chunk."""
    directory.mkdir()
    (directory / "token").write_text(TOKEN)
    return asyncio.run(_exercise(directory, layer, blob, content, outage, deadline_s))


def peer_failures(outage: PeerOutage, seen: PeerSeen) -> list[str]:
    """What was not as it was declared."""
    found = []
    if seen.wrong:
        found.append(f"{seen.wrong} reads were wrong")
    if seen.right_afterwards != CHUNKS:
        found.append(f"{CHUNKS - seen.right_afterwards} reads failed when all was well again")
    if outage.must_fail and seen.right:
        found.append(f"{seen.right} reads succeeded: it did not fail")
    if not outage.must_fail and seen.failed:
        found.append(f"{seen.failed} reads failed, although somebody had the bytes")
    if seen.faults != seen.failed:
        found.append(f"{seen.failed} reads failed, {seen.faults} faults were reported")
    if outage.peers_serve is not None and not outage.lies and outage.peers_serve != (seen.from_peers > 0):
        found.append(f"peers sent {seen.from_peers} bytes meanwhile")
    if outage.lies == seen.asked_again:
        found.append("peers were asked again" if outage.lies else "peers were not asked again")
    if seen.left_out != (outage.peers if outage.lies else 0):
        found.append(f"{seen.left_out} of {outage.peers} peers were left out")
    return found
