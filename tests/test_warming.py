"""Layers that are brought into the cache before anybody wants them: what is brought and shared, what is left alone, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import attrs
import pytest
from aiohttp import web
from peer_harness import addresses, node
from plane_harness import QUICK, Mounted, layers_of, mounted, wait_until
from registry_fixture import CHUNK, Proxy, RegistryServer, make_layer
from strategies import make_content

from registry import Group, parse_reference, push_group, resolve_group
from registry.referrers import attach, fallback_tag, read_subject
from weefs.cachedir import list_layers
from weefs.coalesce import MAX_RANGE_BYTES
from weefs.core import ChunkIndex
from weefs.peerconfig import PeersConfig
from weefs.profiles import ARTIFACT_TYPE, DOCUMENT_TYPE, Profile, ProfileStore, document_of
from weefs.protocol import Layer, PrefetchProgress, PrefetchWhat
from weefs.room import CacheBound

CHUNKS = 200
SMALL_CHUNKS = 20
LARGE = make_content(CHUNK * CHUNKS, 1, False)
OTHER = make_content(CHUNK * SMALL_CHUNKS, 2, False)
NAMED = (150, 7, 8, 9, 151)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("layers")
    return make_layer(directory, "large", {"large": LARGE}), make_layer(directory, "other", {"other": OTHER})


@pytest.fixture
def proxy(proxy: Proxy, server: RegistryServer, files: tuple[Path, Path]) -> Proxy:
    push_group(f"{server.host}/warm:large", [files[0]])
    push_group(f"{server.host}/warm:other", [files[1]])
    return proxy


@pytest.fixture
def group(proxy: Proxy) -> Group:
    return resolve_group(f"{proxy.host}/warm:large")


@pytest.fixture
def other(proxy: Proxy, group: Group) -> Group:
    """What the mount shows. Nothing is counted of the two's resolution."""
    other = resolve_group(f"{proxy.host}/warm:other")
    proxy.seen.clear()
    return other


def contents_of(proxy: Proxy, group: Group) -> list[int]:
    """The chunks of a group's one layer that were asked for: they are as large in the blob as in the stream."""
    layer, chunks = group.layers[0], []
    for one in proxy.blob_reads():
        if layer.digest in one.path and one.range is not None:
            begin, _, last = one.range.removeprefix("bytes=").partition("-")
            if int(begin) != layer.toc_offset:
                chunks += range(int(begin) // CHUNK, -(-(int(last) + 1) // CHUNK))
    return sorted(chunks)


async def warmed(mount: Mounted, layers: list[Layer], what: PrefetchWhat = "auto", caller: str = "c") -> PrefetchProgress:
    while not (progress := await mount.plane.warmer.progress(caller, layers, what)).done:
        assert progress.done_bytes <= progress.wanted_bytes
    return progress


def save_profile(directory: Path, group: Group) -> None:
    """As if earlier runs had read these."""
    (directory / "cache").mkdir(parents=True)
    known = Profile(layer=group.layers[0].digest, layer_chunks=CHUNKS, chunks=NAMED, missed=(0,) * len(NAMED))
    ProfileStore(directory / "cache").save(known)


def test_a_whole_layer_is_brought_once_and_is_there_without_the_registry(proxy: Proxy, group: Group, other: Group, tmp_path: Path) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "m", layers_of(other), keep_cache=True) as mount:
            progress = await warmed(mount, layers_of(group))
            (layer,) = progress.layers
            assert (layer.by, layer.failure, layer.failure_kind) == ("all", "", None)
            assert progress.done_bytes == progress.wanted_bytes == len(LARGE)
            assert contents_of(proxy, group) == [*range(CHUNKS)], "each chunk once"
            assert await warmed(mount, layers_of(group)) == progress, "idempotent"
            assert contents_of(proxy, group) == [*range(CHUNKS)]
            await wait_until(lambda: group.layers[0].digest not in mount.plane.statistics()["layers"])
        proxy.fault = lambda _request: _answer(503)
        async with mounted(tmp_path / "m", layers_of(group)) as mount:
            assert await mount.read("large") == LARGE

    asyncio.run(run())


async def _answer(status: int) -> web.StreamResponse:
    return web.Response(status=status)


@pytest.mark.parametrize(("what", "expected"), [("auto", sorted(NAMED)), ("profile", sorted(NAMED)), ("all", [*range(CHUNKS)])])
def test_a_profile_says_what_is_brought_unless_all_is_wanted(
    proxy: Proxy, group: Group, other: Group, tmp_path: Path, what: PrefetchWhat, expected: list[int]
) -> None:
    save_profile(tmp_path / "m", group)

    async def run() -> None:
        async with mounted(tmp_path / "m", layers_of(other)) as mount:
            progress = await warmed(mount, layers_of(group), what)
            assert progress.layers[0].by == ("all" if what == "all" else "profile")
            assert progress.done_bytes == progress.wanted_bytes == len(expected) * CHUNK
            assert contents_of(proxy, group) == expected

    asyncio.run(run())


