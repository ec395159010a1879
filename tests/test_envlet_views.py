"""What an environment changed, in every view: the diff says it, and says the same; and the mounts of images come and go."""

from __future__ import annotations

import io
import os
import random
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import attrs
import pytest
import views
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from merge_corners import directory, file, link, symlink
from strategies import Layer, encode_layer
from test_envlet_diff import OPERATIONS, Tree, apply_bytes, mutate, names_of, scan, take_diff
from views import Environment, ViewedCore
from weefs_harness import tree_rows

from envlet import kernel_view, mounts, overlay
from envlet.diff import walk_changes
from envlet.errors import EnvletError
from envlet.kernel_view import KernelView
from layerformat import read_tar
from layerformat.dirreader import DirectoryReader
from layerformat.encoder import encode

MTIME_NS = 1_700_000_000_123_456_789
PLAIN = [operation for operation in OPERATIONS if operation != "rename"]
"""Those that every view allows."""


@pytest.fixture(scope="module")
def cores() -> Iterator[list[ViewedCore]]:
    with views.viewed_cores(views.MERGED, views.KERNEL, views.METACOPY) as cores:
        yield cores


def seen(root: Path) -> Tree:
    """A group of which one name is left is none: a file of the plan whose other names were removed still counts them, its copy does not."""
    tree = scan(root)
    groups = Counter(row[5] for row in tree.values())
    return {path: (*row[:5], row[5] if groups[row[5]] > 1 else None, *row[6:]) for path, row in tree.items()}


def random_layer(rng: random.Random) -> bytes:
    """A layer from a directory in which things happened."""
    with tempfile.TemporaryDirectory() as top:
        mutate(Path(top), rng, 40)
        blob = io.BytesIO()
        encode(DirectoryReader(os.fsencode(top), upper=False, warn=lambda text: None).entries(), blob)
        return blob.getvalue()


@contextmanager
def plan_of(cores: list[ViewedCore], *blobs: bytes) -> Iterator[Path]:
    slots = [cores[0].add_layer(blob) for blob in blobs]
    _slot, path = cores[0].add_plan_of(slots)
    try:
        yield path
    finally:
        for core_ in cores[1:]:
            core_.kernel_view.forget(core_.plan(path))
        cores[0].remove_plan(path)


def diff_of(env: Environment) -> bytes:
    return take_diff(env.upper, env.lower, env.root)


@contextmanager
def applied(core_: ViewedCore, data: bytes, lower: Path) -> Iterator[Environment]:
    """A fresh environment with the diff in it."""
    with core_.environment(lower, prepare=partial(apply_bytes, data, lower)) as env:
        yield env


def said(data: bytes) -> dict[bytes, object]:
    """The entries of a diff and their contents, without the times that depend on when it was made."""
    entries: dict[bytes, object] = {}
    for entry, contents in read_tar(io.BytesIO(data), "diff"):
        bare = attrs.evolve(entry, mtime_ns=0, sparse=None)
        entries[entry.path] = (bare, contents.read(entry.size) if entry.sparse is None else b"")
    return entries


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_applying_a_diff_gives_the_tree_in_every_view(cores: list[ViewedCore], seed: int) -> None:
    rng = random.Random(seed)
    with plan_of(cores, random_layer(rng), random_layer(rng)) as lower:
        for core_ in cores:
            with core_.environment(lower) as env:
                mutate(env.root, random.Random(seed), 40)
                wanted, data = seen(env.root), diff_of(env)
                assert diff_of(env) == data
            for other in (core_, cores[0]):
                with applied(other, data, lower) as again:
                    assert seen(again.root) == wanted, core_.view


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_equal_changes_are_equal_diffs_in_every_view(cores: list[ViewedCore], seed: int) -> None:
    rng = random.Random(seed)
    with plan_of(cores, random_layer(rng), random_layer(rng)) as lower:
        diffs = []
        for core_ in cores:
            with core_.environment(lower) as env:
                mutate(env.root, random.Random(seed), 40, PLAIN)
                diffs.append(said(diff_of(env)))
        assert diffs[1] == diffs[0]
        assert diffs[2] == diffs[0]


# With metacopy=on: what the upper directory does not say by itself


BASE: Layer = [
    directory(b"d", 0o755, mtime_ns=MTIME_NS),
    file(b"d/f", b"contents" * 1000, mtime_ns=MTIME_NS),
    link(b"d/same", b"d/f"),
    file(b"d/holes", b"end", 0o600),
    directory(b"d/sub", 0o700, uid=7, mtime_ns=MTIME_NS),
    file(b"d/sub/deep", b"deep", xattrs={b"user.k": b"v"}),
    symlink(b"d/s", b"f"),
    directory(b"e"),
    file(b"e/hidden", b"hidden"),
    file(b"f", b"other"),
]


