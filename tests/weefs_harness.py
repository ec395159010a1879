"""A core with a real mount and layers in memory or on disk behind it, without registry and daemon; and what a mounted
tree looks like.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import select
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

from layerformat import Layer as LayerFile
from layerformat import decode_footer, restore_toc
from weefs import core
from weefs.cachedir import opened
from weefs.merge import Directory, File, View, link_count, shown_mode

FOOTER_SIZE = 80


@attrs.frozen
class Row:
    """Everything that a mount shows of one path; `group` are all paths of the same inode (files with several names
    only).
    """

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    rdev: int
    size: int
    nlink: int
    target: bytes = b""
    content: bytes = b""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    group: tuple[bytes, ...] = ()


def toc_of(blob: bytes) -> bytes:
    """The raw TOC of a layer file."""
    footer = decode_footer(blob[-FOOTER_SIZE:], blob_size=len(blob))
    return restore_toc(blob[footer.toc_offset : footer.toc_offset + footer.toc_stored_size], footer.toc_raw_size)


@attrs.frozen
class AddedPlan:
    """A plan in the mount."""

    slot: core.PlanSlot
    info: core.PlanInfo
    layers: tuple[core.LayerSlot, ...]


Answer = Callable[[bytes, core.Miss], bytes | int]
"""What a fetch of a chunk brings: its bytes, given the blob; or an errno."""


def faithful(blob: bytes, miss: core.Miss) -> bytes:
    return blob[miss.blob_offset : miss.blob_offset + miss.stored_size]


class MountedCore:
    """A core, its mount, and one thread that serves its misses from blobs in memory. Use `mounted_core`."""

    def __init__(self, directory: Path, threads: int, escape: bool, max_pending: int) -> None:
        self.directory = directory
        self.mountpoint = directory / "mnt"
        self.mountpoint.mkdir()
        self.core = core.Core(escape_overlay_xattrs=escape, max_pending=max_pending)
        self.answer: Answer = faithful
        self.faults: list[core.CoreFault] = []
        self.rejected: list[str] = []
        self.fetched: list[core.Miss] = []
        self._blobs: dict[core.LayerSlot, bytes] = {}
        self.tocs: dict[core.LayerSlot, tuple[str, bytes]] = {}
        """Name and raw TOC of each layer."""
        self.plans: dict[Path, AddedPlan] = {}
        self._stop_read, self._stop_write = os.pipe()
        self._plans = 0
        descriptors = core.mount(self.mountpoint, source="weefs-test", threads=threads)
        self.core.serve(descriptors)
        for fd in descriptors:
            os.close(fd)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def add_layer(self, blob: bytes, directory: Path | None = None) -> core.LayerSlot:
        """Adds a layer file's bytes; its cache goes below `directory`, or a new one."""
        if directory is None:
            directory = Path(tempfile.mkdtemp(dir=self.directory))
        toc = toc_of(blob)
        (directory / "toc").write_bytes(toc)
        name = hashlib.sha256(toc).hexdigest()[:32]
        with opened(directory) as files:
            slot = self.core.add_layer(files, name=name)
        self._blobs[slot] = blob
        self.tocs[slot] = (name, toc)
        return slot

    def add_plan(self, blobs: Sequence[bytes]) -> tuple[core.PlanSlot, Path]:
        """Adds the layers and their plan; returns its slot and its directory in the mount."""
        return self.add_plan_of([self.add_layer(blob) for blob in blobs])

    def add_plan_of(self, slots: Sequence[core.LayerSlot]) -> tuple[core.PlanSlot, Path]:
        self._plans += 1
        name = f"plan{self._plans}"
        slot, info = self.core.add_plan(name, slots)
        self.plans[self.mountpoint / name] = AddedPlan(slot, info, tuple(slots))
        return slot, self.mountpoint / name

    def _serve(self) -> None:
        while True:
            readable, _, _ = select.select([self.core.miss_fd, self._stop_read], [], [])
            if self._stop_read in readable:
                return
            os.read(self.core.miss_fd, 8)
            while misses := self.core.take_misses():
                for miss in misses:
                    self._serve_one(miss)
            while faults := self.core.take_faults():
                self.faults += faults
                self.core.answer_faults(faults[-1].number)

    def _serve_one(self, miss: core.Miss) -> None:
        self.fetched.append(miss)
        answer = self.answer(self._blobs[miss.layer], miss)
        if isinstance(answer, int):
            self.core.fail(miss.layer, miss.chunk, answer)
            return
        try:
            self.core.publish(miss.layer, miss.chunk, answer)
        except core.DamagedError as error:
            self.rejected.append(str(error))
            self.core.fail(miss.layer, miss.chunk, error.errno or 5)

    def close(self) -> None:
        if subprocess.run(["umount", self.mountpoint], capture_output=True).returncode:
            # A test that failed left a reader: its requests are aborted, so that neither it nor this waits for ever.
            subprocess.run(["umount", "--force", self.mountpoint], capture_output=True)
            subprocess.run(["umount", "--lazy", self.mountpoint], capture_output=True)
        os.close(self._stop_write)
        self._thread.join()
        os.close(self._stop_read)
        self.core.close()