def test_a_published_profile_is_used(server: RegistryServer, proxy: Proxy, files: tuple[Path, Path], other: Group, tmp_path: Path) -> None:
    """Of a repository of its own: what is published beside a group stays."""
    push_group(f"{server.host}/warm-published:t", [files[0]])
    reference = parse_reference(f"{server.host}/warm-published:t")
    group = resolve_group(f"{proxy.host}/warm-published:t")
    known = Profile(layer=group.layers[0].digest, layer_chunks=CHUNKS, chunks=NAMED, missed=(0,) * len(NAMED))
    attach(reference, read_subject(reference, None), ARTIFACT_TYPE, DOCUMENT_TYPE, document_of([known]), None)
    proxy.seen.clear()

    async def run() -> None:
        async with mounted(tmp_path / "m", layers_of(other)) as mount:
            (layer,) = (await warmed(mount, layers_of(group), "profile")).layers
            assert (layer.by, layer.failure, layer.done_bytes) == ("profile", "", len(NAMED) * CHUNK)
            assert contents_of(proxy, group) == sorted(NAMED)

    asyncio.run(run())


def test_a_plan_that_goes_takes_no_published_profile_from_others(
    server: RegistryServer, proxy: Proxy, files: tuple[Path, Path], tmp_path: Path
) -> None:
    """It is looked for once for a group, whoever wants it: a plan that is removed meanwhile does not end that."""
    push_group(f"{server.host}/warm-shared:other", [files[1]])
    push_group(f"{server.host}/warm-shared:t", [files[0]])
    other = resolve_group(f"{proxy.host}/warm-shared:other")
    reference = parse_reference(f"{server.host}/warm-shared:t")
    group = resolve_group(f"{proxy.host}/warm-shared:t")
    known = Profile(layer=group.layers[0].digest, layer_chunks=CHUNKS, chunks=NAMED, missed=(0,) * len(NAMED))
    attach(reference, read_subject(reference, None), ARTIFACT_TYPE, DOCUMENT_TYPE, document_of([known]), None)

    async def run() -> None:
        asked, go_on = asyncio.Event(), threading.Event()

        async def wait_for_it(request: web.Request) -> None:
            if request.path.endswith((f"/referrers/{group.digest}", f"/manifests/{fallback_tag(group.digest)}")):
                loop.call_soon_threadsafe(asked.set)
                await asyncio.to_thread(go_on.wait)

        loop = asyncio.get_running_loop()
        proxy.fault = wait_for_it
        async with mounted(tmp_path / "m", layers_of(other), profiles=True) as mount:
            try:
                plan = await mount.plane.add_plan(layers_of(group))
                await asked.wait()
                await mount.plane.remove_plan(plan.plan_id)
            finally:
                go_on.set()
            (layer,) = (await warmed(mount, layers_of(group), "profile")).layers
            assert (layer.by, layer.failure, layer.done_bytes) == ("profile", "", len(NAMED) * CHUNK)

    asyncio.run(run())


def test_peers_are_asked_first(proxy: Proxy, group: Group, tmp_path: Path) -> None:
    """The one that has it owns all of it."""
    first, second = addresses(2)

    async def run() -> None:
        async with node(tmp_path / "1", layers_of(group), PeersConfig(listen=first, members=[first])) as one:
            assert (await warmed(one, layers_of(group))).done_bytes == len(LARGE)
            proxy.seen.clear()
            async with node(tmp_path / "2", layers_of(group), PeersConfig(listen=second, members=[first])) as two:
                assert (await warmed(two, layers_of(group))).done_bytes == len(LARGE)
                assert contents_of(proxy, group) == []
                assert two.plane.statistics()["fetched_for"]["peer"]["prefetch"] == len(LARGE)

    asyncio.run(run())


def test_without_any_profile_nothing_is_what_profiles_name(group: Group, other: Group, tmp_path: Path) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "m", layers_of(other)) as mount:
            (layer,) = (await warmed(mount, layers_of(group), "profile")).layers
            assert layer.failure.startswith("no layer has a profile")

    asyncio.run(run())


def test_two_callers_and_a_reader_share_each_chunk(proxy: Proxy, group: Group, other: Group, tmp_path: Path) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "m", [*layers_of(group), *layers_of(other)]) as mount:
            first, second, data = await asyncio.gather(
                warmed(mount, layers_of(group)), warmed(mount, layers_of(group), caller="d"), mount.read("large")
            )
            assert data == LARGE
            assert first.done_bytes == second.done_bytes == len(LARGE)
            assert contents_of(proxy, group) == [*range(CHUNKS)]

    asyncio.run(run())


