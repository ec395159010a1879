"""`python -m bench.views`: what metadata costs in an environment of each view: a cold walk, one with stat, and the requests to weefs.

One plan of `--layers` layers with `--entries` entries in all, made here. Cold: dentries and inodes dropped, images and TOCs cached.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import attrs

from bench.erofs import entries
from bench.measure import run
from envlet import overlay, syscalls
from envlet.kernel_view import KernelView, View
from envlet.ports import MountedPlan
from layerformat import Entry, Kind, decode_footer, encode, restore_toc
from tools.output import duration, print_table
from weefs import core
from weefs.cachedir import opened

VIEWS = {
    "merged": View("merged", "bench"),
    "kernel, one image": View("kernel", "bench"),
    "kernel, a stack": View("kernel", "bench", metacopy=True, stack=True),
}
WALKS = {"walk": ["find", "."], "walk+stat": ["find", ".", "-printf", "%s"], "again": ["find", ".", "-printf", "%s"]}


def make_toc(number: int, count: int) -> bytes:
    blob = io.BytesIO()
    parents = [Entry(path=path, kind=Kind.DIRECTORY, mode=0o755) for path in (b"usr", b"usr/lib")]
    own = ((attrs.evolve(entry, path=entry.path.replace(b"package", b"layer%d-package" % number)), data) for entry, data in entries(count))
    encode([*((parent, io.BytesIO()) for parent in parents), *own], blob)
    data = blob.getvalue()
    footer = decode_footer(data[-80:], blob_size=len(data))
    return restore_toc(data[footer.toc_offset : footer.toc_offset + footer.toc_stored_size], footer.toc_raw_size)


class Stage:
    """A core with a mount, and one plan in every view."""

    def __init__(self, top: Path, tocs: list[bytes], closing: ExitStack) -> None:
        self._top = top
        self.core = core.Core()
        mountpoint = top / "mnt"
        mountpoint.mkdir()
        slots, layers = [], []
        for number, toc in enumerate(tocs):
            slots.append(self._add_layer(number, toc))
            layers.append(self._image(f"{number}", partial(core.write_layer_image, toc, name_of(toc))))
        slot, info = self.core.add_plan("plan", slots)
        if info.not_stackable:
            raise SystemExit(f"the plan cannot be stacked: {info.not_stackable}")
        one = self._image("plan", partial(self.core.write_plan_image, slot, "0" * 32))
        fds = core.mount(mountpoint, threads=4)
        closing.callback(self.core.close)
        closing.callback(syscalls.umount, str(mountpoint))
        self.core.serve(fds)
        for fd in fds:
            os.close(fd)
        self.plans = {False: (one,), True: tuple(layers)}
        self.path = mountpoint / "plan"

    def _add_layer(self, number: int, toc: bytes) -> core.LayerSlot:
        directory = self._top / f"{number}"
        directory.mkdir()
        (directory / "toc").write_bytes(toc)
        with opened(directory) as files:
            return self.core.add_layer(files, name=name_of(toc))

    def _image(self, name: str, write: Callable[[int], core.ImageInfo]) -> Path:
        path = self._top / f"{name}.erofs"
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        write(fd)
        os.close(fd)
        return path

    def requests(self) -> int:
        return sum(n for name, n in self.core.statistics().items() if name.startswith("requests_") and "forget" not in name)

    def measure(self, view: View, runs: int) -> dict[str, tuple[float, int]]:
        """Median seconds and requests of each walk, in an environment of its own."""
        top = Path(tempfile.mkdtemp(dir=self._top))
        places = [top / name for name in ("upper", "work", "root")]
        for place in places:
            place.mkdir()
        shown = KernelView(top / "meta", view, required=True)
        shown.mount(MountedPlan("plan", self.path, 0, 0, self.plans[view.stack]), *places)
        result = {}
        try:
            for name, command in WALKS.items():
                walls, requests = [], []
                for _ in range(runs):
                    if name != "again":
                        Path("/proc/sys/vm/drop_caches").write_text("2")
                    before, begin = self.requests(), time.perf_counter()
                    run(["env", "-C", places[2], *command])
                    walls.append(time.perf_counter() - begin)
                    requests.append(self.requests() - before)
                result[name] = statistics.median(walls), requests[-1]
        finally:
            overlay.unmount(places[2])
            shown.close()
        return result


def name_of(toc: bytes) -> str:
    return hashlib.sha256(toc).hexdigest()[:32]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=60_000)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    top = Path(tempfile.mkdtemp(prefix="weenv-bench-"))
    try:
        with ExitStack() as closing:
            tocs = [make_toc(number, arguments.entries // arguments.layers) for number in range(arguments.layers)]
            stage = Stage(top, tocs, closing)
            rows = []
            for name, view in VIEWS.items():
                found = stage.measure(view, arguments.runs)
                rows.append((name, *(f"{duration(wall_s)} / {requests}" for wall_s, requests in found.values())))
            print(f"{arguments.entries} entries in {arguments.layers} layers; median of {arguments.runs} / requests to weefs\n")
            print_table(("VIEW", *(walk.upper() for walk in WALKS)), rows)
    finally:
        shutil.rmtree(top)


if __name__ == "__main__":
    main()
