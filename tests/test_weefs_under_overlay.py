"""An environment's overlay on top of a plan: what the kernel does with weefs as its lower directory.

Mounted with the node daemon's own options, upper and work directory on a disk. Reading shows the plan; every kind of
copy-up keeps contents and metadata; attributes of a layer that would instruct an overlay are content; two environments
share one page cache; locks, file handles, mmap and exec work.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import views
from hypothesis import given
from merge_corners import directory, file, link, symlink
from strategies import Layer, Member, encode_layer, layer_stacks, make_content
from views import ViewedCore
from weefs_harness import Row, open_layers, tree_rows

from envlet import overlay
from layerformat import Entry, Kind
from weefs.merge import PlanRefused, View

MTIME_NS = 1_700_000_000_123_456_789
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
BIG = make_content(300_000, 3, False)
BUSYBOX = Path("/usr/bin/busybox")


@pytest.fixture(scope="module", params=[views.MERGED, views.KERNEL], ids=["merged", "kernel"])
def mounted(request: pytest.FixtureRequest) -> Iterator[ViewedCore]:
    with views.viewed_core(request.param) as mounted:
        yield mounted


def shown(root: Path, path: str) -> Row:
    return tree_rows(root)[os.fsencode(path)]


def mapped(path: Path, change: str = "") -> bytes:
    """What a private mapping of the file shows, changed by a statement about `mapped`. In a process of its own: a page
    fault keeps the interpreter's lock, which the thread that serves the misses of this process needs.
    """
    program = (
        "import mmap, sys\n"
        "with open(sys.argv[1], 'rb') as opened:\n"
        "    mapped = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)\n"
        f"{change}\n"
        "sys.stdout.buffer.write(mapped)\n"
    )
    return subprocess.run([sys.executable, "-c", program, path], check=True, capture_output=True).stdout


def node(path: bytes, kind: Kind, **fields: object) -> Member:
    return Member(Entry(path=path, kind=kind, mode=0o640, uid=5, gid=70_000, mtime_ns=MTIME_NS, **fields))  # type: ignore[arg-type]


KINDS: Layer = [
    directory(b".", 0o755, mtime_ns=MTIME_NS),
    directory(b"d", 0o2775, uid=5, gid=6, mtime_ns=MTIME_NS, xattrs={b"user.dir": b"1"}),
    file(
        b"d/big", BIG, 0o644, uid=5, gid=70_000, mtime_ns=MTIME_NS, xattrs={b"user.note": b"\0\xff", b"trusted.t": b""}
    ),
    file(b"d/small", b"small", 0o4755, mtime_ns=MTIME_NS, xattrs={b"security.capability": CAPABILITY}),
    file(b"d/empty", b"", 0o600, mtime_ns=MTIME_NS),
    node(b"d/holes", Kind.REGULAR, size=1 << 20, sparse=()),
    symlink(b"d/symlink", b"big"),
    node(b"d/fifo", Kind.FIFO),
    node(b"d/null", Kind.CHARACTER, rdev=os.makedev(1, 3)),
    node(b"d/disk", Kind.BLOCK, rdev=os.makedev(4095, 2**20 - 1)),
    directory(b"d/sub", 0o700, mtime_ns=MTIME_NS),
    file(b"d/sub/f", b"below"),
]
FILES = ["d/big", "d/small", "d/empty", "d/holes"]
SPECIAL = ["d/symlink", "d/fifo", "d/null", "d/disk"]


def readable(rows: dict[bytes, Row]) -> dict[bytes, Row]:
    """overlayfs makes one of several names of a lower file each a file of its own, and counts no subdirectories."""
    return {path: attrs.evolve(row, nlink=0, group=()) for path, row in rows.items()}


def test_generated_stacks_read_the_same_through_an_overlay(mounted: ViewedCore) -> None:
    compared: list[int] = []

    @given(layer_stacks(extractable=True))
    def check(stack: list[Layer]) -> None:
        try:
            View(open_layers([encode_layer(layer) for layer in stack]))
        except PlanRefused:
            return
        with mounted.environment_of(*stack) as env:
            through, below = readable(tree_rows(env.root)), readable(tree_rows(env.lower))
            root = below.pop(b""), through.pop(b"")
            assert root[0].mode == root[1].mode
            assert through == below
            assert os.listdir(env.upper) == []
            compared.append(len(through))

    check()
    assert sum(compared) > 100


@pytest.mark.parametrize("path", FILES + SPECIAL + ["d", "d/sub"])
def test_chmod_and_chown_copy_up_everything_else(mounted: ViewedCore, path: str) -> None:
    with mounted.environment_of(KINDS) as env:
        before = readable(tree_rows(env.root))[os.fsencode(path)]
        os.chown(env.root / path, 77, 88, follow_symlinks=False)
        expected = attrs.evolve(before, uid=77, gid=88)
        if path not in ("d", "d/sub", "d/symlink"):
            os.chmod(env.root / path, 0o604)
            expected = attrs.evolve(expected, mode=stat.S_IFMT(before.mode) | 0o604)
        if stat.S_ISREG(before.mode):  # chown takes capabilities away, as on every filesystem
            kept = [pair for pair in expected.xattrs if pair[0] != b"security.capability"]
            expected = attrs.evolve(expected, xattrs=tuple(kept))
        assert readable(tree_rows(env.root))[os.fsencode(path)] == expected
        assert os.path.lexists(env.upper / path)


@pytest.mark.parametrize("path", FILES)
def test_writing_copies_up_contents_and_metadata(mounted: ViewedCore, path: str) -> None:
    with mounted.environment_of(KINDS) as env:
        before = shown(env.root, path)
        with open(env.root / path, "ab") as appended:
            appended.write(b"more")
        after = shown(env.root, path)
        assert after.content == before.content + b"more"
        lost = {b"security.capability"}  # to the write, as on every filesystem
        assert after.xattrs == tuple(pair for pair in before.xattrs if pair[0] not in lost)
        assert (after.uid, after.gid) == (before.uid, before.gid)
        assert after.mode & 0o777 == before.mode & 0o777
        assert shown(env.lower, path) == before


@pytest.mark.parametrize("size", [0, 5, 100_001, 400_000])
def test_truncating_copies_up_what_is_left(mounted: ViewedCore, size: int) -> None:
    with mounted.environment_of(KINDS) as env:
        os.truncate(env.root / "d/big", size)
        assert (env.root / "d/big").read_bytes() == BIG[:size] + bytes(max(0, size - len(BIG)))
        assert (env.lower / "d/big").read_bytes() == BIG


@pytest.mark.parametrize("path", FILES + SPECIAL)
def test_renaming_keeps_everything(mounted: ViewedCore, path: str) -> None:
    with mounted.environment_of(KINDS) as env:
        before = shown(env.root, path)
        os.rename(env.root / path, env.root / "moved")
        rows = tree_rows(env.root)
        assert rows[b"moved"] == before
        assert os.fsencode(path) not in rows
        assert os.lstat(env.upper / path).st_rdev == 0
        assert stat.S_ISCHR(os.lstat(env.upper / path).st_mode)


def test_renaming_a_directory_of_the_plan_is_left_to_mv(mounted: ViewedCore) -> None:
    with mounted.environment_of(KINDS) as env:
        with pytest.raises(OSError, match="cross-device") as caught:
            os.rename(env.root / "d", env.root / "e")
        assert caught.value.errno == errno.EXDEV
        before = readable(tree_rows(env.root / "d"))
        subprocess.run(["mv", env.root / "d", env.root / "e"], check=True)
        assert readable(tree_rows(env.root / "e")) == before


@pytest.mark.parametrize("path", FILES)
def test_links_and_attributes_copy_up(mounted: ViewedCore, path: str) -> None:
    with mounted.environment_of(KINDS) as env:
        before = shown(env.root, path)
        os.link(env.root / path, env.root / "second")
        os.setxattr(env.root / path, "user.new", b"v")
        rows = tree_rows(env.root)
        xattrs = tuple(sorted((*before.xattrs, (b"user.new", b"v"))))
        expected = attrs.evolve(before, nlink=2, xattrs=xattrs)
        for name in (b"second", os.fsencode(path)):  # which inode number each has: docs/decisions/0002
            assert attrs.evolve(rows[name], group=()) == expected
        with open(env.root / "second", "r+b") as second, open(env.root / path, "rb") as first:
            second.write(b"!")
            second.flush()
            assert first.read(1) == b"!"
            second.truncate(len(before.content))
            second.seek(0)
            second.write(before.content)
        os.removexattr(env.root / path, "user.new")
        os.unlink(env.root / path)
        after = shown(env.root, "second")
        assert (after.nlink, after.content, after.uid, after.gid) == (1, before.content, before.uid, before.gid)


def test_removing_and_making_again(mounted: ViewedCore) -> None:
    with mounted.environment_of(KINDS) as env:
        shutil.rmtree(env.root / "d/sub")
        (env.root / "d/sub").mkdir()
        assert os.listdir(env.root / "d/sub") == []
        assert os.getxattr(env.upper / "d/sub", overlay.OPAQUE_XATTR) == b"y"
        os.unlink(env.root / "d/small")
        assert "small" not in os.listdir(env.root / "d")
        assert (env.lower / "d/sub/f").read_bytes() == b"below"


def test_one_name_of_a_linked_file_is_copied_up_alone(mounted: ViewedCore) -> None:
    with mounted.environment_of([file(b"a"), link(b"b", b"a")]) as env:
        (env.root / "a").write_bytes(b"changed")
        assert (env.root / "b").read_bytes() == b"data"


# What would instruct an overlay


INSTRUCTIONS: dict[bytes, bytes] = {
    b"opaque": b"y",
    b"redirect": b"/secret",
    b"metacopy": b"",
    b"whiteout": b"",
    b"origin": b"\0\xfb\x1d\0",
    b"impure": b"y",
    b"overlay.opaque": b"y",
    b"whiteouts": b"",
    b"nlink": b"L+7",
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
@pytest.mark.parametrize("prefix", [b"trusted.overlay.", b"user.overlay."])
def test_attributes_of_a_layer_never_act_on_the_overlay(mounted: ViewedCore, prefix: bytes, name: bytes) -> None:
    xattrs = {prefix + name: INSTRUCTIONS[name]}
    base: Layer = [
        directory(b"d"),
        file(b"d/below"),
        directory(b"secret"),
        file(b"secret/s", b"secret"),
        file(b"e", b""),
    ]
    top: Layer = [
        directory(b".", xattrs=xattrs),
        directory(b"d", xattrs=xattrs),
        directory(b"d/own", xattrs=xattrs),
        file(b"d/own/f", b"own", xattrs=xattrs),
        file(b"d/file", b"contents", xattrs=xattrs),
        file(b"d/empty", b"", xattrs=xattrs),
        file(b"e", b"", xattrs=xattrs),
    ]
    with mounted.environment_of(base, top) as env:
        rows = tree_rows(env.root)
        assert set(rows) == {
            b"", b"d", b"d/below", b"d/own", b"d/own/f", b"d/file", b"d/empty", b"e", b"secret", b"secret/s",
        }  # fmt: skip
        assert (rows[b"d/file"].content, rows[b"d/own/f"].content, rows[b"d/empty"].content) == (
            b"contents",
            b"own",
            b"",
        )
        for path in (b"d", b"d/own", b"d/own/f", b"d/file", b"d/empty", b"e"):
            assert rows[path].xattrs == tuple(xattrs.items()), path  # overlayfs takes the escape off again
        os.chmod(env.root / "d/file", 0o600)
        assert (env.root / "d/file").read_bytes() == b"contents"
        (env.root / "d/own/new").write_bytes(b"")
        assert sorted(os.listdir(env.root / "d/own")) == ["f", "new"]


def test_attributes_are_escaped_in_the_plans_directory(mounted: ViewedCore) -> None:
    xattrs = {b"trusted.overlay.opaque": b"y", b"trusted.overlay.overlay.opaque": b"z", b"user.overlay.opaque": b"u"}
    with mounted.environment_of([directory(b"d", xattrs=xattrs)]) as env:
        assert dict(shown(env.lower, "d").xattrs) == {
            b"trusted.overlay.overlay.opaque": b"y",
            b"trusted.overlay.overlay.overlay.opaque": b"z",
            b"user.overlay.opaque": b"u",
        }
        with pytest.raises(OSError, match="No data"):
            os.getxattr(env.lower / "d", "trusted.overlay.opaque")
        assert dict(shown(env.root, "d").xattrs) == xattrs


# Sharing, and what programs do with files


def test_two_environments_share_one_page_cache(mounted: ViewedCore) -> None:
    views.while_caches_are_kept(lambda: check_sharing(mounted))


def check_sharing(mounted: ViewedCore) -> None:
    own = file(os.urandom(8).hex().encode())
    shared = mounted.add_layer(encode_layer([file(b"big", BIG), directory(b"d"), file(b"d/small", b"small"), own]))
    plans = [mounted.add_plan_of([shared, mounted.add_layer(encode_layer([file(name)]))]) for name in (b"one", b"two")]
    try:
        with mounted.environment(plans[0][1]) as first, mounted.environment(plans[1][1]) as second:
            assert (first.root / "big").read_bytes() == BIG
            assert (first.root / "d/small").read_bytes() == b"small"
            before = mounted.core.statistics()["requests_read"]
            assert (second.root / "big").read_bytes() == BIG
            assert (second.root / "d/small").read_bytes() == b"small"
            assert mapped(second.root / "big") == BIG
            assert mounted.core.statistics()["requests_read"] == before
    finally:
        for _, path in plans:
            mounted.remove_plan(path)


def test_programs_run_from_a_plan(mounted: ViewedCore) -> None:
    layer = [directory(b"bin"), file(b"bin/busybox", BUSYBOX.read_bytes(), 0o755), symlink(b"bin/sh", b"busybox")]
    with mounted.environment_of(layer) as env:
        command = ["chroot", str(env.root), "/bin/sh", "-c", "echo run; /bin/busybox sha256sum /bin/busybox"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        digest = subprocess.run(["sha256sum", BUSYBOX], check=True, capture_output=True, text=True).stdout.split()[0]
        assert output == ["run", digest, "/bin/busybox"]


def test_locks(mounted: ViewedCore) -> None:
    with (
        mounted.environment_of([file(b"f")]) as env,
        open(env.root / "f", "rb") as one,
        open(env.root / "f", "rb") as two,
    ):
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(one, fcntl.LOCK_UN)
        fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(two, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_open_files_survive_copy_up_and_removal(mounted: ViewedCore) -> None:
    with mounted.environment_of([file(b"f", BIG)]) as env, open(env.root / "f", "rb") as opened:
        assert opened.read(10) == BIG[:10]
        os.unlink(env.root / "f")
        assert opened.read() == BIG[10:]


def test_private_mappings_are_written_in_memory_only(mounted: ViewedCore) -> None:
    with mounted.environment_of([file(b"f", BIG)]) as env:
        assert mapped(env.root / "f", "mapped[5:10] = b'12345'") == BIG[:5] + b"12345" + BIG[10:]
        assert (env.root / "f").read_bytes() == BIG


def file_handle(path: Path) -> bytes:
    """name_to_handle_at(2): type and bytes of the handle."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer((128).to_bytes(4, "little") + bytes(132))
    mount_id = ctypes.c_int()
    if libc.name_to_handle_at(-100, os.fsencode(path), buffer, ctypes.byref(mount_id), 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return buffer.raw[4 : 8 + int.from_bytes(buffer.raw[:4], "little")]


def test_file_handles_open_the_file_that_they_were_made_of(mounted: ViewedCore) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with mounted.environment_of([file(b"f", BIG), file(b"g")]) as env:
        handles = {name: file_handle(env.lower / name) for name in ("f", "g")}
        assert handles["f"] != handles["g"]
        for name, handle in handles.items():
            raw = (len(handle) - 4).to_bytes(4, "little") + handle
            directory_fd = os.open(env.lower, os.O_RDONLY)
            fd = libc.open_by_handle_at(directory_fd, raw, os.O_RDONLY)
            os.close(directory_fd)
            assert fd >= 0, os.strerror(ctypes.get_errno())
            with open(fd, "rb") as opened:
                assert opened.read() == (env.root / name).read_bytes()


def test_statfs_is_answered_at_both(mounted: ViewedCore) -> None:
    with mounted.environment_of([file(b"f")]) as env:
        assert os.statvfs(env.lower).f_namemax == 255
        assert os.statvfs(env.root).f_namemax == 255


def test_an_environment_is_one_device_and_a_linked_file_one_number(mounted: ViewedCore) -> None:
    """`xino=on`, which needs node ids that leave the highest bits free: for files, and for directories of every
    kind.
    """
    upper = [directory(b"d", 0o700), file(b"d/new", b"1"), directory(b"only/here", 0o755)]
    with mounted.environment_of(KINDS, upper) as env:
        status = {path: os.lstat(env.root / path) for path in ("d", "d/big", "d/new", "only", "only/here")}
        assert len({one.st_dev for one in status.values()}) == 1
        assert len({one.st_ino for one in status.values()}) == len(status)
        (env.root / "d/big").chmod(0o600)
        os.link(env.root / "d/big", env.root / "second")
        assert os.path.samefile(env.root / "d/big", env.root / "second")
        assert os.lstat(env.root / "d/big").st_dev == status["d"].st_dev
