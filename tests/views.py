"""Environments' overlays over a mounted core, in each view: what a node daemon mounts, without the daemon."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs
from strategies import Layer, encode_layer
from weefs_harness import MountedCore, mounted_core

from envlet import overlay
from envlet.kernel_view import KernelView, View
from envlet.ports import MountedPlan
from weefs import core

MERGED = View("merged", "test")
KERNEL = View("kernel", "test")
METACOPY = View("kernel", "test", metacopy=True, stack=True)
LOOP = View("kernel", "test", loop=True)
LOOP_METACOPY = View("kernel", "test", metacopy=True, loop=True, stack=True)


@attrs.frozen
class Environment:
    """A mounted overlay: the root that one sees, its upper directory, and the plan's directory in weefs."""

    root: Path
    upper: Path
    lower: Path


class ViewedCore:
    """A mounted core and one view of its plans. Use `viewed_core`."""

    def __init__(self, mounted: MountedCore, view: View) -> None:
        self._mounted = mounted
        self.core = mounted.core
        self.mounted = mounted
        self.view = view
        self.images = mounted.directory / "images"
        self.images.mkdir(exist_ok=True)
        self.kernel_view = KernelView(mounted.directory / f"meta{id(self)}", view, required=True)

    def add_layer(self, blob: bytes) -> core.LayerSlot:
        return self._mounted.add_layer(blob)

    def add_plan_of(self, slots: Sequence[core.LayerSlot]) -> tuple[core.PlanSlot, Path]:
        return self._mounted.add_plan_of(slots)

    def remove_plan(self, path: Path) -> None:
        self.kernel_view.forget(self.plan(path))
        self.core.remove_plan(self._mounted.plans.pop(path).slot)

    def is_stacked(self, path: Path) -> bool:
        """Whether the kernel view of the plan is a stack of its layers."""
        plan = self._mounted.plans[path]
        return not plan.info.not_stackable and len({self._mounted.tocs[slot][0] for slot in plan.layers}) == len(plan.layers)

    def plan(self, path: Path) -> MountedPlan:
        """The plan as the data plane hands it over, with its images if this view needs some."""
        images: list[Path] = []
        plan = self._mounted.plans[path]
        if self.view.kind == "kernel" and self.view.stack and self.is_stacked(path):
            images = [self.layer_image(slot) for slot in plan.layers]
        elif self.view.kind == "kernel":
            images = [self.plan_image(path)]
        return MountedPlan(path.name, path, plan.info.content_size, plan.info.entries, tuple(images))

    def layer_image(self, slot: core.LayerSlot) -> Path:
        name, toc = self._mounted.tocs[slot]
        return self._image(name, lambda fd: core.write_layer_image(toc, name, fd))

    def plan_image(self, path: Path) -> Path:
        name = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
        slot = self._mounted.plans[path].slot
        return self._image(name, lambda fd: self.core.write_plan_image(slot, name, fd))

    def _image(self, name: str, write: Callable[[int], core.ImageInfo]) -> Path:
        path = self.images / f"{name}.erofs"
        if not path.exists():
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                write(fd)
            finally:
                os.close(fd)
        return path

    @contextmanager
    def environment(self, lower: Path, prepare: Callable[[Path], object] = lambda upper: None) -> Iterator[Environment]:
        """An overlay as envlet makes one; its upper directory is prepared before the mount."""
        top = Path(tempfile.mkdtemp(prefix="weefs-env-"))
        try:
            made = Environment(top / "root", top / "upper", lower)
            for path in (made.root, made.upper, top / "work"):
                path.mkdir()
            overlay.copy_metadata(lower, made.upper)
            prepare(made.upper)
            self.kernel_view.mount(self.plan(lower), made.upper, top / "work", made.root)
            try:
                yield made
            finally:
                overlay.unmount(made.root)
        finally:
            shutil.rmtree(top)

    @contextmanager
    def environment_of(self, *stack: Layer) -> Iterator[Environment]:
        """One whose plan is there for as long as it is."""
        _slot, lower = self._mounted.add_plan([encode_layer(layer) for layer in stack])
        try:
            with self.environment(lower) as made:
                yield made
        finally:
            self.remove_plan(lower)


@contextmanager
def viewed_cores(*wanted: View) -> Iterator[list[ViewedCore]]:
    """One core in several views."""
    with mounted_core(escape=True) as mounted, ExitStack() as closing:
        made = [ViewedCore(mounted, view) for view in wanted]
        for one in made:
            closing.callback(one.kernel_view.close)
        yield made


@contextmanager
def viewed_core(view: View) -> Iterator[ViewedCore]:
    with viewed_cores(view) as made:
        yield made[0]


def cache_drops() -> int:
    """How often somebody emptied the machine's caches: counted when it is done."""
    counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(counters["drop_pagecache"]) + int(counters["drop_slab"])


def while_caches_are_kept(measure: Callable[[], None]) -> None:
    """For what makes all that it looks at, and fails if the machine's caches are emptied meanwhile, as a benchmark beside it
    does, or another run of these tests: then it is done again.
    """
    while True:
        drops = cache_drops()
        try:
            measure()
            return
        except AssertionError:
            deadline = time.monotonic() + 5  # for one that goes on
            while cache_drops() == drops:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
