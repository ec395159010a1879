"""The reference filesystem on pyfuse3 against the C mount: two servers that share the layer format and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from hypothesis import given
from merge_corners import directory, file, link, symlink, whiteout
from strategies import Layer, encode_layer, layer_stacks, make_content
from weefs_harness import MountedCore, mounted_core, open_layers, tree_rows

from envlet import syscalls
from weefs.merge import PlanRefused, View
from weefs.reference import serve

GOLDEN = Path(__file__).parent / "assets" / "golden"


@pytest.fixture(scope="module")
def mounted() -> Iterator[MountedCore]:
    with mounted_core() as mounted:
        yield mounted


@contextmanager
def reference_mount(blobs: Sequence[bytes]) -> Iterator[Path]:
    """A mount by the reference filesystem, served by a thread of its own until it is unmounted."""
    mountpoint = Path(tempfile.mkdtemp(prefix="weefs-reference-"))
    ready = threading.Event()
    failures: list[BaseException] = []

    class Started:
        def started(self, value: None = None) -> None:
            ready.set()

    async def main() -> None:
        await serve(open_layers(blobs), mountpoint, task_status=Started())

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as error:
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        if failures:
            raise failures[0]
        try:
            yield mountpoint
        finally:
            syscalls.umount(str(mountpoint))
    finally:
        thread.join()
        shutil.rmtree(mountpoint)
    assert failures == []


def compare(mounted: MountedCore, blobs: Sequence[bytes]) -> int:
    """Asserts that both mounts show the same; the number of entries."""
    slot, path = mounted.add_plan(blobs)
    try:
        compiled = tree_rows(path, directory_sizes=True)
    finally:
        mounted.core.remove_plan(slot)
    with reference_mount(blobs) as mountpoint:
        reference = tree_rows(mountpoint, directory_sizes=True)
    assert compiled.keys() == reference.keys()
    for name, row in reference.items():
        assert compiled[name] == row, name
    return len(reference)


def test_generated_stacks(mounted: MountedCore) -> None:
    compared: list[int] = []

    @given(layer_stacks(extractable=True))
    def check(stack: list[Layer]) -> None:
        blobs = [encode_layer(layer) for layer in stack]
        try:
            View(open_layers(blobs))
        except PlanRefused:
            return
        compared.append(compare(mounted, blobs))

    check()
    assert sum(compared) > 100


@pytest.mark.parametrize(
    "names",
    [["empty.1"], ["everything.1"], ["everything.2"], ["shared.1"], ["everything.1", "upper.2"], ["empty.2", "everything.2", "upper.1"]],
    ids="-".join,
)
def test_golden_layers(mounted: MountedCore, names: list[str]) -> None:
    assert compare(mounted, [(GOLDEN / f"{name}.layer").read_bytes() for name in names]) > 0


MANY = [directory(b"many"), *[file(b"many/%04d" % number, b"%d" % number) for number in range(3000)]]
USRMERGE = [
    [directory(b"usr/lib"), file(b"usr/lib/a"), symlink(b"lib", b"usr/lib", 0o640)],
    [file(b"lib/b"), link(b"usr/lib/d", b"usr/lib/a")],
    [whiteout(b"lib/a"), file(b"lib/b", b"newer")],
]


@pytest.mark.parametrize("stack", [[MANY], USRMERGE], ids=["many", "usrmerge"])
def test_named_stacks(mounted: MountedCore, stack: list[Layer]) -> None:
    assert compare(mounted, [encode_layer(layer) for layer in stack]) > 3


def test_nothing_can_be_written_and_absence_is_said(mounted: MountedCore) -> None:
    with reference_mount([encode_layer([file(b"f"), directory(b"d")])]) as mountpoint:
        for path in (mountpoint, mounted.mountpoint):
            with pytest.raises(OSError, match="Read-only") as caught:
                (path / "new").write_bytes(b"")
            assert caught.value.errno == errno.EROFS
            assert not os.path.lexists(path / "d" / "missing")


def test_damaged_chunks_are_errors_and_not_bytes() -> None:
    blob = bytearray(encode_layer([file(b"f", make_content(5000, 1, False)), file(b"g", make_content(20_000, 2, False))]))
    blob[10] ^= 1  # in the first chunk, which is stored as it is: no bit of it is without meaning
    with reference_mount([bytes(blob)]) as mountpoint:
        answers = []
        for name in ("f", "g"):
            try:
                answers.append(len((mountpoint / name).read_bytes()))
            except OSError as error:
                answers.append(-(error.errno or 0))
        assert -errno.EIO in answers
