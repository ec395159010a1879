"""The data plane from a mount to a real registry, without the daemon: which requests a reader causes, and what it meets
when the registry is damaged, away, or back again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from plane_harness import IMPATIENT, QUICK, layers_of, mounted, wait_until
from registry_fixture import (
    CHUNK,
    Proxy,
    RegistryServer,
    Seen,
    auth_file,
    free_port,
    make_layer,
    run_registry,
)
from strategies import make_content

from layerformat import Layer as LayerFile
from registry import Unreachable, load_credentials, push_group, resolve_group
from weefs.errors import LayerRefused
from weefs.fetch import FetchPolicy, LayerSource, in_thread, read_patiently
from weefs.traffic import LayerTraffic

LARGE = make_content(CHUNK * 8, 1, False)
FILES = {"large": LARGE, "other": make_content(CHUNK * 3, 2, False), "small": b"small"}


@pytest.fixture(scope="module")
def layer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_layer(tmp_path_factory.mktemp("layer"), "layer", FILES)


@pytest.fixture
def proxy(proxy: Proxy, server: RegistryServer, layer_file: Path) -> Proxy:
    """The registry with the group `…/repo:t` in it, nothing counted yet."""
    push_group(f"{server.host}/repo:t", [layer_file])
    return proxy


def chunks_of(layer_file: Path, name: str) -> list[tuple[int, int]]:
    """Offset and stored size in the blob of each chunk that a file is in."""
    with LayerFile.open(layer_file) as layer:
        number = layer.lookup(name.encode())
        assert number is not None
        inode = layer.inode(number)
        begin, end = inode.data, inode.data + inode.size  # where its contents are in the stream
        return [
            (chunk.blob_offset, chunk.stored_size)
            for chunk in layer.toc.chunks
            if chunk.stream_offset < end and chunk.stream_offset + chunk.raw_size > begin
        ]


def ranges_of(seen: list[Seen]) -> list[tuple[int, int]]:
    """Offset and size of the ranges that were asked for."""
    found = []
    for one in seen:
        assert one.range is not None
        begin, _, end = one.range.removeprefix("bytes=").partition("-")
        found.append((int(begin), int(end) + 1 - int(begin)))
    return found


# opening a layer


@pytest.mark.parametrize("annotated", [True, False])
def test_opening_a_layer_transfers_its_toc_and_no_more(proxy: Proxy, tmp_path: Path, annotated: bool) -> None:
    group = resolve_group(f"{proxy.host}/repo:t")
    layer = group.layers[0]
    toc_offset, toc_size = layer.toc_offset, layer.toc_size_bytes
    assert toc_offset is not None
    assert toc_size is not None
    toc = (toc_offset, toc_size)
    footer = (layer.size_bytes - 80, 80)
    proxy.seen.clear()

    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(group, annotated=annotated)) as mount:
            listed = await asyncio.to_thread(lambda: {path.name: path.stat().st_size for path in mount.path.iterdir()})
            assert listed == {name: len(data) for name, data in FILES.items()}
            assert ranges_of(proxy.seen) == ([toc] if annotated else [footer, toc])
            assert sum(one.received_bytes for one in proxy.seen) == toc_size + (0 if annotated else 80)
            counted = mount.traffic()
            assert (counted["metadata_requests"], counted["requests"]) == (1 if annotated else 2, 0)
            assert counted["metadata_bytes"] == sum(one.received_bytes for one in proxy.seen)

    asyncio.run(run())


def test_a_layer_that_is_open_is_not_opened_again(proxy: Proxy, layer_file: Path, tmp_path: Path) -> None:
    push_group(f"{proxy.host}/repo:two", [make_layer(tmp_path, "second", {"f": b"f"}), layer_file])
    one, two = (resolve_group(f"{proxy.host}/repo:{tag}") for tag in ("t", "two"))
    proxy.seen.clear()

    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(one)) as mount:
            plans = await asyncio.gather(*(mount.plane.add_plan(layers_of(group)) for group in (one, two, one, two)))
            assert len({plan.plan_id for plan in plans}) == 2

    asyncio.run(run())
    assert len(proxy.seen) == 2


# reading


def test_a_read_fetches_the_chunks_that_cover_it_and_nothing_else(
    proxy: Proxy, layer_file: Path, tmp_path: Path
) -> None:
    chunks = chunks_of(layer_file, "large")
    assert len(chunks) == 8
    reads = {
        (CHUNK * 2 + 5, 100): chunks[2:3],
        (CHUNK * 2, CHUNK): [],  # it is here by now
        (CHUNK * 5 - 1, 2): chunks[4:6],
        (CHUNK * 8 - 1, 1): chunks[7:],
    }

    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(resolve_group(f"{proxy.host}/repo:t"))) as mount:
            for (offset, size), wanted in reads.items():
                proxy.seen.clear()
                assert await mount.read("large", offset, size) == LARGE[offset : offset + size]
                fetched = {
                    position for begin, length in ranges_of(proxy.seen) for position in range(begin, begin + length)
                }
                assert fetched == {position for begin, length in wanted for position in range(begin, begin + length)}
                assert sum(one.received_bytes for one in proxy.seen) == len(fetched)
            assert mount.traffic()["bytes"] == sum(size for _, size in [*chunks[2:3], *chunks[4:6], *chunks[7:]])

    asyncio.run(run())


def test_neighbouring_misses_become_one_range(proxy: Proxy, layer_file: Path, tmp_path: Path) -> None:
    """Readers of eight chunks wait before anybody fetches."""
    chunks = chunks_of(layer_file, "large")

    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(resolve_group(f"{proxy.host}/repo:t")), fetching=False) as mount:
            proxy.seen.clear()
            readers = [asyncio.create_task(mount.read("large", i * CHUNK, CHUNK)) for i in (3, 0, 1, 7, 2, 6)]
            await wait_until(lambda: mount.plane.statistics()["fuse"]["in_flight"] == 6)
            mount.start_fetching()
            assert await asyncio.gather(*readers) == [LARGE[i * CHUNK : (i + 1) * CHUNK] for i in (3, 0, 1, 7, 2, 6)]

    asyncio.run(run())
    assert sorted(ranges_of(proxy.seen)) == [
        (chunks[0][0], sum(size for _, size in chunks[:4])),
        (chunks[6][0], sum(size for _, size in chunks[6:])),
    ]


def test_a_sequential_reader_is_read_ahead_of(proxy: Proxy, layer_file: Path, tmp_path: Path) -> None:
    """It waits for a few of its chunks only, and none is fetched twice."""
    chunks = chunks_of(layer_file, "large")

    async def run() -> None:
        layers = layers_of(resolve_group(f"{proxy.host}/repo:t"))
        async with mounted(tmp_path / "1", layers, policy=FetchPolicy()) as mount:
            proxy.seen.clear()
            for i in range(len(chunks)):
                assert await mount.read("large", i * CHUNK, CHUNK) == LARGE[i * CHUNK : (i + 1) * CHUNK]
                await wait_until(lambda: mount.plane.statistics()["fuse"]["in_flight"] == 0)
            assert mount.plane.statistics()["fuse"]["reads_waited"] == 5  # for 0 to 3 (then 4 and 5 come) and 6 (7)

    asyncio.run(run())
    fetched = sorted(ranges_of(proxy.seen))
    assert fetched[0][0] == chunks[0][0]
    assert all(begin + size == after for (begin, size), (after, _) in itertools.pairwise(fetched))


def test_every_file_reads_as_it_was(proxy: Proxy, tmp_path: Path) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(resolve_group(f"{proxy.host}/repo:t"))) as mount:
            found = await asyncio.gather(*(mount.read(name) for name in FILES for _ in range(4)))
            assert found == [data for data in FILES.values() for _ in range(4)]
            assert mount.traffic()["present_content_bytes"] >= sum(map(len, FILES.values()))
            assert mount.faults == []

    asyncio.run(run())


def test_a_registry_with_a_password_is_read_with_it(layer_file: Path, tmp_path: Path) -> None:
    with run_registry(tmp_path / "registry", password_file=True) as server:
        credentials = load_credentials([auth_file(tmp_path / "auth.json", server.host)])
        push_group(f"{server.host}/repo:t", [layer_file], credentials=credentials)
        group = resolve_group(f"{server.host}/repo:t", credentials=credentials)

        async def run() -> None:
            async with mounted(tmp_path / "1", layers_of(group), credentials=credentials) as mount:
                assert await mount.read("large") == LARGE

        asyncio.run(run())


# damage


def flipping(times: int, at: Callable[[int, int], int] = lambda _begin, _end: 0) -> Callable[[web.Request], Any]:
    """Answers the first ranges of contents with one bit flipped (`at` says in which byte of the range)."""
    left = [times]

    async def fault(request: web.Request) -> web.Response | None:
        if "Range" not in request.headers or not left[0]:
            return None
        left[0] -= 1
        begin, end = request.http_range.start, request.http_range.stop
        body = bytearray(BLOBS[request.path.rpartition("/")[2]][begin:end])
        body[at(begin, end)] ^= 0x10
        return web.Response(status=206, body=bytes(body), headers={"Content-Range": f"bytes {begin}-{end - 1}/*"})

    return fault


BLOBS: dict[str, bytes] = {}


@pytest.fixture(autouse=True)
def blob(layer_file: Path, proxy: Proxy) -> None:
    BLOBS[resolve_group(f"{proxy.host}/repo:t").layers[0].digest] = layer_file.read_bytes()


def test_a_chunk_damaged_twice_is_a_fault_and_the_next_read_asks_again(proxy: Proxy, tmp_path: Path) -> None:
    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(resolve_group(f"{proxy.host}/repo:t"))) as mount:
            proxy.seen.clear()
            proxy.fault = flipping(2)
            with pytest.raises(OSError) as caught:
                await mount.read("large", 0, 10)
            assert caught.value.errno == errno.EIO
            assert len(proxy.seen) == 2  # once more, and no third time
            await wait_until(lambda: bool(mount.faults))
            (fault,) = mount.faults
            assert fault.pid in {thread.native_id for thread in threading.enumerate()}  # to FUSE, a thread is a pid
            assert fault.error == f"chunk {fault.chunk} of {mount.digest} is damaged: received twice without its digest"
            assert mount.traffic()["given_up_chunks"] == 1
            assert await mount.read("large", 0, 10) == LARGE[:10]
            assert len(proxy.seen) == 3

    asyncio.run(run())


def test_a_chunk_damaged_once_is_asked_for_again_by_itself(proxy: Proxy, layer_file: Path, tmp_path: Path) -> None:
    chunks = chunks_of(layer_file, "large")
    inside = chunks[1][0] + 7

    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(resolve_group(f"{proxy.host}/repo:t")), fetching=False) as mount:
            proxy.seen.clear()
            proxy.fault = flipping(1, at=lambda begin, _end: inside - begin)
            readers = [asyncio.create_task(mount.read("large", i * CHUNK, CHUNK)) for i in range(3)]
            await wait_until(lambda: mount.plane.statistics()["fuse"]["in_flight"] == 3)
            mount.start_fetching()
            assert await asyncio.gather(*readers) == [LARGE[i * CHUNK : (i + 1) * CHUNK] for i in range(3)]
            assert mount.faults == []

    asyncio.run(run())
    assert ranges_of(proxy.seen) == [(chunks[0][0], sum(size for _, size in chunks[:3])), chunks[1]]


def test_a_blob_that_is_gone_is_a_fault_at_once(proxy: Proxy, tmp_path: Path) -> None:
    async def gone(request: web.Request) -> web.Response:
        return web.Response(status=404, text="BLOB_UNKNOWN")

    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(resolve_group(f"{proxy.host}/repo:t"))) as mount:
            proxy.seen.clear()
            proxy.fault = gone
            with pytest.raises(OSError) as caught:
                await mount.read("large", 0, 10)
            assert caught.value.errno == errno.EIO
            assert len(proxy.seen) == 1
            await wait_until(lambda: bool(mount.faults))
            assert "status 404" in mount.faults[0].error

    asyncio.run(run())


@pytest.mark.parametrize("place", ["first", "last", "footer"])
def test_a_damaged_toc_is_refused(proxy: Proxy, tmp_path: Path, place: str) -> None:
    layers = layers_of(resolve_group(f"{proxy.host}/repo:t"), annotated=place != "footer")
    proxy.fault = flipping(1, at=lambda begin, end: {"first": 0, "last": end - begin - 1, "footer": 20}[place])

    async def run() -> None:
        async with mounted(tmp_path / "1", layers):
            raise AssertionError("it must not be mounted")

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run())
    assert caught.group_contains(LayerRefused, match=layers[0].digest)


def test_a_toc_whose_frame_claims_more_than_the_manifest_is_refused_before_it_is_unpacked(
    proxy: Proxy, tmp_path: Path
) -> None:
    layers = layers_of(resolve_group(f"{proxy.host}/repo:t"))
    frame = bytes.fromhex("28b52ffde0ffffffffffff0000") + b"\x01\x00\x00"  # one empty block, 2^48 - 1 bytes claimed

    async def bomb(request: web.Request) -> web.Response | None:
        begin, end = request.http_range.start, request.http_range.stop
        headers = {"Content-Range": f"bytes {begin}-{end - 1}/*"}
        return web.Response(status=206, body=frame.ljust(end - begin, b"\0"), headers=headers)

    proxy.fault = bomb

    async def run() -> None:
        async with mounted(tmp_path / "1", layers):
            raise AssertionError("it must not be mounted")

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run())
    assert caught.group_contains(LayerRefused, match=r"whose frame says 281474976710655")


def test_a_toc_with_another_digest_than_the_manifests_is_refused(proxy: Proxy, tmp_path: Path) -> None:
    wrong = f"sha256:{'0' * 64}"
    (layer,) = layers_of(resolve_group(f"{proxy.host}/repo:t"))

    async def run() -> None:
        async with mounted(tmp_path / "1", [msgspec.structs.replace(layer, toc_digest=wrong)]):
            raise AssertionError("it must not be mounted")

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run())
    assert caught.group_contains(LayerRefused, match=f"expected a TOC with digest {wrong}, received {layer.toc_digest}")


# a registry that is away


def test_a_registry_that_is_away_and_back_in_time_costs_only_time(layer_file: Path, tmp_path: Path) -> None:
    port = free_port()
    with run_registry(tmp_path / "registry", port=port) as server:
        push_group(f"{server.host}/repo:t", [layer_file])
        group = resolve_group(f"{server.host}/repo:t")

    async def read_while_away() -> None:
        with contextlib.ExitStack() as first:
            await asyncio.to_thread(first.enter_context, run_registry(tmp_path / "registry", port=port))
            async with mounted(tmp_path / "1", layers_of(group)) as mount:
                await asyncio.to_thread(first.close)
                reader = asyncio.create_task(mount.read("large", 0, 10))
                await wait_until(lambda: mount.traffic()["retries"] >= 2)
                with contextlib.ExitStack() as second:
                    await asyncio.to_thread(second.enter_context, run_registry(tmp_path / "registry", port=port))
                    assert await reader == LARGE[:10]
                    assert mount.faults == []

    asyncio.run(read_while_away())


def test_a_registry_that_stays_away_is_a_fault_and_the_next_read_asks_again(proxy: Proxy, tmp_path: Path) -> None:
    async def away(request: web.Request) -> web.Response:
        return web.Response(status=503, text="down for maintenance")

    async def run() -> None:
        layers = layers_of(resolve_group(f"{proxy.host}/repo:t"))
        async with mounted(tmp_path / "1", layers, policy=IMPATIENT) as mount:
            proxy.fault = away
            with pytest.raises(OSError) as caught:
                await mount.read("large", 0, 10)
            assert caught.value.errno == errno.EIO
            await wait_until(lambda: bool(mount.faults))
            assert "status 503 Service Unavailable: down for maintenance" in mount.faults[0].error
            assert mount.traffic()["retries"] >= 1
            proxy.fault = None
            assert await mount.read("large", 0, 10) == LARGE[:10]

    asyncio.run(run())


def test_a_registry_that_is_silent_is_a_fault_after_the_deadline(proxy: Proxy, tmp_path: Path) -> None:
    async def silent(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        layers = layers_of(resolve_group(f"{proxy.host}/repo:t"))
        async with mounted(tmp_path / "1", layers, policy=IMPATIENT) as mount:
            proxy.fault = silent
            with pytest.raises(OSError) as caught:
                await mount.read("large", 0, 10)
            assert caught.value.errno == errno.EIO
            await wait_until(lambda: bool(mount.faults))
            assert "expected an answer within 0.3 s, received none" in mount.faults[0].error

    asyncio.run(run())


def test_a_registry_that_is_away_for_a_moment_is_waited_for_when_a_layer_is_opened(
    proxy: Proxy, tmp_path: Path
) -> None:
    left = [2]

    async def twice(request: web.Request) -> web.Response | None:
        left[0] -= 1
        return web.Response(status=503) if left[0] >= 0 else None

    layers = layers_of(resolve_group(f"{proxy.host}/repo:t"))
    proxy.fault = twice

    async def run() -> None:
        async with mounted(tmp_path / "1", layers) as mount:
            assert mount.traffic()["metadata_requests"] == 3
            assert mount.traffic()["retries"] == 2

    asyncio.run(run())


def test_who_waits_when_the_data_plane_stops_gets_an_error(proxy: Proxy, tmp_path: Path) -> None:
    async def silent(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        async with mounted(tmp_path / "1", layers_of(resolve_group(f"{proxy.host}/repo:t"))) as mount:
            proxy.fault = silent
            reader = asyncio.create_task(mount.read("large", 0, 10))
            await wait_until(lambda: mount.traffic()["requests"] == 1)
            assert mount.fetcher is not None
            mount.fetcher.cancel()
            with pytest.raises(OSError) as caught:
                await reader
            assert caught.value.errno == errno.EIO

    asyncio.run(run())


# patience, without a mount


class Scripted:
    """A range reader that fails as told and then answers."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)

    async def read_into(self, digest: str, offset: int, into: memoryview) -> None:
        if self.failures:
            raise self.failures.pop(0)
        into[:] = b"x" * len(into)

    async def read(self, digest: str, offset: int, size: int) -> bytes:
        raise AssertionError

    async def size(self, digest: str) -> int:
        return 0

    async def close(self) -> None:
        return None


