"""apply(diff(A)) over a fresh upper shows what A shows: property tests on real overlay mounts, and what apply must
refuse.
"""

import os
import random
import stat
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest
from envlet_harness import isolated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envlet import overlay
from envlet.apply import apply_diff, clean_path
from envlet.diff import walk_changes, write_diff
from envlet.errors import EnvletError
from envlet.removal import remove_directories
from envlet.rootfs import mark
from envlet.streams import CancellableFile
from layerformat.model import Entry, Kind
from layerformat.tarwriter import TarWriter

Tree = dict[bytes, tuple[object, ...]]


def scan(root: Path) -> Tree:
    """Everything that one can see of a tree: type, mode, ids, times, attributes, contents, link groups."""
    seen: Tree = {}
    groups: dict[tuple[int, int], bytes] = {}

    def visit(path: bytes) -> None:
        full = os.path.join(os.fsencode(root), path)
        status = os.lstat(full)
        attributes = {
            name: os.getxattr(full, name, follow_symlinks=False)
            for name in os.listxattr(full, follow_symlinks=False)
            if not name.startswith("trusted.overlay.")
        }
        content: object = None
        if stat.S_ISREG(status.st_mode):
            content = Path(os.fsdecode(full)).read_bytes()
        elif stat.S_ISLNK(status.st_mode):
            content = os.readlink(full)
        first = None
        if not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1:
            first = groups.setdefault((status.st_dev, status.st_ino), path)
        seen[path] = (status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, content, first, sorted(attributes.items()))
        if stat.S_ISDIR(status.st_mode):
            for name in sorted(os.listdir(full)):
                visit(os.path.join(path, name))

    visit(b"")
    return seen


