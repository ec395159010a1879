"""Layers unpacked one by one, each to a directory of its own, as overlayfs takes them; and an overlay over them.

The extractor starts from what the second opinion says of a layer (layer_model.py), so it shares nothing with the
encoder. A whiteout is a character device 0:0, an opaque directory has `trusted.overlay.opaque=y`. A lower link is a
real hard link into the directory of the layer that has the file: they are on one filesystem, and to overlayfs the two
names are then one file.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from layer_model import Row as ModelRow
from merge_corners import converted, models_of
from strategies import Layer, write_pax
from weefs_harness import open_layers

from envlet import overlay, syscalls
from weefs.merge import Directory, File, View

_TYPES = {
    "regular": stat.S_IFREG,
    "fifo": stat.S_IFIFO,
    "character": stat.S_IFCHR,
    "block": stat.S_IFBLK,
}

FileKey = tuple[int, int]
"""Layer and inode number."""


class UnpackedStack:
    """The layers of a stack in `directory`/0, 1, …, base first."""

    def __init__(self, directory: Path, stack: list[Layer], whiteouts_anywhere: bool) -> None:
        self.blobs = [converted(write_pax(layer)) for layer in stack]
        self.models = models_of(stack)
        self.roots: list[Path] = []
        self.names: dict[FileKey, list[bytes]] = {}
        """Every path that a layer has of a file, those by lower links included."""
        self._places: dict[FileKey, bytes] = {}
        layers = open_layers(self.blobs)
        for index, model in enumerate(self.models):
            root = directory / str(index)
            root.mkdir()
            self.roots.append(root)
            numbers = dict(layers[index].walk())
            below = dict(View(layers[:index]).walk()) if index and not whiteouts_anywhere else {}
            view = (
                dict(View(layers[: index + 1]).walk()) if "lower link" in {row.kind for row in model.values()} else {}
            )
            for path, row in sorted(model.items()):  # parents first
                if row.kind == "whiteout" and not (whiteouts_anywhere or _merges(model, below, path)):
                    continue
                node = view.get(path)
                if row.kind == "lower link" and isinstance(node, File):
                    key = (node.layer, node.number)
                else:
                    key = (index, numbers[path] or 0)
                self._make(os.fsencode(root) + b"/" + path if path else os.fsencode(root), row, key)
                if row.kind not in ("directory", "whiteout"):
                    self.names.setdefault(key, []).append(path)
            for path, row in sorted(model.items(), reverse=True):  # children first, for the directories' times
                self._finish(os.fsencode(root) + b"/" + path if path else os.fsencode(root), row)

    def _make(self, full: bytes, row: ModelRow, key: FileKey) -> None:
        if row.kind == "directory":
            if not os.path.isdir(full):
                os.mkdir(full)
            return
        if row.kind == "whiteout":
            os.mknod(full, stat.S_IFCHR, os.makedev(0, 0))
            return
        if key in self._places:
            os.link(self._places[key], full, follow_symlinks=False)
            return
        self._places[key] = full
        if row.kind == "symlink":
            os.symlink(row.target, full)
            return
        os.mknod(full, _TYPES[row.kind], os.makedev(row.rdev >> 8 & 0xFFF, row.rdev & 0xFF | row.rdev >> 12 & 0xFFF00))
        if row.kind == "regular":
            with open(full, "wb") as file:
                file.write(row.content)

    def _finish(self, full: bytes, row: ModelRow) -> None:
        if row.kind in ("whiteout", "lower link"):
            return
        os.chown(full, row.uid, row.gid, follow_symlinks=False)
        if row.kind != "symlink":
            os.chmod(full, row.mode)
        for name, value in row.xattrs:
            os.setxattr(full, name, value, follow_symlinks=False)
        if row.opaque:
            os.setxattr(full, overlay.OPAQUE_XATTR, b"y")
        os.utime(full, ns=(row.mtime_ns, row.mtime_ns), follow_symlinks=False)


def _merges(model: dict[bytes, ModelRow], below: dict[bytes, File | Directory], path: bytes) -> bool:
    """Whether the directory that `path` is in merges with one below: elsewhere overlayfs does not look for whiteouts
    when it lists a directory, and shows them as names that cannot be looked up.
    """
    parent = path.rpartition(b"/")[0]
    if not isinstance(below.get(parent), Directory):
        return False
    while not model[parent].opaque:
        if not parent:
            return True
        parent = parent.rpartition(b"/")[0]
    return False


@contextmanager
def kernel_view(stack: list[Layer], *, whiteouts_anywhere: bool = False) -> Iterator[tuple[UnpackedStack, Path]]:
    """The unpacked layers and a read-only overlay mount over them. PlanRefused as the merged view.

    whiteouts_anywhere  makes whiteouts also where there is no directory below that could have the name.
    """
    directory = Path(tempfile.mkdtemp(prefix="weefs-layers-"))
    target = directory / "mnt"
    try:
        unpacked = UnpackedStack(directory, stack, whiteouts_anywhere)
        empty = directory / "empty"
        empty.mkdir()
        lowers = [*unpacked.roots[::-1], empty]  # overlayfs wants two lower directories when there is no upper one
        target.mkdir()
        syscalls.mount("overlay", str(target), "overlay", syscalls.MS_RDONLY, "lowerdir=" + ":".join(map(str, lowers)))
        try:
            yield unpacked, target
        finally:
            syscalls.umount(str(target))
    finally:
        shutil.rmtree(directory)
