"""The data plane as the daemon keeps it: whatever happens to the process that serves, another one does."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs
import msgspec
import pytest
import trio
from test_weefs_recovery import FILES, serve_files
from weefs_keeper import PLAIN_PYTHON, Keeper, Source, keeper, run_source, wait_until
from weefs_keeper import umount as umount2

from envlet import processes
from envlet.dataplane import DataPlaneConfig, DataPlaneError, WeefsDataPlane, _Process, open_data_plane
from envlet.errors import EnvletError
from envlet.keeper import Running, find_running
from envlet.ports import LayerRef

DEADLINE_S = 60.0
"""Nothing here may wait for ever, which is what it would do without what is tested."""


@pytest.fixture
def config(tmp_path: Path) -> Iterator[DataPlaneConfig]:
    (tmp_path / "run").mkdir()
    yield DataPlaneConfig(tmp_path / "mnt", tmp_path / "cache", tmp_path / "run", threads=2)
    while umount2(tmp_path / "mnt", 2) == 0:  # what a test that failed left
        pass


async def pid_of(plane: WeefsDataPlane) -> int:
    """Of the process that serves, when one does: figures do not wait for a successor, other calls do."""
    await plane.remove_plan("none")
    pid: int = (await plane.statistics())["process"]["pid"]
    return pid


async def left_running(config: DataPlaneConfig) -> Running:
    """A data plane whose daemon has left, as the next one finds it."""
    async with open_data_plane(config) as plane:
        plane.leave()
    running = find_running(config.socket_path)
    assert running is not None
    return running


def test_a_process_that_hangs_is_replaced(config: DataPlaneConfig) -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE_S):
            quick = DataPlaneConfig(config.mount_path, config.cache_path, config.run_dir, threads=2, answer_deadline_s=0.5)
            async with open_data_plane(quick) as plane:
                hung = await pid_of(plane)
                os.kill(hung, signal.SIGSTOP)
                layers = [LayerRef("sha256:" + "0" * 64, 100, f"oci:{config.run_dir}", None, None, None)]
                with pytest.raises(EnvletError, match=r"0{64}"):  # asked of the one, refused by the other
                    await plane.add_plan(layers)
                statistics = await plane.statistics()
                assert (statistics["process"]["pid"] != hung, statistics["process"]["successors"]) == (True, 1)

    trio.run(main)


def test_the_socket_is_made_again_when_its_file_was_removed(config: DataPlaneConfig) -> None:
    """For the successor, and for a daemon that wants to take it over."""

    async def main() -> None:
        with trio.fail_after(DEADLINE_S):
            async with open_data_plane(config) as plane:
                config.socket_path.unlink()
                os.kill(await pid_of(plane), signal.SIGKILL)
                successor = await pid_of(plane)
                plane.leave()
            running = find_running(config.socket_path)
            assert running is not None
            assert running.welcome.pid == successor
            async with open_data_plane(config, running) as plane:
                assert await pid_of(plane) == successor

    trio.run(main)


@pytest.mark.parametrize("renew", [False, True], ids=["taken over", "renewed"])
def test_a_process_that_dies_while_it_is_taken_over_has_a_successor(config: DataPlaneConfig, renew: bool) -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE_S):
            running = await left_running(config)
            pidfd = os.pidfd_open(running.welcome.pid)
            os.kill(running.welcome.pid, signal.SIGKILL)
            await processes.wait_exit(pidfd)
            assert processes.reap(pidfd) == -signal.SIGKILL
            os.close(pidfd)
            async with open_data_plane(config, running, renew=renew) as plane:
                assert await pid_of(plane) != running.welcome.pid

    trio.run(main)


SESSION_VERSION_AT = 8
"""In the session memory: behind the magic (csrc/session.h)."""


@pytest.mark.parametrize("speaks", [True, False], ids=["speaks", "speaks not"])
def test_a_process_that_no_successor_could_follow_is_not_replaced(config: DataPlaneConfig, speaks: bool) -> None:
    """Of another version, say: it serves on, and a daemon that cannot talk to it either says so and leaves it."""

    async def main() -> None:
        with trio.fail_after(DEADLINE_S):
            running = await left_running(config)
            version = os.pread(running.kept.session, 4, SESSION_VERSION_AT)
            os.pwrite(running.kept.session, (1 << 20).to_bytes(4, "little"), SESSION_VERSION_AT)
            if speaks:
                async with open_data_plane(config, running, renew=True) as plane:
                    assert await pid_of(plane) == running.welcome.pid
                return
            strange = attrs.evolve(running, welcome=msgspec.structs.replace(running.welcome, version=1))
            with pytest.raises(DataPlaneError, match="speaks version 1"):
                async with open_data_plane(config, strange):
                    pass
            os.pwrite(running.kept.session, version, SESSION_VERSION_AT)
            async with open_data_plane(config, running, renew=True) as plane:
                assert await pid_of(plane) != running.welcome.pid

    trio.run(main)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Keeper]:
    with keeper(tmp_path / "keeper") as kept:
        yield kept


@pytest.fixture
def source() -> Iterator[Source]:
    with run_source() as source:
        yield source


DYING = """
import ctypes, os, sys, threading
threading.Thread(target=lambda: os.stat(sys.argv[1])).start()
print(flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit(2): the main thread alone
"""


def test_a_process_that_cannot_die_before_its_successor_serves_is_not_waited_for(kept: Keeper, source: Source) -> None:
    """As a thread of weefs that tells the kernel something while the kernel waits for an answer of weefs."""
    _connection, root = serve_files(kept, source, FILES)
    kept.kill()
    dying = subprocess.Popen([PLAIN_PYTHON, "-c", DYING, root / "d0"], stdout=subprocess.PIPE)
    assert dying.stdout is not None
    dying.stdout.readline()
    request = os.read(kept.fuse_fds[0], 64 << 10)  # taken: from now on no signal ends the wait for its answer
    tasks = Path(f"/proc/{dying.pid}/task")
    wait_until(lambda: {"Z", "S"} == {path.read_text().rpartition(")")[2].split()[0] for path in tasks.glob("*/stat")})

    async def end() -> None:
        with trio.fail_after(DEADLINE_S):
            await _Process(dying.pid, os.pidfd_open(dying.pid)).end()

    try:
        trio.run(end)
        assert tasks.exists()
    finally:
        size = os.fstat(kept.session_fd).st_size
        os.pwrite(kept.session_fd, request, size - 2 * (64 << 10))
        kept.start()
        dying.stdout.close()
        dying.wait(60)
