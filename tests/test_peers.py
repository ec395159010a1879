"""Nodes as each other's peers: what the registry sends, and what happens when a peer dies, stalls, lies or is not allowed in.

Requests and bytes are counted, times are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from peer_fronts import Fail, Front, cut, stall_midway
from peer_harness import GONE, addresses, ask, cluster, make_certificates, misbehaving, never, node, peering, read_all
from plane_harness import QUICK, layers_of, wait_until
from registry_fixture import CHUNK, Proxy, RegistryServer, make_layer
from strategies import make_content

from layerformat import Layer as LayerFile
from registry import push_group, resolve_group
from weefs import peering as peering_module
from weefs import peerserver, placement
from weefs.core import ChunkIndex, CoreError
from weefs.crowd import CHILDREN
from weefs.errors import LayerRefused
from weefs.peerconfig import PeersConfig
from weefs.peerhealth import FAILURES
from weefs.peerserver import MAX_RANGE_BYTES
from weefs.placement import OWNERS, owners
from weefs.protocol import Layer

FILES = {f"large{i}": make_content(CHUNK * 24 + 777 * i, i, False) for i in range(3)} | {"small": b"small"}
TOKEN = "a token of thirty-two characters".replace(" ", "-")


@pytest.fixture(scope="module")
def layer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_layer(tmp_path_factory.mktemp("layer"), "layer", FILES)


@pytest.fixture
def proxy(proxy: Proxy, server: RegistryServer, layer_file: Path) -> Proxy:
    push_group(f"{server.host}/repo:t", [layer_file])
    return proxy


@pytest.fixture
def layers(proxy: Proxy) -> list[Layer]:
    """Of the group; nothing is counted yet."""
    found = layers_of(resolve_group(f"{proxy.host}/repo:t"))
    proxy.seen.clear()
    return found


def stream_of(layer_file: Path) -> bytes:
    """The layer's logical stream."""
    with LayerFile.open(layer_file) as layer:
        stream = bytearray(layer.toc.chunks[-1].stream_offset + layer.toc.chunks[-1].raw_size)
        for name, data in FILES.items():
            number = layer.lookup(name.encode())
            assert number is not None
            at = layer.inode(number).data
            stream[at : at + len(data)] = data
        return bytes(stream)


def sent_by_registry(proxy: Proxy, layer_file: Path) -> Counter[int]:
    """How often each chunk was sent."""
    with LayerFile.open(layer_file) as layer:
        chunks = [(chunk.blob_offset, chunk.stored_size) for chunk in layer.toc.chunks]
    times: Counter[int] = Counter()
    for one in proxy.blob_reads():
        if one.range is None or "/repo/" not in one.path:
            continue
        begin, _, last = one.range.removeprefix("bytes=").partition("-")
        times.update(i for i, (offset, size) in enumerate(chunks) if int(begin) <= offset and offset + size <= int(last) + 1)
    return times


def absent() -> web.Response:
    """What a peer says that has nothing and knows nobody."""
    return web.Response(status=404, body=b'{"reason": "absent", "holders": []}')


