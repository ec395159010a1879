"""The bound of a node's cache: with many layers, served and not, pinned, of before a crash, and on a disk that is full."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from plane_harness import QUICK, Mounted, layers_of, mounted, wait_until
from registry_fixture import CHUNK, make_layer
from strategies import make_content

from registry import push_group, resolve_group
from weefs.cachedir import list_layers, opened
from weefs.core import sweep_files
from weefs.errors import LayerRefused
from weefs.protocol import Layer
from weefs.room import CacheBound, disk_bytes

CHUNKS = 40
"""Of each layer's one file."""
NO_FREE_MIN = 0


def content(number: int) -> bytes:
    return make_content(CHUNK * CHUNKS, number, False)


def pushed(directory: Path, name: str, files: dict[str, bytes]) -> Layer:
    """A layer in a layout in that directory."""
    reference = f"oci:{directory}/layout:{name}"
    push_group(reference, [make_layer(directory, name, files)])
    (layer,) = layers_of(resolve_group(reference))
    return layer


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> list[Layer]:
    """Four of them."""
    directory = tmp_path_factory.mktemp("layers")
    return [pushed(directory, f"t{number}", {f"f{number}": content(number)}) for number in range(4)]


async def read_all(mount: Mounted, number: int) -> None:
    assert await mount.read(f"f{number}") == content(number)


async def read_at_random(mount: Mounted, numbers: list[int], times: int, seed: int) -> None:
    chosen = random.Random(seed)
    for _ in range(times):
        number, chunk = chosen.choice(numbers), chosen.randrange(CHUNKS)
        assert await mount.read(f"f{number}", chunk * CHUNK, CHUNK) == content(number)[chunk * CHUNK :][:CHUNK]


def used_on_disk(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in (directory / "cache").rglob("*") if path.is_file())


def test_the_bound_is_held_and_nothing_wrong_is_read(tmp_path: Path, layers: list[Layer]) -> None:
    """Two layers in a cache that one of them would fill."""
    size = CHUNK * CHUNKS
    bound = CacheBound(size, NO_FREE_MIN)
    highest = 0

    async def watch(mount: Mounted) -> None:
        nonlocal highest
        while True:
            highest = max(highest, mount.plane.room.usage.used)
            await asyncio.sleep(0.001)

    async def run() -> None:
        async with mounted(tmp_path / "m", layers[:2], bound=bound) as mount:
            watcher = asyncio.create_task(watch(mount))
            await asyncio.gather(*(read_at_random(mount, [0, 1], 100, seed) for seed in range(4)))
            watcher.cancel()
            await wait_until(lambda: mount.plane.room.usage.used <= size * bound.high_share)
            assert used_on_disk(tmp_path / "m") <= size
            assert mount.plane.statistics()["fuse"]["evicted_bytes"] > size
            assert not mount.faults

    asyncio.run(run())
    assert highest <= size


def test_layers_that_nobody_has_go_by_the_same_clock(tmp_path: Path, layers: list[Layer]) -> None:
    size = CHUNK * CHUNKS * 3

    async def run() -> None:
        for number in range(2):
            async with mounted(tmp_path / "m", [layers[number]], keep_cache=True) as mount:
                await read_all(mount, number)
        async with mounted(tmp_path / "m", layers[2:], bound=CacheBound(size, NO_FREE_MIN)) as mount:
            await read_all(mount, 2)
            await read_all(mount, 3)
            await mount.plane.room.shrink(int(size * 0.5))
            kept = {layer.record.digest: layer.present_chunks for layer in list_layers(tmp_path / "m" / "cache")}
            assert sum(kept.values()) <= CHUNKS * 1.5
            await mount.plane.room.shrink(0)
            await mount.plane.room.shrink(0)
            left = [layer.record.digest for layer in list_layers(tmp_path / "m" / "cache")]
            assert sorted(left) == sorted(layer.digest for layer in layers[2:]), "those that are served keep their metadata"
            await read_all(mount, 2)

    asyncio.run(run())


def test_a_pinned_layer_stays_whatever_is_wanted(tmp_path: Path, layers: list[Layer]) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "m", [layers[0]], keep_cache=True) as mount:
            await read_all(mount, 0)
        pinned = next(iter(list_layers(tmp_path / "m" / "cache"))).path
        (pinned / "pinned").touch()
        async with mounted(tmp_path / "m", [layers[1]], bound=CacheBound(CHUNK * CHUNKS, NO_FREE_MIN)) as mount:
            await read_all(mount, 1)
            for _ in range(3):
                await mount.plane.room.shrink(0)
            assert await mount.plane.room.collect(0, dry_run=False) == []
            found = {layer.record.digest: layer for layer in list_layers(tmp_path / "m" / "cache")}
            assert found[layers[0].digest].present_chunks == CHUNKS
            assert found[layers[0].digest].pinned
            await read_all(mount, 1)
            assert not mount.faults

    asyncio.run(run())


