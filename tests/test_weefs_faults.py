"""Misses through a real mount: single flight, damage, loss, interruption, bounds, and what survives in the cache."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from merge_corners import file
from strategies import Member, encode_layer, make_content
from weefs_harness import MountedCore, faithful, forget, mounted_core, read_direct

from layerformat import Entry, Kind
from weefs import core
from weefs.cachedir import boot_id, opened
from weefs.core import MAX_PENDING

CHUNK = 8192
CONTENT = make_content(CHUNK * 6 + 100, 1, False)


def layer_of(**files: bytes) -> bytes:
    members = [
        Member(Entry(path=name.encode(), kind=Kind.REGULAR, mode=0o644, size=len(data)), data)
        for name, data in files.items()
    ]
    return encode_layer(members, chunk_size=CHUNK)


@pytest.fixture
def mounted() -> Iterator[MountedCore]:
    with mounted_core(threads=4) as mounted:
        yield mounted


def wait_until(condition: Callable[[], bool]) -> None:
    """For what has no event to wait for: a counter of the core."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.002)


class Gate:
    """Answers that wait until the gate is opened; opened at the end in any case, so that a failing test cannot
    leave readers behind.
    """

    def __init__(self, mounted: MountedCore) -> None:
        self._open = threading.Event()
        self._mounted = mounted

    def __enter__(self) -> Gate:
        self._mounted.answer = self._answer
        return self

    def _answer(self, blob: bytes, miss: core.Miss) -> bytes:
        self._open.wait()
        return faithful(blob, miss)

    def open(self) -> None:
        self._open.set()

    def __exit__(self, *_: object) -> None:
        self.open()


def test_readers_of_one_chunk_fetch_it_once(mounted: MountedCore) -> None:
    # Three small files of one gathered chunk: their readers wait for the same flight, in requests of their own.
    _slot, path = mounted.add_plan([layer_of(f=CONTENT[:300], g=CONTENT[:100], h=CONTENT[:200])])
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda name=name: results.append((path / name).read_bytes()))
        for name in ("f", "g", "h")
    ]
    with Gate(mounted) as gate:
        for thread in threads:
            thread.start()
        wait_until(lambda: mounted.core.statistics()["pending"] == 3)
        in_flight = mounted.core.statistics()["in_flight"]
        gate.open()
        for thread in threads:
            thread.join()
    assert in_flight == 1
    assert sorted(map(len, results)) == [100, 200, 300]
    assert len(mounted.fetched) == 1


@given(position=st.integers(0, 1 << 20), bit=st.integers(0, 7))
def test_a_flipped_bit_gives_eio_and_then_the_right_bytes(position: int, bit: int) -> None:
    with mounted_core() as mounted:

        def flip(blob: bytes, miss: core.Miss) -> bytes:
            stored = bytearray(faithful(blob, miss))
            stored[position % len(stored)] ^= 1 << bit
            return bytes(stored)

        mounted.answer = flip
        _slot, path = mounted.add_plan([layer_of(f=make_content(5000, position, position % 2 == 0))])
        with pytest.raises(OSError) as caught:
            (path / "f").read_bytes()
        assert caught.value.errno == errno.EIO
        assert mounted.rejected
        mounted.answer = faithful
        assert (path / "f").read_bytes() == make_content(5000, position, position % 2 == 0)


@pytest.mark.parametrize("length", [0, 1, 100])
def test_a_short_or_long_chunk_is_refused(mounted: MountedCore, length: int) -> None:
    mounted.answer = lambda blob, miss: (
        (faithful(blob, miss) + b"x")[:length] if length else faithful(blob, miss) + b"x"
    )
    _slot, path = mounted.add_plan([layer_of(f=CONTENT)])
    with pytest.raises(OSError) as caught:
        (path / "f").read_bytes()
    assert caught.value.errno == errno.EIO
    assert "stored bytes" in mounted.rejected[0]


