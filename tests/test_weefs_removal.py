"""Removing plans gives everything back, slots are used again, and nobody ever sees another image's bytes or attributes."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from strategies import Member, encode_layer, make_content
from weefs_harness import MountedCore, mounted_core
from weefs_keeper import Connection, Keeper, Source, keeper, run_source, wait_until

from layerformat import Entry, Kind
from weefs import core, protocol

CHUNK = 8192


def image(number: int, *, shared: bool = False) -> bytes:
    """A layer whose names are everybody's and whose bytes, sizes and times are its own."""
    data = make_content(CHUNK + 100 + number % 50, 7 if shared else number, False)
    members = [
        Member(Entry(path=b"d", kind=Kind.DIRECTORY, mode=0o755, mtime_ns=number)),
        Member(Entry(path=b"d/e", kind=Kind.DIRECTORY, mode=0o755, mtime_ns=number)),
        Member(Entry(path=b"d/f", kind=Kind.REGULAR, mode=0o644, size=len(data), mtime_ns=number), data),
        Member(Entry(path=b"link", kind=Kind.SYMLINK, target=b"%d" % number, mtime_ns=number)),
    ]
    return encode_layer(members, chunk_size=CHUNK)


def base(number: int) -> bytes:
    entry = Entry(path=b"base", kind=Kind.REGULAR, mode=0o600, size=4, mtime_ns=number)
    return encode_layer([Member(entry, b"%04d" % (number % 10000))], chunk_size=CHUNK)


def content(number: int, *, shared: bool = False) -> bytes:
    return make_content(CHUNK + 100 + number % 50, 7 if shared else number, False)


def let_go() -> None:
    """What somebody had open when its plan was removed stays in the kernel's cache of names afterwards, until memory is wanted."""
    Path("/proc/sys/vm/drop_caches").write_text("2")


@pytest.fixture
def mounted() -> Iterator[MountedCore]:
    with mounted_core(threads=2) as mounted:
        yield mounted


def close_layer(mounted: MountedCore, layer: core.LayerSlot) -> bool:
    closed = mounted.core.close_layer(layer)
    if closed:
        mounted.core.release_layer(core.Place(layer, 0))
    return closed


# The core


def test_a_plans_slot_is_used_again_when_the_kernel_has_let_its_nodes_go(mounted: MountedCore) -> None:
    layer = mounted.add_layer(image(1))
    slot, path = mounted.add_plan_of([layer])
    assert (path / "d/f").read_bytes() == content(1)
    held = os.open(path / "d", os.O_RDONLY | os.O_DIRECTORY)
    mounted.core.remove_plan(slot)
    other, _path = mounted.add_plan_of([layer])
    assert other != slot, "somebody is still in the old one"
    os.close(held)
    let_go()
    mounted.core.remove_plan(other)
    seen = []

    def again() -> bool:
        place = mounted.core.reserve_plan()
        mounted.core.release_plan(place)
        seen.append(place)
        return place.slot == slot

    wait_until(again)
    assert len({place.generation for place in seen}) == len(seen)


def test_a_layer_is_closed_only_when_nothing_uses_it(mounted: MountedCore) -> None:
    layer = mounted.add_layer(image(1))
    slot, path = mounted.add_plan_of([layer])
    assert not close_layer(mounted, layer), "a plan has it"
    file = os.open(path / "d/f", os.O_RDONLY)
    mounted.core.remove_plan(slot)
    assert not close_layer(mounted, layer), "a file of it is open"
    assert os.pread(file, 1 << 20, 0) == content(1), "and is read on, from chunks that were absent"
    assert os.fstat(file).st_mtime_ns == 1
    os.close(file)
    let_go()
    wait_until(lambda: mounted.core.idle_layers() == [layer])
    assert close_layer(mounted, layer)
    with pytest.raises(core.CoreError):
        mounted.core.layer_info(layer)
    assert mounted.add_layer(image(2)) == layer


def test_a_layer_with_a_flight_is_not_closed(mounted: MountedCore) -> None:
    blob = image(1)
    layer = mounted.add_layer(blob)
    assert mounted.core.claim(layer, core.ChunkIndex(0)) is not None
    assert not close_layer(mounted, layer)
    mounted.core.fail(layer, core.ChunkIndex(0), errno.EIO)
    assert close_layer(mounted, layer)