@contextmanager
def metacopied(cores: list[ViewedCore]) -> Iterator[Environment]:
    with plan_of(cores, encode_layer(BASE)) as lower, cores[2].environment(lower) as env:
        yield env


def round_trip(cores: list[ViewedCore], env: Environment) -> tuple[Tree, list[str]]:
    """What the environment shows, which a fresh one with its diff must show too, in each view; and the names in the diff."""
    data = diff_of(env)
    wanted = seen(env.root)
    for core_ in cores:
        with applied(core_, data, env.lower) as again:
            assert seen(again.root) == wanted
    return wanted, names_of(data)


def test_a_changed_mode_does_not_lose_contents(cores: list[ViewedCore]) -> None:
    with metacopied(cores) as env:
        os.chmod(env.root / "f", 0o600)
        assert os.getxattr(env.upper / "f", overlay.METACOPY_XATTR) == b""
        assert (env.upper / "f").read_bytes() == bytes(5)
        tree, names = round_trip(cores, env)
        assert (tree[b"f"][4], names) == (b"other", [".", "f"])
        with pytest.raises(EnvletError, match="root is not mounted"):
            list(walk_changes(env.upper, env.lower))


def test_a_moved_directory_is_whole_in_the_diff(cores: list[ViewedCore]) -> None:
    with metacopied(cores) as env:
        os.rename(env.root / "d", env.root / "moved")
        assert os.getxattr(env.upper / "moved", overlay.REDIRECT_XATTR)
        assert os.listdir(env.upper / "moved") == []
        (env.root / "moved/new").write_bytes(b"new")
        os.unlink(env.root / "moved/s")
        os.rename(env.root / "moved/sub", env.root / "e/sub")
        tree, names = round_trip(cores, env)
        assert tree[b"moved/same"][5] == b"moved/f"
        assert {"moved/f", "moved/same", "moved/holes", "moved/new", "e/sub/deep", ".wh.d"} <= set(names)
        assert not {"moved/s", "moved/.wh.s", "moved/sub", "e/hidden"} & set(names)


def test_a_directory_moved_over_a_removed_one_hides_it(cores: list[ViewedCore]) -> None:
    with metacopied(cores) as env:
        os.unlink(env.root / "e/hidden")
        os.rename(env.root / "d", env.root / "e")
        tree, names = round_trip(cores, env)
        assert b"e/hidden" not in tree
        assert "e/.wh..wh..opq" in names


def test_a_directory_moved_away_and_back_is_whole(cores: list[ViewedCore]) -> None:
    with metacopied(cores) as env:
        before = seen(env.root)
        os.rename(env.root / "d", env.root / "x")
        os.rename(env.root / "x", env.root / "d")
        tree, _names = round_trip(cores, env)
        assert {path: row[4] for path, row in tree.items()} == {path: row[4] for path, row in before.items()}


def test_files_with_several_names_stay_one_file(cores: list[ViewedCore]) -> None:
    """Made as metadata only, moved, and with a name below a directory that was moved."""
    with metacopied(cores) as env:
        os.link(env.root / "f", env.root / "second")
        os.rename(env.root / "d", env.root / "moved")
        os.link(env.root / "second", env.root / "moved/third")
        (env.root / "own").write_bytes(b"own")
        os.link(env.root / "own", env.root / "moved/own")
        os.rename(env.root / "f", env.root / "moved/f2")
        tree, _names = round_trip(cores, env)
        assert {tree[path][5] for path in (b"second", b"moved/third", b"moved/f2")} == {b"moved/f2"}
        assert {tree[path][5] for path in (b"own", b"moved/own")} == {b"moved/own"}
        assert tree[b"second"][4] == b"other"


# Mounts of images


def test_an_image_is_mounted_once_and_unmounted_with_its_last_plan(cores: list[ViewedCore]) -> None:
    core_ = cores[2]
    held = core_.kernel_view
    shared = core_.add_layer(encode_layer([file(b"shared")]))
    plans = [core_.add_plan_of([shared, core_.add_layer(encode_layer([file(name)]))])[1] for name in (b"one", b"two")]
    place = str(held._target(core_.plan(plans[0]).images[0]))

    def mounted() -> int:
        return sum(mount.target == place for mount in mounts.current_mounts())

    with core_.environment(plans[0]), core_.environment(plans[1]) as last:
        assert mounted() == 1
        held.forget(core_.plan(plans[0]))
        assert mounted() == 1
        # A successor in the same mount namespace takes over what it finds, and unmounts it in the end.
        successor = KernelView(held._directory, core_.view, required=True)
        successor.adopt(core_.plan(plans[1]))
        assert mounted() == 1
        successor.forget(core_.plan(plans[1]))
        assert mounted() == 0
        assert (last.root / "shared").read_bytes() == b"data"  # the overlay has the image by itself
    held.close()
    assert [mount for mount in mounts.current_mounts() if mount.target.startswith(str(held._directory))] == []
    assert list(held._directory.iterdir()) == []
    for path in plans:
        core_.remove_plan(path)