def test_a_lost_chunk_is_a_fault_of_its_reader_and_is_asked_for_again(mounted: MountedCore) -> None:
    mounted.answer = lambda _blob, _miss: errno.ETIMEDOUT
    _slot, path = mounted.add_plan([layer_of(f=CONTENT, g=CONTENT)])
    program = "import sys\ntry:\n open(sys.argv[1], 'rb').read()\nexcept OSError as error:\n print(error.errno)"
    process = subprocess.Popen([sys.executable, "-c", program, path / "f"], stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate()
    assert output.strip() == str(errno.EIO)
    wait_until(lambda: bool(mounted.faults))
    assert {fault.pid for fault in mounted.faults} == {process.pid}
    assert {fault.error for fault in mounted.faults} == {errno.ETIMEDOUT}
    mounted.answer = faithful
    assert (path / "f").read_bytes() == CONTENT
    assert mounted.core.statistics()["pending"] == mounted.core.statistics()["in_flight"] == 0


DIRECT_READ = "import mmap, os, sys; os.readv(os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT), [mmap.mmap(-1, 4096)])"


@pytest.mark.parametrize("direct", [False, True])
def test_a_killed_reader_leaves_its_wait_and_its_chunk_arrives_all_the_same(mounted: MountedCore, direct: bool) -> None:
    _slot, path = mounted.add_plan([layer_of(f=CONTENT)])
    with Gate(mounted) as gate:
        command = [sys.executable, "-c", DIRECT_READ, path / "f"] if direct else ["cat", path / "f"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until(lambda: mounted.core.statistics()["pending"] > 0)
        process.send_signal(signal.SIGKILL)
        process.wait()  # it would stay in D for ever if its request were not answered
        # Through the page cache the kernel reads on by itself; a direct read is interrupted.
        if direct:
            wait_until(lambda: mounted.core.statistics()["reads_interrupted"] == 1)
        gate.open()
        assert (path / "f").read_bytes() == CONTENT
    wait_until(lambda: mounted.core.statistics()["pending"] == 0)


def test_more_waiting_reads_than_the_bound_all_complete() -> None:
    with mounted_core(threads=2, max_pending=2) as mounted:
        blob = layer_of(**{f"f{i}": make_content(CHUNK, i, False) for i in range(24)})
        _slot, path = mounted.add_plan([blob])
        results: dict[int, bytes] = {}
        threads = [
            threading.Thread(target=lambda i=i: results.update({i: (path / f"f{i}").read_bytes()})) for i in range(24)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {i: make_content(CHUNK, i, False) for i in range(24)}


def test_ten_thousand_reads_that_wait_hold_nobody_else_up(tmp_path: Path) -> None:
    """They take no thread, no descriptor and little memory, and what is present is read beside them."""
    program = tmp_path / "many_readers"
    subprocess.run(["cc", "-O2", "-pthread", "-o", program, Path(__file__).with_name("many_readers.c")], check=True)
    count = 10_000
    members = [file(b"f%d" % number, b"%08d" % number * 600) for number in range(count)]
    blob = encode_layer([*members, file(b"present", CONTENT)])
    with mounted_core(threads=2, max_pending=MAX_PENDING) as mounted:
        _slot, path = mounted.add_plan([blob])
        assert (path / "present").read_bytes() == CONTENT
        before = resources()
        with Gate(mounted) as gate:
            readers = subprocess.Popen([program, path, str(count)])
            # Some find their file in a chunk that a neighbour waits for: all of them wait, whoever fetches.
            wait_until(lambda: mounted.core.statistics()["pending"] >= count)
            forget(path / "present")
            assert (path / "present").read_bytes() == CONTENT
            assert sorted(os.listdir(path))[-1] == "present"
            waiting = resources()
            gate.open()
            assert readers.wait(120) == 0
        assert (waiting.threads, waiting.descriptors) == (before.threads, before.descriptors)
        assert waiting.memory_bytes - before.memory_bytes < 32 << 20
        assert mounted.core.statistics()["pending"] == 0


@attrs.frozen
class Resources:
    """Of this process."""

    threads: int
    descriptors: int
    memory_bytes: int


def resources() -> Resources:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Resources(int(status["Threads"]), len(os.listdir("/proc/self/fd")), int(status["VmRSS"].split()[0]) << 10)


def test_a_mount_that_goes_while_reads_wait_for_room_ends() -> None:
    with mounted_core(threads=2, max_pending=1) as mounted:
        _slot, path = mounted.add_plan([layer_of(**{f"f{i}": make_content(CHUNK, i, False) for i in range(4)})])
        with Gate(mounted):
            readers = [subprocess.Popen(["cat", path / f"f{i}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for i in range(4)]
            wait_until(lambda: mounted.core.statistics()["requests_read"] >= 2)
            subprocess.run(["umount", "--force", mounted.mountpoint], capture_output=True)
            assert all(reader.wait(30) for reader in readers), "each got an error and none hangs"
            subprocess.run(["umount", "--lazy", mounted.mountpoint], capture_output=True)
    # Leaving the block waited for the FUSE threads.


def test_a_claimed_chunk_is_nobody_elses_until_it_is_published(mounted: MountedCore) -> None:
    blob = layer_of(f=CONTENT)
    layer = mounted.add_layer(blob)
    miss = mounted.core.claim(layer, core.ChunkIndex(0))
    assert miss is not None
    assert mounted.core.claim(layer, core.ChunkIndex(0)) is None
    mounted.core.publish(layer, miss.chunk, faithful(blob, miss))
    assert mounted.core.claim(layer, core.ChunkIndex(0)) is None
    _slot, path = mounted.add_plan_of([layer])
    with (path / "f").open("rb", buffering=0) as file:
        assert file.read(10) == CONTENT[:10]
    with pytest.raises(core.CoreError):
        mounted.core.claim(layer, core.ChunkIndex(1000))


def read_through(directory: Path, blob: bytes, boot: bytes) -> tuple[int, int]:
    """Serves a cache directory once more; how many chunks it had, and how many a reader had to wait for."""
    with mounted_core() as mounted:
        if (directory / "toc").exists():
            before = core.Core()  # only to look into the map with another boot id
            with opened(directory) as files:
                before.add_layer(attrs.evolve(files, boot_id=boot))
            before.close()
        layer = mounted.add_layer(blob, directory)
        had = mounted.core.layer_info(layer).present_chunks
        _slot, path = mounted.add_plan_of([layer])
        assert (path / "f").read_bytes() == CONTENT
        return had, len(mounted.fetched)


def test_the_cache_survives_a_process_and_not_a_boot(tmp_path: Path) -> None:
    blob = layer_of(f=CONTENT)
    assert read_through(tmp_path, blob, boot_id()) == (0, 7)
    assert read_through(tmp_path, blob, boot_id()) == (7, 0)
    assert read_through(tmp_path, blob, b"another boot id!") == (0, 7)


def test_a_cache_file_of_another_size_is_not_believed(tmp_path: Path) -> None:
    blob = layer_of(f=CONTENT)
    read_through(tmp_path, blob, boot_id())
    os.truncate(tmp_path / "data", 4096)
    assert read_through(tmp_path, blob, boot_id()) == (0, 7)


def test_a_removed_plan_is_gone_and_a_new_one_may_take_its_name(mounted: MountedCore) -> None:
    one, two = (mounted.add_layer(layer_of(f=data)) for data in (b"one" * 2000, b"two" * 2000))
    for _ in range(20):
        for layer, data in ((one, b"one" * 2000), (two, b"two" * 2000)):
            slot, _info = mounted.core.add_plan("plan", [layer])
            assert os.listdir(mounted.mountpoint) == ["objects", "plan"]
            assert (mounted.mountpoint / "plan/f").read_bytes() == data
            mounted.core.remove_plan(slot)
            assert os.listdir(mounted.mountpoint) == ["objects"]
            with pytest.raises(FileNotFoundError):
                (mounted.mountpoint / "plan/f").read_bytes()


def test_what_is_used_after_its_removal_is_stale_and_no_other_plans(mounted: MountedCore) -> None:
    blob = encode_layer(
        [
            Member(Entry(path=b"d", kind=Kind.DIRECTORY, mode=0o755)),
            Member(Entry(path=b"d/a", kind=Kind.SYMLINK, target=b"x")),
        ]
    )
    slot, path = mounted.add_plan([blob])
    fd = os.open(path / "d", os.O_RDONLY | os.O_DIRECTORY)
    mounted.core.remove_plan(slot)
    mounted.add_plan([layer_of(z=b"z")])
    with pytest.raises(OSError) as caught:
        os.listdir(fd)
    assert caught.value.errno in (errno.ESTALE, errno.ENOENT)
    os.close(fd)


def test_writes_and_unknown_operations_are_refused(mounted: MountedCore) -> None:
    _slot, path = mounted.add_plan([layer_of(f=b"data")])
    for call in (
        lambda: (path / "f").write_bytes(b"x"),
        lambda: (path / "g").touch(),
        lambda: (path / "f").unlink(),
        lambda: (path / "f").chmod(0),
    ):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EROFS


def test_overlay_attributes_of_a_layer_are_escaped_when_asked(tmp_path: Path) -> None:
    entry = Entry(
        path=b"d",
        kind=Kind.DIRECTORY,
        mode=0o755,
        xattrs={b"trusted.overlay.opaque": b"y", b"user.overlay.x": b"1", b"trusted.y": b"2"},
    )
    blob = encode_layer([Member(entry)])
    shown = {b"trusted.overlay.opaque": b"y", b"user.overlay.x": b"1", b"trusted.y": b"2"}
    escaped = {b"trusted.overlay.overlay.opaque": b"y", b"user.overlay.x": b"1", b"trusted.y": b"2"}
    for escape, expected in ((False, shown), (True, escaped)):
        with mounted_core(escape=escape) as mounted:
            _slot, path = mounted.add_plan([blob])
            names = os.listxattr(path / "d")
            assert {os.fsencode(name): os.getxattr(path / "d", name) for name in names} == expected
            with pytest.raises(OSError) as caught:
                os.getxattr(path / "d", "trusted.overlay.opaque" if escape else "trusted.overlay.overlay.opaque")
            assert caught.value.errno == errno.ENODATA


# The cache itself fails


def test_a_full_disk_costs_time_and_no_reader(mounted: MountedCore, tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", tmp_path], check=True)
    try:
        layer = mounted.add_layer(layer_of(f=CONTENT), tmp_path)
        _slot, path = mounted.add_plan_of([layer])
        for _ in range(3):
            assert read_direct(path / "f", len(CONTENT)) == CONTENT
        statistics = mounted.core.statistics()
        assert statistics["chunks_unwritten"] > 0
        assert statistics["reads_failed"] == 0
        assert mounted.core.layer_info(layer).present_chunks < 7
        subprocess.run(["mount", "-o", "remount,size=10m", tmp_path], check=True)
        assert read_direct(path / "f", len(CONTENT)) == CONTENT
        assert mounted.core.layer_info(layer).present_chunks == 7
        assert mounted.faults == []
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.parametrize("left", [0, 4096, CHUNK * 3 + 17])
def test_a_cache_file_that_is_cut_off_while_it_is_served_is_fetched_again(mounted: MountedCore, tmp_path: Path, left: int) -> None:
    layer = mounted.add_layer(layer_of(f=CONTENT), tmp_path)
    _slot, path = mounted.add_plan_of([layer])
    assert read_direct(path / "f", len(CONTENT)) == CONTENT
    fetched = len(mounted.fetched)
    os.truncate(tmp_path / "data", left)
    assert read_direct(path / "f", len(CONTENT)) == CONTENT
    assert len(mounted.fetched) > fetched
    assert mounted.core.layer_info(layer).present_chunks == 7
    assert mounted.faults == []


def test_a_chunk_never_goes_behind_the_end_of_a_file_that_was_cut_off(mounted: MountedCore, tmp_path: Path) -> None:
    blob = layer_of(f=CONTENT)
    layer = mounted.add_layer(blob, tmp_path)
    _slot, path = mounted.add_plan_of([layer])
    first = mounted.core.claim(layer, core.ChunkIndex(0))
    last = mounted.core.claim(layer, core.ChunkIndex(5))
    assert first is not None
    assert last is not None
    mounted.core.publish(layer, first.chunk, faithful(blob, first))
    os.truncate(tmp_path / "data", 0)
    mounted.core.publish(layer, last.chunk, faithful(blob, last))  # makes the file long enough again
    assert mounted.core.layer_info(layer).present_chunks == 1, "the first one is void"
    assert read_direct(path / "f", len(CONTENT)) == CONTENT


def test_a_chunk_map_that_is_cut_off_ends_nothing(mounted: MountedCore, tmp_path: Path) -> None:
    layer = mounted.add_layer(layer_of(f=CONTENT), tmp_path)
    _slot, path = mounted.add_plan_of([layer])
    os.truncate(tmp_path / "map", 0)
    assert read_direct(path / "f", len(CONTENT)) == CONTENT
    assert read_through(tmp_path, layer_of(f=CONTENT), boot_id()) == (0, 7), "the next process does not believe it"


def test_a_cache_file_that_cannot_be_read_is_a_fault(mounted: MountedCore, tmp_path: Path) -> None:
    blob = layer_of(f=CONTENT)
    mounted.add_layer(blob, tmp_path)
    unreadable = os.open(tmp_path / "data", os.O_WRONLY)
    with opened(tmp_path) as files:
        layer = mounted.core.add_layer(attrs.evolve(files, data_fd=unreadable))
    os.close(unreadable)
    mounted._blobs[layer] = blob
    _slot, path = mounted.add_plan_of([layer])
    with pytest.raises(OSError) as caught:
        read_direct(path / "f", len(CONTENT))
    assert caught.value.errno == errno.EIO
    wait_until(lambda: bool(mounted.faults))
    assert {(fault.layer, fault.error, fault.pid) for fault in mounted.faults} == {(layer, errno.EBADF, os.getpid())}
