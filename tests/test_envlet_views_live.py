"""The daemon in each view, with the real runtime: environments run, are compared and removed, and no mount of an image stays."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio
import views
from envlet_harness import DirectoryDataPlane, Node, default_resolver, isolated, leftovers, make_root, node_config, node_directories
from merge_corners import directory, file
from strategies import encode_layer
from test_envlet_live import diff_names, shell
from views import ViewedCore
from weefs_harness import mounted_core

from envlet import mounts
from envlet.client import Client
from envlet.daemon import serve
from envlet.errors import EnvletError
from envlet.ports import LayerRef, MountedPlan
from layerformat.dirreader import DirectoryReader
from layerformat.encoder import encode


class CoreDataPlane(DirectoryDataPlane):
    """The same two layers for every plan, served by a core in this process."""

    def __init__(self, core_: ViewedCore, blobs: Sequence[bytes], refused: str) -> None:
        super().__init__(Path("/nonexistent"))
        self._core = core_
        self._slots = [core_.add_layer(blob) for blob in blobs]
        self._refused = refused
        self._paths: dict[str, Path] = {}
        self.asked: list[tuple[bool, bool]] = []

    async def add_plan(self, layers: Sequence[LayerRef], *, images: bool = False, stacked: bool = False) -> MountedPlan:
        self.asked.append((images, stacked))
        _slot, path = self._core.add_plan_of(self._slots)
        plan = await trio.to_thread.run_sync(self._core.plan, path)
        if not images or self._refused:
            plan = MountedPlan(plan.plan_id, path, plan.content_bytes, plan.entries, (), self._refused)
        self._paths[plan.plan_id] = path
        self.plans[plan.plan_id] = 1
        return plan

    async def remove_plan(self, plan_id: str) -> None:
        await super().remove_plan(plan_id)
        await trio.to_thread.run_sync(self._core.remove_plan, self._paths.pop(plan_id))


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    root = make_root(tmp_path_factory.mktemp("lower") / "root")
    blob = io.BytesIO()
    encode(DirectoryReader(os.fsencode(root), upper=False, warn=lambda text: None).entries(), blob)
    return [blob.getvalue(), encode_layer([directory(b"project"), file(b"project/upper", b"of the upper layer\n")])]


def run(blobs: list[bytes], view: str, work: Callable[[Client, CoreDataPlane, Node], None], refused: str = "") -> None:
    """`work` with a client of a fresh node in that view; nothing may be left."""

    async def main(core_: ViewedCore) -> None:
        with node_directories() as (state_dir, run_dir):
            config = node_config(state_dir, run_dir, view=view)
            plane = CoreDataPlane(core_, blobs, refused)
            with trio.fail_after(120):
                async with trio.open_nursery() as nursery:
                    start = functools.partial(serve, config, default_resolver(), plane, handle_signals=False)
                    node = Node(config, await nursery.start(start), plane, default_resolver())
                    await node.call(lambda client: work(client, plane, node))
                    nursery.cancel_scope.cancel()
            assert leftovers(config) == []
            assert plane.plans == {}

    def serve_core() -> None:
        with mounted_core(escape=True) as mounted:
            trio.run(main, ViewedCore(mounted, views.MERGED if view == "merged" else views.KERNEL))

    isolated(serve_core)


def images_mounted(node: Node) -> list[str]:
    return [mount.target for mount in mounts.current_mounts() if mount.target.startswith(f"{node.config.images_dir}/")]


@pytest.mark.parametrize("view", ["kernel", "merged", "auto"])
def test_an_environment_from_its_start_to_its_end(blobs: list[bytes], view: str) -> None:
    def work(client: Client, plane: CoreDataPlane, node: Node) -> None:
        kind = "merged" if view == "merged" else "kernel"
        info = client.info()
        assert info.view == kind
        assert ("the configuration says so" in info.view_reason) == (view == "merged")
        made = [client.create(["base"], init=["echo changed > data", "mv sub moved", "chmod 700 upper"]) for _ in range(2)]
        assert plane.asked == [(kind == "kernel", False)]
        assert len(images_mounted(node)) == (kind == "kernel")
        result = shell(client, made[0].id, "cat data upper moved/one; ls -A sub; stat -c %a upper; grep ' / ' /proc/mounts")
        assert result.stdout.decode().startswith("changed\nof the upper layer\n1\n700\n")
        assert ("datadir+" in result.stdout.decode() or "::" in result.stdout.decode()) == (kind == "kernel")
        changed = ["data", "moved", "moved/one", "moved/two", ".wh.sub", "upper"]
        assert sorted(diff_names(client, made[0].id)) == sorted([".", "project", *(f"project/{name}" for name in changed)])
        for environment in made:
            client.delete(environment.id)

    run(blobs, view, work)


def test_a_plan_without_images_is_an_error_only_where_the_kernel_view_is_demanded(blobs: list[bytes]) -> None:
    def shown_merged(client: Client, _plane: CoreDataPlane, _node: Node) -> None:
        made = client.create(["base"])
        assert shell(client, made.id, "cat upper").stdout == b"of the upper layer\n"
        assert client.info().statistics["views"]["merged_instead"] == 1
        client.delete(made.id)

    def refused(client: Client, _plane: CoreDataPlane, _node: Node) -> None:
        with pytest.raises(EnvletError, match="no images: an attribute that EROFS does not know"):
            client.create(["base"])
        assert client.list() == []

    run(blobs, "auto", shown_merged, "an attribute that EROFS does not know")
    run(blobs, "kernel", refused, "an attribute that EROFS does not know")
