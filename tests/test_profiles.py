"""Profiles: recorded in the order of reading, prefetched at the next cold start, better with each run, published beside a group, and
believed no more than they must be.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from node_process import Groups, Node, create, run_node
from node_process import wait_until as await_condition
from plane_harness import layers_of, mounted, wait_until
from registry_fixture import CHUNK, Proxy, RegistryServer, Seen, make_layer
from strategies import make_content
from weenv_cli import NOT_FOUND, OK, Weenv

from registry import Group, parse_reference, push_group, resolve_group
from registry.referrers import attach, fallback_tag, read_subject
from weefs import core, profiles
from weefs.core import ChunkIndex, LayerSlot, Miss
from weefs.link import Link
from weefs.prefetch import MAX_GAP_BYTES, plan_ranges
from weefs.profiles import Profile, ProfileRefused, ProfileStore, after_run, document_of, merged, published_profile, within_trust

CHUNKS = 200
LARGE = make_content(CHUNK * CHUNKS, 1, False)
LAYER = "sha256:" + "ab" * 32


@pytest.fixture(scope="module")
def layer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_layer(tmp_path_factory.mktemp("layer"), "layer", {"large": LARGE})


@pytest.fixture
def proxy(proxy: Proxy, server: RegistryServer, layer_file: Path, request: pytest.FixtureRequest) -> Proxy:
    """A repository for each test: what is published beside a group stays."""
    repository = request.node.name.split("[")[0].lower().replace("_", "-")
    push_group(f"{server.host}/{repository}:t", [layer_file])
    return proxy


@pytest.fixture
def reference(proxy: Proxy, request: pytest.FixtureRequest) -> str:
    return f"{proxy.host}/{request.node.name.split('[')[0].lower().replace('_', '-')}:t"


@pytest.fixture
def group(proxy: Proxy, reference: str) -> Group:
    """Nothing is counted of its resolution."""
    group = resolve_group(reference)
    proxy.seen.clear()
    return group


def contents_of(seen: Sequence[Seen], group: Group) -> list[tuple[int, int]]:
    """Begin and end of the ranges of contents that were asked for."""
    found = []
    for one in seen:
        if one.range is not None:
            begin, _, last = one.range.removeprefix("bytes=").partition("-")
            if int(begin) != group.layers[0].toc_offset:
                found.append((int(begin), int(last) + 1))
    return found


def chunks_of(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """The contents are not compressible, so chunks are as large in the blob as in the stream, and in the same places."""
    return sorted(chunk for begin, end in ranges for chunk in range(begin // CHUNK, -(-end // CHUNK)))


async def one_run(directory: Path, group: Group, chunks: Sequence[int], *, cache: bool = False) -> dict[str, Any]:
    """A cold run on a node that has its profiles (and its cache, if it is to), but nothing in the kernel's cache. What its data plane
    counted, when the profile was fetched and the reads were made.
    """
    async with mounted(directory, layers_of(group), profiles=True, keep_cache=True, rooted=False) as mount:
        await until_prefetched(mount.plane)
        for chunk in chunks:
            assert await mount.read("large", chunk * CHUNK, CHUNK) == LARGE[chunk * CHUNK : (chunk + 1) * CHUNK]
        found: dict[str, Any] = mount.plane.statistics()
        assert not mount.faults
        (plan,) = mount.plane.plans()
        await mount.plane.remove_plan(plan.plan_id)
    if not cache:
        forget_contents(directory / "cache")
    return found


async def until_prefetched(plane: Any) -> None:
    """A profile is loaded or looked for when the plan is there; then nothing is on its way any more."""
    recordings = plane._recorder._recordings.values()

    def is_done() -> bool:
        looking = any(one.looking is not None and not one.looking.done() for one in recordings)
        found = plane.statistics()
        return not looking and not found["profiles"]["planned_ranges"] and not found["fuse"]["in_flight"]

    await wait_until(is_done)


def forget_contents(cache: Path) -> None:
    """The node has lost its chunks, not its profiles."""
    for path in cache.glob("layers/*/*"):
        if path.name in ("data", "map"):
            os.truncate(path, 0)


def stored(directory: Path, group: Group) -> Profile:
    profile = ProfileStore(directory / "cache").load(group.layers[0].digest)
    assert profile is not None
    return profile


# recording and prefetching


READ = [150, 7, 8, 9, 151, 80]


def test_the_second_cold_start_prefetches_what_the_first_read_in_few_requests(proxy: Proxy, group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        await one_run(tmp_path / "n", group, READ)
        profile = stored(tmp_path / "n", group)
        assert profile.chunks == tuple(READ)
        assert (profile.runs, profile.raw_bytes, profile.origin) == (1, len(READ) * CHUNK, "recorded")
        proxy.seen.clear()
        found = await one_run(tmp_path / "n", group, READ)
        ranges = contents_of(proxy.seen, group)
        assert chunks_of(ranges) == sorted(READ)
        assert len(ranges) == 3, "150-151, 7-9 and 80 lie far apart"
        assert found["fuse"]["reads_waited"] == 0
        assert found["profiles"]["prefetched_bytes"] == found["profiles"]["used_bytes"] == len(READ) * CHUNK
        again = stored(tmp_path / "n", group)
        assert (again.runs, again.hits, again.hit_rate) == (2, ((len(READ) * CHUNK, len(READ) * CHUNK),), 1.0)

    asyncio.run(run())


def test_what_is_in_the_cache_is_not_fetched_again_and_counts_as_named(proxy: Proxy, group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        await one_run(tmp_path / "n", group, READ, cache=True)
        proxy.seen.clear()
        found = await one_run(tmp_path / "n", group, READ[:3])
        assert contents_of(proxy.seen, group) == []
        assert found["profiles"]["prefetched_bytes"] == 0
        assert stored(tmp_path / "n", group).hits == ((3 * CHUNK, len(READ) * CHUNK),)

    asyncio.run(run())


def test_a_reader_that_is_faster_than_its_profile_fetches_once(proxy: Proxy, group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        await one_run(tmp_path / "n", group, READ)
        proxy.seen.clear()
        async with mounted(tmp_path / "n", layers_of(group), profiles=True, keep_cache=True, fetching=False) as mount:
            readers = [asyncio.create_task(mount.read("large", chunk * CHUNK, CHUNK)) for chunk in READ]
            await wait_until(lambda: mount.plane.statistics()["fuse"]["pending"] == len(READ))
            mount.start_fetching()
            for chunk, data in zip(READ, await asyncio.gather(*readers), strict=True):
                assert data == LARGE[chunk * CHUNK : (chunk + 1) * CHUNK]
            await until_prefetched(mount.plane)
            assert chunks_of(contents_of(proxy.seen, group)) == sorted(READ), "each chunk once"

    asyncio.run(run())


def test_a_run_in_which_nothing_is_read_says_nothing(group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        await one_run(tmp_path / "n", group, READ)
        before = stored(tmp_path / "n", group)
        for _ in range(3):
            await one_run(tmp_path / "n", group, [])
        assert stored(tmp_path / "n", group) == before

    asyncio.run(run())


def test_a_warm_run_adds_and_is_not_counted(group: Group, tmp_path: Path) -> None:
    """The layer is open still when its next plan comes: the kernel has pages of it, whose reading nobody sees."""

    async def run() -> None:
        layers = layers_of(group)
        async with mounted(tmp_path / "n", layers, profiles=True, keep_cache=True, rooted=False) as mount:
            with (mount.path / "large").open("rb"):
                await mount.read("large", 7 * CHUNK, CHUNK)
                (plan,) = mount.plane.plans()
                await mount.plane.remove_plan(plan.plan_id)
                assert stored(tmp_path / "n", group).chunks == (7,)
                await mount.plane.add_plan(layers)
                await mount.read("large", 3 * CHUNK, CHUNK)
                await mount.plane.remove_plan(plan.plan_id)
        profile = stored(tmp_path / "n", group)
        assert (profile.chunks, profile.missed, profile.runs, profile.hits) == ((7, 3), (0, 0), 1, ())

    asyncio.run(run())


def test_a_profile_that_cannot_be_written_costs_nothing_else(group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        (tmp_path / "n" / "cache").mkdir(parents=True)
        (tmp_path / "n" / "cache" / "profiles").write_text("in the way")
        await one_run(tmp_path / "n", group, READ)

    asyncio.run(run())


def test_a_file_that_is_damaged_or_of_another_layer_is_none(group: Group, tmp_path: Path) -> None:
    async def run() -> None:
        await one_run(tmp_path / "n", group, READ)
        store = ProfileStore(tmp_path / "n" / "cache")
        path = store.path(group.layers[0].digest)
        good = msgspec.json.decode(path.read_bytes())
        for change in (
            {"chunks": [0, 0], "missed": [0, 0]},
            {"chunks": [CHUNKS], "missed": [0]},
            {"missed": []},
            {"profile": 2},
            {"layer": LAYER},
            {"chunks": [-1], "missed": [0]},
        ):
            path.write_bytes(msgspec.json.encode(good | change))
            assert store.load(group.layers[0].digest) is None, change
        path.write_bytes(b"{")
        await one_run(tmp_path / "n", group, READ[:2])
        assert stored(tmp_path / "n", group).chunks == tuple(READ[:2])

    asyncio.run(run())


def test_a_registry_that_fails_a_prefetch_is_no_fault(proxy: Proxy, group: Group, tmp_path: Path) -> None:
    async def fault(request: web.Request) -> web.Response | None:
        return web.Response(status=404) if "Range" in request.headers else None

    async def run() -> None:
        await one_run(tmp_path / "n", group, READ)
        async with mounted(tmp_path / "n", layers_of(group), profiles=True, keep_cache=True, fetching=False) as mount:
            proxy.fault = fault
            mount.start_fetching()
            await until_prefetched(mount.plane)
            proxy.fault = None
            for chunk in READ:
                assert await mount.read("large", chunk * CHUNK, CHUNK) == LARGE[chunk * CHUNK : (chunk + 1) * CHUNK]
            assert not mount.faults
            assert mount.traffic()["given_up_chunks"] == 0

    asyncio.run(run())


# what becomes of a profile: values


SIZES = dict.fromkeys(range(1000), 10)


def counted(before: Profile | None, *touched: int) -> Profile:
    return after_run(before, LAYER, 1000, touched, SIZES)


def test_the_order_is_the_last_runs_and_what_it_did_not_read_stands_behind() -> None:
    profile = counted(counted(None, 1, 2, 3), 3, 9, 1)
    assert (profile.chunks, profile.missed) == ((3, 9, 1, 2), (0, 0, 0, 1))
    assert profile.hits == ((20, 30),)
    assert profile.raw_bytes == 40


def test_a_chunk_leaves_after_three_runs_without_it_and_comes_back_when_it_is_read() -> None:
    profile = counted(None, 1, 2, 3, 4)
    for runs in (1, 2):
        profile = counted(profile, 1, 2, 3)
        assert dict(zip(profile.chunks, profile.missed, strict=True))[4] == runs
    assert counted(profile, 1, 2, 3).chunks == (1, 2, 3)
    assert counted(profile, 4, 1, 2, 3).missed == (0, 0, 0, 0)


def test_a_profile_that_is_mostly_wrong_three_times_begins_again() -> None:
    profile = counted(None, *range(10))
    for number in (1, 2):
        profile = counted(profile, number)
        assert len(profile.chunks) == 10
    assert profile.hit_rate == pytest.approx(0.1)
    begun = counted(profile, 7, 77)
    assert (begun.chunks, begun.missed, begun.hits) == ((7, 77), (0, 0), ())


def test_one_that_is_half_right_stays() -> None:
    profile = counted(None, *range(10))
    for _ in range(3):
        profile = counted(profile, *range(5))
    assert profile.hit_rate == pytest.approx(0.5)
    assert len(profile.hits) == 3


def test_merging_keeps_the_earlier_order() -> None:
    profile = merged(counted(counted(None, 5, 4), 5), LAYER, 1000, [9, 4, 8], SIZES)
    assert (profile.chunks, profile.missed, profile.runs) == ((5, 4, 9, 8), (0, 1, 0, 0), 2)
    assert merged(None, LAYER, 1000, [2, 1], SIZES).runs == 0


def test_a_node_keeps_a_bounded_number_of_them_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "MAX_PROFILES", 3)
    store = ProfileStore(tmp_path)
    for number in range(6):
        digest = f"sha256:{number:064x}"
        store.save(Profile(layer=digest, layer_chunks=10, chunks=(1,), missed=(0,)))
        os.utime(store.path(digest), (number, number))
    assert [one.layer[-1] for one in store.all()] == ["3", "4", "5"]
    store.save(Profile(layer=f"sha256:{3:064x}", layer_chunks=10, chunks=(2,), missed=(0,)))
    assert [one.layer[-1] for one in store.all()] == ["3", "4", "5"], "one that is written anew removes none"


# which ranges


def misses(*chunks: int, size: int = CHUNK) -> list[Miss]:
    return [Miss(LayerSlot(1), ChunkIndex(chunk), chunk * size, size, size) for chunk in chunks]


def link_of(round_trip_s: float, bytes_per_s: float) -> Link:
    link = Link()
    link.observe(100, round_trip_s)
    link.observe(100 << 20, round_trip_s / 2 + (100 << 20) / bytes_per_s)
    return link


def test_a_gap_is_fetched_along_when_that_is_cheaper_than_a_request() -> None:
    wanted = misses(*range(16), *range(18, 40))
    far = plan_ranges(wanted, link_of(0.02, 125e6))
    assert [one.size for one in far] == [40 * CHUNK], "two chunks of 64 KiB take a millisecond, a request 20"
    near = plan_ranges(wanted, link_of(0.0001, 125e6))
    assert [one.size for one in near] == [16 * CHUNK, 22 * CHUNK]


def test_the_range_that_has_the_earliest_chunk_comes_first() -> None:
    ranges = plan_ranges(misses(150, 7, 8, 80, 151, 9), link_of(0.0001, 125e6))
    assert [[miss.chunk for miss in one.misses] for one in ranges] == [[150, 151], [7, 8, 9], [80]]


def test_gaps_are_bounded_by_themselves_and_together() -> None:
    link = link_of(0.2, 1e9)
    wide = MAX_GAP_BYTES // CHUNK + 1
    assert len(plan_ranges(misses(*range(30), *range(30 + wide, 60)), link)) == 2
    scattered = plan_ranges(misses(*range(0, 400, 3)), link)
    assert sum(one.size for one in scattered) <= 134 * CHUNK * 9 / 8


def test_a_link_is_known_by_its_answers() -> None:
    link = Link()
    assert (link.round_trip_s, link.bytes_per_s) == (0.02, 50e6)
    for took_s in (0.5, 0.01, 0.03):
        link.observe(1000, took_s)
    link.observe(1 << 20, 0.105)
    assert link.round_trip_s == 0.01
    assert link.bytes_per_s == pytest.approx((1 << 20) / 0.1)
    assert link.bytes_per_round_trip == pytest.approx((1 << 20) / 10, abs=2)


# published


def publish(reference: str, data: bytes) -> None:
    parsed = parse_reference(reference)
    attach(parsed, read_subject(parsed), profiles.ARTIFACT_TYPE, profiles.DOCUMENT_TYPE, data)


def document(group: Group, named: Sequence[int], **other: Any) -> bytes:
    layer = {"layer": group.layers[0].digest, "layer_chunks": CHUNKS, "chunks": list(named)} | other
    return json.dumps({"profile": 1, "layers": [layer]}).encode()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command line looks for a node's cache."""
    monkeypatch.setenv("WEENV_CACHE", str(tmp_path / "n" / "cache"))
    return tmp_path / "n"


