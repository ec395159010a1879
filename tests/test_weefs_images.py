"""EROFS images of metadata: what fsck says of them, what the kernel shows of them, and what a stack of them shows."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest
import views
from hypothesis import given, settings
from layer_model import Row as ModelRow
from layer_model import expected
from merge_corners import KINDS, directory, file, link, on_disk, opaque, symlink, whiteout
from strategies import Layer, Member, encode_layer, layer_stacks, layers
from test_weefs_overlay import HIDDEN_AND_MADE_AGAIN, LINKS_OVER_LAYERS, OPAQUE, REPLACED, RETYPED
from views import ViewedCore
from weefs_harness import Row, open_layers, toc_of, tree_rows

from envlet import syscalls
from envlet.kernel_view import mount_image
from layerformat import Entry, Kind
from weefs import core
from weefs.merge import PlanRefused, View

INSTRUCTING = b"trusted.overlay."


def name_of(toc: bytes) -> str:
    return hashlib.sha256(toc).hexdigest()[:32]


def write(toc: bytes, path: Path) -> core.ImageInfo:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        return core.write_layer_image(toc, name_of(toc), fd)
    finally:
        os.close(fd)


def check(path: Path, name: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        core.check_image(fd, name)
    finally:
        os.close(fd)


@contextmanager
def mounted_image(path: Path) -> Iterator[Path]:
    target = Path(tempfile.mkdtemp(prefix="weefs-image-"))
    try:
        mount_image(path, target, loop=False)
        try:
            yield target
        finally:
            syscalls.umount(str(target))
    finally:
        target.rmdir()


def fsck(path: Path) -> None:
    done = subprocess.run(["fsck.erofs", path], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def wanted_rows(layer: Layer, name: str, numbers: dict[bytes, int]) -> dict[bytes, Row]:
    """What the kernel must show of the layer's image, from the slow model of the layer."""
    model = expected(layer)
    whiteouts = [path for path, row in model.items() if row.kind == "whiteout" and not hides_all(model, path)]
    kinds = {"regular": Kind.REGULAR, "directory": Kind.DIRECTORY, "symlink": Kind.SYMLINK, "fifo": Kind.FIFO, "character": Kind.CHARACTER}
    rows = {}
    for path, row in model.items():
        if row.kind == "whiteout":
            if path in whiteouts:
                group = tuple(sorted(whiteouts)) if len(whiteouts) > 1 else ()
                rows[path] = Row(stat.S_IFCHR, 0, 0, 0, 0, 0, len(whiteouts), group=group)
            continue
        kind = kinds.get(row.kind, Kind.BLOCK)
        inside = [other for other in model if path != other and other.rpartition(b"/")[0] == path]
        subdirectories = sum(model[other].kind == "directory" for other in inside)
        size = len(row.target) if row.kind == "symlink" else row.size
        rows[path] = Row(
            mode=kind << 12 | (0o777 if row.kind == "symlink" else row.mode),
            uid=row.uid,
            gid=row.gid,
            mtime_ns=row.mtime_ns,
            rdev=os.makedev(row.rdev >> 8 & 0xFFF, row.rdev & 0xFF | row.rdev >> 12 & 0xFFF00),
            size=0 if row.kind == "directory" else size,
            nlink=2 + subdirectories if row.kind == "directory" else max(1, len(row.group)),
            target=row.target if row.kind == "symlink" else b"",
            xattrs=tuple(sorted(shown_xattrs(row, f"/{name}/{numbers[path]}".encode()))),
            group=tuple(sorted(row.group)) if len(row.group) > 1 else (),
        )
    return rows


def hides_all(model: dict[bytes, ModelRow], path: bytes) -> bool:
    """The whiteout lies in an opaque directory, where it hides nothing more."""
    return model[path.rpartition(b"/")[0]].opaque


def shown_xattrs(row: ModelRow, redirect: bytes) -> Iterator[tuple[bytes, bytes]]:
    for key, value in row.xattrs:
        yield (INSTRUCTING + b"overlay." + key[len(INSTRUCTING) :] if key.startswith(INSTRUCTING) else key), value
    if row.kind == "regular" and row.size:
        yield b"trusted.overlay.metacopy", b""
        yield b"trusted.overlay.redirect", redirect
    if row.opaque:
        yield b"trusted.overlay.opaque", b"y"