def test_what_opens_and_closes_layers_does_not_look_through_the_cache(
    tmp_path: Path, layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a thousand layers, that would be four thousand files each time. What is counted instead is right."""

    async def run() -> None:
        async with mounted(tmp_path / "m", [layers[0]]) as mount:
            room = mount.plane.room
            await wait_until(lambda: room._look_through_s > 0)  # it has begun with a look
            looked_at: list[Path] = []
            monkeypatch.setattr("weefs.room.disk_bytes", lambda path: looked_at.append(path) or disk_bytes(path))
            for layer in layers[1:]:
                plan = await mount.plane.add_plan([layer])
                await mount.plane.remove_plan(plan.plan_id)
            await read_all(mount, 0)
            await wait_until(lambda: list(mount.plane.statistics()["layers"]) == [layers[0].digest])
            assert looked_at == []
            counted = room.usage.used
            assert abs(counted - (await room.measure()).used) <= 64 << 10, "blocks of small files"

    asyncio.run(run())


def test_collecting_takes_whole_unused_layers_the_longest_unused_first(tmp_path: Path, layers: list[Layer]) -> None:
    async def run() -> None:
        for number in (1, 0, 2):
            async with mounted(tmp_path / "m", [layers[number]], keep_cache=True) as mount:
                await read_all(mount, number)
        for age, number in enumerate((2, 0, 1)):
            name = layers[number].digest.replace(":", "-")
            os.utime(tmp_path / "m" / "cache" / "layers" / name, (1e9 - age, 1e9 - age))
        async with mounted(tmp_path / "m", [layers[3]]) as mount:
            await read_all(mount, 3)
            room = mount.plane.room
            before = (await room.measure()).used
            would = await room.collect(before - 1, dry_run=True)
            assert [removed.digest for removed in would] == [layers[1].digest]
            assert (await room.measure()).used == before, "it was a dry run"
            assert await room.collect(before - 1, dry_run=False) == would
            assert (await room.measure()).used == before - would[0].disk_bytes
            assert [removed.digest for removed in await room.collect(0, dry_run=False)] == [layers[0].digest, layers[2].digest]
            assert await room.collect(0, dry_run=False) == []

    asyncio.run(run())


def test_verifying_drops_what_is_damaged_and_readers_get_it_anew(tmp_path: Path, layers: list[Layer]) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "m", [layers[0]], keep_cache=True) as mount:
            await read_all(mount, 0)
        async with mounted(tmp_path / "m", [layers[1]]) as mount:
            await read_all(mount, 1)
            for number in range(2):
                name = layers[number].digest.replace(":", "-")
                with (tmp_path / "m" / "cache" / "layers" / name / "data").open("r+b") as data:
                    data.seek(CHUNK * 3)
                    data.write(b"damaged")
            verified = {layer.digest: (layer.good, layer.damaged) for layer in await mount.plane.verify(None)}
            assert verified == {layers[0].digest: (CHUNKS - 1, 1), layers[1].digest: (CHUNKS - 1, 1)}
            assert [(layer.good, layer.damaged) for layer in await mount.plane.verify(layers[0].digest)] == [(CHUNKS - 1, 0)]
            with pytest.raises(LayerRefused, match="expected one that is in the cache"):
                await mount.plane.verify(layers[2].digest)
            requests = mount.traffic()["requests"]
            assert await mount.read("f1", CHUNK * 3, CHUNK) == content(1)[CHUNK * 3 : CHUNK * 4]
            assert mount.traffic()["requests"] == requests + 1

    asyncio.run(run())


def test_after_a_crash_of_the_machine_nothing_whole_is_fetched_again(
    tmp_path: Path, layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "m", [layers[0]], keep_cache=True) as mount:
            await read_all(mount, 0)
        monkeypatch.setattr("weefs.cachedir.boot_id", lambda: b"another boot id.")
        (path,) = (tmp_path / "m" / "cache" / "layers").iterdir()
        with (path / "data").open("r+b") as data:
            data.seek(CHUNK * 7)
            data.write(bytes(CHUNK))  # what a filesystem shows of a block that was not written
        async with mounted(tmp_path / "m", [layers[0]], policy=QUICK) as mount:
            await read_all(mount, 0)
            assert mount.traffic()["requests"] == 1
            assert not mount.faults

    asyncio.run(run())


def test_a_new_version_takes_from_the_disk_what_it_shares_with_the_old_one(tmp_path: Path) -> None:
    """One of 40 chunks is another; and what of the old version was evicted meanwhile is fetched."""
    new = bytearray(content(0))
    new[CHUNK * 11] ^= 1
    versions = [pushed(tmp_path, "old", {"f0": content(0)}), pushed(tmp_path, "new", {"f0": bytes(new)})]

    async def run() -> None:
        async with mounted(tmp_path / "m", versions[:1], keep_cache=True) as mount:
            await read_all(mount, 0)
        (old,) = (tmp_path / "m" / "cache" / "layers").iterdir()
        with opened(old) as files:
            assert sweep_files(files, CHUNK * 3).freed == CHUNK * 3
        async with mounted(tmp_path / "m", versions[1:]) as mount:
            await wait_until(lambda: mount.plane.statistics()["layers_compared"] == 2)
            assert await mount.read("f0") == bytes(new)
            await wait_until(lambda: mount.plane.statistics()["sources"]["copy"]["misses"] == CHUNKS - 4)
            fetched = mount.plane.statistics()["sources"]["layout"]
            assert fetched["misses"] + fetched["ahead"] == 4
            assert not mount.faults
            await mount.plane.room.collect(0, dry_run=False)
            assert mount.plane.statistics()["layers_compared"] == 1

    asyncio.run(run())


def test_a_copy_that_is_damaged_is_not_taken(tmp_path: Path) -> None:
    versions = [pushed(tmp_path, name, {"f0": content(0), name: b"so that it is another layer"}) for name in ("old", "new")]

    async def run() -> None:
        async with mounted(tmp_path / "m", versions[:1], keep_cache=True) as mount:
            await read_all(mount, 0)
        (old,) = (tmp_path / "m" / "cache" / "layers").iterdir()
        with (old / "data").open("r+b") as data:
            data.seek(CHUNK * 20)
            data.write(b"damaged")
        async with mounted(tmp_path / "m", versions[1:]) as mount:
            await wait_until(lambda: mount.plane.statistics()["layers_compared"] == 2)
            await read_all(mount, 0)
            await wait_until(lambda: mount.plane.statistics()["sources"]["copy"]["misses"] == CHUNKS - 1)
            assert not mount.faults

    asyncio.run(run())


def test_a_cache_without_any_room_serves_from_memory(tmp_path: Path, layers: list[Layer]) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "m", layers[:2], bound=CacheBound(1, NO_FREE_MIN)) as mount:
            await mount.plane.room.measure()
            await asyncio.gather(*(read_at_random(mount, [0, 1], 50, seed) for seed in range(4)))
            assert mount.plane.statistics()["fuse"]["chunks_published"] == 0
            assert not mount.faults

    asyncio.run(run())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem with room for one and a half of the layers."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = CHUNK * CHUNKS * 3 // 2
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_disk_that_others_fill_costs_fetches_and_no_reader(small_disk: Path, layers: list[Layer]) -> None:
    async def run() -> None:
        async with mounted(small_disk / "m", layers[:2], bound=CacheBound(None, NO_FREE_MIN)) as mount:
            await read_at_random(mount, [0, 1], 150, 1)
            assert mount.plane.statistics()["fuse"]["evicted_bytes"] > 0, "both layers do not fit"
            with (small_disk / "others").open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:  # until it is full
                    file.write(bytes(4096))
            await asyncio.gather(*(read_at_random(mount, [0, 1], 50, seed) for seed in range(4)))
            (small_disk / "others").unlink()
            published = mount.plane.statistics()["fuse"]["chunks_published"]
            await read_at_random(mount, [0, 1], 50, 9)
            assert mount.plane.statistics()["fuse"]["chunks_published"] > published, "there is room again"
            assert not mount.faults

    asyncio.run(run())


def test_the_filesystem_keeps_what_is_promised_to_others(tmp_path: Path, layers: list[Layer]) -> None:
    free = os.statvfs(tmp_path)

    async def run() -> None:
        bound = CacheBound(None, free.f_bavail * free.f_frsize + (1 << 40))
        async with mounted(tmp_path / "m", [layers[0]], bound=bound) as mount:
            await wait_until(lambda: mount.plane.room.usage.capacity == 0)
            await read_all(mount, 0)
            assert mount.plane.statistics()["fuse"]["chunks_published"] == 0

    asyncio.run(run())