def test_a_fresh_node_begins_with_what_another_published(
    proxy: Proxy, reference: str, group: Group, node: Path, weenv: Weenv, tmp_path: Path
) -> None:
    """By way of the tag: this registry does not list referrers."""
    read = [100, 101, 103, 102, 104, 30, 31]

    async def first() -> None:
        await one_run(node, group, read)

    async def second() -> None:
        proxy.seen.clear()
        found = await one_run(tmp_path / "fresh", group, read)
        ranges = contents_of(proxy.seen, group)
        assert len(ranges) == 2
        assert chunks_of(ranges) == sorted(read)
        assert found["fuse"]["reads_waited"] == 0
        asked = [one for one in proxy.seen if one.range is None]
        assert [(one.path.rpartition("/")[2], one.status) for one in asked] == [
            (group.digest, 404),
            (fallback_tag(group.digest), 200),
        ], "what is beside the group is in the list of what is beside it"
        assert stored(tmp_path / "fresh", group).hit_rate == 1.0

    asyncio.run(first())
    published = weenv("profile", "publish", reference)
    assert (published.status, published.out[:7]) == (OK, "sha256:"), published.err
    asyncio.run(second())


def test_show_and_export_say_what_the_node_knows(reference: str, group: Group, node: Path, weenv: Weenv, tmp_path: Path) -> None:
    asyncio.run(one_run(node, group, READ))
    digest = group.layers[0].digest
    for what in (reference, digest, digest[:20], digest[7:19]):
        (shown,) = json.loads(weenv("profile", "show", what, "--format", "json").out)
        assert (shown["layer"], shown["chunks"], shown["runs"]) == (digest, READ, 1)
    assert digest[:19] in weenv("profile", "show", reference).out
    assert weenv("profile", "export", reference, "-o", tmp_path / "exported").status == OK
    assert published_profile((tmp_path / "exported").read_bytes(), digest, CHUNKS) is not None