@settings(max_examples=60)
@given(layers(whiteouts=True))
def test_an_image_shows_its_layer(layer: Layer) -> None:
    blob = encode_layer(layer)
    toc = toc_of(blob)
    numbers = {path: number for path, number in open_layers([blob])[0].walk() if number is not None}
    with tempfile.TemporaryDirectory() as top:
        path = Path(top, "image")
        info = write(toc, path)
        assert info.size == path.stat().st_size
        check(path, name_of(toc))
        fsck(path)
        with mounted_image(path) as root:
            assert tree_rows(root, contents=False) == wanted_rows(layer, name_of(toc), numbers)


def test_large_directories_long_targets_and_attributes(tmp_path: Path) -> None:
    """Blocks of names that are full, the last one inline or not, and what does not fit in an inode's block."""
    layer: Layer = [directory(b"d")]
    layer += [file(b"d/%05d" % number + b"x" * (number % 200), b"") for number in range(2000)]
    layer += [directory(b"full")] + [file(b"full/%04d" % number + b"y" * 240, b"") for number in range(16 * 3)]
    layer += [symlink(b"long", b"t" * 4095), file(b"wide", b"1", xattrs={b"user.%d" % i: b"v" * 3000 for i in range(20)})]
    layer += [directory(b"wided", xattrs={b"user.%d" % i: b"v" * 3000 for i in range(2)}), file(b"wided/f")]
    layer += [file(b"z/" + text, b"") for text in (b"-rf", b"!", b".-", b"...", b".a", b"..a", b"\xff", b"/".join([b"d" * 200] * 15))]
    layer += [Member(Entry(path=b"huge", kind=Kind.REGULAR, mode=0o644, size=2**62, sparse=()))]
    blob = encode_layer(layer)
    toc = toc_of(blob)
    numbers = {path: number for path, number in open_layers([blob])[0].walk() if number is not None}
    path = tmp_path / "image"
    write(toc, path)
    fsck(path)
    with mounted_image(path) as root:
        shown = tree_rows(root, contents=False)
        for name in (b"-rf", b"!", b".-", b"...", b"\xff"):
            assert os.path.lexists(os.fsencode(root) + b"/z/" + name)
        with open(root / "huge", "rb") as huge:
            huge.seek(2**61)
            assert huge.read(4) == bytes(4)
    assert shown.pop(b"huge").size == 2**62
    assert shown == wanted_rows([member for member in layer if member.entry.path != b"huge"], name_of(toc), numbers)


def test_the_same_layer_gives_the_same_bytes(tmp_path: Path) -> None:
    toc = toc_of(encode_layer(KINDS[0]))
    for name in ("one", "two"):
        write(toc, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ([file(b"f", xattrs={b"system.other": b""})], "the attribute 'system.other'"),
        ([file(b"f", xattrs={b"user.k": b"v" * 65536})], "65536 of value"),
        ([file(b"f", xattrs={b"user.%d" % i: b"v" * 60_000 for i in range(5)})], "on one inode"),
        ([file(b"a"), link(b"b", b"below")], "1 hard links into layers below"),
    ],
)
def test_what_an_image_cannot_hold_is_refused_by_name(tmp_path: Path, layer: Layer, reason: str) -> None:
    with pytest.raises(core.CoreError, match=reason) as caught:
        write(toc_of(encode_layer(layer)), tmp_path / "image")
    assert caught.value.errno == errno.EOPNOTSUPP


def test_a_value_that_is_named_often_does_not_fill_the_disk(tmp_path: Path) -> None:
    layer = [file(b"f%05d" % i, b"", xattrs={b"user.%d" % j: b"v" * 65_000 for j in range(4)}) for i in range(5000)]
    toc = toc_of(encode_layer(layer))
    assert len(toc) < 1 << 20
    with pytest.raises(core.CoreError, match="more than 1073741824 bytes"):
        write(toc, tmp_path / "image")


def test_damage_is_seen(tmp_path: Path) -> None:
    toc = toc_of(encode_layer(KINDS[0]))
    path = tmp_path / "image"
    write(toc, path)
    whole = path.read_bytes()
    check(path, name_of(toc))
    for damaged in (whole[:-1], b"", whole[:1500] + b"\xff" + whole[1501:], whole + bytes(4096), bytes(len(whole))):
        path.write_bytes(damaged)
        with pytest.raises(core.DamagedError):
            check(path, name_of(toc))
    path.write_bytes(whole)
    with pytest.raises(core.DamagedError, match="another tree"):
        check(path, "0" * 32)


