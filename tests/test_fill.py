"""What is fetched while nobody waits: in which order and size, behind whom, how fast, until when; and that it harms nobody."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import attrs
import pytest
from aiohttp import web
from plane_harness import QUICK, Mounted, layers_of, mounted, wait_until
from registry_fixture import CHUNK, Proxy, RegistryServer, make_layer
from strategies import make_content

from layerformat import Layer as LayerFile
from registry import Group, push_group, resolve_group
from weefs import core
from weefs.core import ChunkIndex, LayerSlot, Miss
from weefs.demand import Demand
from weefs.fetch import Ahead
from weefs.fill import Begin, Bucket, Filler, FillPolicy, Wait
from weefs.link import Link
from weefs.room import CacheBound

CHUNKS = 40
LARGE = make_content(CHUNK * CHUNKS, 1, False)
EAGER = FillPolicy("eager", first_pause_s=0.01, longest_pause_s=0.05)


@pytest.fixture(scope="module")
def layer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_layer(tmp_path_factory.mktemp("layer"), "layer", {"large": LARGE})


@pytest.fixture
def proxy(proxy: Proxy, server: RegistryServer, layer_file: Path) -> Proxy:
    push_group(f"{server.host}/fill:t", [layer_file])
    return proxy


@pytest.fixture
def group(proxy: Proxy) -> Group:
    """Nothing is counted of its resolution."""
    group = resolve_group(f"{proxy.host}/fill:t")
    proxy.seen.clear()
    return group


def content_ranges(proxy: Proxy, group: Group) -> list[tuple[int, int]]:
    """Begin and end of the ranges of contents that were asked for, in order."""
    toc = group.layers[0].toc_offset
    ranges = []
    for one in proxy.blob_reads():
        assert one.range is not None
        begin, _, last = one.range.removeprefix("bytes=").partition("-")
        if int(begin) != toc:
            ranges.append((int(begin), int(last) + 1))
    return ranges


def fill_state(mount: Mounted) -> str:
    state: str = mount.traffic()["fill"]["state"]
    return state


async def until_full(mount: Mounted) -> None:
    await wait_until(lambda: fill_state(mount) == "full")


# a whole layer


def test_an_eager_fill_brings_each_byte_once_in_large_ranges(proxy: Proxy, group: Group, layer_file: Path, tmp_path: Path) -> None:
    with LayerFile.open(layer_file) as layer:
        end = max(chunk.blob_offset + chunk.stored_size for chunk in layer.toc.chunks)

    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(group), fill=EAGER) as mount:
            await until_full(mount)
            ranges = content_ranges(proxy, group)
            assert sorted(ranges) == ranges
            assert ranges[0][0] == 0
            assert ranges[-1][1] == end
            assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges)), "each byte once"
            assert len(ranges) <= 2, "4 MiB each"
            counted = mount.traffic()
            assert counted["fill"]["filled_bytes"] == end == mount.plane.statistics()["fill"]["filled_bytes"]
            assert mount.plane.statistics()["fill"]["remaining_bytes"] == 0
            assert await mount.read("large") == LARGE
            assert content_ranges(proxy, group) == ranges, "everything was there"
            assert not mount.faults

    asyncio.run(run())


def test_what_was_filled_is_unread_so_it_goes_first(group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(group), fill=EAGER) as mount:
            await until_full(mount)
            for chunk in (3, 4):
                await mount.read("large", chunk * CHUNK, CHUNK)
            await mount.plane.room.shrink((await mount.plane.room.measure()).used - (CHUNKS - 2) * CHUNK)
            before = mount.plane.statistics()["fuse"]["reads_waited"]
            for chunk in (3, 4):
                await mount.read("large", chunk * CHUNK, CHUNK)
            found = mount.plane.statistics()
            assert found["fuse"]["reads_waited"] == before, "the two that were read stayed"
            assert found["layers"][mount.digest]["fill"]["state"] == "full", "what was evicted is not filled again"

    asyncio.run(run())


def test_the_bound_of_the_cache_stops_it_and_nothing_is_evicted_for_it(group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        bound = CacheBound(CHUNK * CHUNKS // 2, 0)
        small = attrs.evolve(EAGER, range_bytes=CHUNK, near_demand_bytes=CHUNK)
        async with mounted(tmp_path / "1", layers_of(group), fill=attrs.evolve(small, mode="off"), bound=bound, keep_cache=True) as mount:
            await mount.read("large", 0, CHUNK)
        async with mounted(tmp_path / "1", layers_of(group), fill=small, bound=bound, fetching=False) as mount:
            await mount.plane.room.measure()
            mount.start_fetching()
            await wait_until(lambda: fill_state(mount) == "stopped" and mount.plane.statistics()["fill"]["active"] == 0)
            usage = await mount.plane.room.measure()
            assert usage.capacity * 0.95 - CHUNK < usage.used <= usage.capacity * 0.95
            assert mount.traffic()["fill"]["reason"] == "the cache is nearly full"
            assert mount.plane.statistics()["fuse"]["evicted_bytes"] == 0
            assert mount.plane.statistics()["fuse"]["chunks_unwritten"] == 0

    asyncio.run(run())


# behind demand


@attrs.define
class Held:
    """A registry whose answers to ranges wait for `let_go`; `waiting`: what was asked for until then. `refused`: how they are answered."""

    refused: bool = False
    waiting: list[str] = attrs.field(factory=list)
    _events: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = attrs.field(factory=list)
    _gone: bool = False

    async def __call__(self, request: web.Request) -> web.Response | None:
        if "Range" not in request.headers or self._gone:
            return None
        event = asyncio.Event()
        self._events.append((asyncio.get_running_loop(), event))
        self.waiting.append(request.headers["Range"])
        await event.wait()
        return web.Response(status=404, text="gone") if self.refused else None

    def let_go(self) -> None:
        self._gone = True
        for loop, event in self._events:
            loop.call_soon_threadsafe(event.set)


@pytest.fixture
def held(proxy: Proxy) -> Iterator[Held]:
    """Begins with `proxy.fault = held`."""
    held = Held()
    yield held
    held.let_go()


def test_no_fill_begins_while_a_reader_waits(proxy: Proxy, held: Held, group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(group), fill=attrs.evolve(EAGER, mode="off")) as mount:
            proxy.fault = held
            readers = [asyncio.create_task(mount.read("large", CHUNK * 20, CHUNK))]
            await wait_until(lambda: len(held.waiting) == 1)
            filler = mount.plane._filler
            filler.policy = EAGER
            filler._changed.set()
            await wait_until(lambda: not filler._changed.is_set())  # it has looked
            readers.append(asyncio.create_task(mount.read("large", CHUNK * 39, CHUNK)))
            await wait_until(lambda: len(held.waiting) == 2)
            assert mount.plane.statistics()["fill"]["active"] == 0
            held.let_go()
            assert b"".join(await asyncio.gather(*readers)) == LARGE[CHUNK * 20 : CHUNK * 21] + LARGE[CHUNK * 39 :]
            await until_full(mount)
            assert not mount.faults

    asyncio.run(run())


@contextlib.asynccontextmanager
async def being_filled(
    directory: Path, group: Group, proxy: Proxy, held: Held, policy: FillPolicy = EAGER, *, requests: int = 1, rooted: bool = True
) -> AsyncIterator[Mounted]:
    """A node whose fill waits for its first answers."""
    async with mounted(directory, layers_of(group), fill=policy, fetching=False, rooted=rooted) as mount:
        proxy.fault = held
        mount.start_fetching()
        await wait_until(lambda: len(held.waiting) == requests)
        yield mount


def test_a_reader_of_what_is_being_filled_waits_for_that_flight(proxy: Proxy, held: Held, group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        async with being_filled(tmp_path / "1", group, proxy, held) as mount:
            reader = asyncio.create_task(mount.read("large", CHUNK * 5, CHUNK))
            await wait_until(lambda: mount.plane.statistics()["fuse"]["pending"] == 1)
            held.let_go()
            assert await reader == LARGE[CHUNK * 5 : CHUNK * 6]
            await until_full(mount)
            assert len(content_ranges(proxy, group)) == len(set(content_ranges(proxy, group))) <= 2

    asyncio.run(run())


def test_a_reader_whose_fill_failed_is_served_as_any_other(proxy: Proxy, held: Held, group: Group, tmp_path: Path) -> None:
    """The fill gives up; the reader that came meanwhile has all of demand's patience."""
    held.refused = True
    once = attrs.evolve(EAGER, first_pause_s=1000)

    async def run() -> None:
        async with being_filled(tmp_path / "1", group, proxy, held, once) as mount:
            reader = asyncio.create_task(mount.read("large", CHUNK * 5, CHUNK))
            await wait_until(lambda: mount.plane.statistics()["fuse"]["pending"] == 1)
            held.let_go()
            assert await reader == LARGE[CHUNK * 5 : CHUNK * 6]
            assert not mount.faults
            found = mount.traffic()
            assert found["given_up_chunks"] == 0
            assert found["fill"]["state"] == "stopped"
            assert "404" in found["fill"]["reason"]
            assert found["present_bytes"] == found["fill"]["filled_bytes"] + CHUNK

    asyncio.run(run())


