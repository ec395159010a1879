"""The clock of a layer's cache, through a real mount: what goes, what stays, that no reader sees a hole, and what a next process finds."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from strategies import Member, encode_layer, make_content
from weefs_harness import MountedCore, faithful, mounted_core, read_direct

from layerformat import Entry, Kind
from weefs import core
from weefs.cachedir import opened
from weefs.core import Core, LayerSlot, check_files, sweep_files

CHUNK = 8192
CHUNKS = 150
CONTENT = make_content(CHUNK * CHUNKS, 7, False)
BLOB = encode_layer([Member(Entry(path=b"f", kind=Kind.REGULAR, mode=0o644, size=len(CONTENT)), CONTENT)], chunk_size=CHUNK)
EVERYTHING = 1 << 40


@attrs.frozen
class Served:
    """A layer of one file, of which nothing is in the page cache; `directory` has its cache."""

    mounted: MountedCore
    directory: Path
    layer: LayerSlot
    file: Path

    @property
    def core(self) -> Core:
        return self.mounted.core

    def read(self, chunk: int, count: int = 1) -> None:
        """From weefs, whatever the kernel has."""
        size = CHUNK * count
        assert read_direct(self.file, size, offset=CHUNK * chunk) == CONTENT[CHUNK * chunk :][:size]

    def present(self) -> int:
        return self.core.layer_info(self.layer).present_chunks

    def fetched(self) -> list[int]:
        """The chunks that were fetched since this was last asked."""
        chunks = [miss.chunk for miss in self.mounted.fetched]
        self.mounted.fetched.clear()
        return chunks

    def turn(self) -> int:
        """One round of the clock, with no chunk chosen that was read since the last; what it freed."""
        swept = self.core.sweep(self.layer, EVERYTHING)
        assert swept.at_end
        return swept.freed


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with mounted_core(threads=4) as mounted:
        layer = mounted.add_layer(BLOB, tmp_path)
        _slot, path = mounted.add_plan_of([layer])
        yield Served(mounted, tmp_path, layer, path / "f")


def test_what_was_read_since_the_hand_came_by_stays_once(served: Served) -> None:
    served.read(0, CHUNKS)
    served.read(0, CHUNKS)
    assert served.turn() == 0, "everything was read again"
    served.read(10)
    served.read(80, 2)
    served.fetched()
    assert served.turn() == CHUNK * (CHUNKS - 3)
    assert served.present() == 3
    served.read(10)
    served.read(80, 2)
    assert served.fetched() == [], "they are still there"
    assert served.turn() == 0
    assert served.turn() == CHUNK * 3
    assert served.present() == 0
    served.read(10)
    assert served.fetched() == [10]


def test_the_read_that_a_chunk_was_fetched_for_does_not_keep_it(served: Served) -> None:
    served.read(0, CHUNKS)
    served.read(20, 30)
    assert served.turn() == CHUNK * (CHUNKS - 30)


def test_room_on_the_disk_is_given_back(served: Served) -> None:
    served.read(0, CHUNKS)
    os.sync()
    before = (served.directory / "data").stat().st_blocks * 512
    assert before >= len(CONTENT)
    assert served.core.cache_used == len(CONTENT) == served.core.layer_info(served.layer).room
    served.turn()
    served.turn()
    assert (served.directory / "data").stat().st_blocks * 512 == before - len(CONTENT)
    assert (served.directory / "data").stat().st_size == len(CONTENT)
    assert served.core.cache_used == 0


def test_a_goal_is_reached_and_not_passed(served: Served) -> None:
    served.read(0, CHUNKS)
    swept = served.core.sweep(served.layer, 3 * CHUNK - 5)
    assert (swept.freed, swept.at_end) == (3 * CHUNK, False)
    swept = served.core.sweep(served.layer, 100 * CHUNK)
    assert (swept.freed, swept.at_end) == (100 * CHUNK, False), "over the borders of the bitmap's words"
    served.fetched()
    served.read(103, CHUNKS - 103)
    assert served.fetched() == []
    served.read(0, 103)
    assert served.fetched() == [*range(103)]


def test_chunks_beyond_the_limit_reach_their_readers_and_not_the_disk(served: Served) -> None:
    served.core.limit_cache(10 * CHUNK)
    served.read(0, CHUNKS)
    assert served.present() == 10
    assert served.core.cache_used == 10 * CHUNK
    assert served.core.statistics()["chunks_unwritten"] == CHUNKS - 10
    served.turn()
    served.turn()
    served.fetched()
    served.read(100, 5)
    served.read(100, 5)
    assert served.fetched() == [*range(100, 105)], "there is room again"


def test_no_reader_sees_a_hole_while_chunks_come_and_go(served: Served) -> None:
    """Readers, the one who publishes, and the clock at once; each byte is compared."""
    stop = threading.Event()
    wrong: list[BaseException] = []

    def read_on(seed: int) -> None:
        chosen = random.Random(seed)
        try:
            for _ in range(400):
                count = chosen.randrange(1, 9)
                served.read(chosen.randrange(CHUNKS - count), count)
        except BaseException as error:
            wrong.append(error)

    def turn_on() -> None:
        while not stop.is_set():
            served.core.sweep(served.layer, 20 * CHUNK)

    clock = threading.Thread(target=turn_on)
    readers = [threading.Thread(target=read_on, args=(seed,)) for seed in range(4)]
    clock.start()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    stop.set()
    clock.join()
    assert not wrong
    assert len(served.fetched()) > CHUNKS, "the clock took something"
    assert served.core.cache_used == served.present() * CHUNK, "what is counted is what is there"


def test_the_next_process_goes_on_where_the_hand_was(tmp_path: Path) -> None:
    with mounted_core() as mounted:
        layer = mounted.add_layer(BLOB, tmp_path)
        _slot, path = mounted.add_plan_of([layer])
        served = Served(mounted, tmp_path, layer, path / "f")
        served.read(0, CHUNKS)
        assert mounted.core.sweep(layer, 40 * CHUNK).freed == 40 * CHUNK
        served.read(45, 5)
    with opened(tmp_path) as files:
        swept = sweep_files(files, 10 * CHUNK)
        assert (swept.freed, swept.at_end) == (10 * CHUNK, False)
    with mounted_core() as mounted:
        layer = mounted.add_layer(BLOB, tmp_path)
        _slot, path = mounted.add_plan_of([layer])
        served = Served(mounted, tmp_path, layer, path / "f")
        assert served.present() == CHUNKS - 50
        served.read(0, CHUNKS)
        assert sorted(served.fetched()) == [*range(45), *range(50, 55)], "what was read lately stayed"


def test_a_process_that_is_killed_leaves_no_bit_of_a_punched_chunk(tmp_path: Path) -> None:
    with mounted_core() as mounted:
        layer = mounted.add_layer(BLOB, tmp_path)
        _slot, path = mounted.add_plan_of([layer])
        Served(mounted, tmp_path, layer, path / "f").read(0, CHUNKS)
    program = (
        "import os, sys; from pathlib import Path; from weefs.cachedir import opened; from weefs.core import Core\n"
        "core = Core()\n"
        "with opened(Path(sys.argv[1])) as files: layer = core.add_layer(files)\n"
        "print(core.sweep(layer, 70 * 8192).freed, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
    assert (ended.returncode, int(ended.stdout)) == (-9, 70 * CHUNK)
    with opened(tmp_path) as files:
        assert check_files(files) == (CHUNKS - 70, 0)


def test_a_map_that_cannot_be_written_keeps_its_chunks(tmp_path: Path) -> None:
    """Else the next process would take holes for contents."""
    with mounted_core() as mounted:
        layer = mounted.add_layer(BLOB, tmp_path)
        _slot, path = mounted.add_plan_of([layer])
        Served(mounted, tmp_path, layer, path / "f").read(0, CHUNKS)
    with mounted_core() as mounted:
        read_only = os.open(tmp_path / "map", os.O_RDONLY)
        with opened(tmp_path) as files:
            layer = mounted.core.add_layer(attrs.evolve(files, map_fd=read_only))
        os.close(read_only)
        with pytest.raises(core.CoreError, match="cannot free room"):
            mounted.core.sweep(layer, EVERYTHING)
        assert mounted.core.layer_info(layer).present_chunks == CHUNKS
        assert mounted.core.cache_used == len(CONTENT)
        _slot, path = mounted.add_plan_of([layer])
        assert read_direct(path / "f", len(CONTENT)) == CONTENT
        assert mounted.fetched == []


def with_another_boot(directory: Path) -> Core:
    """A core to whose eyes the machine was started anew."""
    core_ = Core()
    with opened(directory) as files:
        core_.add_layer(attrs.evolve(files, boot_id=b"another boot id."))
    return core_


def filled(directory: Path) -> None:
    with mounted_core() as mounted:
        layer = mounted.add_layer(BLOB, directory)
        _slot, path = mounted.add_plan_of([layer])
        Served(mounted, directory, layer, path / "f").read(0, CHUNKS)


def test_after_a_crash_of_the_machine_a_chunk_counts_when_it_has_its_digest(tmp_path: Path) -> None:
    filled(tmp_path)
    with (tmp_path / "data").open("r+b") as data:
        data.seek(CHUNK * 5)
        data.write(bytes(CHUNK))
    core_ = with_another_boot(tmp_path)
    layer = LayerSlot(1)
    assert core_.layer_info(layer).suspect_chunks == CHUNKS
    assert core_.layer_info(layer).present_chunks == 0
    assert core_.cache_used == len(CONTENT), "it takes its room"
    assert core_.check_chunk(layer, core.ChunkIndex(4))
    assert core_.claim(layer, core.ChunkIndex(4)) is None
    with pytest.raises(core.DamagedError):
        core_.check_chunk(layer, core.ChunkIndex(5))
    assert not core_.check_chunk(layer, core.ChunkIndex(5)), "it is dropped"
    info = core_.layer_info(layer)
    assert (info.present_chunks, info.suspect_chunks, info.room) == (1, CHUNKS - 2, len(CONTENT) - CHUNK)
    assert core_.cache_used == len(CONTENT) - CHUNK
    core_.close()
    core_ = with_another_boot(tmp_path)
    info = core_.layer_info(layer)
    assert (info.present_chunks, info.suspect_chunks) == (1, CHUNKS - 2), "the next process knows both"
    core_.close()


def test_a_suspect_chunk_that_arrives_is_present_and_counted_once(tmp_path: Path) -> None:
    filled(tmp_path)
    core_ = with_another_boot(tmp_path)
    layer = LayerSlot(1)
    miss = core_.claim(layer, core.ChunkIndex(9))
    assert miss is not None
    core_.publish(layer, miss.chunk, faithful(BLOB, miss))
    info = core_.layer_info(layer)
    assert (info.present_chunks, info.suspect_chunks, info.room) == (1, CHUNKS - 1, len(CONTENT))
    assert core_.cache_used == len(CONTENT)
    core_.sweep(layer, EVERYTHING)
    assert core_.cache_used == 0, "suspect ones go, too"
    core_.close()


def test_a_copy_of_another_layer_is_taken_only_if_it_is_the_chunk(served: Served, tmp_path: Path) -> None:
    source = os.open(tmp_path / "elsewhere", os.O_RDWR | os.O_CREAT)
    os.pwrite(source, CONTENT[CHUNK * 3 : CHUNK * 4], 100)
    chunk = core.ChunkIndex(3)
    with pytest.raises(core.DamagedError):
        served.core.publish_copy(served.layer, chunk, source, 99)
    with pytest.raises(core.DamagedError):
        served.core.publish_copy(served.layer, chunk, source, 4000)
    assert served.core.publish_copy(served.layer, chunk, source, 100)
    os.close(source)
    served.read(3)
    assert served.fetched() == []