def test_without_a_profile_there_is_nothing_to_show_or_publish(reference: str, group: Group, node: Path, weenv: Weenv) -> None:
    (node / "cache").mkdir(parents=True)
    for command in (("show",), ("publish",), ("export", "-o", "/dev/null")):
        refused = weenv("profile", command[0], reference, *command[1:])
        assert (refused.status, refused.out) == (NOT_FOUND, "")
        assert "no profile of it" in refused.err


def test_a_layout_has_it_in_its_index_and_the_group_is_still_the_only_one(layer_file: Path, tmp_path: Path) -> None:
    reference = f"oci:{tmp_path}/layout:t"
    push_group(reference, [layer_file])
    group = resolve_group(reference)
    for chunks in ([1, 2], [50, 51, 52]):
        publish(reference, document(group, chunks))
    assert resolve_group(reference) == group

    async def run() -> None:
        found = await one_run(tmp_path / "n", group, [50, 51, 52])
        assert found["profiles"]["prefetched_bytes"] == 3 * CHUNK
        assert found["fuse"]["reads_waited"] == 0

    asyncio.run(run())


def test_what_a_node_knows_itself_goes_before_what_is_published(proxy: Proxy, reference: str, group: Group, tmp_path: Path) -> None:
    publish(reference, document(group, [1, 2, 3]))

    async def run() -> None:
        async with mounted(tmp_path / "n", layers_of(group), keep_cache=True):
            pass
        ProfileStore(tmp_path / "n" / "cache").save(
            Profile(layer=group.layers[0].digest, layer_chunks=CHUNKS, chunks=(9,), missed=(0,), runs=1)
        )
        proxy.seen.clear()
        await one_run(tmp_path / "n", group, [9])
        assert chunks_of(contents_of(proxy.seen, group)) == [9]
        assert [one for one in proxy.seen if one.range is None] == [], "and is not asked for"

    asyncio.run(run())


