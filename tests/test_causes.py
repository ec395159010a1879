"""Bytes by kind of source and by cause: each byte of contents that arrives is counted once, under what it was fetched for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import attrs
import pytest
from peer_harness import cluster
from plane_harness import QUICK, Mounted, layers_of, mounted, wait_until
from registry_fixture import CHUNK, RegistryServer, make_layer
from strategies import make_content

from registry import Group, push_group, resolve_group
from weefs.causes import CAUSES
from weefs.fill import FillPolicy
from weefs.profiles import Profile, ProfileStore

CHUNKS = 40
LARGE = make_content(CHUNK * CHUNKS, 1, False)


@pytest.fixture(scope="module")
def group(server: RegistryServer, tmp_path_factory: pytest.TempPathFactory) -> Group:
    push_group(f"{server.host}/causes:t", [make_layer(tmp_path_factory.mktemp("layer"), "layer", {"large": LARGE})])
    return resolve_group(f"{server.host}/causes:t")


def counted(mount: Mounted) -> dict[str, dict[str, int]]:
    """Without zeros."""
    causes = mount.plane.statistics()["fetched_for"]
    assert all(tuple(of) == CAUSES for of in causes.values())
    found = {source: {cause: n for cause, n in of.items() if n} for source, of in causes.items()}
    return {source: of for source, of in found.items() if of}


async def until_all_is_counted(mount: Mounted) -> None:
    """Readers are answered first. Then the sums are those of the sources' own counters, whatever it was for."""

    def agrees() -> bool:
        statistics = mount.plane.statistics()
        sums = {source: sum(of.values()) for source, of in statistics["fetched_for"].items()}
        all_came = sum(sums.values()) >= mount.traffic()["present_content_bytes"]
        return all_came and sums == {source: of["bytes"] for source, of in statistics["sources"].items()}

    await wait_until(agrees)


def test_a_reader_and_what_is_read_ahead_of_it(group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "m", layers_of(group), policy=attrs.evolve(QUICK, read_ahead_chunks=4)) as mount:
            await mount.read("large", 20 * CHUNK, CHUNK)
            await until_all_is_counted(mount)
            assert counted(mount) == {"registry": {"miss": CHUNK}}
            for chunk in range(4):
                await mount.read("large", chunk * CHUNK, CHUNK)
            await wait_until(lambda: mount.plane.statistics()["fuse"]["in_flight"] == 0)
            await until_all_is_counted(mount)
            assert counted(mount) == {"registry": {"miss": 5 * CHUNK, "read_ahead": 2 * CHUNK}}

    asyncio.run(run())


def test_the_fill(group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "m", layers_of(group), fill=FillPolicy("eager")) as mount:
            await wait_until(lambda: mount.traffic()["fill"]["state"] == "full")
            await until_all_is_counted(mount)
            assert counted(mount) == {"registry": {"fill": len(LARGE)}}

    asyncio.run(run())


def test_a_profile_and_a_prefetch(group: Group, tmp_path: Path) -> None:
    (tmp_path / "m/cache").mkdir(parents=True)
    digest = group.layers[0].digest
    ProfileStore(tmp_path / "m/cache").save(Profile(layer=digest, layer_chunks=CHUNKS, chunks=(3, 4, 9), missed=(0, 0, 0)))

    async def run() -> None:
        async with mounted(tmp_path / "m", layers_of(group), profiles=True) as mount:
            await wait_until(lambda: mount.traffic()["present_content_bytes"] >= 3 * CHUNK)
            await wait_until(lambda: mount.plane.statistics()["fuse"]["in_flight"] == 0)
            await until_all_is_counted(mount)
            known = counted(mount)["registry"]["profile"]
            assert known >= 3 * CHUNK
            while not (await mount.plane.warmer.progress("c", layers_of(group), "all")).done:
                pass
            assert counted(mount) == {"registry": {"profile": known, "prefetch": len(LARGE) - known}}

    asyncio.run(run())


def test_peers(group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, [layers_of(group), layers_of(group)]) as nodes:
            for mount in nodes:
                assert await mount.read("large") == LARGE
            for mount in nodes:
                await until_all_is_counted(mount)
            assert sum(counted(mount).get("registry", {}).get("miss", 0) for mount in nodes) == len(LARGE), "once among them"
            assert sum(counted(mount).get("peer", {}).get("miss", 0) for mount in nodes) == len(LARGE), "each of them has all"

    asyncio.run(run())


def test_copies(server: RegistryServer, group: Group, tmp_path: Path) -> None:
    push_group(f"{server.host}/causes:more", [make_layer(tmp_path, "more", {"large": LARGE, "more": b"more"})])
    more = resolve_group(f"{server.host}/causes:more")

    async def run() -> None:
        async with mounted(tmp_path / "m", layers_of(group), keep_cache=True) as mount:
            assert await mount.read("large") == LARGE
        async with mounted(tmp_path / "m", layers_of(more)) as mount:
            await wait_until(lambda: mount.plane.statistics()["layers_compared"] == 2)
            assert await mount.read("large") == LARGE
            await until_all_is_counted(mount)
            assert counted(mount)["copy"] == {"miss": len(LARGE)}

    asyncio.run(run())