def test_a_slot_in_use_is_refused(mounted: MountedCore) -> None:
    layer = mounted.add_layer(image(1))
    plan, _path = mounted.add_plan_of([layer])
    with pytest.raises(core.CoreError) as caught:
        mounted.core.add_plan("other", [layer], place=core.Place(plan, 9))
    assert caught.value.errno == errno.EEXIST
    _slot, _info = mounted.core.add_plan("other", [layer], place=core.Place(77, 9))
    assert (mounted.mountpoint / "other/d/f").read_bytes() == content(1)


def seen_inside(directory: int) -> set[int | None]:
    """The times, or the errors, that somebody meets whose directory was removed. Times of these tests are numbers of images."""
    found: set[int | None] = set()
    for name in ("f", "e"):
        try:
            found.add(os.stat(name, dir_fd=directory).st_mtime_ns)
        except OSError as error:
            found.add(error.errno)
    return found


def test_old_names_and_descriptors_never_show_the_next_owner_of_a_slot(mounted: MountedCore) -> None:
    """Whoever is inside of a removed plan gets errors, or what was there before."""
    for number in range(10001, 10030):
        layer = mounted.add_layer(image(number))
        slot, path = mounted.add_plan_of([layer])
        directory = os.open(path / "d", os.O_RDONLY | os.O_DIRECTORY)
        file = os.open(path / "d/f", os.O_RDONLY)
        mounted.core.remove_plan(slot)
        following = mounted.add_layer(image(number + 1000))
        next_slot, next_path = mounted.add_plan_of([following])
        assert (next_path / "d/f").read_bytes() == content(number + 1000)
        assert os.pread(file, 1 << 20, 0) == content(number)
        assert seen_inside(directory) <= {number, errno.ESTALE, errno.ENOENT, errno.EIO}
        os.close(directory)
        os.close(file)
        mounted.core.remove_plan(next_slot)
        let_go()
        for one in (layer, following):
            wait_until(lambda one=one: close_layer(mounted, one))


# The whole process


@pytest.fixture
def source() -> Iterator[Source]:
    with run_source() as source:
        yield source


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Keeper]:
    with keeper(tmp_path / "keeper") as kept:
        kept.start()
        yield kept


def use(path: Path, number: int, *, shared: bool) -> None:
    status = os.lstat(path / "d/f")
    assert (status.st_mtime_ns, status.st_size) == (number, len(content(number, shared=shared)))
    assert (path / "d/f").read_bytes() == content(number, shared=shared)
    assert os.readlink(path / "link") == str(number)
    assert sorted(os.listdir(path)) == ["base", "d", "link"]
    assert stat.S_ISDIR(os.stat(path / "d/e").st_mode)


def figures(kept: Keeper) -> dict[str, int]:
    """What must not grow. Sizes in KiB."""
    assert kept.process is not None
    status = Path(f"/proc/{kept.process.pid}/status").read_text()
    return {
        "descriptors": len(os.listdir(f"/proc/{kept.process.pid}/fd")),
        "mappings": len(Path(f"/proc/{kept.process.pid}/maps").read_text().splitlines()),
        "rss_kib": int(status.partition("VmRSS:")[2].split()[0]),
        "journal": kept.journal.stat().st_size,
        "slot": max([line.slot for line in _journal(kept)], default=0),
    }


def _journal(kept: Keeper) -> list[protocol.Any]:
    import json

    import attrs

    @attrs.frozen
    class Line:
        slot: int

    return [Line(slot) for line in kept.journal.read_text().splitlines() if (slot := json.loads(line).get("slot"))]


def all_closed(connection: Connection) -> bool:
    return connection.call(protocol.GetStatistics)["layers"] == {}


