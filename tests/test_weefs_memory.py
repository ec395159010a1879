"""What is in memory: the contents of a large file once, in the page cache of the mount and not of the node cache's data file too."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from merge_corners import file
from strategies import encode_layer
from weefs_harness import forget, mounted_core

from layerformat import DEFAULT_CHUNK_SIZE

PAGE = mmap.PAGESIZE
LARGE = random.Random(1).randbytes(24 << 20)
SMALL = [random.Random(number).randbytes(8 << 10) for number in range(2, 10)]


def resident_bytes(path: Path) -> int:
    """How much of a file is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    size = path.stat().st_size
    states = (ctypes.c_ubyte * (-(-size // PAGE)))()
    with path.open("rb") as opened:
        place = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, opened.fileno(), 0)
        assert libc.mincore(place, size, states) == 0
        libc.munmap(place, size)
    return sum(state & 1 for state in states) * PAGE


@attrs.frozen
class Mount:
    """A plan with a large file and small ones, all of whose chunks are present, and the data file that they are in."""

    path: Path
    data: Path


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    # The page cache is asked, so the data file must be on a filesystem that has one of its own.
    with mounted_core() as mounted:
        members = [file(b"large", LARGE), *(file(b"small%d" % number, data) for number, data in enumerate(SMALL))]
        layer = mounted.add_layer(encode_layer(members, chunk_size=DEFAULT_CHUNK_SIZE), tmp_path)
        _slot, path = mounted.add_plan_of([layer])
        for one in path.iterdir():
            one.read_bytes()
            forget(one)
        forget(tmp_path / "data", write_back=True)
        assert resident_bytes(tmp_path / "data") == 0
        yield Mount(path, tmp_path / "data")


def test_a_large_file_read_to_its_end_is_in_memory_once(mount: Mount) -> None:
    assert (mount.path / "large").read_bytes() == LARGE
    assert resident_bytes(mount.path / "large") == len(LARGE)
    assert resident_bytes(mount.data) <= 1 << 20
    forget(mount.path / "large")
    assert (mount.path / "large").read_bytes() == LARGE


def test_a_large_file_read_at_random_is_in_memory_once(mount: Mount) -> None:
    choose = random.Random(3)
    with (mount.path / "large").open("rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for _ in range(100):
            at = choose.randrange(len(LARGE) - 5000)
            assert os.pread(opened.fileno(), 5000, at) == LARGE[at : at + 5000]
    assert resident_bytes(mount.path / "large") >= 100 * PAGE
    assert resident_bytes(mount.data) == 0


def test_a_mapped_large_file_is_in_memory_once(mount: Mount) -> None:
    with (mount.path / "large").open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        for at in range(0, len(LARGE), 1 << 20):
            assert mapping[at] == LARGE[at]
    seen = resident_bytes(mount.path / "large")
    assert resident_bytes(mount.data) <= seen // 4


def test_small_files_stay_where_they_are_read_from(mount: Mount) -> None:
    assert (mount.path / "small0").read_bytes() == SMALL[0]
    assert resident_bytes(mount.data) >= len(SMALL[0])


def test_what_was_fetched_does_not_stay_twice(tmp_path: Path) -> None:
    """A stream of chunks through the cache: only the last ones, which are being written back, may be in memory twice."""
    with mounted_core() as mounted:
        data = random.Random(4).randbytes(1 << 20) * 96  # more than the chunks that settle at once
        layer = mounted.add_layer(encode_layer([file(b"large", data)], chunk_size=DEFAULT_CHUNK_SIZE), tmp_path)
        _slot, path = mounted.add_plan_of([layer])
        with (path / "large").open("rb") as opened:
            for at in range(0, len(data), 1 << 20):
                assert opened.read(1 << 20) == data[at : at + (1 << 20)]
                os.sync()  # the disk keeps up
        assert resident_bytes(tmp_path / "data") <= 80 << 20


def test_the_kernel_reads_ahead_enough_to_keep_requests_going(mount: Mount) -> None:
    device = os.stat(mount.path).st_dev
    assert Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").read_text() == "512\n"