async def send_half(request: web.Request) -> web.StreamResponse:
    """Of what was asked for, as if the rest were to come."""
    begin, _, last = request.headers["Range"].removeprefix("bytes=").partition("-")
    response = web.StreamResponse(status=206, headers={"Content-Range": f"bytes {begin}-{last}/*"})
    response.content_length = int(last) - int(begin) + 1
    await response.prepare(request)
    await response.write(b"x" * (response.content_length // 2))
    return response


def blob_bytes(proxy: Proxy) -> int:
    return sum(one.received_bytes for one in proxy.blob_reads())


# the registry's share


def test_the_registry_sends_each_chunk_once_to_four_nodes_that_start_at_once(
    proxy: Proxy, layers: list[Layer], layer_file: Path, tmp_path: Path
) -> None:
    async def alone() -> None:
        async with node(tmp_path / "alone", layers, PeersConfig(listen=addresses(1)[0])) as mount:
            await read_all(mount, FILES)

    asyncio.run(alone())
    of_one = blob_bytes(proxy)
    proxy.seen.clear()

    async def together() -> None:
        async with cluster(tmp_path, [layers] * 4) as nodes:
            await asyncio.gather(*(read_all(mount, FILES) for mount in nodes))
            chunks = len(sent_by_registry(proxy, layer_file))

            def taken(source: str) -> int:
                return sum(mount.plane.statistics()["sources"][source]["misses"] for mount in nodes)

            # A reader has its answer a moment before it is counted.
            await wait_until(lambda: taken("registry") + taken("peer") == 4 * chunks)
            figures = [mount.plane.statistics() for mount in nodes]
            assert all(not mount.faults for mount in nodes)
            received = sum(each["peers"]["received_bytes"] for each in figures)
            assert received >= 3 * sum(map(len, FILES.values())) * 0.8
            assert sum(each["peers"]["served_bytes"] for each in figures) >= received
            by_peers = [each["sources"]["peer"] for each in figures]
            assert sum(each["bytes"] + each["metadata_bytes"] for each in by_peers) == received

    asyncio.run(together())
    times = sent_by_registry(proxy, layer_file)
    assert max(times.values()) <= OWNERS
    assert blob_bytes(proxy) <= 1.2 * of_one


def test_without_members_nothing_changes(proxy: Proxy, layers: list[Layer], layer_file: Path, tmp_path: Path) -> None:
    async def run() -> None:
        name = addresses(1)[0]
        async with node(tmp_path / "1", layers, PeersConfig(listen=name, members=[name])) as mount:
            await read_all(mount, FILES)
            assert mount.plane.statistics()["sources"]["peer"]["requests"] == 0
            assert mount.plane.statistics()["peers"]["members"] == []

    asyncio.run(run())
    assert set(sent_by_registry(proxy, layer_file).values()) == {1}


def test_an_owner_opens_a_layer_that_only_its_peers_want(
    proxy: Proxy, layers: list[Layer], server: RegistryServer, layer_file: Path, tmp_path: Path
) -> None:
    """The registry is asked by the owner alone; the layer goes when nobody has asked for some time."""
    push_group(f"{server.host}/other:t", [make_layer(tmp_path, "other", {"f": b"of the owner"})])
    other = layers_of(resolve_group(f"{proxy.host}/other:t"))
    digest = layers[0].digest

    async def run() -> None:
        owner, asker = addresses(2)
        settings = PeersConfig(listen=owner, members=[owner])
        async with (
            node(tmp_path / "owner", other, settings) as its,
            node(tmp_path / "asker", layers, msgspec.structs.replace(settings, listen=asker)) as mount,
        ):
            await read_all(mount, FILES)
            assert mount.plane.statistics()["sources"]["registry"]["requests"] == 0
            assert peering(its).statistics()["lent_layers"] == 1
            assert digest in its.plane.statistics()["layers"]
            peering(its).lending.clear(float("inf"))
            await wait_until(lambda: digest not in its.plane.statistics()["layers"])
            assert await its.read("f") == b"of the owner"

    asyncio.run(run())
    assert set(sent_by_registry(proxy, layer_file).values()) == {1}


def test_no_layer_is_opened_from_a_source_that_peers_may_not_use(proxy: Proxy, layers: list[Layer], tmp_path: Path) -> None:
    async def run() -> None:
        name = addresses(1)[0]
        async with node(tmp_path / "1", layers, PeersConfig(listen=name, members=[name])):
            digest = f"sha256:{'0' * 64}"
            for source in ("oci:/etc", "http://127.0.0.1:1/elsewhere", "https://metadata.internal/x"):
                strange = msgspec.structs.replace(layers[0], digest=digest, source=source, toc_digest=digest)
                answer = await ask(name, digest, 0, 10, layer=strange)
                assert answer.status == 403
                assert b"may not be opened" in answer.body

    asyncio.run(run())


def test_a_toc_that_a_peer_described_wrongly_is_used_for_no_plan(
    proxy: Proxy, layers: list[Layer], server: RegistryServer, layer_file: Path, tmp_path: Path
) -> None:
    """A blob may hold several tables; which is the layer's says its manifest, and not a peer."""
    push_group(f"{server.host}/other:t", [make_layer(tmp_path, "other", {"f": b"f"})])
    other = layers_of(resolve_group(f"{proxy.host}/other:t"))[0]
    # The same blob, but by the name of the layer: what a registry in the hands of a peer would send.
    stored = server.blob_file(other.digest).read_bytes()
    claimed = msgspec.structs.replace(other, digest=layers[0].digest)

    async def send_other(request: web.Request) -> web.StreamResponse | None:
        if request.method != "GET" or layers[0].digest not in request.path:
            return None
        begin, _, last = request.headers["Range"].removeprefix("bytes=").partition("-")
        body = stored[int(begin) : int(last) + 1]
        return web.Response(status=206, headers={"Content-Range": f"bytes {begin}-{last}/{len(stored)}"}, body=body)

    async def run() -> None:
        name = addresses(1)[0]
        proxy.fault = send_other
        async with node(tmp_path / "1", [other], PeersConfig(listen=name, members=[name])) as mount:
            assert (await ask(name, claimed.digest, 0, 1, layer=claimed)).status == 206
            proxy.fault = None
            with pytest.raises(BaseExceptionGroup) as refused:
                await mount.plane.add_plan(layers)
            assert refused.group_contains(LayerRefused, match="a peer that asked for it described it")
            no_annotations = msgspec.structs.replace(
                layers[0], toc_offset=None, toc_size_bytes=None, toc_raw_size_bytes=None, toc_digest=None
            )
            with pytest.raises(BaseExceptionGroup) as refused:
                await mount.plane.add_plan([no_annotations])
            assert refused.group_contains(LayerRefused, match="a peer that asked for it described it")

    asyncio.run(run())


def test_a_layer_that_a_peer_described_rightly_is_used_for_a_plan(
    proxy: Proxy, layers: list[Layer], server: RegistryServer, tmp_path: Path
) -> None:
    push_group(f"{server.host}/other:t", [make_layer(tmp_path, "other", {"f": b"f"})])
    other = layers_of(resolve_group(f"{proxy.host}/other:t"))

    async def run() -> None:
        name = addresses(1)[0]
        async with node(tmp_path / "1", other, PeersConfig(listen=name, members=[name])) as mount:
            assert (await ask(name, layers[0].digest, 0, CHUNK, layer=layers[0])).status == 206
            proxy.seen.clear()
            plan = await mount.plane.add_plan(layers)
            assert plan.entries
            assert proxy.seen == []

    asyncio.run(run())


def test_a_toc_comes_from_a_peer(proxy: Proxy, layers: list[Layer], server: RegistryServer, tmp_path: Path) -> None:
    """From one that has it, and from one that must get it first; compared with the digest that the manifest says."""
    push_group(f"{server.host}/other:t", [make_layer(tmp_path, "other", {"f": b"f"})])
    other = layers_of(resolve_group(f"{proxy.host}/other:t"))
    toc_offset = f"bytes={layers[0].toc_offset}-"

    def tocs() -> int:
        return sum(one.range is not None and one.range.startswith(toc_offset) for one in proxy.blob_reads())

    async def run() -> None:
        owner, *askers = addresses(4)
        async with (
            node(tmp_path / "owner", other, PeersConfig(listen=owner, members=[owner])),
            node(tmp_path / "a", layers, PeersConfig(listen=askers[0], members=[owner])) as a,
            node(tmp_path / "b", layers, PeersConfig(listen=askers[1], members=[owner])) as b,
        ):
            for mount in (a, b):
                assert mount.plane.statistics()["sources"]["registry"]["metadata_requests"] == 0
                assert mount.plane.statistics()["sources"]["peer"]["metadata_bytes"] == layers[0].toc_raw_size_bytes
            assert tocs() == 1
            unsaid = [msgspec.structs.replace(layers[0], toc_digest=None)]
            async with node(tmp_path / "c", unsaid, PeersConfig(listen=askers[2], members=[owner])) as c:
                assert c.plane.statistics()["sources"]["peer"]["metadata_requests"] == 0

    asyncio.run(run())


def test_a_toc_that_is_another_is_a_lie(proxy: Proxy, layers: list[Layer], tmp_path: Path) -> None:
    async def lie(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"no TOC")

    async def run() -> None:
        with misbehaving(lie) as liar:
            async with node(tmp_path / "1", layers, PeersConfig(listen=addresses(1)[0], members=[liar])) as mount:
                assert [peer["state"] for peer in mount.plane.statistics()["peers"]["members"]] == ["left_out"]
                await read_all(mount, FILES)

    asyncio.run(run())


# peers that fail


def test_a_peer_that_is_gone_costs_nothing_but_a_few_refused_connections(
    proxy: Proxy, layers: list[Layer], layer_file: Path, tmp_path: Path
) -> None:
    async def run() -> None:
        async with node(tmp_path / "1", layers, PeersConfig(listen=addresses(1)[0], members=[GONE])) as mount:
            await read_all(mount, FILES)
            assert mount.faults == []
            assert [peer["state"] for peer in mount.plane.statistics()["peers"]["members"]] == ["down"]
            assert mount.plane.statistics()["sources"]["peer"]["misses"] == 0

    asyncio.run(run())
    assert set(sent_by_registry(proxy, layer_file).values()) == {1}


def test_a_peer_that_dies_in_the_middle(proxy: Proxy, layers: list[Layer], layer_file: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, [layers] * 4) as nodes:
            dying, *others = nodes
            reads = [asyncio.create_task(read_all(mount, FILES)) for mount in others]
            await wait_until(lambda: peering(dying).server.served.bytes > 0 or all(read.done() for read in reads))
            await peering(dying).server.close()
            await asyncio.gather(*reads)
            await read_all(dying, FILES)
            assert all(not mount.faults for mount in nodes)

    asyncio.run(run())
    assert max(sent_by_registry(proxy, layer_file).values()) <= OWNERS


def test_a_peer_that_cuts_its_answer_short(proxy: Proxy, layers: list[Layer], layer_file: Path, tmp_path: Path) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/toc"):
            return absent()
        response = await send_half(request)
        assert request.transport is not None
        request.transport.close()
        return response

    async def run() -> None:
        with misbehaving(cut) as address:
            async with node(tmp_path / "1", layers, PeersConfig(listen=addresses(1)[0], members=[address])) as mount:
                await read_all(mount, FILES)
                assert peering(mount).counted.lies == 0
                assert mount.plane.statistics()["sources"]["peer"]["misses"] == 0

    asyncio.run(run())
    assert set(sent_by_registry(proxy, layer_file).values()) == {1}


@pytest.mark.parametrize("fail", [stall_midway, cut(lambda body: 1)], ids=["stalls", "is-cut"])
def test_a_peer_that_begins_answers_and_does_not_end_them_is_given_up(
    proxy: Proxy, layers: list[Layer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Fail
) -> None:
    """Else each read waited for it, again and again. Its first bytes are a sign of life, and no more."""
    monkeypatch.setattr(peering_module, "PEERS_S", 0.2)

    async def run() -> None:
        async with cluster(tmp_path, [layers]) as [holder]:
            await read_all(holder, FILES)
            front = Front(addresses(1)[0], peering(holder).name)
            await front.start()
            async with node(tmp_path / "asker", layers, PeersConfig(listen=addresses(1)[0], members=[front.address])) as asker:
                front.fail = fail
                for number in range(FAILURES):
                    assert peering(asker).statistics()["members"][0]["state"] == "up"
                    at = number * CHUNK * 4
                    assert await asker.read("large0", at, CHUNK) == FILES["large0"][at : at + CHUNK]
                assert peering(asker).statistics()["members"][0]["state"] == "down"
            await front.stop()

    asyncio.run(run())


@pytest.mark.parametrize("halfway", [False, True], ids=["at_once", "halfway"])
def test_a_peer_that_stalls_loses_to_the_next_owner(
    proxy: Proxy, layers: list[Layer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, halfway: bool
) -> None:
    monkeypatch.setattr(peering_module, "PEERS_S", 600.0)  # only the next owner can end it

    async def stall(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/toc"):
            return absent()
        if halfway:
            await send_half(request)
        return await never(request)

    async def run() -> None:
        with misbehaving(stall) as stalled:
            async with cluster(tmp_path, [layers]) as [holder]:
                await read_all(holder, FILES)
                before = blob_bytes(proxy)
                members = [peering(holder).name, stalled]
                monkeypatch.setattr(placement, "places_to_ask", lambda *_: [stalled, peering(holder).name])
                async with node(tmp_path / "asker", layers, PeersConfig(listen=addresses(1)[0], members=members)) as asker:
                    toc = blob_bytes(proxy) - before
                    await read_all(asker, FILES)
                    assert peering(asker).counted.hedges > 0
                    assert blob_bytes(proxy) == before + toc  # not one chunk
                    states = {peer["address"]: peer["state"] for peer in asker.plane.statistics()["peers"]["members"]}
                    assert states[peering(holder).name] == "up"

    asyncio.run(run())


def test_a_peer_that_lies_is_left_out_and_the_bytes_are_right(
    proxy: Proxy, layers: list[Layer], layer_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = []

    async def lie(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/toc"):
            return absent()
        asked.append(request.headers["Range"])
        begin, _, last = request.headers["Range"].removeprefix("bytes=").partition("-")
        body = os.urandom(int(last) - int(begin) + 1)
        return web.Response(status=206, headers={"Content-Range": f"bytes {begin}-{last}/*"}, body=body)

    async def run() -> None:
        with misbehaving(lie) as liar:
            async with node(tmp_path / "1", layers, PeersConfig(listen=addresses(1)[0], members=[liar])) as mount:
                await mount.read("large0", 0, 4096)
                assert len(asked) == 1
                await read_all(mount, FILES)
                assert len(asked) == 1  # never again
                assert mount.faults == []
                figures = mount.plane.statistics()
                assert [peer["state"] for peer in figures["peers"]["members"]] == ["left_out"]
                assert figures["peers"]["lies"] == 1
                assert figures["fuse"]["chunks_rejected"] >= 1

        assert f"{liar} sent bytes without their digest" in capfd.readouterr().err

    asyncio.run(run())
    assert set(sent_by_registry(proxy, layer_file).values()) == {1}


def test_a_peer_with_a_damaged_disk_is_found_out(proxy: Proxy, layers: list[Layer], layer_file: Path, tmp_path: Path) -> None:
    """What it has is not what it was sent; it does not know."""

    async def run() -> None:
        async with cluster(tmp_path, [layers]) as [damaged]:
            await read_all(damaged, FILES)
            data = damaged.plane._cache.directory(layers[0].digest) / "data"
            data.write_bytes(bytes(data.stat().st_size))
            members = [peering(damaged).name]
            async with node(tmp_path / "asker", layers, PeersConfig(listen=addresses(1)[0], members=members)) as asker:
                await read_all(asker, FILES)
                assert asker.faults == []
                assert [peer["state"] for peer in asker.plane.statistics()["peers"]["members"]] == ["left_out"]

    asyncio.run(run())


def test_nodes_that_believe_in_different_members_do_not_wait_for_each_other(
    proxy: Proxy, layers: list[Layer], layer_file: Path, tmp_path: Path
) -> None:
    """Each believes that the others own everything. Nobody fails, which a circle's end by its time-outs would be."""

    async def run() -> None:
        names = addresses(4)
        async with (
            node(tmp_path / "0", layers, PeersConfig(listen=names[0], members=names[1:])) as a,
            node(tmp_path / "1", layers, PeersConfig(listen=names[1], members=[names[0], *names[2:]])) as b,
            node(tmp_path / "2", layers, PeersConfig(listen=names[2], members=[*names[:2], names[3]])) as c,
            node(tmp_path / "3", layers, PeersConfig(listen=names[3], members=names[:3])) as d,
        ):
            nodes = (a, b, c, d)
            await asyncio.gather(*(read_all(mount, FILES) for mount in nodes))
            assert all(not mount.faults for mount in nodes)
            assert all(peer["state"] == "up" for mount in nodes for peer in mount.plane.statistics()["peers"]["members"])

    asyncio.run(run())


# what is served


def test_ranges_are_exact_and_bounded(layers: list[Layer], layer_file: Path, tmp_path: Path) -> None:
    stream = stream_of(layer_file)
    digest = layers[0].digest

    async def run() -> None:
        async with cluster(tmp_path, [layers]) as [mount]:
            name = peering(mount).name
            assert (await ask(name, digest, 0, 10)).status == 404  # not here yet, and not asked to fetch it
            await read_all(mount, FILES)
            for offset, size in ((0, 1), (0, 2), (CHUNK - 3, 7), (CHUNK * 5 + 11, CHUNK * 9), (len(stream) - 1, 1), (0, len(stream))):
                answer = await ask(name, digest, offset, size)
                assert answer.status == 206
                assert answer.headers["Content-Range"] == f"bytes {offset}-{offset + size - 1}/*"
                assert answer.body == stream[offset : offset + size]
            assert (await ask(name, digest, len(stream), 1)).status == 416
            assert (await ask(name, digest, len(stream) - 1, 2)).status == 416
            assert (await ask(name, digest, 0, MAX_RANGE_BYTES + 1)).status == 416
            assert (await ask(name, digest, 5, 0)).status == 416
            assert (await ask(name, f"sha256:{'1' * 64}", 0, 1)).status == 404
            assert (await ask(name, "sha256:../../etc/passwd", 0, 1)).status == 400
            wrong = msgspec.structs.replace(layers[0], digest=f"sha256:{'1' * 64}")
            assert (await ask(name, digest, 0, 1, layer=wrong)).status == 400

    asyncio.run(run())


async def paused_answer(address: str, digest: str, size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request whose answer is not read yet: more than the sockets hold, so that the sender stands still."""
    connection = socket.socket()
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, _, port = address.partition(":")
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    writer.write(f"GET /v1/layers/{digest}/stream HTTP/1.1\r\nHost: x\r\nRange: bytes=0-{size - 1}\r\n\r\n".encode())
    assert await reader.readline() == b"HTTP/1.1 206 Partial Content\r\n"
    while await reader.readline() != b"\r\n":
        pass
    return reader, writer


BIG = {"big": make_content(CHUNK * 200, 7, False)}
"""More than the sockets of a connection take."""


@pytest.fixture
def big_layers(server: RegistryServer, tmp_path: Path) -> list[Layer]:
    push_group(f"{server.host}/big:t", [make_layer(tmp_path, "big", BIG)])
    return layers_of(resolve_group(f"{server.host}/big:t"))


def test_a_chunk_is_not_evicted_while_it_is_sent(big_layers: list[Layer], tmp_path: Path) -> None:
    size = CHUNK * 200
    digest = big_layers[0].digest

    async def run() -> None:
        async with cluster(tmp_path, [big_layers]) as [mount]:
            await read_all(mount, BIG)
            core, slot = mount.plane._core, mount.plane._layers[digest].slot
            reader, writer = await paused_answer(peering(mount).name, digest, size)
            for _ in range(3):
                assert core.sweep(slot, 1 << 40).freed == 0
            assert await reader.readexactly(size) == BIG["big"]
            writer.close()
            await wait_until(lambda: sum(core.sweep(slot, 1 << 40).freed for _ in range(2)) > 0)
            assert core.layer_info(slot).present_chunks == 0

    asyncio.run(run())


def test_what_is_lost_while_it_is_sent_is_not_sent_to_its_end(big_layers: list[Layer], tmp_path: Path) -> None:
    """Found damaged in the middle: the peer learns that it has nothing, and not that this node lies."""
    size = CHUNK * 200
    digest = big_layers[0].digest

    async def run() -> None:
        async with cluster(tmp_path, [big_layers]) as [mount]:
            await read_all(mount, BIG)
            core, slot = mount.plane._core, mount.plane._layers[digest].slot
            reader, writer = await paused_answer(peering(mount).name, digest, size)
            with (mount.plane._cache.directory(digest) / "data").open("r+b") as data:
                data.seek(CHUNK * 150)
                data.write(b"damage")
            with pytest.raises(CoreError):
                core.check_chunk(slot, ChunkIndex(150))
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(size)
            writer.close()
            assert peering(mount).server.served.aborted == 1
            assert peering(mount).server.served.bytes == 0

    asyncio.run(run())


def test_a_peer_that_does_not_read_on_is_cut_off(big_layers: list[Layer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep chunks from being evicted for as long as it likes."""
    monkeypatch.setattr(peerserver, "SEND_S", 0.05)
    digest = big_layers[0].digest

    async def run() -> None:
        async with cluster(tmp_path, [big_layers]) as [mount]:
            await read_all(mount, BIG)
            core, slot = mount.plane._core, mount.plane._layers[digest].slot
            reader, writer = await paused_answer(peering(mount).name, digest, CHUNK * 200)
            await wait_until(lambda: peering(mount).server.served.aborted == 1)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(CHUNK * 200)
            writer.close()
            assert sum(core.sweep(slot, 1 << 40).freed for _ in range(2)) > 0

    asyncio.run(run())


def test_holds_are_bounded_and_given_back(big_layers: list[Layer], tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, [big_layers]) as [mount]:
            core, slot = mount.plane._core, mount.plane._layers[big_layers[0].digest].slot
            assert core.hold(slot, range(1)) is None
            await read_all(mount, BIG)
            holds = []
            for _ in range(256):
                hold = core.hold(slot, range(1))
                assert hold is not None
                holds.append(hold)
            assert len(set(holds)) == 256
            with pytest.raises(CoreError, match="busy"):
                core.hold(slot, range(1))
            assert (await ask(peering(mount).name, big_layers[0].digest, 0, 1)).status == 503
            for hold in holds:
                assert core.unhold(slot, hold)
            assert (await ask(peering(mount).name, big_layers[0].digest, 0, 1)).status == 206

    asyncio.run(run())


def test_a_crowd_is_sent_on(layers: list[Layer], tmp_path: Path) -> None:
    async def run() -> None:
        askers = [f"127.0.0.1:{i}" for i in range(1, CHILDREN + 4)]
        async with cluster(tmp_path, [layers], more=askers) as [mount]:
            name, digest = peering(mount).name, layers[0].digest
            await read_all(mount, FILES)
            for asker in askers[:CHILDREN]:
                assert (await ask(name, digest, 0, CHUNK, name=asker)).status == 206
            for asker in askers[CHILDREN:]:
                answer = await ask(name, digest, 0, CHUNK, name=asker)
                assert answer.status == 404
                assert sorted(msgspec.json.decode(answer.body)["holders"]) == sorted(askers[:CHILDREN])
            assert (await ask(name, digest, 0, CHUNK, name=askers[0])).status == 206  # who was let in
            assert (await ask(name, digest, 0, CHUNK, name="a stranger")).status == 206  # whom nobody could be sent to

    asyncio.run(run())


def test_whoever_is_sent_on_gets_it_there(
    proxy: Proxy, layers: list[Layer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More nodes than one sends to, one after the other, with one owner that has everything."""
    whole = sum(map(len, FILES.values()))

    async def run() -> None:
        names = addresses(CHILDREN + 4)
        async with cluster(tmp_path, [layers]) as [holder], contextlib.AsyncExitStack() as stack:
            owner = peering(holder).name
            monkeypatch.setattr(placement, "owners", lambda members, layer, group: [owner])
            await read_all(holder, FILES)
            nodes = []
            for number, name in enumerate(names):
                config = PeersConfig(listen=name, members=[owner, *names])
                nodes.append(await stack.enter_async_context(node(tmp_path / f"n{number}", layers, config)))
            peering(holder).members.names = frozenset([owner, *names])
            proxy.seen.clear()
            for mount in nodes:
                await read_all(mount, FILES)
            assert blob_bytes(proxy) == 0
            # Reads of one node may be cut at other places than another's: a chunk may be sent once more, for a range that nobody has whole.
            assert peering(holder).server.served.bytes < (CHILDREN + 2) * whole
            assert sum(peering(mount).server.served.bytes for mount in nodes) > 2 * whole

    asyncio.run(run())


# who is let in


def test_a_wrong_token_is_refused_and_costs_no_read(proxy: Proxy, layers: list[Layer], layer_file: Path, tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(TOKEN + "\n")
    wrong.write_text("another-token-of-some-length")

    async def run() -> None:
        async with cluster(tmp_path, [layers], token_file=str(right)) as [holder]:
            await read_all(holder, FILES)
            name, digest = peering(holder).name, layers[0].digest
            for token in (None, "", "wrong", TOKEN[:-1], TOKEN + "x", "ü"):
                assert (await ask(name, digest, 0, 10, token=token)).status == 401
            assert (await ask(name, digest, 0, 10, token=TOKEN)).status == 206
            config = PeersConfig(listen=addresses(1)[0], members=[name], token_file=str(wrong))
            async with node(tmp_path / "asker", layers, config) as mount:
                await read_all(mount, FILES)
                assert mount.plane.statistics()["peers"]["received_bytes"] == 0
                assert [peer["state"] for peer in mount.plane.statistics()["peers"]["members"]] == ["down"]
            config = msgspec.structs.replace(config, token_file=str(right))
            async with node(tmp_path / "friend", layers, config) as mount:
                await read_all(mount, FILES)
                assert mount.plane.statistics()["sources"]["registry"]["requests"] == 0

    asyncio.run(run())


def test_with_tls_both_sides_show_a_certificate(proxy: Proxy, layers: list[Layer], tmp_path: Path) -> None:
    ours = make_certificates(tmp_path / "ours")
    others = make_certificates(tmp_path / "others")

    async def run() -> None:
        async with cluster(tmp_path, [layers], **ours) as [holder]:
            await read_all(holder, FILES)
            config = PeersConfig(listen=addresses(1)[0], members=[peering(holder).name], **ours)
            async with node(tmp_path / "friend", layers, config) as mount:
                await read_all(mount, FILES)
                assert mount.plane.statistics()["sources"]["registry"]["requests"] == 0
                assert peering(holder).server.served.bytes >= sum(map(len, FILES.values()))
            served = peering(holder).server.served.bytes
            for settings in (others, others | {"tls_ca": ours["tls_ca"]}, {}):
                config = PeersConfig(listen=addresses(1)[0], members=[peering(holder).name], **settings)
                async with node(tmp_path / "stranger", layers, config) as mount:
                    await read_all(mount, FILES)
                    assert mount.plane.statistics()["peers"]["received_bytes"] == 0
            assert peering(holder).server.served.bytes == served

    asyncio.run(run())


def test_owners_are_who_the_nodes_take_them_for() -> None:
    """The tests above rely on it: one member owns everything."""
    assert owners([GONE], "sha256:x", 0) == [GONE]
    assert QUICK.deadline_s > 6
