"""Layers unpacked one by one, each to a directory of its own, as overlayfs takes them; and an overlay over them.

The extractor starts from what the second opinion says of a layer (layer_model.py), so it shares nothing with the
encoder. A whiteout is a character device 0:0, an opaque directory has `trusted.overlay.opaque=y`. A lower link is a
real hard link into the directory of the layer that has the file: they are on one filesystem, and to overlayfs the two
names are then one file.

And layers unpacked by other tools, for archives that no model speaks for: by umoci, all into one directory, and by GNU tar, each into
one of its own that becomes a layer of an overlay.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
from layer_model import Row as ModelRow
from merge_corners import converted, models_of
from oci_image import ImageSpec, write_image
from strategies import Layer, write_pax
from weefs_harness import Row, open_layers, tree_rows

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
    with _directory() as directory:
        unpacked = UnpackedStack(directory, stack, whiteouts_anywhere)
        with _overlay(directory, unpacked.roots) as target:
            yield unpacked, target


@contextmanager
def _directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="weefs-layers-"))
    try:
        yield directory
    finally:
        subprocess.run(["rm", "-rf", "--", directory], check=True)  # shutil's is recursive, and paths are as deep as they can be


@contextmanager
def _overlay(directory: Path, roots: list[Path]) -> Iterator[Path]:
    """A read-only overlay over `roots`, base first; the mount and what it needs lie in `directory`."""
    target, empty = directory / "mnt", directory / "empty"
    target.mkdir()
    empty.mkdir()
    lowers = [*roots[::-1], empty]  # overlayfs wants two lower directories when there is no upper one
    syscalls.mount("overlay", str(target), "overlay", syscalls.MS_RDONLY, "lowerdir=" + ":".join(map(str, lowers)))
    try:
        yield target
    finally:
        syscalls.umount(str(target))


# By other tools


@attrs.frozen
class Unpacked:
    """What a tool left, or why it did not; the directories that it touched have a time of this span."""

    rows: dict[bytes, Row]
    error: str
    began_ns: int
    ended_ns: int

    def touched(self, row: Row) -> bool:
        return self.began_ns <= row.mtime_ns <= self.ended_ns


def _began_ns() -> int:
    return time.time_ns() - 20_000_000  # the kernel's clock for files is coarse


def umoci(tars: Sequence[bytes]) -> Unpacked:
    """What `umoci unpack` makes of an image of these archives, base first."""
    return umoci_image(ImageSpec(tars, kinds=[""] * len(tars)))


def umoci_image(spec: ImageSpec) -> Unpacked:
    """The same of any image."""
    with _directory() as directory:
        image = write_image(directory / "image", spec)
        began_ns = _began_ns()
        command = ["umoci", "raw", "unpack", "--image", image, str(directory / "rootfs")]
        done = subprocess.run(command, capture_output=True)
        ended_ns = time.time_ns()
        error = done.stderr.decode(errors="replace").strip() if done.returncode else ""
        return Unpacked({} if error else tree_rows(directory / "rootfs"), error, began_ns, ended_ns)


def kernel(tars: Sequence[bytes]) -> Unpacked:
    """What overlayfs shows over directories into which GNU tar extracted these archives, base first, one each."""
    with _directory() as directory:
        began_ns = _began_ns()
        roots: list[Path] = []
        for index, tar in enumerate(tars):
            root = directory / str(index)
            root.mkdir()
            command = ["tar", "-x", "-p", "--same-owner", "--numeric-owner", "--xattrs", "--xattrs-include=*", "-C", str(root), "-f", "-"]
            done = subprocess.run(command, input=tar, capture_output=True, env={**os.environ, "LC_ALL": "C"})
            if done.returncode:
                return Unpacked({}, done.stderr.decode(errors="replace").strip(), began_ns, time.time_ns())
            _convert_whiteouts(root, roots)
            roots.append(root)
        with _overlay(directory, roots) as target:
            return Unpacked(tree_rows(target), "", began_ns, time.time_ns())


def _convert_whiteouts(root: Path, lowers: list[Path]) -> None:
    """Puts overlayfs' own marks in the place of the specification's; the directories keep their times."""
    opaque: set[bytes] = set()
    pending = [os.fsencode(root)]
    while pending:
        parent = pending.pop()
        status, names = os.lstat(parent), os.listdir(parent)
        if b".wh..wh..opq" in names or os.path.dirname(parent) in opaque:
            opaque.add(parent)
        for name in [name for name in names if name.startswith(b".wh.")]:
            full = os.path.join(parent, name)
            hidden = os.path.join(parent, name[4:])
            if _is_directory(full):
                shutil.rmtree(full)
            else:
                os.unlink(full)
            if name == b".wh..wh..opq":
                os.setxattr(parent, overlay.OPAQUE_XATTR, b"y")
            elif name.startswith(b".wh..wh."):
                continue
            elif _is_directory(hidden):
                os.setxattr(hidden, overlay.OPAQUE_XATTR, b"y")
                opaque.add(hidden)
            elif not os.path.lexists(hidden) and parent not in opaque and _is_below(os.path.relpath(parent, os.fsencode(root)), lowers):
                os.mknod(hidden, stat.S_IFCHR, os.makedev(0, 0))
        pending += filter(_is_directory, (os.path.join(parent, name) for name in names))
        os.utime(parent, ns=(status.st_atime_ns, status.st_mtime_ns))


def _is_directory(path: bytes) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _is_below(path: bytes, lowers: list[Path]) -> bool:
    """Whether a lower layer has this directory; elsewhere overlayfs lists whiteouts that cannot be looked up."""
    return any(_is_directory(os.path.join(os.fsencode(lower), path)) for lower in lowers)