def test_a_full_disk_is_an_error_and_no_image(tmp_path: Path) -> None:
    toc = toc_of(encode_layer(KINDS[0]))
    fd = os.open("/dev/full", os.O_RDWR)
    try:
        with pytest.raises(core.CoreError, match="No space left"):
            core.write_layer_image(toc, name_of(toc), fd)
    finally:
        os.close(fd)


# Stacks, and one image for a plan


@pytest.fixture(scope="module")
def cores() -> Iterator[list[ViewedCore]]:
    with views.viewed_cores(views.MERGED, views.KERNEL, views.METACOPY, views.LOOP, views.LOOP_METACOPY) as cores:
        yield cores


def comparable(rows: dict[bytes, Row]) -> dict[bytes, Row]:
    """Merged directories have link count 1 in a stack."""
    return {path: attrs.evolve(row, nlink=0) if stat.S_ISDIR(row.mode) else row for path, row in rows.items()}


def compare_views(cores: list[ViewedCore], stack: list[Layer]) -> bool:
    """What the plan's directory, and the environments of all views, show; whether the plan could be stacked."""
    _slot, path = cores[0].mounted.add_plan([encode_layer(layer) for layer in stack])
    stacked = cores[0].is_stacked(path)
    wanted = comparable(tree_rows(path))
    wanted[b""] = on_disk(wanted[b""])  # of the upper directory
    for core_ in cores:
        with core_.environment(path) as env:
            shown = comparable(tree_rows(env.root))
            assert set(shown) == set(wanted), core_.view
            for name, row in wanted.items():
                escaped = tuple((key.replace(INSTRUCTING + b"overlay.", INSTRUCTING), value) for key, value in row.xattrs)
                assert shown[name] == attrs.evolve(row, xattrs=escaped), (core_.view, name)
            assert os.listdir(env.upper) == []
    for core_ in cores[1:]:
        core_.kernel_view.forget(core_.plan(path))
    cores[0].remove_plan(path)
    return stacked


def test_generated_stacks_are_the_same_in_every_view(cores: list[ViewedCore]) -> None:
    outcomes: list[bool] = []

    @settings(max_examples=60)
    @given(layer_stacks())
    def check_stack(stack: list[Layer]) -> None:
        try:
            View(open_layers([encode_layer(layer) for layer in stack]))
        except PlanRefused:
            return
        outcomes.append(compare_views(cores[:3], stack))

    check_stack()
    assert 0 < sum(outcomes) < len(outcomes)


def test_explicit_stacks_are_the_same_in_every_view(cores: list[ViewedCore]) -> None:
    """As above, but each layer has an entry for each of its directories, as archivers write them: most can be stacked."""
    outcomes: list[bool] = []

    @settings(max_examples=60)
    @given(layer_stacks())
    def check_stack(stack: list[Layer]) -> None:
        explicit = [with_directories(layer) for layer in stack]
        try:
            View(open_layers([encode_layer(layer) for layer in explicit]))
        except PlanRefused:
            return
        outcomes.append(compare_views(cores[:3], explicit))

    check_stack()
    assert sum(outcomes) > 5


def with_directories(layer: Layer) -> Layer:
    implicit = [path for path, row in expected(layer).items() if row.kind == "directory" and row.implicit and path]
    return [*layer, *(directory(path, 0o751, mtime_ns=5) for path in sorted(implicit))]


ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, rights, who)
    for tag, rights, who in ((1, 6, 2**32 - 1), (2, 4, 1000), (4, 4, 2**32 - 1), (16, 4, 2**32 - 1), (32, 0, 2**32 - 1))
)
"""user::rw-, user:1000:r--, group::r--, mask::r--, other::---"""
NAMED = {
    "kinds": KINDS,
    "acl": [
        [
            directory(b"d", 0o640, xattrs={b"system.posix_acl_access": ACL, b"system.posix_acl_default": ACL}),
            file(b"d/f", mode=0o640, xattrs={b"system.posix_acl_access": ACL}),
        ]
    ],
    "links over layers": LINKS_OVER_LAYERS,
    "opaque": OPAQUE,
    "replaced": [REPLACED[0], REPLACED[1], [directory(b"a"), file(b"a/z"), directory(b"b"), directory(b"b/y"), file(b"b/y/z")]],
    "hidden": HIDDEN_AND_MADE_AGAIN,
    "retyped": RETYPED,
    "empty": [[]],
    "empty above": [[file(b"a")], [], [directory(b"d"), file(b"d/x")]],
    "empty twice": [[file(b"a")], [], []],
    "opaque root": [[file(b"a")], [opaque(b"."), file(b"b")]],
    "through a symlink": [[directory(b"usr/lib"), file(b"usr/lib/a"), symlink(b"lib", b"usr/lib")], [file(b"lib/b")]],
    "implicit": [[directory(b"d", 0o700, uid=5, mtime_ns=3)], [file(b"d/f")]],
    "torn": [[file(b"a"), link(b"b", b"a"), link(b"c", b"a")], [whiteout(b"a")]],
    "loose whiteout": [[file(b"f")], [directory(b"made"), whiteout(b"made/gone")]],
    "loose whiteout below": [[file(b"f")], [directory(b"made"), directory(b"made/in"), whiteout(b"made/in/gone")], [directory(b"made")]],
    "whiteout in opaque": [[directory(b"d"), file(b"d/x")], [directory(b"d"), opaque(b"d"), whiteout(b"d/x"), file(b"d/y")]],
    "twice": [[file(b"a")], [file(b"b")], [file(b"a")]],
    "instructions": [[file(b"a", xattrs={b"trusted.overlay.metacopy": b"", b"trusted.overlay.redirect": b"/b"}), file(b"b", b"other")]],
}
STACKED = {"kinds", "acl", "opaque", "replaced", "empty", "empty above", "whiteout in opaque", "instructions", "retyped"}


