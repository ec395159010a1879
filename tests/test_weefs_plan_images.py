"""The images that a data plane keeps in its cache: made once, used again, replaced when damaged, bounded, refused with a reason."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs
import pytest
from merge_corners import directory, file, link
from strategies import Layer, encode_layer
from weefs_harness import toc_of

from weefs import core
from weefs import protocol as wire
from weefs.cachedir import CacheDirectory, LayerRecord
from weefs.dataplane import DataPlane
from weefs.images import Images

BASE: Layer = [directory(b"d"), file(b"d/f", b"contents")]
UPPER: Layer = [directory(b"d"), file(b"d/g", b"more")]


@attrs.frozen
class Stage:
    """A data plane whose layers are in its cache already."""

    plane: DataPlane
    cache: CacheDirectory
    images: Path

    def layer(self, layer: Layer) -> wire.Layer:
        blob = encode_layer(layer)
        toc = toc_of(blob)
        digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
        record = LayerRecord(
            digest=digest,
            size_bytes=len(blob),
            source=f"oci:{self.cache.path}",
            toc_digest=f"sha256:{hashlib.sha256(toc).hexdigest()}",
            toc_size_bytes=len(toc),
            content_bytes=0,
            chunks=0,
        )
        self.cache.create(record, toc)
        return wire.Layer(digest=digest, size_bytes=len(blob), source=record.source)

    def counts(self) -> dict[str, int]:
        counted: dict[str, int] = self.plane.statistics()["images"]
        return counted


def names(stage: Stage) -> set[str]:
    return {path.name for path in stage.images.iterdir()} - {"boot"}


def with_plane(directory: Path, work: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        cache = CacheDirectory.open(directory)
        filesystem = core.Core()
        plane = DataPlane(filesystem, cache)
        try:
            await work(Stage(plane, cache, directory / "erofs"))
        finally:
            await plane.close()
            filesystem.close()
            cache.close()

    asyncio.run(main())


def test_images_are_of_the_plan_or_of_its_layers(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        layers = [stage.layer(BASE), stage.layer(UPPER)]
        bare = await stage.plane.add_plan(layers)
        assert (bare.images, bare.images_refused, names(stage)) == ([], "", set())
        one = await stage.plane.add_plan(layers, images=True)
        assert one.images == [str(stage.images / f"1-plan-{one.plan_id}.erofs")]
        stacked = await stage.plane.add_plan(layers, images=True, stacked=True)
        digests = [hashlib.sha256(toc_of(encode_layer(layer))).hexdigest() for layer in (BASE, UPPER)]
        assert stacked.images == [str(stage.images / f"1-{digest}.erofs") for digest in digests]
        assert {os.path.basename(path) for path in one.images + stacked.images} == names(stage)
        assert stage.counts() == {"written": 3, "damaged": 0, "refused": 0, "removed": 0}

    with_plane(tmp_path, work)


@pytest.mark.parametrize(
    "stack",
    [[BASE, [file(b"d/g")]], [BASE, [link(b"other", b"d/f")]], [BASE, UPPER, BASE]],
    ids=["implicit directory", "link into a lower layer", "a layer twice"],
)
def test_what_a_stack_cannot_say_is_one_image(tmp_path: Path, stack: list[Layer]) -> None:
    async def work(stage: Stage) -> None:
        plan = await stage.plane.add_plan([stage.layer(layer) for layer in stack], images=True, stacked=True)
        assert plan.images == [str(stage.images / f"1-plan-{plan.plan_id}.erofs")]

    with_plane(tmp_path, work)


def test_layers_of_one_tree_are_not_stacked_on_themselves(tmp_path: Path) -> None:
    """Two blobs with the same TOC have the same image, and overlayfs takes a directory once."""

    async def work(stage: Stage) -> None:
        first = stage.layer(BASE)
        again = wire.Layer(digest=f"sha256:{'5' * 64}", size_bytes=first.size_bytes, source=first.source)
        record = stage.cache.find(first.digest)
        assert record is not None
        values = {name: getattr(record, name) for name in LayerRecord.__struct_fields__}
        stage.cache.create(LayerRecord(**(values | {"digest": again.digest})), toc_of(encode_layer(BASE)))
        plan = await stage.plane.add_plan([first, again], images=True, stacked=True)
        assert [Path(path).name for path in plan.images] == [f"1-plan-{plan.plan_id}.erofs"]

    with_plane(tmp_path, work)


def test_an_image_is_made_once_however_many_ask(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        base = stage.layer(BASE)
        plans = [[base, stage.layer([file(b"%d" % number)])] for number in range(5)]
        await asyncio.gather(*(stage.plane.add_plan(plan, images=True, stacked=True) for plan in plans for _ in range(3)))
        assert stage.counts()["written"] == 6

    with_plane(tmp_path, work)


def test_the_next_data_plane_uses_what_is_good_and_replaces_what_is_not(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        plan = await stage.plane.add_plan([stage.layer(BASE), stage.layer(UPPER)], images=True, stacked=True)
        made.append(([Path(path) for path in plan.images], stage.counts()))

    made: list[tuple[list[Path], dict[str, int]]] = []
    with_plane(tmp_path, work)
    paths = made[0][0]
    whole = [path.read_bytes() for path in paths]
    (tmp_path / "erofs" / "1-left.new").write_bytes(b"an interrupted write")
    with_plane(tmp_path, work)
    paths[0].write_bytes(whole[0][:-1])
    inode = paths[0].stat().st_ino
    with_plane(tmp_path, work)
    assert [counts["written"] for _, counts in made] == [2, 0, 1]
    assert [counts["damaged"] for _, counts in made] == [0, 0, 1]
    assert [path.read_bytes() for path in paths] == whole
    assert paths[0].stat().st_ino != inode  # a mount of the old file keeps what it has
    assert not list((tmp_path / "erofs").glob("*.new"))


def test_images_of_an_earlier_boot_are_written_again(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        await stage.plane.add_plan([stage.layer(BASE)], images=True)
        written.append(stage.counts()["written"])

    written: list[int] = []
    with_plane(tmp_path, work)
    with_plane(tmp_path, work)
    (tmp_path / "erofs" / "boot").write_bytes(bytes(16))
    with_plane(tmp_path, work)
    assert written == [1, 0, 1]


def test_a_plan_whose_image_cannot_be_made_is_served_without(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        layers = [stage.layer([file(b"f", xattrs={b"system.other": b""})])]
        for stacked in (True, False):
            plan = await stage.plane.add_plan(layers, images=True, stacked=stacked)
            assert (plan.images, plan.images_refused) == ([], "the attribute 'system.other': EROFS knows user, trusted, security and ACLs")
        assert names(stage) == set()
        assert stage.counts()["refused"] == 2

    with_plane(tmp_path, work)


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        layers = [stage.layer([file(b"%d" % number)]) for number in range(4)]
        plans = [await stage.plane.add_plan([layer], images=True) for layer in layers]
        paths = [Path(plan.images[0]) for plan in plans]
        for age, path in enumerate(paths):
            os.utime(path, ns=(0, 10**9 * age))
        images = Images(tmp_path, unused_max=1)
        images.shrink({paths[0]})
        assert names(stage) == {paths[0].name, paths[3].name}
        assert images.statistics()["removed"] == 2

    with_plane(tmp_path, work)
