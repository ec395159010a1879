"""What is fetched while nobody waits: in which order and size, behind whom, how fast, until when; and that it harms nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from plane_harness import Mounted, layers_of, mounted, wait_until
from registry_fixture import CHUNK, Proxy, RegistryServer, make_layer, run_proxy
from strategies import make_content

from layerformat import Layer as LayerFile
from registry import Group, push_group, resolve_group
from weefs.fill import FillPolicy

CHUNKS = 40
LARGE = make_content(CHUNK * CHUNKS, 1, False)
EAGER = FillPolicy("eager", first_pause_s=0.01, longest_pause_s=0.05)


@pytest.fixture(scope="module")
def layer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_layer(tmp_path_factory.mktemp("layer"), "layer", {"large": LARGE})


@pytest.fixture
def proxy(server: RegistryServer, layer_file: Path) -> Iterator[Proxy]:
    push_group(f"{server.host}/fill:t", [layer_file])
    with run_proxy(server.host) as proxy:
        yield proxy


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
            assert all(before[1] == after[0] for before, after in zip(ranges, ranges[1:], strict=False)), "each byte once"
            assert len(ranges) <= 2, "4 MiB each"
            counted = mount.traffic()
            assert counted["fill"]["filled_bytes"] == end == mount.plane.statistics()["fill"]["filled_bytes"]
            assert mount.plane.statistics()["fill"]["remaining_bytes"] == 0
            assert await mount.read("large") == LARGE
            assert content_ranges(proxy, group) == ranges, "everything was there"
            assert not mount.faults

    asyncio.run(run())