@pytest.mark.parametrize("name", NAMED)
def test_named_stacks_are_the_same_in_every_view(cores: list[ViewedCore], name: str) -> None:
    assert compare_views(cores, NAMED[name]) == (name in STACKED)


def test_127_layers(cores: list[ViewedCore]) -> None:
    stack = [[directory(b"d"), file(b"d/common", b"%d" % i), file(b"d/own%d" % i, b"%d" % i)] for i in range(127)]
    assert compare_views(cores[:3], stack)


def test_a_layer_cannot_stand_in_for_the_contents_of_another(cores: list[ViewedCore]) -> None:
    """overlayfs looks for a redirected file in the layers below before it looks in the data-only ones."""
    victim = encode_layer([directory(b"d"), file(b"d/f", b"true")])
    name = name_of(toc_of(victim))
    number = dict(open_layers([victim])[0].walk())[b"d/f"]
    shadow = [directory(name.encode()), file(b"%s/%d" % (name.encode(), number or 0), b"lies")]
    _slot, path = cores[0].mounted.add_plan([encode_layer(shadow), victim])
    assert cores[0].mounted.plans[path].info.not_stackable == "a layer has an entry with the name of a layer's objects"
    for core_ in cores[:3]:
        with core_.environment(path) as env:
            assert (env.root / "d/f").read_bytes() == b"true"
        core_.kernel_view.forget(core_.plan(path))
    cores[0].remove_plan(path)


# What it costs


def requests(core_: ViewedCore) -> dict[str, int]:
    return {name: n for name, n in core_.core.statistics().items() if name.startswith("requests_") and n}


def difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    counted = {name.removeprefix("requests_"): n - before.get(name, 0) for name, n in after.items() if n != before.get(name, 0)}
    return {name: n for name, n in counted.items() if name not in ("forget", "batch_forget")}


@pytest.mark.parametrize("view", [1, 2], ids=["one image", "stack"])
def test_metadata_costs_no_request_and_contents_are_shared(cores: list[ViewedCore], view: int) -> None:
    views.while_caches_are_kept(lambda: check_costs(cores[view], view))


def check_costs(core_: ViewedCore, view: int) -> None:
    contents = os.urandom(300_000)
    base = [directory(b"d"), file(b"big", contents), symlink(b"s", b"big")]
    base += [file(b"d/%d" % i, b"%d" % view * (i + 1)) for i in range(200)]
    shared = core_.add_layer(encode_layer(base))
    plans = [core_.add_plan_of([shared, core_.add_layer(encode_layer([file(b"%d-%d" % (view, i))]))])[1] for i in range(2)]
    try:
        with core_.environment(plans[0]) as first, core_.environment(plans[0]) as second, core_.environment(plans[1]) as other:
            before = requests(core_)
            for env in (first, second, other):
                assert len(tree_rows(env.root, contents=False)) == 205
            assert difference(before, requests(core_)) == {}
            assert (first.root / "big").read_bytes() == contents
            assert (first.root / "d/7").read_bytes() == b"%d" % view * 8
            read = difference(before, requests(core_))
            assert set(read) <= {"lookup", "getattr", "read", "getxattr", "open", "flush"}  # the last two once for a mount
            before = requests(core_)
            for env in (second, other):
                assert (env.root / "big").read_bytes() == contents
                assert (env.root / "d/7").read_bytes() == b"%d" % view * 8
            assert difference(before, requests(core_)) == {}
            assert (plans[1] / "big").read_bytes() == contents  # the merged view has the same inode
            assert "read" not in difference(before, requests(core_))
    finally:
        for path in plans:
            core_.remove_plan(path)


