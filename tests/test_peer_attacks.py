"""Peers that mean harm, and names and settings that nobody meant: no read and no plan fails for them, and nothing is left claimed."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from peer_harness import addresses, cluster, misbehaving, node, peering, read_all
from plane_harness import layers_of, wait_until
from registry_fixture import CHUNK, RegistryServer, make_layer, run_proxy
from strategies import make_content

from registry import push_group, resolve_group
from weefs import peering as peering_module
from weefs import peerserver
from weefs.coalesce import Range
from weefs.core import ChunkIndex, CoreError, Miss
from weefs.peerconfig import PeersConfig, is_address
from weefs.placement import group_of, owners
from weefs.protocol import Layer

FILES = {"large": make_content(CHUNK * 40, 1, False)}


@pytest.fixture(scope="module")
def layers(server: RegistryServer, tmp_path_factory: pytest.TempPathFactory) -> list[Layer]:
    reference = f"{server.host}/attacks:t"
    push_group(reference, [make_layer(tmp_path_factory.mktemp("layer"), "layer", FILES)])
    return layers_of(resolve_group(reference))


# what a peer says


def test_a_refusal_that_nests_deeply_fails_no_plan_and_no_read(
    layers: list[Layer], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def nested(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=404, body=b'{"x": ' + b"[" * 10000)

    async def run() -> None:
        with misbehaving(nested) as peer:
            async with node(tmp_path / "n", layers, PeersConfig(listen=addresses(1)[0], members=[peer])) as mount:
                await read_all(mount, FILES)
                assert not mount.faults

    asyncio.run(run())
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("path", ["stream", "toc"])
def test_a_peer_that_refers_to_one_many_times_makes_nobody_ask_it_many_times(layers: list[Layer], tmp_path: Path, path: str) -> None:
    asked = 0

    async def has_nothing(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += request.path.endswith(path)
        return web.json_response({"reason": "absent", "holders": []}, status=404)

    async def run() -> None:
        with misbehaving(has_nothing) as victim:

            async def refers(_request: web.Request) -> web.StreamResponse:
                return web.json_response({"reason": "crowded", "holders": [victim] * 500}, status=404)

            with misbehaving(refers) as peer:
                config = PeersConfig(listen=addresses(1)[0], members=[peer, victim])
                async with node(tmp_path / "n", layers, config) as mount:
                    await mount.read("large", 0, CHUNK)
        assert 0 < asked <= 2, "once as an owner, and once for the referral"

    asyncio.run(run())


def test_a_description_that_nests_deeply_is_refused_as_any_other(layers: list[Layer], tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, [layers]) as [mount]:
            header = base64.urlsafe_b64encode(b'{"x": ' + b"[" * 5000).decode()
            url = f"http://{peering(mount).name}/v1/layers/{layers[0].digest}/stream"
            headers = {"Weenv-Layer": header, "Range": "bytes=0-0"}
            async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
                assert answer.status == 400

    asyncio.run(run())


@pytest.mark.parametrize("name", ["node..example:1", ".example:1", "x" * 64 + ":1", ".".join(["abcdefg"] * 40) + ":1", "[1]:1", "n:0"])
def test_names_that_no_host_can_have_are_no_members(name: str) -> None:
    assert not is_address(name)


@pytest.mark.parametrize("name", ["node:1", "n-1.example:65535", "node.example.:1", "_a.b_c:1", "[::1]:1", "10.0.0.1:9", "x" * 63 + ":1"])
def test_names_that_hosts_have_are_addresses(name: str) -> None:
    assert is_address(name)


# who is asked for what


def test_what_nobody_waits_for_is_cut_along_groups_too(layers: list[Layer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group has owners of its own: what is asked of another's comes from the registry once more."""

    async def run() -> None:
        async with (
            cluster(tmp_path, [layers]) as [owner],
            node(tmp_path / "n", layers, PeersConfig(listen=addresses(1)[0], members=[peering(owner).name])) as mount,
        ):
            groups: list[set[int]] = []
            take = peering(mount).take

            async def noting(wanted: Range, digest: str, deadline: float) -> list[Miss]:
                groups.append({group_of(miss.chunk) for miss in wanted.misses})
                return await take(wanted, digest, deadline)

            monkeypatch.setattr(peering(mount), "take", noting)
            while not (await mount.plane.warmer.progress("c", layers, "all")).done:
                pass
            assert all(len(among) == 1 for among in groups), groups
            assert set.union(*groups) == {0, 1, 2}
            assert mount.plane.statistics()["sources"]["registry"]["bytes"] == 0

    asyncio.run(run())


def test_a_node_that_is_its_own_peer_by_another_name_is_told_and_does_not_wait_for_itself(
    layers: list[Layer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peerserver, "ARRIVAL_S", 60.0)
    monkeypatch.setattr(peering_module, "PEERS_S", 10.0)

    async def run() -> None:
        (name,) = addresses(1)
        alias = name.replace("127.0.0.1", "localhost")
        async with node(tmp_path / "n", layers, PeersConfig(listen=name, members=[alias])) as mount:
            async with asyncio.timeout(9):
                await read_all(mount, FILES)
            assert peering(mount).server.served.by_status[404] > 0

    asyncio.run(run())
    assert "which is this node" in capfd.readouterr().err


def test_the_first_owner_of_a_group_takes_it_from_one_behind_it_that_has_it(
    server: RegistryServer, layers: list[Layer], tmp_path: Path
) -> None:
    """It came later, or lost it: the registry is gone, and whoever has the bytes is ranked behind."""

    async def run() -> None:
        with run_proxy(server.host) as proxy:
            there = [msgspec.structs.replace(layers[0], source=layers[0].source.replace(server.host, proxy.host))]
            async with cluster(tmp_path, [there, there]) as nodes:
                first = owners(peering(nodes[0]).members.names, there[0].digest, 0)[0]
                mount, other = sorted(nodes, key=lambda node: peering(node).name != first)
                peering(other).members.names = frozenset([peering(other).name])  # it fetches all for itself
                await read_all(other, FILES)
                proxy.fault = gone
                await read_all(mount, FILES)
                assert not mount.faults
                assert mount.plane.statistics()["sources"]["registry"]["requests"] == 0

    async def gone(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=404)

    asyncio.run(run())


# what is claimed is settled


def test_what_was_claimed_is_fetched_also_when_too_much_of_the_layer_is_held(layers: list[Layer], tmp_path: Path) -> None:
    """A peer's request for a chunk that is absent and one that is there, while as many ranges are held as can be: the absent one's reader
    is answered.
    """

    async def run() -> None:
        async with cluster(tmp_path, [layers]) as [mount]:
            core, slot = mount.plane._core, mount.plane._layers[layers[0].digest].slot
            await mount.read("large", CHUNK, CHUNK)
            holds = [core.hold(slot, range(1, 2)) for _ in range(256)]
            with pytest.raises(CoreError, match="busy"):
                await mount.plane._fetcher.bring(slot, [ChunkIndex(0), ChunkIndex(1)])
            try:
                await wait_until(lambda: core.layer_info(slot).present_chunks == 2)
            finally:
                for hold in holds:
                    assert hold is not None
                    core.unhold(slot, hold)
            assert await mount.read("large", 0, CHUNK) == FILES["large"][:CHUNK]

    asyncio.run(run())