class Overlay:
    """A lower tree and fresh uppers over it, mounted."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.lower = top / "lower"
        self.lower.mkdir()
        self.count = 0

    def fresh(self, prepare: Callable[[Path], object] = lambda upper: None) -> tuple[Path, Path]:
        """A new upper, prepared before the mount; the upper and the merged root."""
        self.count += 1
        base = self.top / str(self.count)
        for name in ("upper", "work", "root"):
            (base / name).mkdir(parents=True)
        overlay.copy_metadata(self.lower, base / "upper")
        prepare(base / "upper")
        overlay.mount(self.lower, base / "upper", base / "work", base / "root")
        return base / "upper", base / "root"

    def close(self) -> None:
        for number in range(1, self.count + 1):
            overlay.unmount(self.top / str(number) / "root")


def take_diff(upper: Path, lower: Path, root: Path | None = None) -> bytes:
    out = BytesIO()
    write_diff(walk_changes(upper, lower, root=root), out)
    return out.getvalue()


def tar_of(*entries: tuple[Entry, bytes]) -> bytes:
    out = BytesIO()
    with TarWriter(out) as tar:
        for entry, data in entries:
            tar.add(entry, [data])
    return out.getvalue()


def apply_bytes(data: bytes, lower: Path, upper: Path) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        apply_diff(CancellableFile(file.fileno(), lambda: None), upper, lower)


NAMES = [b"a", b"b", b"c", b"\xff\xfe", "ü".encode(), b"with space", b"new\nline", b"n" * 120, b"=x"]
CAPABILITY = bytes.fromhex("0100000202000000000000000000000000000000")
"""A value that the kernel takes for security.capability, too; it is not UTF-8 throughout."""
OPERATIONS = (
    "write", "mkdir", "symlink", "link", "fifo", "remove", "replace_dir", "chmod", "chown", "xattr", "utime", "rename", "append",
)  # fmt: skip


def mutate(root: Path, rng: random.Random, steps: int, operations: Sequence[str] = OPERATIONS) -> None:
    """Random operations on a tree, those that the kernel refuses left out."""
    base = os.fsencode(root)

    def some_directory() -> bytes:
        found = [directory for directory, _, _ in os.walk(base)]
        return rng.choice(sorted(path for path in found if path.count(b"/") - base.count(b"/") < 5))

    def some_entry() -> bytes | None:
        found = [os.path.join(directory, name) for directory, dirs, files in os.walk(base) for name in sorted(dirs + files)]
        return rng.choice(sorted(found)) if found else None

    def remove(path: bytes) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            for name in os.listdir(path):
                remove(os.path.join(path, name))
            os.rmdir(path)
        else:
            os.unlink(path)

    for _ in range(steps):
        operation = rng.choice(operations)
        target = os.path.join(some_directory(), rng.choice(NAMES))
        existing = some_entry()
        try:
            if operation == "write":
                fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK)  # a fifo has no reader: refused
                os.write(fd, rng.randbytes(rng.choice([0, 1, 511, 512, 513, 5000])))
                os.close(fd)
            elif operation == "mkdir":
                os.mkdir(target)
            elif operation == "symlink":
                os.symlink(rng.choice([b"a", b"/etc/passwd", b"../..", b"x" * 150, b"\xff"]), target)
            elif operation == "fifo":
                os.mkfifo(target)
            elif existing is None:
                continue
            elif operation == "link":
                os.link(existing, target, follow_symlinks=False)
            elif operation == "remove":
                remove(existing)
            elif operation == "replace_dir":
                if os.path.isdir(existing) and not os.path.islink(existing):
                    remove(existing)
                    os.mkdir(existing)
            elif operation == "chmod":
                if not os.path.islink(existing):
                    os.chmod(existing, rng.choice([0o600, 0o755, 0o4755, 0o2770, 0o1777, 0o000]))
            elif operation == "chown":
                os.chown(existing, rng.choice([0, 1000, 3_000_000]), rng.choice([0, 70000]), follow_symlinks=False)
            elif operation == "xattr":
                if os.path.isfile(existing) and not os.path.islink(existing):
                    os.setxattr(existing, rng.choice(["user.n", "security.capability", "trusted.mine"]), CAPABILITY)
            elif operation == "utime":
                time_ns = rng.choice([0, 1, 1_700_000_000_123_456_789, -1, -5_000_000_001, 2**33 * 10**9 + 7])
                os.utime(existing, ns=(time_ns, time_ns), follow_symlinks=False)
            elif operation == "rename":
                os.rename(existing, target)
            elif operation == "append" and os.path.isfile(existing) and not os.path.islink(existing):
                with open(existing, "ab") as file:
                    file.write(b"more")
        except OSError:
            continue


def check_round_trip(seed: int) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as top:
        stage = Overlay(Path(top))
        try:
            mutate(stage.lower, rng, 40)
            upper, root = stage.fresh()
            mutate(root, rng, 40)
            wanted = scan(root)
            data = take_diff(upper, stage.lower)
            assert take_diff(upper, stage.lower) == data
            _, again = stage.fresh(partial(apply_bytes, data, stage.lower))
            assert scan(again) == wanted
        finally:
            stage.close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, 2**32), min_size=4, max_size=4))
def test_applying_a_diff_gives_the_tree_it_was_taken_from(seeds: list[int]) -> None:
    isolated(lambda: [check_round_trip(seed) for seed in seeds])


def in_overlay(work: Callable[[Overlay], None]) -> None:
    def run() -> None:
        with tempfile.TemporaryDirectory() as top:
            stage = Overlay(Path(top))
            try:
                work(stage)
            finally:
                stage.close()

    isolated(run)


def names_of(data: bytes) -> list[str]:
    with tarfile.open(fileobj=BytesIO(data)) as archive:
        return archive.getnames()


def test_removed_replaced_and_new_directories_are_said_as_oci_says_them() -> None:
    def work(stage: Overlay) -> None:
        for name in ("gone", "replaced", "kept"):
            (stage.lower / name).mkdir()
            (stage.lower / name / "old").write_text("old")
        upper, root = stage.fresh()
        (root / "gone" / "old").unlink()
        (root / "gone").rmdir()
        (root / "replaced" / "old").unlink()
        (root / "replaced").rmdir()
        (root / "replaced").mkdir()
        (root / "replaced" / "new").write_text("new")
        (root / "made" / "deep").mkdir(parents=True)
        assert names_of(take_diff(upper, stage.lower)) == [
            ".", ".wh.gone", "made", "made/deep", "replaced", "replaced/.wh..wh..opq", "replaced/new",
        ]  # fmt: skip

    in_overlay(work)


def test_what_envlet_added_is_left_out_until_somebody_touches_it() -> None:
    def work(stage: Overlay) -> None:
        os.utime(stage.lower, ns=(0, 0))  # else the tick of the kernel's clock decides whether the root has changed
        upper, root = stage.fresh()
        for name in ("proc", "srv", "srv/deep"):
            (root / name).mkdir()
        marks = [mark(upper, path) for path in (b"proc", b"srv", b"srv/deep")]

        def names() -> list[bytes]:
            return [change.entry.path for change in walk_changes(upper, stage.lower, marks)]

        assert names() == [b"."]
        (root / "srv" / "deep" / "file").write_text("x")
        assert names() == [b".", b"srv", b"srv/deep", b"srv/deep/file"]
        (root / "proc").chmod(0o700)
        assert names() == [b".", b"proc", b"srv", b"srv/deep", b"srv/deep/file"]

    in_overlay(work)


def test_holes_stay_holes() -> None:
    def work(stage: Overlay) -> None:
        upper, root = stage.fresh()
        with open(root / "sparse", "wb") as file:
            file.seek(1 << 30)
            file.write(b"end")
        data = take_diff(upper, stage.lower)
        assert len(data) < 100_000
        other, again = stage.fresh(partial(apply_bytes, data, stage.lower))
        assert (again / "sparse").stat().st_size == (1 << 30) + 3
        assert (other / "sparse").stat().st_blocks < 100
        with open(again / "sparse", "rb") as file:
            file.seek((1 << 30) - 1)
            assert file.read() == b"\0end"

    in_overlay(work)


def test_a_name_that_would_be_a_whiteout_is_refused_by_name() -> None:
    def work(stage: Overlay) -> None:
        upper, root = stage.fresh()
        (root / ".wh.x").write_text("")
        with pytest.raises(EnvletError, match=r"/\.wh\.x: an OCI layer cannot have this name"):
            take_diff(upper, stage.lower)

    in_overlay(work)


def test_a_deep_tree_is_written_and_a_path_that_is_too_long_is_refused_by_name() -> None:
    def work(stage: Overlay) -> None:
        upper, _ = stage.fresh()
        directory = upper
        for _ in range(1200):  # more than Python recurses
            directory /= "d"
            directory.mkdir()
        assert names_of(take_diff(upper, stage.lower))[-1] == "/".join("d" * 1200)
        fd = os.open(directory, os.O_RDONLY)
        for _ in range(20):
            os.mkdir("n" * 200, dir_fd=fd)
            below = os.open("n" * 200, os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = below
        os.close(fd)
        with pytest.raises(EnvletError, match=r"diff_failed: /d/d/.*too long"):
            take_diff(upper, stage.lower)
        remove_directories(upper / "d")

    in_overlay(work)


def test_devices_are_counted_and_the_first_are_named() -> None:
    def work(stage: Overlay) -> None:
        upper, _ = stage.fresh()
        for number in range(7):
            os.mknod(upper / f"device{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        os.mknod(upper / "whiteout", stat.S_IFCHR, 0)
        result = write_diff(walk_changes(upper, stage.lower), BytesIO())
        assert result.devices == [f"/device{number}" for number in range(5)]
        assert result.device_count == 7

    in_overlay(work)


def test_a_diff_of_another_tool_is_applied_by_the_rules_of_layers() -> None:
    """No directory entries, a link to a file of the plan, a whiteout after its directory, sparse zeros."""

    def work(stage: Overlay) -> None:
        (stage.lower / "d").mkdir(mode=0o750)
        (stage.lower / "d" / "old").write_text("old")
        (stage.lower / "d" / "origin").write_text("origin")
        os.chown(stage.lower / "d" / "origin", 7, 8)
        data = tar_of(
            (Entry(b"./d//link", Kind.HARD_LINK, target=b"/d/origin"), b""),
            (Entry(b"d/.wh.old", Kind.REGULAR), b""),
            (Entry(b"fresh/file", Kind.REGULAR, size=5, mode=0o640), b"12345"),
            (Entry(b"zeros", Kind.REGULAR, size=1024), bytes(1024)),
        )
        _, root = stage.fresh(partial(apply_bytes, data, stage.lower))
        assert (root / "d").stat().st_mode & 0o7777 == 0o750
        assert sorted(os.listdir(root / "d")) == ["link", "origin"]
        assert (root / "d" / "link").read_text() == "origin"
        assert (root / "d" / "link").stat().st_ino == (root / "d" / "origin").stat().st_ino
        assert ((root / "d" / "link").stat().st_uid, (root / "d" / "link").stat().st_gid) == (7, 8)
        assert (root / "fresh" / "file").read_text() == "12345"
        assert (root / "zeros").read_bytes() == bytes(1024)

    in_overlay(work)


HOSTILE: dict[str, list[Entry]] = {
    r"a path with '\.\.'": [Entry(b"a/../../x", Kind.REGULAR)],
    "needs a directory here": [Entry(b"out", Kind.SYMLINK, target=b"/"), Entry(b"out/tmp/pwned", Kind.REGULAR)],
    "the plan has something else": [Entry(b"lowerlink/x", Kind.REGULAR)],
    "devices and sockets": [Entry(b"disk", Kind.BLOCK, rdev=os.makedev(8, 0))],
    "neither the tar nor the plan": [Entry(b"x", Kind.HARD_LINK, target=b"lowerlink")],
    "would instruct the overlay": [Entry(b"x", Kind.REGULAR, xattrs={b"trusted.overlay.redirect": b"/etc"})],
    "not the name of a whiteout": [Entry(b".wh..", Kind.REGULAR)],
    "one kind only": [Entry(b"d", Kind.DIRECTORY), Entry(b"d", Kind.REGULAR)],
}


@pytest.mark.parametrize("reason", HOSTILE)
def test_what_apply_refuses(reason: str) -> None:
    def work(stage: Overlay) -> None:
        (stage.lower / "lowerlink").symlink_to("/tmp")
        data = tar_of(*((entry, b"") for entry in HOSTILE[reason]))
        with pytest.raises(EnvletError, match=reason) as caught:
            stage.fresh(partial(apply_bytes, data, stage.lower))
        assert caught.value.code.name == "apply_refused"

    in_overlay(work)


@pytest.mark.parametrize("cut", [100, 512, 700])
def test_a_truncated_diff_is_refused(cut: int) -> None:
    def work(stage: Overlay) -> None:
        data = tar_of((Entry(b"x", Kind.REGULAR, size=600), bytes(600)))[:cut]
        with pytest.raises(EnvletError, match=r"truncated|expected a tar"):
            stage.fresh(partial(apply_bytes, data, stage.lower))

    in_overlay(work)


@given(st.binary(max_size=40))
def test_a_clean_path_never_leaves(path: bytes) -> None:
    try:
        cleaned = clean_path(path)
    except EnvletError:
        assert b".." in path.split(b"/") or b"\0" in path
        return
    assert not cleaned.startswith(b"/")
    assert b".." not in cleaned.split(b"/")
