"""The reference filesystem: a read-only mount on pyfuse3 over the reference decoder, slow and obvious.

The oracle of the tests, and what serves where the C core cannot be built. It holds whole layers as local files; nothing
is fetched. Inode numbers are positions in a table made when the view is built, so there is no lookup count to keep. """

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pyfuse3
import trio

from layerformat import FormatError, Layer
from weefs.merge import Directory, File, View, link_count, shown_mode

FOREVER_S = 10 * 365 * 86400


class ReferenceFilesystem(pyfuse3.Operations):
    """Serves one view. Damaged chunks give EIO."""

    enable_writeback_cache = False

    def __init__(self, view: View) -> None:
        super().__init__()
        self._view = view
        self._nodes: list[File | Directory | None] = [None, view.root]  # pyfuse3.ROOT_INODE is 1
        self._numbers: dict[int, int] = {id(view.root): 1}
        for _path, node in view.walk():
            if id(node) not in self._numbers:
                self._numbers[id(node)] = len(self._nodes)
                self._nodes.append(node)

    def _node(self, inode: int) -> File | Directory:
        node = self._nodes[inode]
        if node is None:
            raise pyfuse3.FUSEError(errno.ESTALE)
        return node

    def _file(self, inode: int) -> File:
        node = self._node(inode)
        if not isinstance(node, File):
            raise pyfuse3.FUSEError(errno.EISDIR)
        return node

    def _attributes(self, node: File | Directory) -> pyfuse3.EntryAttributes:
        record = node.inode
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = pyfuse3.InodeT(self._numbers[id(node)])
        entry.generation = 0
        entry.entry_timeout = entry.attr_timeout = FOREVER_S
        entry.st_mode = pyfuse3.ModeT(shown_mode(node))
        entry.st_nlink = link_count(node)
        entry.st_uid, entry.st_gid = record.uid, record.gid
        entry.st_rdev = os.makedev(record.rdev >> 8 & 0xFFF, record.rdev & 0xFF | record.rdev >> 12 & 0xFFF00)
        entry.st_size = 4096 if isinstance(node, Directory) else record.size
        entry.st_blksize = 4096
        entry.st_blocks = 0 if isinstance(node, Directory) else (self._data_bytes(node) + 511) // 512
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = record.total_mtime_ns
        return entry

    def _data_bytes(self, file: File) -> int:
        if not file.inode.is_regular:
            return 0
        return sum(part.length for part in self._view.layers[file.layer].toc.segments(file.number))

    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext | None = None) -> pyfuse3.EntryAttributes:
        return self._attributes(self._node(inode))

    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext | None = None) -> pyfuse3.EntryAttributes:
        directory = self._node(parent_inode)
        if not isinstance(directory, Directory):
            raise pyfuse3.FUSEError(errno.ENOTDIR)
        child = directory.children.get(name)
        if child is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._attributes(child)

    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileNameT:
        return pyfuse3.FileNameT(self._view.target(self._file(inode)))

    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileHandleT:
        return pyfuse3.FileHandleT(inode)

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        directory = self._node(fh)
        if not isinstance(directory, Directory):
            raise pyfuse3.FUSEError(errno.ENOTDIR)
        for position, name in enumerate(sorted(directory.children)):
            if position >= start_id:
                attributes = self._attributes(directory.children[name])
                if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(name), attributes, position + 1):
                    return

    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise pyfuse3.FUSEError(errno.EROFS)
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(inode), keep_cache=True)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        file = self._file(fh)
        try:
            return self._view.layers[file.layer].read(file.number, off, size)
        except FormatError as error:
            print(f"weefs reference: {error}", file=sys.stderr)
            raise pyfuse3.FUSEError(errno.EIO) from error

    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        value = self._xattrs(inode).get(name)
        if value is None:
            raise pyfuse3.FUSEError(errno.ENODATA)
        return value

    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[pyfuse3.XAttrNameT]:
        return [pyfuse3.XAttrNameT(name) for name in self._xattrs(inode)]

    def _xattrs(self, inode: int) -> dict[bytes, bytes]:
        node = self._node(inode)
        return self._view.layers[node.layer].toc.xattrs(node.number)

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = 4096
        data.f_blocks = sum((layer.toc.header.stream_size + 4095) // 4096 for layer in self._view.layers)
        data.f_files = len(self._nodes)
        data.f_bfree = data.f_bavail = data.f_ffree = data.f_favail = 0
        data.f_namemax = 255
        return data


async def serve(layers: Sequence[Layer], mountpoint: Path, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Mounts the merged view of `layers`, base first, until cancelled or unmounted."""
    filesystem = ReferenceFilesystem(View(layers))
    options = set(pyfuse3.default_options) | {"fsname=weefs-reference", "ro", "allow_other", "default_permissions"}
    pyfuse3.init(filesystem, str(mountpoint), options)
    unmounted = False
    try:
        task_status.started()
        await pyfuse3.main()
        unmounted = True
    finally:
        pyfuse3.close(unmount=not unmounted)