def test_a_registry_that_lists_referrers_is_asked_for_them(proxy: Proxy, reference: str, group: Group, tmp_path: Path) -> None:
    publish(reference, document(group, [20, 21]))
    tag = fallback_tag(group.digest)
    listed = read_subject(parse_reference(f"{reference.rpartition(':')[0]}:{tag}"))
    without_data = msgspec.json.decode(listed)
    for one in without_data["manifests"]:
        del one["data"]

    async def lists(request: web.Request) -> web.Response | None:
        if "/referrers/" in request.path:
            return web.Response(body=msgspec.json.encode(without_data), content_type="application/vnd.oci.image.index.v1+json")
        return None

    async def run() -> None:
        proxy.fault = lists
        proxy.seen.clear()
        found = await one_run(tmp_path / "n", group, [20, 21])
        assert found["fuse"]["reads_waited"] == 0
        asked = [one.path.rpartition("/")[2] for one in proxy.seen if one.range is None]
        assert asked == [group.digest, without_data["manifests"][0]["digest"]], "the list, and the manifest that has the rest"

    asyncio.run(run())


@pytest.mark.parametrize("status", [401, 403, 500, 429])
def test_a_registry_that_fails_to_say_what_is_beside_a_group_is_as_one_without(
    proxy: Proxy, group: Group, tmp_path: Path, status: int
) -> None:
    async def refuses(request: web.Request) -> web.Response | None:
        return web.Response(status=status) if "Range" not in request.headers else None

    async def run() -> None:
        proxy.fault = refuses
        found = await one_run(tmp_path / "n", group, READ)
        assert found["profiles"]["prefetched_bytes"] == 0

    asyncio.run(run())