def test_a_fill_that_fails_is_tried_again_without_a_fault(proxy: Proxy, group: Group, tmp_path: Path) -> None:
    fail = [True] * 5

    async def fault(request: web.Request) -> web.Response | None:
        return web.Response(status=403) if "Range" in request.headers and fail and fail.pop() else None

    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(group), fill=EAGER, fetching=False) as mount:
            proxy.fault = fault
            mount.start_fetching()
            await until_full(mount)
            assert not fail
            found = mount.plane.statistics()
            assert found["fuse"]["reads_failed"] == 0
            assert mount.traffic()["given_up_chunks"] == 0
            assert not mount.faults

    asyncio.run(run())


# its end


def test_it_stops_with_the_last_plan_and_the_layer_can_be_closed(proxy: Proxy, held: Held, group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        small = attrs.evolve(EAGER, range_bytes=CHUNK, near_demand_bytes=CHUNK)
        async with being_filled(tmp_path / "1", group, proxy, held, small, requests=2, rooted=False) as mount:
            (plan,) = mount.plane.plans()
            await mount.plane.remove_plan(plan.plan_id)
            held.let_go()
            await wait_until(lambda: not mount.plane.statistics()["layers"])
            assert len(held.waiting) == 2
            assert len(content_ranges(proxy, group)) == 2, "what was on its way, and no more"
            found = mount.plane.statistics()["fuse"]
            assert (found["in_flight"], found["chunks_published"]) == (0, 2)

    asyncio.run(run())


def test_an_end_in_the_middle_leaves_no_flight(proxy: Proxy, held: Held, group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        async with being_filled(tmp_path / "1", group, proxy, held) as mount:
            assert mount.fetcher is not None
            mount.fetcher.cancel()
            await asyncio.wait([mount.fetcher])
            assert mount.plane.statistics()["fuse"]["in_flight"] == 0
            held.let_go()

    asyncio.run(run())


# what is decided, with a clock and a cache of the test's


@attrs.frozen
class Info:
    chunks: int = 100
    present_chunks: int = 0
    stream_size: int = 100 * CHUNK
    read_raw: int = 0
    blob_size: int = 100 * CHUNK
    present_stored: int = 0


@attrs.define
class World:
    """What a filler sees."""

    now_s: float = 1000.0
    has_room: bool = True
    infos: dict[LayerSlot, Info] = attrs.field(factory=dict)
    the_link: Link = attrs.field(factory=Link)

    def clock(self) -> float:
        return self.now_s

    def layer_info(self, slot: LayerSlot) -> Info:
        return self.infos.setdefault(slot, Info())

    def link(self, layer: LayerSlot) -> Link:
        return self.the_link

    async def fetch_ahead(self, claimed: Sequence[Miss], *, within_s: float, gap_bytes: int = 0) -> Ahead:
        raise AssertionError("nothing is done here")


def decide(policy: FillPolicy) -> tuple[World, Demand, Filler]:
    world = World()
    world.the_link.observe(100 << 20, 1.0)
    demand = Demand(world.clock)
    return world, demand, Filler(world, world, demand, policy, lambda size: world.has_room, world.clock)  # type: ignore[arg-type]


BASE, TASK, OTHER = LayerSlot(1), LayerSlot(2), LayerSlot(3)


def begun(step: Begin | Wait) -> tuple[LayerSlot, int]:
    assert isinstance(step, Begin), step
    return step.layer.slot, step.size


def test_idle_waits_for_quiet_and_the_topmost_layer_comes_first() -> None:
    world, demand, filler = decide(FillPolicy("idle"))
    filler.add_plan("p", [BASE, TASK])
    assert filler.next_step(world.now_s) == Wait(1002.0)
    world.now_s = 1001.0
    with demand.of(BASE) as place:
        place.taken()
        world.now_s = 1500.0
        assert filler.next_step(world.now_s) == Wait(float("inf")), "a reader waits"
        assert filler.layer_statistics(TASK)["state"] == "waiting"
    assert filler.next_step(world.now_s) == Wait(1502.0)
    world.now_s = 1502.0
    assert begun(filler.next_step(world.now_s)) == (TASK, 4 << 20)


def test_another_plan_that_is_busy_keeps_no_idle_one_but_makes_its_ranges_smaller() -> None:
    world, demand, filler = decide(FillPolicy("idle"))
    filler.add_plan("quiet", [BASE])
    filler.add_plan("busy", [OTHER])
    world.now_s = 1010.0
    with demand.of(OTHER):
        pass
    assert begun(filler.next_step(world.now_s)) == (BASE, 1 << 20)


def test_eager_does_not_wait_for_quiet_but_for_readers() -> None:
    world, demand, filler = decide(FillPolicy("eager"))
    filler.add_plan("p", [BASE])
    assert begun(filler.next_step(world.now_s)) == (BASE, 4 << 20)
    with demand.of(BASE):
        assert filler.next_step(world.now_s) == Wait(float("inf"))
    assert begun(filler.next_step(world.now_s)) == (BASE, 1 << 20)


def test_off_is_off() -> None:
    world, _demand, filler = decide(FillPolicy("off"))
    filler.add_plan("p", [BASE])
    world.infos[BASE] = Info(read_raw=99 * CHUNK)
    assert filler.next_step(world.now_s + 1e9) == Wait(float("inf"))
    assert filler.layer_statistics(BASE)["state"] == "off"


def test_two_requests_at_once_and_all_of_them_for_a_layer_that_most_is_wanted_of() -> None:
    world, _demand, filler = decide(FillPolicy("eager", wanted_requests_at_once=16))
    filler.add_plan("p", [BASE, TASK])
    step = filler.next_step(world.now_s)
    assert isinstance(step, Begin)
    step.layer.active = 2
    assert isinstance(filler.next_step(world.now_s), Wait)
    world.infos[BASE] = Info(read_raw=25 * CHUNK)
    assert begun(filler.next_step(world.now_s))[0] == BASE
    step.layer.active = 16
    assert isinstance(filler.next_step(world.now_s), Wait)


def test_a_wanted_layer_does_not_wait_for_quiet() -> None:
    world, demand, filler = decide(FillPolicy("idle"))
    filler.add_plan("p", [BASE, TASK])
    world.infos[BASE] = Info(read_raw=25 * CHUNK)
    with demand.of(BASE):
        assert isinstance(filler.next_step(world.now_s), Wait), "but for readers"
    assert begun(filler.next_step(world.now_s)) == (BASE, 1 << 20)
    world.infos[BASE] = Info(read_raw=24 * CHUNK)
    assert isinstance(filler.next_step(world.now_s), Wait)


def test_a_cache_without_room_stops_it_for_some_seconds() -> None:
    world, _demand, filler = decide(FillPolicy("eager"))
    filler.add_plan("p", [BASE])
    world.has_room = False
    assert filler.next_step(world.now_s) == Wait(1005.0)
    assert filler.layer_statistics(BASE) == {"state": "stopped", "reason": "the cache is nearly full", "filled_bytes": 0}


def test_a_slow_source_is_asked_for_less_at_once() -> None:
    world, _demand, filler = decide(FillPolicy("eager"))
    world.the_link = Link()
    world.the_link.observe(1 << 20, 4.0)
    filler.add_plan("p", [BASE])
    assert begun(filler.next_step(world.now_s))[1] <= 1 << 19, "a second's worth"


def test_the_rate_is_kept_on_the_average() -> None:
    """By the clock of the test: what is begun within 100 s is what 100 s are good for, and a range more."""
    world, _demand, filler = decide(FillPolicy("eager", rate=200_000))
    filler.add_plan("p", [BASE])
    assert filler._bucket is not None
    spent, begin_s = 0, world.now_s
    while world.now_s < begin_s + 100:
        match filler.next_step(world.now_s):
            case Begin(_, size):
                assert size <= 200_000
                filler._bucket.spend(size, world.now_s)
                spent += size
            case Wait(until_s):
                assert until_s > world.now_s
                world.now_s = until_s
    assert 100 * 200_000 <= spent <= 102 * 200_000


def test_a_rate_does_not_save_up() -> None:
    bucket = Bucket(10.0)
    bucket.spend(0, 0.0)
    bucket.spend(10, 1000.0)
    assert bucket.free_at_s(1000.0) == 1000.0
    bucket.spend(20, 1000.0)
    assert bucket.free_at_s(1000.0) == 1002.0


def test_a_layer_of_two_plans_stays_until_the_second_goes() -> None:
    world, _demand, filler = decide(FillPolicy("eager"))
    filler.add_plan("one", [BASE])
    filler.add_plan("two", [BASE, TASK])
    filler.remove_plan("two")
    assert begun(filler.next_step(world.now_s))[0] == BASE
    filler.remove_plan("one")
    assert filler.next_step(world.now_s) == Wait(float("inf"))
    filler.remove_plan("one")


# claiming and giving back, in the core


def test_a_run_is_one_range_and_goes_no_further_than_it_may(group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(group), fetching=False) as mount:
            filesystem: core.Core = mount.plane._core
            slot = mount.plane._layers[mount.digest].slot
            assert filesystem.claim(slot, ChunkIndex(4)) is not None
            first = filesystem.claim_run(slot, 0, 10 * CHUNK)
            assert [miss.chunk for miss in first] == [0, 1, 2, 3]
            assert [miss.chunk for miss in filesystem.claim_run(slot, 0, 3 * CHUNK)] == [5, 6, 7]
            assert [miss.chunk for miss in filesystem.claim_run(slot, 20, 1)] == [20], "one at least"
            assert [miss.chunk for miss in filesystem.claim_run(slot, 38, 10 * CHUNK)] == [38, 39]
            assert filesystem.claim_run(slot, 38, 10 * CHUNK) == []
            assert filesystem.describe(slot, ChunkIndex(1)) == first[1]
            filesystem.unclaim(slot, ChunkIndex(38))
            assert [miss.chunk for miss in filesystem.claim_run(slot, 38, 10 * CHUNK)] == [38]
            assert filesystem.take_misses() == []
            with pytest.raises(core.CoreError):
                filesystem.unclaim(slot, ChunkIndex(CHUNKS))
            with pytest.raises(core.CoreError):
                filesystem.describe(slot, ChunkIndex(CHUNKS))

    asyncio.run(run())


def test_what_is_given_back_while_a_reader_waits_is_a_miss(group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(group), fetching=False) as mount:
            filesystem: core.Core = mount.plane._core
            slot = mount.plane._layers[mount.digest].slot
            claimed = filesystem.claim_run(slot, 0, 2 * CHUNK)
            reader = asyncio.create_task(mount.read("large", 0, CHUNK))
            await wait_until(lambda: mount.plane.statistics()["fuse"]["pending"] == 1)
            assert filesystem.take_misses() == []
            for miss in claimed:
                filesystem.unclaim(slot, miss.chunk)
            filesystem.unclaim(slot, ChunkIndex(0))
            assert mount.plane.statistics()["fuse"]["in_flight"] == 1
            mount.start_fetching()
            assert await reader == LARGE[:CHUNK]

    asyncio.run(run())


def test_first_touches_are_in_order_and_each_once(group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(group), policy=QUICK) as mount:
            filesystem: core.Core = mount.plane._core
            slot = mount.plane._layers[mount.digest].slot
            assert filesystem.first_touches(slot, 0) == []
            for chunk in (9, 3, 9, 4, 3):
                await mount.read("large", chunk * CHUNK, CHUNK)
            assert filesystem.first_touches(slot, 0) == [9, 3, 4]
            assert filesystem.first_touches(slot, 2) == [4]
            assert filesystem.first_touches(slot, 3) == []
            info = filesystem.layer_info(slot)
            assert (info.read_chunks, info.read_raw) == (3, 3 * CHUNK)

    asyncio.run(run())


def test_first_touches_by_many_readers_at_once_are_all_there_once(group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(group)) as mount:
            await asyncio.gather(*(mount.read("large", chunk % CHUNKS * CHUNK, CHUNK) for chunk in range(4 * CHUNKS)))
            filesystem: core.Core = mount.plane._core
            touched = filesystem.first_touches(mount.plane._layers[mount.digest].slot, 0)
            assert sorted(touched) == list(range(CHUNKS))

    asyncio.run(run())


# what is on the disk is not fetched


def test_after_a_crash_of_the_machine_it_verifies_instead_of_fetching(
    proxy: Proxy, group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(group), fill=EAGER, keep_cache=True) as mount:
            await until_full(mount)
        monkeypatch.setattr("weefs.cachedir.boot_id", lambda: b"another boot id.")
        (path,) = (tmp_path / "1" / "cache" / "layers").iterdir()
        with (path / "data").open("r+b") as data:
            data.seek(CHUNK * 7)
            data.write(bytes(CHUNK))
        proxy.seen.clear()
        async with mounted(tmp_path / "1", layers_of(group), fill=EAGER) as mount:
            await until_full(mount)
            assert content_ranges(proxy, group) == [(CHUNK * 7, CHUNK * 8)]

    asyncio.run(run())


def test_what_another_version_has_is_taken_from_it(tmp_path: Path) -> None:
    new = bytearray(LARGE)
    new[CHUNK * 11] ^= 1
    versions = []
    for name, data in (("old", LARGE), ("new", bytes(new))):
        push_group(f"oci:{tmp_path}/layout:{name}", [make_layer(tmp_path, name, {"large": data})])
        versions += layers_of(resolve_group(f"oci:{tmp_path}/layout:{name}"))

    async def run() -> None:
        async with mounted(tmp_path / "m", versions[:1], fill=EAGER, keep_cache=True) as mount:
            await until_full(mount)
        async with mounted(tmp_path / "m", versions[1:], fill=attrs.evolve(EAGER, mode="off")) as mount:
            await wait_until(lambda: mount.plane.statistics()["layers_compared"] == 2)
            mount.plane._filler.policy = EAGER
            mount.plane._filler._changed.set()
            await until_full(mount)
            assert mount.plane.statistics()["sources"]["copy"]["misses"] == CHUNKS - 1
            assert mount.plane.statistics()["sources"]["layout"]["ahead"] == 1
            assert await mount.read("large") == bytes(new)

    asyncio.run(run())