@contextmanager
def mounted_core(*, threads: int = 2, escape: bool = False, max_pending: int = 1024) -> Iterator[MountedCore]:
    """A core that serves a mount in a directory of its own; everything is gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="weefs-test-"))
    try:
        mounted = MountedCore(directory, threads, escape, max_pending)
        try:
            yield mounted
        finally:
            mounted.close()
    finally:
        shutil.rmtree(directory)


def forget(path: Path, *, write_back: bool = False) -> None:
    """The pages of a file leave the page cache."""
    fd = os.open(path, os.O_RDONLY)
    if write_back:
        os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def read_direct(path: Path, size: int, *, offset: int = 0) -> bytes:
    """Past the page cache, in requests of 64 KiB at most; `offset` is a multiple of 4,096."""
    buffer, data = mmap.mmap(-1, 65536), b""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        while len(data) < size:
            wanted = min(len(buffer), -(-(size - len(data)) // 4096) * 4096)
            n = os.preadv(fd, [memoryview(buffer)[:wanted]], offset + len(data))
            if n == 0:
                break
            data += buffer[:n]
    finally:
        os.close(fd)
    return data[:size]


# What a tree looks like


def tree_rows(root: Path, *, contents: bool = True, directory_sizes: bool = False) -> dict[bytes, Row]:
    """Every path below `root` (b'' is the root itself) as lstat, readlink, listxattr and read show it."""
    rows: dict[bytes, Row] = {}
    groups: dict[tuple[int, int], list[bytes]] = {}
    pending = [b""]
    top = os.fsencode(root)
    while pending:
        path = pending.pop()
        full = top + b"/" + path if path else top
        status = os.lstat(full)
        if stat.S_ISDIR(status.st_mode):
            pending += [path + b"/" + name if path else name for name in os.listdir(full)]
        elif status.st_nlink > 1:
            groups.setdefault((status.st_dev, status.st_ino), []).append(path)
        rows[path] = _row(full, status, contents=contents, directory_sizes=directory_sizes)
    for paths in groups.values():
        for path in paths:
            rows[path] = attrs.evolve(rows[path], group=tuple(sorted(paths)))
    return rows


def _row(full: bytes, status: os.stat_result, *, contents: bool, directory_sizes: bool) -> Row:
    mode = status.st_mode
    content = b""
    if contents and stat.S_ISREG(mode):
        with open(full, "rb") as file:
            content = file.read()
    names = os.listxattr(full, follow_symlinks=False)
    is_directory = stat.S_ISDIR(mode)
    return Row(
        mode=mode,
        uid=status.st_uid,
        gid=status.st_gid,
        mtime_ns=status.st_mtime_ns,
        rdev=status.st_rdev,
        size=status.st_size if directory_sizes or not is_directory else 0,
        nlink=status.st_nlink,
        target=os.readlink(full) if stat.S_ISLNK(mode) else b"",
        content=content,
        xattrs=tuple(sorted((os.fsencode(name), os.getxattr(full, name, follow_symlinks=False)) for name in names)),
    )


def view_rows(view: View) -> dict[bytes, Row]:
    """The same of the slow merged view."""
    paths: dict[int, list[bytes]] = {}
    for path, node in view.walk():
        if isinstance(node, File):
            paths.setdefault(id(node), []).append(path)
    return {path: _view_row(view, node, paths) for path, node in view.walk()}


def _view_row(view: View, node: File | Directory, paths: dict[int, list[bytes]]) -> Row:
    inode, layer = node.inode, view.layers[node.layer]
    names = paths.get(id(node), [])
    return Row(
        mode=shown_mode(node),
        uid=inode.uid,
        gid=inode.gid,
        mtime_ns=inode.total_mtime_ns,
        rdev=os.makedev(inode.rdev >> 8 & 0xFFF, inode.rdev & 0xFF | inode.rdev >> 12 & 0xFFF00),
        size=0 if isinstance(node, Directory) else inode.size,
        nlink=link_count(node),
        target=layer.toc.target(node.number) if inode.is_symlink else b"",
        content=layer.read(node.number, 0, inode.size) if inode.is_regular else b"",
        xattrs=tuple(sorted(layer.toc.xattrs(node.number).items())),
        group=tuple(sorted(names)) if len(names) > 1 else (),
    )


def open_layers(blobs: Sequence[bytes]) -> list[LayerFile]:
    import io

    return [LayerFile.open(io.BytesIO(blob)) for blob in blobs]