# a whole node


def test_a_node_fills_and_records_also_after_its_data_plane_was_killed(groups: Groups, tmp_path: Path) -> None:
    def plane(node: Node) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(node("node", "info", "--format", "json"))["statistics"]["data_plane"]
        return found

    def is_full(node: Node) -> bool:
        found = plane(node)
        return bool(found["serving"]) and {layer["fill"]["state"] for layer in found["layers"].values()} == {"full"}

    with run_node(tmp_path / "node", settings='fill = "eager"\n') as node:
        environment = create(node, groups.base, groups.task)
        node("env", "exec", environment, "--", "cat", "/etc/passwd")
        await_condition(lambda: is_full(node), "the fill of all layers")
        line = r"^ahead +[1-9][\d.]* \w+ by fill \(eager; 0 requests now, 0 B left\); 0 B read of 0 B"
        assert re.search(line, node("node", "info"), re.MULTILINE)
        told = node("node", "metrics")
        assert re.search(r"^weenv_fill_bytes_total [1-9]", told, re.MULTILINE)
        for line in ("weenv_fill_active 0.0", "weenv_fill_remaining_bytes 0.0", "weenv_profile_used_bytes_total 0.0"):
            assert f"\n{line}\n" in told
        os.kill(plane(node)["process"]["pid"], signal.SIGKILL)
        await_condition(lambda: is_full(node), "a successor that fills")
        node("env", "exec", environment, "--", "cat", "/work/answer.txt")
        node("env", "rm", environment)
    found = [*ProfileStore(node.directory / "state/cache").all()]
    assert found, "its plan went when the node ended"
    assert all(profile.chunks for profile in found)
    assert {profile.runs for profile in found} == {0}, "a successor finds pages in the kernel's cache: none of its runs is counted"
    with run_node(tmp_path / "node", settings='fill = "off"\n') as node:
        environment = create(node, groups.base, groups.task)
        node("env", "exec", environment, "--", "cat", "/work/answer.txt")
    assert {profile.runs for profile in ProfileStore(node.directory / "state/cache").all()} == {1}