@attrs.define
class Gate:
    """Ranges of one layer wait for `open`."""

    digest: str
    toc_offset: int | None
    asked: int = 0
    open: bool = False

    async def __call__(self, request: web.Request) -> web.StreamResponse | None:
        wanted = request.headers.get("Range", "")
        if self.digest in request.path and wanted and not wanted.startswith(f"bytes={self.toc_offset}-"):
            self.asked += 1
            while not self.open:  # noqa: ASYNC110 - it runs on another thread's loop
                await asyncio.sleep(0.002)
        return None


@pytest.mark.parametrize("how", ["dropped", "not asked for any more"])
def test_what_nobody_wants_any_more_ends_and_harms_no_reader(
    proxy: Proxy, group: Group, other: Group, tmp_path: Path, how: str
) -> None:
    gate = Gate(group.layers[0].digest, group.layers[0].toc_offset)

    async def run() -> None:
        async with mounted(tmp_path / "m", [*layers_of(group), *layers_of(other)]) as mount:
            warmer = mount.plane.warmer
            warmer._places = asyncio.Semaphore(1)
            proxy.fault = gate
            begun = await warmer.progress("c", layers_of(group), "all")
            assert not begun.done
            await wait_until(lambda: gate.asked > 0)
            reader = asyncio.create_task(mount.read("large", 0, CHUNK))
            if how == "dropped":
                warmer.drop("c")
            else:
                before = warmer._clock
                warmer._clock = lambda: before() + 3600
            gate.open = True
            assert await reader == LARGE[:CHUNK], "whoever waits for what was begun gets it"
            await wait_until(lambda: mount.plane._layers[mount.digest].users == 1)
            assert not mount.faults
            assert contents_of(proxy, group) == [*range(MAX_RANGE_BYTES // CHUNK)], "one range had begun"
            again = await warmed(mount, layers_of(group), "all")
            assert again.done_bytes == len(LARGE)
            assert contents_of(proxy, group) == [*range(CHUNKS)], "the rest, and nothing twice"

    asyncio.run(run())


# what cannot be had


def test_a_registry_that_goes_away_is_said_and_what_came_stays(proxy: Proxy, group: Group, other: Group, tmp_path: Path) -> None:
    policy = attrs.evolve(QUICK, deadline_s=0.6)

    async def goes_away(request: web.Request) -> web.StreamResponse | None:
        if group.layers[0].digest in request.path and request.headers.get("Range", "").startswith("bytes=0-"):
            return web.Response(status=503)
        return None

    async def run() -> None:
        async with mounted(tmp_path / "m", layers_of(other), policy=policy) as mount:
            proxy.fault = goes_away
            progress = await warmed(mount, layers_of(group))
            (layer,) = progress.layers
            assert layer.failure_kind == "unreachable"
            assert "503" in layer.failure
            assert 0 < layer.done_bytes < layer.wanted_bytes
            proxy.fault = None
            before = len(contents_of(proxy, group))
            assert (await warmed(mount, layers_of(group))).done_bytes == len(LARGE)
            assert len(contents_of(proxy, group)) > before

    asyncio.run(run())


def test_a_damaged_chunk_is_said_and_the_others_are_brought(proxy: Proxy, group: Group, other: Group, tmp_path: Path) -> None:
    async def damage(request: web.Request) -> web.StreamResponse | None:
        wanted = request.headers.get("Range", "").removeprefix("bytes=")
        begin, _, last = wanted.partition("-")
        if group.layers[0].digest not in request.path or not last or int(begin) > 3 * CHUNK or int(last) < 3 * CHUNK:
            return None
        data = bytearray(LARGE[int(begin) : int(last) + 1])
        data[3 * CHUNK - int(begin)] ^= 1
        size = group.layers[0].size_bytes
        return web.Response(status=206, body=bytes(data), headers={"Content-Range": f"bytes {begin}-{last}/{size}"})

    async def run() -> None:
        async with mounted(tmp_path / "m", layers_of(other)) as mount:
            proxy.fault = damage
            (layer,) = (await warmed(mount, layers_of(group))).layers
            assert layer.failure_kind == "integrity"
            assert "1 chunks could not be had; chunk 3: " in layer.failure
            assert layer.wanted_bytes - layer.done_bytes == CHUNK
            proxy.fault = None
            (layer,) = (await warmed(mount, layers_of(group))).layers
            assert (layer.failure, layer.done_bytes) == ("", len(LARGE))

    asyncio.run(run())


def test_a_layer_that_is_not_there_fails_by_itself(proxy: Proxy, group: Group, other: Group, tmp_path: Path) -> None:
    missing = Layer(digest="sha256:" + "ab" * 32, size_bytes=1000, source=other.source)

    async def run() -> None:
        async with mounted(tmp_path / "m", layers_of(other)) as mount:
            lost, good = (await warmed(mount, [missing, *layers_of(group)])).layers
            assert (lost.failure_kind, lost.wanted_bytes) == ("not_found", 0)
            assert (good.failure, good.done_bytes) == ("", len(LARGE))

    asyncio.run(run())


# room


def test_what_does_not_fit_is_refused_and_nothing_is_lost_for_it(proxy: Proxy, group: Group, other: Group, tmp_path: Path) -> None:
    bound = CacheBound(CHUNK * CHUNKS, 0)

    async def run() -> None:
        async with mounted(tmp_path / "m", layers_of(other), bound=bound) as mount:
            assert await mount.read("other") == OTHER
            (layer,) = (await warmed(mount, layers_of(group), "all")).layers
            assert layer.failure_kind == "capacity"
            assert f"expected room for {len(LARGE)} bytes, received " in layer.failure
            assert contents_of(proxy, group) == []
            counted = mount.plane.statistics()["fuse"]
            assert (counted["evicted_bytes"], counted["chunks_unwritten"]) == (0, 0)

    asyncio.run(run())


def test_room_is_made_of_what_nothing_uses_and_only_when_that_is_enough(
    proxy: Proxy, server: RegistryServer, files: tuple[Path, Path], group: Group, other: Group, tmp_path: Path
) -> None:
    """The large layer is unused, then in use."""
    third = make_layer(tmp_path, "third", {"third": make_content(CHUNK * SMALL_CHUNKS, 3, False)})
    push_group(f"{server.host}/warm:third", [third])
    wanted = layers_of(resolve_group(f"{server.host}/warm:third"))
    bound = CacheBound(int(CHUNK * (CHUNKS + 1.5 * SMALL_CHUNKS)), 0)

    def digests(mount: Mounted) -> set[str]:
        return {layer.record.digest for layer in list_layers(mount.plane._cache.path)}

    async def run() -> None:
        async with mounted(tmp_path / "m", layers_of(group), bound=bound, keep_cache=True) as mount:
            assert (await warmed(mount, layers_of(group))).done_bytes == len(LARGE)
            (layer,) = (await warmed(mount, [*wanted, *layers_of(other)])).layers[:1]
            assert layer.failure_kind == "capacity", "the large one is in use"
            assert mount.plane.statistics()["fuse"]["evicted_bytes"] == 0
            assert mount.traffic()["present_content_bytes"] == len(LARGE)
        async with mounted(tmp_path / "m", layers_of(other), bound=bound) as mount:
            (layer, _) = (await warmed(mount, [*wanted, *layers_of(other)])).layers
            assert (layer.failure, layer.done_bytes) == ("", layer.wanted_bytes)
            assert digests(mount) == {wanted[0].digest, other.layers[0].digest}

    asyncio.run(run())


def test_after_a_crash_of_the_machine_what_is_whole_is_not_fetched_again(
    proxy: Proxy, group: Group, other: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache with room for it once."""
    bound = CacheBound(int(CHUNK * (CHUNKS + SMALL_CHUNKS) * 1.2), 0)

    async def run() -> None:
        async with mounted(tmp_path / "m", layers_of(other), bound=bound, keep_cache=True) as mount:
            await warmed(mount, layers_of(group))
        proxy.seen.clear()
        monkeypatch.setattr("weefs.cachedir.boot_id", lambda: b"another boot id.")
        async with mounted(tmp_path / "m", layers_of(other), bound=bound) as mount:
            (layer,) = (await warmed(mount, layers_of(group))).layers
            assert (layer.failure, layer.done_bytes) == ("", len(LARGE))
            assert contents_of(proxy, group) == []

    asyncio.run(run())


def test_chunks_that_are_lost_again_are_brought_again(group: Group, other: Group, tmp_path: Path) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "m", [*layers_of(group), *layers_of(other)]) as mount:
            await warmed(mount, layers_of(group))
            await mount.plane.room.shrink((await mount.plane.room.measure()).used - 10 * CHUNK)
            slot = mount.plane._layers[group.layers[0].digest].slot
            assert not all(mount.plane._fetcher.is_present(slot, ChunkIndex(chunk)) for chunk in range(CHUNKS))
            assert (await warmed(mount, layers_of(group))).done_bytes == len(LARGE)

    asyncio.run(run())
