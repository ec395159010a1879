"""A weefs that is killed: nobody above it gets an error, and its successor knows everything. With RESEND and, as on older kernels,
without.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from strategies import make_content
from weefs_keeper import PLAIN_PYTHON, THREADS, Connection, Keeper, Source, keeper, run_source, wait_until
from weefs_kills import CHUNK, exercise, make_files, tree_layer

from weefs import core, protocol
from weefs.errors import JournalError
from weefs.journal import MAX_FAULTS, Acknowledged, Journal, LayerAdded, LayerClosed, PlanAdded, PlanRemoved, faulted

BUFFER = 64 << 10
FILES = make_files(24, 1)
BIG = make_content(CHUNK * 64, 5, False)


@pytest.fixture
def source() -> Iterator[Source]:
    with run_source() as source:
        yield source


@pytest.fixture(params=[True, False], ids=["resend", "tables"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Keeper]:
    with keeper(tmp_path / "keeper", resend=request.param) as kept:
        yield kept


def serve_files(kept: Keeper, source: Source, files: dict[str, bytes]) -> tuple[Connection, Path]:
    """The first process, with one plan. Something was read already: otherwise a test that holds a file open could start no successor, since
    the child that becomes one closes the file, which asks the server the first time.
    """
    kept.start()
    connection = kept.connect()
    root = kept.mountpoint / connection.add_plan([source.add(tree_layer(files | {"first/file": b"first"}))])
    subprocess.run(["cat", root / "first/file"], stdout=subprocess.DEVNULL, check=True)
    return connection, root


def take_over(kept: Keeper) -> Connection:
    kept.kill()
    kept.start()
    return kept.connect()


def in_thread(results: dict[str, object], name: str, path: Path) -> threading.Thread:
    """Read by a process of its own: this one starts others, which a file of the mount would be in the way of."""

    def read() -> None:
        ended = subprocess.run(["cat", path], capture_output=True)
        results[name] = ended.stdout if ended.returncode == 0 else ended.stderr

    thread = threading.Thread(target=read)
    thread.start()
    return thread


@pytest.mark.parametrize("resend", [True, False], ids=["resend", "tables"])
def test_readers_notice_nothing_of_many_kills(resend: bool, tmp_path: Path) -> None:
    counted = exercise(tmp_path, resend=resend, kills=12, files=180, delay_s=0.02)
    assert counted.errors == []
    assert (counted.kills, counted.kills_while_starting) == (12, 4)
    assert counted.waiting_at_kill >= 12, "most kills met readers that waited"
    assert counted.operations > 100


def test_reads_that_wait_when_the_process_is_killed_get_their_bytes(kept: Keeper, source: Source) -> None:
    connection, root = serve_files(kept, source, FILES)
    source.open.clear()
    results: dict[str, object] = {}
    threads = [in_thread(results, name, root / name) for name in FILES]
    wait_until(lambda: kept.parked() >= len(FILES))
    connection = take_over(kept)
    assert connection.call(protocol.GetStatistics)["plans"] == 1
    take_over(kept)  # and once more, before any was answered
    assert results == {}
    source.open.set()
    for thread in threads:
        thread.join()
    assert results == FILES
    wait_until(lambda: kept.parked() == 0)


def put_into_buffer(kept: Keeper, clone: int, request: bytes) -> None:
    """As the thread of that descriptor had it when its process was killed."""
    size = os.fstat(kept.session_fd).st_size
    os.pwrite(kept.session_fd, request, size - (THREADS - clone) * BUFFER)


def test_a_process_killed_with_init_in_its_hands(kept: Keeper, source: Source) -> None:
    put_into_buffer(kept, 1, os.read(kept.fuse_fds[1], BUFFER))
    _connection, root = serve_files(kept, source, FILES)
    assert (root / "d0/1-0").read_bytes() == FILES["d0/1-0"]


def test_a_process_killed_after_it_took_a_lookup(kept: Keeper, source: Source) -> None:
    _connection, root = serve_files(kept, source, FILES)
    kept.kill()
    looking = subprocess.Popen(["stat", "-c", "%s", root / "d3/1-3"], stdout=subprocess.PIPE, text=True)
    put_into_buffer(kept, 0, os.read(kept.fuse_fds[0], BUFFER))
    assert looking.poll() is None
    kept.start()
    output, _ = looking.communicate()
    assert int(output) == len(FILES["d3/1-3"])


def test_a_parked_read_that_is_also_in_its_buffer_is_answered_once_more_in_vain(kept: Keeper, source: Source) -> None:
    _connection, root = serve_files(kept, source, FILES)
    source.open.clear()
    results: dict[str, object] = {}
    size = os.fstat(kept.session_fd).st_size
    thread = in_thread(results, "f", root / "d0/1-0")
    wait_until(lambda: kept.parked() > 0)
    kept.kill()
    for clone in range(THREADS):
        # The length of a request is cleared when it was parked; the rest of it is still there. A kill just before that had left this.
        at = size - (THREADS - clone) * BUFFER
        if int.from_bytes(os.pread(kept.session_fd, 8, at)[4:], "little") == 15:
            os.pwrite(kept.session_fd, (80).to_bytes(4, "little"), at)
    kept.start()
    connection = kept.connect()
    wait_until(lambda: connection.call(protocol.GetStatistics)["fuse"]["pending"] > 0)
    parked = connection.call(protocol.GetStatistics)["fuse"]["pending"]
    assert parked == kept.parked()
    source.open.set()
    thread.join()
    assert results == {"f": FILES["d0/1-0"]}
    wait_until(lambda: kept.parked() == 0)


def test_a_reader_that_is_killed_while_nobody_serves_is_let_go_by_the_successor(kept: Keeper, source: Source) -> None:
    _connection, root = serve_files(kept, source, {"d/f": BIG})
    source.open.clear()
    program = "import mmap, os, sys; os.readv(os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT), [mmap.mmap(-1, 4096)])"
    reader = subprocess.Popen([sys.executable, "-c", program, root / "d/f"])
    wait_until(lambda: kept.parked() == 1)
    kept.kill()
    reader.send_signal(signal.SIGKILL)
    kept.start()
    reader.wait()
    source.open.set()
    assert (root / "d/f").read_bytes() == BIG


HOLDER = """
import hashlib, json, mmap, os, sys
root = sys.argv[1]
os.chdir(root + "/d2")
here = os.open(root + "/d1", os.O_RDONLY | os.O_DIRECTORY)
file = open(root + "/d0/big", "rb", buffering=0)
listing = os.scandir(root + "/many")
first = next(listing).name
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print("open", flush=True)
sys.stdin.readline()
digest = lambda data: hashlib.sha256(data).hexdigest()
print(json.dumps({
    "mapped": digest(mapped[:]),
    "big": digest(b"".join(iter(lambda: file.read(1 << 16), b""))),
    "many": sorted([first, *(entry.name for entry in listing)]),
    "cwd": [os.getcwd(), sorted(os.listdir("."))],
    "here": sorted(os.listdir(here)),
    "at": digest(open(os.open("1-1", os.O_RDONLY, dir_fd=here), "rb").read()),
}))
"""


def test_what_was_open_before_works_afterwards(kept: Keeper, source: Source) -> None:
    files = FILES | {f"many/{i}-{'x' * 100}": b"" for i in range(4000)} | {"d0/big": BIG}
    _connection, root = serve_files(kept, source, files)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "open\n"
    take_over(kept)
    output, _ = holder.communicate("\n")

    def names(directory: str) -> list[str]:
        return sorted(name.rpartition("/")[2] for name in files if name.startswith(f"{directory}/"))

    assert json.loads(output) == {
        "mapped": hashlib.sha256(BIG).hexdigest(),
        "big": hashlib.sha256(BIG).hexdigest(),
        "many": names("many"),
        "cwd": [str(root / "d2"), names("d2")],
        "here": names("d1"),
        "at": hashlib.sha256(FILES["d1/1-1"]).hexdigest(),
    }


def test_a_toc_that_was_deleted_meanwhile_is_fetched_again(kept: Keeper, source: Source) -> None:
    _connection, root = serve_files(kept, source, FILES)
    kept.kill()
    shutil.rmtree(kept.cache / "layers")
    kept.start()
    kept.connect()
    assert (root / "d0/1-0").read_bytes() == FILES["d0/1-0"]


def test_a_toc_that_is_cut_off_under_its_mapping_costs_a_process_and_no_reader(kept: Keeper, source: Source) -> None:
    _connection, root = serve_files(kept, source, FILES)
    (toc,) = kept.cache.glob("layers/*/toc")
    os.truncate(toc, 0)
    looking = subprocess.Popen(["cat", root / "d5/1-5"], stdout=subprocess.PIPE)
    assert kept.process is not None
    assert kept.process.wait(60) == -signal.SIGBUS
    kept.start()
    output, _ = looking.communicate()
    assert output == FILES["d5/1-5"]


def test_a_layer_that_cannot_be_had_any_more_ends_the_successor_and_fails_nobody(tmp_path: Path, source: Source) -> None:
    with keeper(tmp_path / "keeper", deadline_s=2.0) as kept:
        _connection, root = serve_files(kept, source, FILES)
        kept.kill()
        shutil.rmtree(kept.cache / "layers")
        source.error = 503
        results: dict[str, object] = {}
        thread = in_thread(results, "f", root / "d0/1-0")
        assert kept.start().wait(60) == 1
        source.error = 0
        assert results == {}
        kept.start()
        thread.join()
        assert results == {"f": FILES["d0/1-0"]}


def test_a_removal_that_the_kernel_was_not_told_of_is_finished(kept: Keeper, source: Source) -> None:
    connection, root = serve_files(kept, source, FILES)
    other = connection.add_plan([source.add(tree_layer({"d/f": BIG}))])
    assert (kept.mountpoint / other / "d/f").read_bytes() == BIG
    kept.kill()
    lines = [json.loads(line) for line in kept.journal.read_text().splitlines()]
    plan = next(line for line in lines if line["type"] == "plan" and line["plan_id"] == other)
    removed = {"type": "plan_removed", "slot": plan["slot"], "generation": plan["generation"], "plan_id": other}
    with kept.journal.open("a") as journal:
        journal.write(json.dumps(removed) + "\n" + '{"type":"plan","slo')  # and killed in the next line
    kept.start()
    connection = kept.connect()
    wait_until(lambda: not (kept.mountpoint / other).exists(), "the kernel is told")
    assert sorted(os.listdir(kept.mountpoint)) == sorted([root.name, "objects"])
    assert "torn" in kept.said()
    assert connection.add_plan([source.add(tree_layer({"d/f": BIG}))]) == other
    assert (kept.mountpoint / other / "d/f").read_bytes() == BIG


def test_a_new_mount_begins_a_new_journal(tmp_path: Path, source: Source) -> None:
    for _ in range(2):
        with keeper(tmp_path / "keeper") as kept:
            kept.start()
            connection = kept.connect(hello=False)
            welcome, _fds = connection.hello()
            assert (welcome["resumed"], welcome["plans"]) == (False, [])
            connection.add_plan([source.add(tree_layer(FILES))])
            kept.kill()
            kept.start()
            welcome, _fds = kept.connect(hello=False).hello()
            assert welcome["resumed"]
            assert [plan["entries"] for plan in welcome["plans"]] == [24 + 16]
        journal = (tmp_path / "keeper/journal").read_text()
        shutil.rmtree(tmp_path / "keeper")
        (tmp_path / "keeper").mkdir()
        (tmp_path / "keeper/journal").write_text(journal)


def test_a_successor_waits_until_the_cache_is_free_and_serves_from_it(kept: Keeper, source: Source) -> None:
    _connection, root = serve_files(kept, source, FILES)
    kept.kill()
    lock = os.open(kept.cache / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    results: dict[str, object] = {}
    thread = in_thread(results, "f", root / "d0/1-0")
    process = kept.start()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert results == {}
    os.close(lock)
    thread.join()
    assert results == {"f": FILES["d0/1-0"]}


DYING = """
import ctypes, fcntl, os, sys, threading
lock = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
os.ftruncate(lock, 0)
os.pwrite(lock, b"%d" % os.getpid(), 0)
file = os.open(sys.argv[2], os.O_RDONLY)
threading.Thread(target=lambda: os.read(file, 4096)).start()
print(flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit(2): the main thread alone
"""


def test_a_predecessor_that_cannot_die_before_its_successor_serves_is_not_waited_for(kept: Keeper, source: Source) -> None:
    _connection, root = serve_files(kept, source, FILES)
    subprocess.run(["stat", root / "d0/1-0"], check=True, stdout=subprocess.DEVNULL)
    kept.kill()
    dying = subprocess.Popen([PLAIN_PYTHON, "-c", DYING, kept.cache / "lock", root / "d0/1-0"], stdout=subprocess.PIPE)
    assert dying.stdout is not None
    dying.stdout.readline()
    wait_until(lambda: {"Z", "D"} == {path.read_text().rpartition(")")[2].split()[0] for path in tasks_of(dying.pid)})
    kept.start()
    assert dying.wait(60) == 0
    dying.stdout.close()
    assert (root / "d1/1-1").read_bytes() == FILES["d1/1-1"]


def tasks_of(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").glob("*/stat"))


def test_a_process_without_descriptors_refuses_layers_and_serves_on(kept: Keeper, source: Source) -> None:
    connection, root = serve_files(kept, source, FILES)
    assert kept.process is not None
    soft, hard = resource.prlimit(kept.process.pid, resource.RLIMIT_NOFILE)
    fds = len(os.listdir(f"/proc/{kept.process.pid}/fd"))
    resource.prlimit(kept.process.pid, resource.RLIMIT_NOFILE, (fds + 1, hard))
    layer = source.add(tree_layer({"d/f": BIG}))
    with pytest.raises(RuntimeError, match="Too many open files"):
        connection.add_plan([layer])
    assert (root / "d0/1-0").read_bytes() == FILES["d0/1-0"]
    resource.prlimit(kept.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
    plan = connection.add_plan([layer])
    assert (kept.mountpoint / plan / "d/f").read_bytes() == BIG
    assert connection.call(protocol.GetStatistics)["plans"] == 2


# The daemon's side


def test_a_daemon_without_descriptors_gets_them_all(kept: Keeper, source: Source) -> None:
    serve_files(kept, source, FILES)
    _welcome, fds = kept.connect(hello=False).hello(descriptors=True)
    kinds = [os.readlink(f"/proc/self/fd/{fd}") for fd in fds]
    expected = [os.readlink(f"/proc/self/fd/{fd}") for fd in (kept.listener.fileno(), kept.session_fd, *kept.fuse_fds)]
    assert kinds == expected
    for fd in fds:
        os.close(fd)


def test_a_new_daemon_ends_the_connection_of_the_one_before(kept: Keeper, source: Source) -> None:
    first, root = serve_files(kept, source, FILES)
    second = kept.connect()
    with pytest.raises(ConnectionError):
        first.receive()
    second.close()
    assert (root / "d0/1-0").read_bytes() == FILES["d0/1-0"]
    garbage = kept.connect()
    garbage._socket.sendall(b"no request\n")
    with pytest.raises(ConnectionError):
        garbage.receive()
    third = kept.connect()
    assert third.call(protocol.GetStatistics)["plans"] == 1
    assert kept.process is not None
    kept.process.send_signal(signal.SIGTERM)
    kept.process.send_signal(signal.SIGINT)
    third.call(protocol.Shutdown)
    assert kept.process.wait() == 0


def test_a_plan_whose_daemon_dies_meanwhile_is_added_all_the_same(kept: Keeper, source: Source) -> None:
    kept.start()
    source.open.clear()
    connection = kept.connect()
    layer = source.add(tree_layer(FILES))
    requests = source.requests
    connection.send(protocol.AddPlan, layers=[layer])
    wait_until(lambda: source.requests > requests)
    connection.close()
    source.open.set()
    connection = kept.connect()
    plan = connection.add_plan([layer])
    assert (kept.mountpoint / plan / "d0/1-0").read_bytes() == FILES["d0/1-0"]


def test_a_removal_that_is_asked_again_of_a_successor_is_done(kept: Keeper, source: Source) -> None:
    """Its predecessor may have died between the removal and the answer."""
    connection, root = serve_files(kept, source, FILES)
    connection.call(protocol.RemovePlan, plan_id=root.name)
    take_over(kept).call(protocol.RemovePlan, plan_id=root.name)


def test_a_process_ends_with_its_mount(kept: Keeper, source: Source) -> None:
    serve_files(kept, source, FILES)
    kept.unmount()
    assert kept.process is not None
    assert kept.process.wait() == 0


def test_a_log_that_nobody_reads_any_more_ends_nothing(tmp_path: Path, source: Source) -> None:
    with keeper(tmp_path / "keeper", deadline_s=0.2) as kept:
        read_end, write_end = os.pipe()
        kept.stderr.close()
        kept.stderr = os.fdopen(write_end, "wb")
        connection, root = serve_files(kept, source, FILES)
        os.close(read_end)
        source.error = 404
        with pytest.raises(OSError):
            (root / "d0/1-0").read_bytes()  # which is said, in vain
        source.error = 0
        assert (root / "d0/1-0").read_bytes() == FILES["d0/1-0"]
        assert connection.call(protocol.GetStatistics)["fuse"]["reads_failed"] >= 1


# Faults


READ_DIRECT = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
try:
    os.readv(fd, [mmap.mmap(-1, 4096)])
except OSError as error:
    print(error.errno)
"""


def failing_reader(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", READ_DIRECT, path], stdout=subprocess.PIPE, text=True)


def test_a_fault_is_repeated_until_it_is_acknowledged(kept: Keeper, source: Source) -> None:
    connection, root = serve_files(kept, source, FILES)
    own_cgroup = Path("/proc/self/cgroup").read_text()
    source.error = 404
    reader = failing_reader(root / "d0/1-0")
    fault = connection.next_fault()
    assert (fault.number, fault.pid, fault.cgroup) == (1, reader.pid, own_cgroup)
    assert "404" in fault.error or "not" in fault.error
    output, _ = reader.communicate()
    assert int(output) == errno.EIO
    connection.close()
    # Nobody is there: it is answered at once, and kept.
    reader = failing_reader(root / "d1/1-1")
    output, _ = reader.communicate()
    assert int(output) == errno.EIO
    assert [kept.connect().next_fault().number for _ in range(2)] == [1, 1]
    connection = take_over(kept)
    assert [connection.next_fault().number for _ in range(2)] == [1, 2]
    connection.send(protocol.AcknowledgeFaults, through=1)
    connection.call(protocol.GetStatistics)
    connection = take_over(kept)
    assert connection.next_fault().number == 2
    reader = failing_reader(root / "d2/1-2")
    fault = connection.next_fault()
    assert (fault.number, fault.pid) == (3, reader.pid)
    reader.communicate()
    source.error = 0
    assert (root / "d0/1-0").read_bytes() == FILES["d0/1-0"]


def test_a_fault_is_said_before_its_reader_is_answered(tmp_path: Path, source: Source) -> None:
    """The core's part of it: between taking and answering, the reader waits, and a successor would find it."""
    from weefs_harness import mounted_core

    with mounted_core() as mounted:
        mounted.answer = lambda _blob, _miss: errno.ETIMEDOUT
        said: list[bool] = []
        answer = mounted.core.answer_faults
        reader: list[subprocess.Popen[str]] = []

        def look_first(through: int) -> None:
            wait_until(lambda: bool(reader))
            said.append(reader[0].poll() is None and Path(f"/proc/{reader[0].pid}/cgroup").exists())
            answer(through)

        mounted.core.answer_faults = look_first  # type: ignore[method-assign]
        _slot, path = mounted.add_plan([tree_layer(FILES)])
        reader.append(failing_reader(path / "d0/1-0"))
        output, _ = reader[0].communicate()
        assert int(output) == errno.EIO
        assert said == [True]


# The journal


def event(number: int) -> protocol.FaultEvent:
    return protocol.FaultEvent(number=number, pid=1, cgroup="0::/", layer="sha256:0", chunk=0, error="why")


def layer_line(slot: int, generation: int) -> LayerAdded:
    return LayerAdded(slot=slot, generation=generation, layer=protocol.Layer(digest=f"sha256:{generation}", size_bytes=1, source="oci:/x"))


def test_a_journal_amounts_to_the_same_after_it_was_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal.begin(path)
    for number in range(1, 40):
        journal.append(layer_line(1 + number % 3, number))
        journal.append(PlanAdded(slot=1 + number % 5, generation=number, plan_id=f"p{number}", layers=[1 + number % 3]))
        journal.append(PlanRemoved(slot=1 + (number - 1) % 5, generation=number - 1, plan_id=f"p{number - 1}"))
        journal.append(LayerClosed(slot=1 + number % 3, generation=number - 3))  # of the layer before: its slot is another's now
        journal.append(faulted(event(number)))
        journal.append(Acknowledged(through=number - 2))
        before = journal.state
        again = Journal.resume(path)
        assert (again.state.layers, again.state.plans, again.state.faults) == (before.layers, before.plans, before.faults)
        assert again.state.leaving.keys() == before.leaving.keys()
        again.close()
        journal.close()
        journal = Journal.resume(path)
    assert list(journal.state.faults) == [38, 39]
    assert {line.generation for line in journal.state.layers.values()} == {37, 38, 39}
    assert list(journal.state.plans) == [1 + 39 % 5]
    journal.close()


def test_a_journal_does_not_grow_with_what_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal.begin(path)
    sizes = []
    for number in range(3000):
        journal.append(PlanAdded(slot=1, generation=number, plan_id="p", layers=[]))
        journal.append(PlanRemoved(slot=1, generation=number, plan_id="p"))
        journal.told("p")
        journal.append(faulted(event(number)))
        sizes.append(path.stat().st_size)
    assert len(journal.state.faults) == MAX_FAULTS
    assert max(sizes[2000:]) <= 3 * min(sizes[2000:])
    journal.close()


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with pytest.raises(JournalError, match="expected the journal"):
        Journal.resume(path)
    for content in ('{"type":"weefs","version":1}\n{"type":"pla\n{}\n', '{"type":"weefs","version":9}\n', "{}\n"):
        path.write_text(content)
        with pytest.raises(JournalError):
            Journal.resume(path)


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_half(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", tmp_path], check=True)
    try:
        journal = Journal.begin(tmp_path / "journal")
        added = []

        def fill() -> None:
            for number in range(1000):
                journal.append(layer_line(number, number))
                added.append(number)

        with pytest.raises(OSError):
            fill()
        assert list(journal.state.layers) == added
        journal.close()
        assert (tmp_path / "journal").read_bytes()[-1:] == b"\n"
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def fill(path: Path) -> None:
    """Takes what is left on the disk, to the last block."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_journal_is_gone_on_with_on_a_full_disk(tmp_path: Path) -> None:
    """A mount is not lost because its journal cannot be written anew. What is torn is cut off all the same."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], check=True)
    try:
        path = tmp_path / "journal"
        journal = Journal.begin(path)
        journal.append(layer_line(1, 1))
        journal.close()
        with path.open("ab") as file:
            file.write(b'{"type":"pla')
        fill(tmp_path / "full")
        journal = Journal.resume(path)
        assert sorted(os.listdir(tmp_path)) == ["full", "journal"]
        journal.append(layer_line(2, 2))  # in the block that the journal has
        journal.close()
        (tmp_path / "full").unlink()
        journal = Journal.resume(path)
        assert list(journal.state.layers) == [1, 2]
        journal.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_session_of_something_else_is_refused() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 1 << 20)
    with pytest.raises(core.CoreError, match="expected one made by weefs"):
        core.Core(session_fd=fd)
    os.close(fd)
    fd = core.create_session()
    os.pwrite(fd, b"\x63", 8)
    with pytest.raises(core.CoreError, match="expected version 3, received 99"):
        core.Core(session_fd=fd)
    with pytest.raises(OSError):
        os.ftruncate(fd, 0)
    os.close(fd)