# hostile


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"chunks": [CHUNKS]}, "expected chunks below 200, received 200"),
        ({"chunks": [5, 5]}, "expected each chunk once, received 1 again"),
        ({"chunks": [-1]}, "expected a document of version 1"),
        ({"chunks": [1 << 32]}, "expected a document of version 1"),
        ({"layer_chunks": 7}, "expected one of 200 chunks, received one of 7"),
        ({"chunks": None}, "expected a document of version 1"),
    ],
)
def test_a_document_that_breaks_a_rule_is_refused(group: Group, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ProfileRefused, match=says):
        published_profile(document(group, [1], **change), group.layers[0].digest, CHUNKS)


def test_documents_of_other_sizes_versions_and_layers(group: Group) -> None:
    digest = group.layers[0].digest
    with pytest.raises(ProfileRefused, match="at most 1048576 bytes"):
        published_profile(document(group, [1]) + b" " * (1 << 20), digest, CHUNKS)
    with pytest.raises(ProfileRefused, match="version 1"):
        published_profile(document(group, [1]).replace(b'"profile": 1', b'"profile": 2'), digest, CHUNKS)
    with pytest.raises(ProfileRefused, match="version 1"):
        published_profile(b"[" * 100_000, digest, CHUNKS)
    assert published_profile(document(group, [1]), LAYER, CHUNKS) is None
    doubled = msgspec.json.decode(document(group, [1]))
    doubled["layers"] *= 2
    with pytest.raises(ProfileRefused, match="once, received it 2 times"):
        published_profile(msgspec.json.encode(doubled), digest, CHUNKS)


