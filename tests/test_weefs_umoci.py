"""The mount against `umoci unpack`: generated stacks and named ones, as images of tar layers, entry by entry.

umoci applies archives to one directory, so it is the second opinion on what a stack of tars means; where it differs, a
predicate says so (merge_corners.py) and docs/decisions/0002-merging-corner-cases.md says why. umoci's own failures are
compared too: what weefs refuses, umoci must refuse, but for the one case that is named.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest
from hypothesis import given
from merge_corners import (
    KINDS,
    compare,
    converted,
    directory,
    file,
    goes_through_a_lower_symlink,
    has_a_whiteout_below_a_file,
    is_hollow,
    is_implicit,
    link,
    on_disk,
    opaque,
    removed_and_implied,
    retypes_a_directory,
    symlink,
    whiteout,
    without_attributes,
)
from strategies import DIALECTS, Layer, dialects, layer_stacks, write_pax
from unpacked_layers import Unpacked, umoci
from weefs_harness import MountedCore, Row, mounted_core, open_layers, tree_rows

from weefs.core import CoreError
from weefs.merge import Directory, View

UMOCI_REFUSES = ("not a directory", "link: no such file or directory", "link: operation not permitted")
"""Ends of umoci's messages for what it cannot unpack and weefs can mount: a path through something that is no directory
in the layers so far, a hard link to a name that this layer has removed before, and a hard link to a directory that
another entry replaces afterwards.
"""


@pytest.fixture(scope="module")
def mounted() -> Iterator[MountedCore]:
    with mounted_core() as mounted:
        yield mounted


def as_go_reads(row: Row) -> Row:
    """Go's PAX reader drops records without a value, and GNU tar's escapes in names stay as they are."""
    xattrs = [(name.replace(b"%", b"%25").replace(b"=", b"%3D"), value) for name, value in row.xattrs if value]
    return attrs.evolve(row, xattrs=tuple(sorted(xattrs)))


def differences(shown: dict[bytes, Row], view: View, unpacked: Unpacked, removed: set[bytes]) -> list[str]:
    """What is not explained by a corner. `removed`: what `removed_and_implied` says of the stack."""
    ours, theirs = dict(shown), dict(unpacked.rows)
    for path, node in view.walk():
        if is_hollow(node) and (path not in theirs or theirs[path].mode >> 12 != 4):
            ours.pop(path)  # umoci makes no directory for the sake of a whiteout, and leaves the file that is there
            theirs |= without_name(theirs, path)
            theirs.pop(path, None)
    for path, node in view.walk():
        if path not in ours or path not in theirs:
            continue
        ours[path], theirs[path] = as_go_reads(on_disk(ours[path])), theirs[path]
        if not isinstance(node, Directory):
            continue
        hollow = sum(is_hollow(child) and (path + b"/" + name if path else name) not in ours for name, child in node.children.items())
        ours[path] = attrs.evolve(ours[path], nlink=ours[path].nlink - hollow)
        if is_implicit(node) or path in removed:
            ours[path], theirs[path] = without_attributes(ours[path]), without_attributes(theirs[path])
        elif unpacked.touched(theirs[path]):  # it made a missing directory in it, and left the time so
            theirs[path] = attrs.evolve(theirs[path], mtime_ns=ours[path].mtime_ns)
    return [str(difference) for difference in compare(ours, theirs)]


def without_name(rows: dict[bytes, Row], path: bytes) -> dict[bytes, Row]:
    """The other names of a file as they are without this one."""
    others = tuple(name for name in rows[path].group if name != path) if path in rows else ()
    group = others if len(others) > 1 else ()
    return {name: attrs.evolve(rows[name], nlink=rows[name].nlink - 1, group=group) for name in others}


def umoci_guesses(refusal: str, stack: list[Layer], blobs: list[bytes]) -> bool:
    """What weefs refuses and umoci unpacks: paths through dangling symlinks; links to files that are there only by way
    of a lower symlink, or that a whiteout below their name has replaced by a directory.
    """
    if "a symlink in a layer below it that leads to no directory" in refusal:
        return True
    return "has a hard link to" in refusal and (goes_through_a_lower_symlink(blobs) or has_a_whiteout_below_a_file(stack))


def agree(mounted: MountedCore, stack: list[Layer], dialect: str = "ours") -> bool:
    """Asserts that the two show the same; False when umoci cannot unpack what weefs can mount."""
    tars = [DIALECTS[dialect][0](layer) for layer in stack]
    blobs = [converted(tar) for tar in tars]
    unpacked = umoci(tars)
    try:
        slot, path = mounted.add_plan(blobs)
    except CoreError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert unpacked.error or umoci_guesses(refusal, stack, blobs), refusal
        return False
    try:
        shown = tree_rows(path)
    finally:
        mounted.core.remove_plan(slot)
    if unpacked.error:
        assert unpacked.error.endswith(UMOCI_REFUSES), unpacked.error
        return False
    assert differences(shown, View(open_layers(blobs)), unpacked, removed_and_implied(stack)) == []
    return True


# Named stacks that both show alike. Every directory but the root has its entry, so that nothing is kept out.

USRMERGE = [
    [directory(b"usr"), directory(b"usr/lib"), file(b"usr/lib/a"), symlink(b"lib", b"usr/lib")],
    [file(b"lib/b"), directory(b"usr/lib/deep"), file(b"lib/deep/c"), file(b"usr/lib/d")],
    [file(b"lib/b", b"newer"), whiteout(b"lib/a"), link(b"lib/e", b"usr/lib/d")],
]
LINKS_OVER_LAYERS = [
    [directory(b"x"), directory(b"y"), file(b"x/a"), link(b"x/b", b"x/a"), file(b"y/c")],
    [directory(b"z"), link(b"z/d", b"x/a"), link(b"z/e", b"y/c")],
    [whiteout(b"x"), link(b"f", b"z/d"), file(b"y/c", b"other")],
]
OPAQUE = [
    [directory(b"d", 0o700), file(b"d/old"), directory(b"d/e"), file(b"d/e/old"), link(b"kept", b"d/old")],
    [opaque(b"d"), file(b"d/new")],
    [directory(b"d/e", 0o711), opaque(b"d/e"), file(b"d/e/new"), directory(b"d", 0o755, mtime_ns=9)],
]
REPLACED = [
    [directory(b"a"), file(b"a/x"), file(b"b"), symlink(b"c", b"a"), directory(b"e"), file(b"e/x")],
    [file(b"a"), directory(b"b"), file(b"b/y"), directory(b"c"), file(b"c/z"), whiteout(b"e"), directory(b"e", 0o700)],
]
HIDDEN_AND_MADE_AGAIN = [
    [directory(b"d"), file(b"d/f"), file(b"g")],
    [whiteout(b"d"), whiteout(b"g"), whiteout(b"never")],
    [directory(b"d", 0o711), file(b"d/h"), file(b"g", b"again")],
]
LINK_TO_SYMLINK = [[symlink(b"s", b"t"), directory(b"d")], [link(b"d/hard", b"s")]]


@pytest.mark.parametrize(
    "stack",
    [KINDS, USRMERGE, LINKS_OVER_LAYERS, OPAQUE, REPLACED, HIDDEN_AND_MADE_AGAIN, LINK_TO_SYMLINK],
    ids=["kinds", "usrmerge", "links", "opaque", "replaced", "hidden", "link-to-symlink"],
)
def test_named_stacks(mounted: MountedCore, stack: list[Layer]) -> None:
    assert agree(mounted, stack)


def test_generated_stacks(mounted: MountedCore) -> None:
    compared: list[bool] = []

    @given(layer_stacks(extractable=True), dialects())
    def check(stack: list[Layer], dialect: str) -> None:
        if not retypes_a_directory(stack):
            compared.append(agree(mounted, stack, dialect))

    check()
    assert sum(compared) > len(compared) / 2


# The corners: what is kept out above, shown to be as the decision record says.


def both(mounted: MountedCore, *stack: Layer) -> tuple[dict[bytes, Row], Unpacked]:
    tars = [write_pax(layer) for layer in stack]
    slot, path = mounted.add_plan([converted(tar) for tar in tars])
    try:
        return tree_rows(path), umoci(tars)
    finally:
        mounted.core.remove_plan(slot)


def test_implicit_directories_keep_the_attributes_below_and_else_get_the_formats(mounted: MountedCore) -> None:
    set_gid = directory(b"known", 0o2775, gid=7, mtime_ns=1)
    ours, theirs = both(mounted, [set_gid], [file(b"known/made/f")])
    assert (ours[b"known"].mode, ours[b"known"].gid, ours[b"known"].mtime_ns) == (0o42775, 7, 1)
    assert (ours[b"known/made"].mode, ours[b"known/made"].gid, ours[b"known/made"].mtime_ns) == (0o40755, 0, 0)
    assert (theirs.rows[b"known/made"].mode, theirs.rows[b"known/made"].gid) == (0o42755, 7)
    assert theirs.touched(theirs.rows[b"known"])
    assert ours.keys() == theirs.rows.keys()


def test_whiteouts_below_nothing_make_their_directories(mounted: MountedCore) -> None:
    ours, theirs = both(mounted, [file(b"f")], [whiteout(b"a/b/c"), whiteout(b"f/x")])
    assert set(ours) == {b"", b"a", b"a/b", b"f"}
    assert ours[b"f"].mode == 0o40755
    assert set(theirs.rows) == {b"", b"f"}
    assert theirs.rows[b"f"].content == b"data"


def test_a_path_that_changes_its_type_within_a_layer_merges_as_its_last_entry_says(mounted: MountedCore) -> None:
    ours, theirs = both(mounted, [directory(b"d"), file(b"d/old")], [file(b"d"), directory(b"d", 0o700)])
    assert ours.keys() - theirs.rows.keys() == {b"d/old"}
    assert ours[b"d"].mode == theirs.rows[b"d"].mode == 0o40700


def test_a_removed_directory_that_is_only_implied_keeps_its_attributes(mounted: MountedCore) -> None:
    stack = [[directory(b"d", 0o700, uid=5), file(b"d/old")], [whiteout(b"d"), file(b"d/new")]]
    ours, theirs = both(mounted, *stack)
    assert set(ours) == set(theirs.rows) == {b"", b"d", b"d/new"}
    assert (ours[b"d"].mode, ours[b"d"].uid) == (0o40700, 5)
    assert (theirs.rows[b"d"].mode, theirs.rows[b"d"].uid) == (0o40755, 0)


def test_lower_links_name_the_file_that_was_there_before_the_layer(mounted: MountedCore) -> None:
    ours, theirs = both(mounted, [file(b"a", b"first")], [whiteout(b"a"), link(b"b", b"a")])
    assert ours[b"b"].content == b"first"
    assert theirs.error.endswith("link: no such file or directory")


def test_links_to_what_only_a_lower_symlink_leads_to_are_refused(mounted: MountedCore) -> None:
    stack = [[directory(b"usr/lib"), symlink(b"lib", b"usr/lib")], [file(b"lib/a"), link(b"b", b"usr/lib/a")]]
    with pytest.raises(CoreError, match="hard link to 'usr/lib/a', which must be a file of a layer below it"):
        both(mounted, *stack)
    assert umoci([write_pax(layer) for layer in stack]).rows[b"b"].group == (b"b", b"usr/lib/a")


def test_failing_links_that_are_replaced_leave_no_trace(mounted: MountedCore) -> None:
    ours, theirs = both(mounted, [directory(b"d")], [link(b"a", b"d"), file(b"a", b"later")])
    assert ours[b"a"].content == b"later"
    assert theirs.error.endswith("link: operation not permitted")


def test_paths_through_lower_files_replace_them(mounted: MountedCore) -> None:
    ours, theirs = both(mounted, [file(b"a")], [file(b"a/b")])
    assert set(ours) == {b"", b"a", b"a/b"}
    assert theirs.error.endswith("not a directory")


def test_paths_through_dangling_symlinks_are_refused(mounted: MountedCore) -> None:
    stack = [[symlink(b"s", b"/no/where")], [file(b"s/f")]]
    with pytest.raises(CoreError, match=r"entries below 's', which is a symlink .* that leads to no directory"):
        both(mounted, *stack)
    assert b"no/where/f" in umoci([write_pax(layer) for layer in stack]).rows


def test_attributes_that_go_cannot_read(mounted: MountedCore) -> None:
    xattrs = {b"user.empty": b"", b"user.a=b%": b"v"}
    ours, theirs = both(mounted, [file(b"f", xattrs=xattrs)])
    assert dict(ours[b"f"].xattrs) == xattrs
    assert dict(theirs.rows[b"f"].xattrs) == {b"user.a%3Db%25": b"v"}


def test_times_before_what_ext4_holds(mounted: MountedCore) -> None:
    ours, theirs = both(mounted, [file(b"f", mtime_ns=-(2**31) * 10**9 + 5)])
    assert (ours[b"f"].mtime_ns, theirs.rows[b"f"].mtime_ns) == (-(2**31) * 10**9 + 5, -(2**31) * 10**9)


def test_symlinks_have_all_permission_bits(mounted: MountedCore) -> None:
    ours, theirs = both(mounted, [symlink(b"s", b"t", 0o640)])
    assert ours[b"s"].mode == theirs.rows[b"s"].mode == 0o120777
