"""Trees that strangers filled are removed whatever their depth, by env.delete and at the next start of the daemon."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio
from envlet_harness import Node, daemon_process, isolated, leftovers, make_root, node_config, node_directories, with_node

from envlet import environment as environment_module
from envlet.client import Client
from envlet.errors import EnvletError
from envlet.removal import remove_directories
from envlet.types import CreateRequest

DEPTH = 3000


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("lower") / "root")


def failure(work: Any, *arguments: Any) -> EnvletError:
    with pytest.raises(EnvletError) as caught:
        work(*arguments)
    return caught.value


def nest(directory: Path, depth: int = DEPTH) -> None:
    """`depth` directories, each in the one before, with a file and a symlink in the last; deeper than any path."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(depth):
        os.mkdir("nested", dir_fd=fd)
        below = os.open("nested", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    os.symlink("/", "link", dir_fd=fd)
    os.close(fd)


def test_a_tree_deeper_than_any_path_is_removed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "out").symlink_to(kept)
    nest(tree)
    nest(tree / "a" / "b", 10)
    descriptors = os.listdir("/proc/self/fd")
    remove_directories(tree, tmp_path / "never was")
    assert os.listdir(tmp_path) == ["kept"]
    assert (kept / "file").read_text() == "x"
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_an_entry_that_stays_is_named() -> None:
    def work() -> None:
        from envlet import syscalls

        with node_directories() as (state_dir, _):
            mounted = state_dir / "tree" / "mounted"
            mounted.mkdir(parents=True)
            syscalls.mount("none", str(mounted), "tmpfs", 0)
            with pytest.raises(OSError, match=r"removing mounted below .*/tree"):
                remove_directories(state_dir / "tree")
            syscalls.umount(str(mounted))

    isolated(work)


def test_an_environment_with_a_deep_tree_is_deleted_and_its_diff_refused_by_name(root: Path) -> None:
    async def test(node: Node) -> None:
        made = await node.daemon.create(CreateRequest(groups=["base"]), [])
        nest(node.config.bundles_dir / made.id / "root" / "tmp")
        out = os.open(os.devnull, os.O_WRONLY)
        error = await node.call(lambda client: failure(client.diff, made.id, out))
        os.close(out)
        assert error.code.name == "diff_failed"
        assert "too long" in error.message
        await node.call(lambda client: client.delete(made.id))
        assert leftovers(node.config) == []

    with_node(root, test)


def test_a_killed_daemons_deep_tree_does_not_keep_the_next_from_starting(root: Path) -> None:
    with node_directories() as (state_dir, run_dir):
        config = node_config(state_dir, run_dir)
        with daemon_process(state_dir, run_dir, root) as process:
            with Client(config.socket_path) as client:
                made = client.create(["base"])
            process.kill()
            process.wait(60)
        nest(config.uppers_dir / made.id / "upper")
        with daemon_process(state_dir, run_dir, root) as process:
            assert leftovers(config) == []
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def test_a_leftover_that_stays_is_an_error_by_name_and_the_others_are_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from envlet import daemon, leftovers

    def refuse(*directories: Path) -> None:
        if directories[0].name == "stubborn":
            raise RecursionError("injected")
        remove_directories(*directories)

    def work() -> None:
        from envlet_harness import DirectoryDataPlane, default_resolver

        with node_directories() as (state_dir, run_dir):
            config = node_config(state_dir, run_dir)
            for name in ("another", "stubborn", "third"):
                (config.uppers_dir / name).mkdir(parents=True)
            monkeypatch.setattr(leftovers, "remove_directories", refuse)

            async def start() -> None:
                await daemon.serve(config, default_resolver(), DirectoryDataPlane(root), handle_signals=False)

            with pytest.raises(EnvletError, match=r"cleanup_failed: .*stubborn: injected.*remove it by hand"):
                trio.run(start)
            assert os.listdir(config.uppers_dir) == ["stubborn"]

    isolated(work)


def test_a_removal_that_failed_unexpectedly_can_be_repeated(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [True]

    def refuse_once(*directories: Path) -> None:
        if failing.pop() if failing else False:
            raise RecursionError("injected")
        remove_directories(*directories)

    monkeypatch.setattr(environment_module, "remove_directories", refuse_once)

    async def test(node: Node) -> None:
        made = await node.call(lambda client: client.create(["base"]))
        error = await node.call(lambda client: failure(client.delete, made.id))
        assert error.code.name == "cleanup_failed"
        assert (await node.call(lambda client: client.get(made.id))).state == "error"
        await node.call(lambda client: client.delete(made.id))
        assert (await node.call(lambda client: client.get(made.id))).state == "deleted"

    with_node(root, test)