def read_scripted(*failures: Exception, deadline_s: float) -> tuple[bytes | Exception, int]:
    """What comes of it, and after how many requests."""
    traffic = LayerTraffic()

    async def run() -> bytes:
        deadline = asyncio.get_running_loop().time() + deadline_s
        return await read_patiently(LayerSource(Scripted(*failures), "sha256:0", traffic), 0, 3, deadline=deadline, policy=QUICK)

    try:
        return asyncio.run(run()), traffic.requests
    except Exception as error:
        return error, traffic.requests


def test_patience_ends_where_waiting_would_pass_the_deadline() -> None:
    later = Unreachable("busy", retry_after_s=100.0)
    assert read_scripted(later, deadline_s=30) == (later, 1)  # at once: the answer would come too late
    assert read_scripted(Unreachable("a"), Unreachable("b", 0.01), deadline_s=30) == (b"xxx", 3)


def test_a_delay_grows_and_stays_within_its_bound() -> None:
    policy = FetchPolicy(first_delay_s=0.05, longest_delay_s=2.0)
    for attempt in (1, 2, 3, 10, 10_000):
        longest = min(2.0, 0.05 * 2 ** min(attempt - 1, 32))
        assert longest / 2 <= policy.delay_s(attempt) <= longest


def test_a_cancelled_call_into_the_core_is_waited_for() -> None:
    entered, gate, left = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        entered.set()
        gate.wait()
        left.set()

    async def run() -> None:
        task = asyncio.create_task(in_thread(call))
        await asyncio.to_thread(entered.wait)
        task.cancel()
        await asyncio.wait([task], timeout=0)
        early = task.done()
        gate.set()
        assert not early
        with pytest.raises(asyncio.CancelledError):
            await task
        assert left.is_set()

    asyncio.run(run())