def test_a_plan_without_images_is_shown_merged_unless_the_kernel_view_is_required(cores: list[ViewedCore], tmp_path: Path) -> None:
    with plan_of(cores, encode_layer(BASE)) as lower:
        plan = attrs.evolve(cores[0].plan(lower), images_refused="the attribute 'system.other'")
        places = [tmp_path / name for name in ("upper", "work", "root")]
        for place in places:
            place.mkdir()
        auto = KernelView(tmp_path / "meta", views.KERNEL)
        auto.mount(plan, *places)
        try:
            assert (places[2] / "f").read_bytes() == b"other"
        finally:
            overlay.unmount(places[2])
        assert auto.statistics()["merged_instead"] == 1
        with pytest.raises(ValueError, match=r"no images: the attribute 'system\.other'"):
            KernelView(tmp_path / "meta", views.KERNEL, required=True).mount(plan, *places)


def test_long_paths_and_strange_names_are_mounted(cores: list[ViewedCore], tmp_path: Path) -> None:
    with plan_of(cores, encode_layer(BASE)) as lower:
        for name in ("n" * 250, "a,b:c\\d"):
            places = [tmp_path / name / place for place in ("upper", "work", "root")]
            for place in places:
                place.mkdir(parents=True)
            cores[1].kernel_view.mount(cores[1].plan(lower), *places)
            try:
                (places[2] / "new").write_bytes(b"new")
                assert (places[2] / "f").read_bytes() == b"other"
                assert os.listdir(places[0]) == ["new"]
            finally:
                overlay.unmount(places[2])


def test_the_option_string_of_older_kernels(cores: list[ViewedCore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(22, "fsconfig lowerdir+=/x: Invalid argument")

    monkeypatch.setattr(overlay.syscalls, "mount_new", refuse)
    with plan_of(cores, encode_layer(BASE), encode_layer([directory(b"d"), file(b"d/upper")])) as lower:
        for core_ in cores[1:]:
            with core_.environment(lower) as env:
                assert tree_rows(env.root).keys() == tree_rows(lower).keys()
                assert (env.root / "d/upper").read_bytes() == b"data"
    with pytest.raises(ValueError, match="4095 at most"):
        overlay.stack_options([tmp_path / ("x" * 40)] * 127, tmp_path, tmp_path, tmp_path, metacopy=True)


# The choice


def test_what_the_kernel_can_is_tried_and_nothing_stays(tmp_path: Path) -> None:
    before = [mount.target for mount in mounts.current_mounts()]
    view = kernel_view.choose("kernel", tmp_path / "scratch")
    assert view.kind == "kernel"
    assert kernel_view.choose("merged", tmp_path / "unused") == kernel_view.View("merged", "the configuration says so")
    assert not (tmp_path / "unused").exists()
    assert [mount.target for mount in mounts.current_mounts()] == before
    assert str(tmp_path) not in subprocess.run(["losetup", "-a"], capture_output=True, text=True).stdout


def test_a_kernel_that_cannot_is_told_from_one_that_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(image: Path, target: Path, *, loop: bool) -> None:
        raise OSError(19, f"mount erofs: No such device (loop {loop})")

    monkeypatch.setattr(kernel_view, "mount_image", refuse)
    view = kernel_view.choose("auto", tmp_path / "one")
    assert view.kind == "merged"
    assert "No such device (loop True)" in view.reason
    with pytest.raises(EnvletError, match="view = kernel, but this kernel cannot"):
        kernel_view.choose("kernel", tmp_path / "two")


def test_loop_devices_are_tried_where_files_cannot_be_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount_image = kernel_view.mount_image

    def only_loop(image: Path, target: Path, *, loop: bool) -> None:
        if not loop:
            raise OSError(15, "mount erofs: Block device required")
        mount_image(image, target, loop=loop)

    monkeypatch.setattr(kernel_view, "mount_image", only_loop)
    view = kernel_view.choose("auto", tmp_path / "scratch")
    assert (view.kind, view.loop) == ("kernel", True)