@pytest.mark.timeout(600)
def test_a_thousand_plans_come_and_go_and_leave_nothing(kept: Keeper, source: Source) -> None:
    connection = kept.connect()
    held: list[int] = []
    inside: list[subprocess.Popen[bytes]] = []
    early: dict[str, int] = {}
    shared_base = source.add(base(0))
    for number in range(1, 1001):
        shared = number % 2 == 0
        layer = source.add(image(number, shared=shared))
        plan = connection.add_plan([shared_base if number % 3 else source.add(base(number)), layer])
        path = kept.mountpoint / plan
        use(path, number, shared=shared)
        if number % 20 == 0:
            held.append(os.open(path / "d/f", os.O_RDONLY))
            held.append(os.open(path / "d", os.O_RDONLY | os.O_DIRECTORY))
        if number % 250 == 0:
            program = "import os, sys; os.chdir(sys.argv[1]); print(flush=True); sys.stdin.read()"
            inside.append(subprocess.Popen([sys.executable, "-c", program, path / "d"], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert inside[-1].stdout is not None
            inside[-1].stdout.readline()
        connection.call(protocol.RemovePlan, plan_id=plan)
        assert not path.exists()
        if number % 20 == 0 and number % 40:
            assert os.pread(held[-2], 1 << 20, 0) == content(number, shared=shared)
        if len(held) > 10:
            os.close(held.pop(0))
            os.close(held.pop(0))
        if number % 100 == 0:
            source.blobs.clear()
            source.add(base(0))
            let_go()
        if number == 200:
            early = figures(kept)
    for fd in held:
        os.close(fd)
    for process in inside:
        process.communicate()
    let_go()
    wait_until(lambda: all_closed(connection), "that all layers are closed")
    late = figures(kept)
    # Held are the last 10, and what was closed since the last let_go().
    assert late["slot"] <= early["slot"] + 4 <= 40
    assert late["descriptors"] <= early["descriptors"]
    assert late["mappings"] <= early["mappings"] + 20
    # A sanitizer has memory of its own for memory that was touched, and gives none back.
    assert late["rss_kib"] <= early["rss_kib"] + (32768 if "SANITIZED_PYTHON" in os.environ else 8192)
    assert late["journal"] <= early["journal"] + 40000
    assert connection.call(protocol.GetStatistics)["plans"] == 0
    assert os.listdir(kept.mountpoint) == ["objects"]


def test_a_layer_that_is_wanted_again_is_taken_back(kept: Keeper, source: Source) -> None:
    connection = kept.connect()
    layers = [source.add(base(1)), source.add(image(1))]
    plan = connection.add_plan(layers)
    path = kept.mountpoint / plan
    use(path, 1, shared=False)
    with (path / "d/f").open("rb") as file:
        connection.call(protocol.RemovePlan, plan_id=plan)
        requests = source.requests
        assert connection.add_plan(layers) == plan
        use(path, 1, shared=False)
        assert source.requests == requests, "nothing of it was fetched twice"
        assert file.read() == content(1)


def test_a_layer_with_a_reader_that_waits_stays_until_it_is_answered(kept: Keeper, source: Source) -> None:
    connection = kept.connect()
    layers = [source.add(base(1)), source.add(image(1))]
    plan = connection.add_plan(layers)
    source.open.clear()
    reader = subprocess.Popen(["cat", kept.mountpoint / plan / "d/f"], stdout=subprocess.PIPE)
    wait_until(lambda: kept.parked() > 0)
    connection.call(protocol.RemovePlan, plan_id=plan)
    assert layers[1].digest in connection.call(protocol.GetStatistics)["layers"]
    source.open.set()
    output, _ = reader.communicate()
    assert output == content(1)
    let_go()
    wait_until(lambda: all_closed(connection))


HOLDER = """
import os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
print(flush=True)
sys.stdin.read()
sys.stdout.buffer.write(os.pread(file, 1 << 20, 0))
"""


def test_counts_survive_a_kill_and_so_do_files_of_removed_plans(kept: Keeper, source: Source) -> None:
    connection = kept.connect()
    plan = connection.add_plan([source.add(base(1)), source.add(image(1))])
    subprocess.run(["cat", kept.mountpoint / plan / "base"], check=True, stdout=subprocess.DEVNULL)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, kept.mountpoint / plan / "d/f"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    connection.call(protocol.RemovePlan, plan_id=plan)
    kept.kill()
    kept.start()
    connection = kept.connect()
    other = connection.add_plan([source.add(base(2)), source.add(image(2))])
    use(kept.mountpoint / other, 2, shared=False)
    assert layers_served(connection) == 3, "the open file's, and the new plan's"
    output, _ = holder.communicate(b"\n")
    assert output == content(1)
    let_go()
    wait_until(lambda: layers_served(connection) == 2)


def layers_served(connection: Connection) -> int:
    return len(connection.call(protocol.GetStatistics)["layers"])