def test_one_that_names_everything_costs_a_quarter_of_a_large_layer() -> None:
    chunks = tuple(range(100_000))
    sizes = dict.fromkeys(chunks, CHUNK)
    everything = Profile(layer=LAYER, layer_chunks=len(chunks), chunks=chunks, missed=(0,) * len(chunks), origin="published")
    kept = within_trust(everything, sizes, len(chunks) * CHUNK)
    assert len(kept.chunks) == len(kept.missed) == 25_000
    small = within_trust(everything, sizes, 1)
    assert len(small.chunks) * CHUNK == 64 << 20


def test_one_that_names_everything_is_fetched_no_further_than_that(
    proxy: Proxy, reference: str, group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "UNTRUSTED_BYTES", 0)
    publish(reference, document(group, range(CHUNKS)))

    async def run() -> None:
        found = await one_run(tmp_path / "n", group, [0])
        assert found["profiles"]["prefetched_bytes"] == CHUNKS // 4 * CHUNK
        assert chunks_of(contents_of(proxy.seen, group)) == list(range(CHUNKS // 4))
        assert len(stored(tmp_path / "n", group).chunks) == CHUNKS // 4

    asyncio.run(run())


def test_a_wrong_published_profile_is_gone_after_three_runs(proxy: Proxy, reference: str, group: Group, tmp_path: Path) -> None:
    publish(reference, document(group, range(100, 150)))

    async def run() -> None:
        for _ in range(3):
            await one_run(tmp_path / "n", group, [1, 2])
        assert stored(tmp_path / "n", group).chunks == (1, 2)
        proxy.seen.clear()
        await one_run(tmp_path / "n", group, [1, 2])
        assert chunks_of(contents_of(proxy.seen, group)) == [1, 2]

    asyncio.run(run())


def test_one_that_lies_in_its_descriptor_is_not_used(proxy: Proxy, reference: str, group: Group, tmp_path: Path) -> None:
    publish(reference, document(group, [20, 21]))

    async def lies(request: web.Request) -> web.Response | None:
        if fallback_tag(group.digest) not in request.path:
            return None
        index = msgspec.json.decode(listed)
        index["manifests"][0]["data"] = "e30="
        return web.Response(body=msgspec.json.encode(index), content_type="application/vnd.oci.image.index.v1+json")

    listed = read_subject(parse_reference(f"{reference.rpartition(':')[0]}:{fallback_tag(group.digest)}"))

    async def run() -> None:
        proxy.fault = lies
        found = await one_run(tmp_path / "n", group, [20, 21])
        assert found["profiles"]["prefetched_bytes"] == 0

    asyncio.run(run())


def test_a_document_that_would_be_too_large_keeps_what_is_read_first() -> None:
    chunks = tuple(range(1_000_000, 1_300_000))
    whole = Profile(layer=LAYER, layer_chunks=2_000_000, chunks=chunks, missed=(0,) * len(chunks))
    data = document_of([whole])
    assert 700_000 < len(data) <= 1 << 20
    found = published_profile(data, LAYER, 2_000_000)
    assert found is not None
    assert found.chunks == chunks[: len(found.chunks)]


def test_the_core_lists_reads_of_a_layer_that_is_gone_as_an_error(tmp_path: Path, group: Group) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "n", layers_of(group)) as mount:
            with pytest.raises(core.CoreError):
                mount.plane._core.first_touches(LayerSlot(99), 0)

    asyncio.run(run())