def test_a_layer_whose_contents_were_read_can_be_closed_with_its_plan(cores: list[ViewedCore]) -> None:
    """The kernel remembers names below /objects for good; it is told to drop them with the last plan that has the layer."""
    core_ = cores[1]
    slot = core_.add_layer(encode_layer([file(b"only/here", b"contents")]))
    plans = [core_.add_plan_of([slot])[1] for _ in range(2)]
    for path in plans:
        with core_.environment(path) as env:
            assert (env.root / "only/here").read_bytes() == b"contents"
            assert not core_.core.close_layer(slot)
        core_.remove_plan(path)
    # What the kernel gives back comes among other requests.
    assert any(core_.core.close_layer(slot) or not os.listdir(core_.mounted.mountpoint) for _ in range(1000))
    name = core_.mounted.tocs[slot][0]
    assert name not in os.listdir(core_.mounted.mountpoint / "objects")
    assert not os.path.lexists(core_.mounted.mountpoint / "objects" / name)


def test_inode_numbers_are_stable_and_found(cores: list[ViewedCore]) -> None:
    for core_ in cores[:3]:
        with core_.environment_of(KINDS[0], [directory(b"d", 0o755), file(b"d/upper")]) as env:
            before = {path: os.lstat(env.root / path).st_ino for path in ("d", "d/set", "d/upper", "d/s")}
            assert len(set(before.values())) == len(before)
            Path("/proc/sys/vm/drop_caches").write_text("2")
            assert {path: os.lstat(env.root / path).st_ino for path in before} == before
            for path, number in before.items():
                found = subprocess.run(["find", env.root, "-inum", str(number)], check=True, capture_output=True, text=True).stdout.split()
                assert str(env.root / path) in found
            assert os.lstat(env.root / "d/set").st_ino == os.lstat(env.root / "d/again").st_ino


def test_overlays_nest(cores: list[ViewedCore]) -> None:
    for core_ in cores:
        with core_.environment_of([directory(b"a"), file(b"a/f", b"below"), directory(b"b"), directory(b"mnt")]) as env:
            options = f"lowerdir={env.root}/a:{env.root}/b"
            syscalls.mount("overlay", str(env.root / "mnt"), "overlay", syscalls.MS_RDONLY, options)
            try:
                assert (env.root / "mnt/f").read_bytes() == b"below"
            finally:
                syscalls.umount(str(env.root / "mnt"))


# The directory of objects


def test_objects_are_the_regular_files_by_number(cores: list[ViewedCore]) -> None:
    core_ = cores[0]
    blob = encode_layer([*KINDS[0], file(b"f", b"contents")])
    slot = core_.add_layer(blob)
    name, _toc = core_.mounted.tocs[slot]
    layer = open_layers([blob])[0]
    regular = {str(number) for _path, number in layer.walk() if number is not None and layer.inode(number).is_regular}
    objects = core_.mounted.mountpoint / "objects"
    assert set(os.listdir(objects / name)) == regular
    assert name in os.listdir(objects)
    assert "objects" in os.listdir(core_.mounted.mountpoint)
    numbers = dict(layer.walk())
    assert (objects / name / str(numbers[b"f"])).read_bytes() == b"contents"
    _slot, path = core_.add_plan_of([slot])
    assert os.lstat(path / "f").st_ino == os.lstat(objects / name / str(numbers[b"f"])).st_ino
    for wrong in (f"0{numbers[b'f']}", f"+{numbers[b'f']}", "0", str(numbers[b"d"]), "999", "99999999999", str(2**32)):
        assert not os.path.lexists(objects / name / wrong)
    assert not os.path.lexists(objects / ("f" * 32))
    assert os.listxattr(objects) == os.listxattr(objects / name) == []
    assert stat.S_IMODE(os.lstat(objects).st_mode) == 0o555
    core_.remove_plan(path)


def test_a_plan_cannot_be_called_objects(cores: list[ViewedCore]) -> None:
    slot = cores[0].add_layer(encode_layer([file(b"f")]))
    with pytest.raises(core.CoreError, match="cannot be the name"):
        cores[0].core.add_plan("objects", [slot])
