"""The mount against kernel overlayfs over the unpacked layers: generated stacks and named ones, entry by entry.

overlayfs is the second opinion on merging: whiteouts, opaque directories, types that change, link groups. Where it
differs, a predicate says so (merge_corners.py) and docs/decisions/0002-merging-corner-cases.md says why.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import attrs
import pytest
from hypothesis import given
from merge_corners import (
    KINDS,
    compare,
    directory,
    file,
    goes_through_a_lower_symlink,
    link,
    makes_the_root_opaque,
    on_disk,
    opaque,
    symlink,
    topmost_is_implicit,
    whiteout,
    without_attributes,
)
from strategies import Layer, encode_layer, layer_stacks
from unpacked_layers import UnpackedStack, kernel_view
from weefs_harness import MountedCore, Row, mounted_core, open_layers, tree_rows

from weefs.merge import Directory, File, PlanRefused, View


@pytest.fixture(scope="module")
def mounted() -> Iterator[MountedCore]:
    with mounted_core() as mounted:
        yield mounted


def both(mounted: MountedCore, stack: list[Layer]) -> tuple[dict[bytes, Row], dict[bytes, Row], UnpackedStack]:
    """What weefs and what overlayfs shows."""
    with kernel_view(stack) as (unpacked, target):
        slot, path = mounted.add_plan(unpacked.blobs)
        try:
            return tree_rows(path), tree_rows(target), unpacked
        finally:
            mounted.core.remove_plan(slot)


def is_torn(unpacked: UnpackedStack, nodes: dict[bytes, File | Directory], node: File) -> bool:
    """A name that some layer has of the file is hidden by a higher one, be it by another name of the same file: the
    inode below counts it all the same.
    """
    names = unpacked.names[node.layer, node.number]
    return len(names) > len(set(names)) or any(nodes.get(path) is not node for path in names)


def differences(ours: dict[bytes, Row], theirs: dict[bytes, Row], unpacked: UnpackedStack) -> list[str]:
    """What is not explained by a corner."""
    nodes = dict(View(open_layers(unpacked.blobs)).walk())
    for path in ours.keys() & theirs.keys():
        node, mine, other = nodes[path], on_disk(ours[path]), theirs[path]
        if isinstance(node, Directory):
            mine, other = attrs.evolve(mine, nlink=0), attrs.evolve(other, nlink=0)  # 1 where overlayfs merges
            if topmost_is_implicit(unpacked.models, path):
                mine, other = without_attributes(mine), without_attributes(other)
        elif is_torn(unpacked, nodes, node):
            assert other.nlink > mine.nlink
            other = attrs.evolve(other, nlink=mine.nlink, group=mine.group)
        ours[path], theirs[path] = mine, other
    return [str(difference) for difference in compare(ours, theirs)]


LINKS_OVER_LAYERS = [
    [directory(b"x"), directory(b"y"), file(b"x/a"), link(b"x/b", b"x/a"), file(b"y/c")],
    [directory(b"z"), link(b"z/d", b"x/a"), link(b"z/e", b"y/c")],
    [link(b"f", b"z/d")],
]
OPAQUE = [
    [directory(b"d", 0o700), file(b"d/old"), directory(b"d/e"), file(b"d/e/old")],
    [directory(b"d"), opaque(b"d"), file(b"d/new")],
    [directory(b"d/e", 0o711), opaque(b"d/e"), file(b"d/e/new"), directory(b"d", 0o755, mtime_ns=9)],
]
REPLACED = [
    [directory(b"a"), file(b"a/x"), file(b"b"), symlink(b"c", b"a"), directory(b"e"), file(b"e/x")],
    [file(b"a"), directory(b"b"), file(b"b/y"), directory(b"c"), file(b"c/z"), whiteout(b"e"), directory(b"e", 0o700)],
    [directory(b"a"), file(b"a/z"), file(b"b/y/z")],
]
HIDDEN_AND_MADE_AGAIN = [
    [directory(b"d"), file(b"d/f"), file(b"g")],
    [whiteout(b"d"), whiteout(b"g"), whiteout(b"never"), whiteout(b"a/b/c"), whiteout(b"d/e/f")],
    [directory(b"d", 0o711), file(b"d/h"), file(b"g", b"again")],
]
RETYPED = [[directory(b"d"), file(b"d/old")], [file(b"d"), directory(b"d", 0o700)]]


@pytest.mark.parametrize(
    "stack",
    [KINDS, LINKS_OVER_LAYERS, OPAQUE, REPLACED, HIDDEN_AND_MADE_AGAIN, RETYPED],
    ids=["kinds", "links", "opaque", "replaced", "hidden", "retyped"],
)
def test_named_stacks(mounted: MountedCore, stack: list[Layer]) -> None:
    ours, theirs, unpacked = both(mounted, stack)
    assert differences(ours, theirs, unpacked) == []


def test_generated_stacks(mounted: MountedCore) -> None:
    compared: list[bool] = []

    @given(layer_stacks(extractable=True))
    def check(stack: list[Layer]) -> None:
        blobs = [encode_layer(layer) for layer in stack]
        try:
            View(open_layers(blobs))
        except PlanRefused:
            return
        compared.append(not goes_through_a_lower_symlink(blobs) and not makes_the_root_opaque(stack))
        if compared[-1]:
            ours, theirs, unpacked = both(mounted, stack)
            assert differences(ours, theirs, unpacked) == []

    check()
    assert sum(compared) > len(compared) / 2


# The corners: what is kept out above, shown to be as the decision record says.


def test_paths_through_lower_symlinks_replace_them_in_overlayfs_only(mounted: MountedCore) -> None:
    stack = [[directory(b"usr/lib"), file(b"usr/lib/a"), symlink(b"lib", b"usr/lib")], [file(b"lib/b")]]
    ours, theirs, _ = both(mounted, stack)
    assert ours.keys() - theirs.keys() == {b"usr/lib/b"}
    assert theirs.keys() - ours.keys() == {b"lib/b"}
    assert (ours[b"lib"].target, theirs[b"lib"].mode >> 12) == (b"usr/lib", 4)


def test_implicit_directories_change_attributes_in_overlayfs_only(mounted: MountedCore) -> None:
    ours, theirs, _ = both(mounted, [[directory(b"d", 0o700, uid=5, mtime_ns=3)], [file(b"d/f")]])
    assert (ours[b"d"].mode, ours[b"d"].uid, ours[b"d"].mtime_ns) == (0o40700, 5, 3)
    assert (theirs[b"d"].mode, theirs[b"d"].uid, theirs[b"d"].mtime_ns) == (0o40755, 0, 0)


def test_torn_link_groups_count_hidden_names_in_overlayfs_only(mounted: MountedCore) -> None:
    ours, theirs, _ = both(mounted, [[file(b"a"), link(b"b", b"a"), link(b"c", b"a")], [whiteout(b"a")]])
    assert (ours[b"b"].nlink, ours[b"b"].group) == (2, (b"b", b"c"))
    assert (theirs[b"b"].nlink, theirs[b"b"].group) == (3, (b"b", b"c"))


def test_whiteouts_that_hide_nothing_are_listed_in_overlayfs_only(mounted: MountedCore) -> None:
    stack = [[file(b"f")], [whiteout(b"made/gone")]]
    with kernel_view(stack, whiteouts_anywhere=True) as (unpacked, target):
        assert os.listdir(target / "made") == ["gone"]
        assert not os.path.lexists(target / "made/gone")
        slot, path = mounted.add_plan(unpacked.blobs)
        assert os.listdir(path / "made") == []
        mounted.core.remove_plan(slot)


def test_an_opaque_root_hides_nothing_in_overlayfs(mounted: MountedCore) -> None:
    ours, theirs, _ = both(mounted, [[file(b"a")], [opaque(b"."), file(b"b")]])
    assert (set(ours), set(theirs)) == ({b"", b"b"}, {b"", b"a", b"b"})
