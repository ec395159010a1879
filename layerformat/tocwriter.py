"""Writes a finished tree as a TOC: docs/format.md §3. One walk breadth first numbers the inodes, a second packs them."""

from __future__ import annotations

import stat
import zlib
from array import array

from . import spec
from .errors import UnsupportedEntry
from .storedtoc import StoredToc
from .tree import Directory, Node


class _Strings:
    """The strings table: equal strings share their bytes."""

    def __init__(self) -> None:
        self.table = bytearray()
        self._offsets: dict[bytes, int] = {}

    def add(self, text: bytes) -> int:
        offset = self._offsets.get(text)
        if offset is None:
            offset = self._offsets[text] = len(self.table)
            self.table += text
            if len(self.table) > spec.MAX_STRINGS:
                raise UnsupportedEntry(text, f"the layer's names have more than {spec.MAX_STRINGS} bytes together; split the layer")
        return offset

    def forget(self) -> None:
        """Nothing more will be added."""
        self._offsets.clear()


class _Tables:
    """The tables under construction."""

    def __init__(self) -> None:
        self.strings = _Strings()
        self.inodes = bytearray()
        self.dirents = bytearray()
        self.xattrs = bytearray()
        self.extents = bytearray()
        self.order: list[Node] = []
        self.names = array("I")  # per inode: subdirectories + 2 of a directory, else names
        self.parents = array("I")
        self.dirent_ranges: list[tuple[int, int]] = []  # per directory, in the order of their numbers
        self.content_size = 0

    def number(self, node: Node, parent: int) -> None:
        if len(self.order) >= spec.MAX_INODES:
            raise UnsupportedEntry(b"", f"the layer has more than {spec.MAX_INODES} inodes; split the layer")
        node.number = len(self.order)
        self.order.append(node)
        self.parents.append(parent)
        self.names.append(2 if isinstance(node, Directory) else 0)

    def number_all(self, root: Directory) -> None:
        """Numbers breadth first and packs the directory entries on the way."""
        self.number(root, 0)
        for node in self.order:  # grows while it is walked
            if isinstance(node, Directory):
                self._pack_directory(node)

    def _pack_directory(self, directory: Directory) -> None:
        pack, add, dirents, names = spec.DIRENT.pack, self.strings.add, self.dirents, self.names
        children = directory.children
        first = len(dirents) // spec.DIRENT.size
        hidden = directory.whiteouts or ()
        for name in sorted(children.keys() | hidden) if hidden else sorted(children):
            child = children.get(name)
            if child is None:
                dirents += pack(add(name), spec.NO_INODE, len(name), spec.DT_WHITEOUT, 0)
                continue
            if child.number < 0:
                self.number(child, directory.number)
            if isinstance(child, Directory):
                names[directory.number] += 1
                if name in hidden:
                    child.flags |= spec.OPAQUE
            else:
                names[child.number] += 1
            dirents += pack(add(name), child.number, len(name), child.mode >> 12, 0)
        self.dirent_ranges.append((first, len(dirents) // spec.DIRENT.size - first))
        directory.children = {}

    def pack_inodes(self) -> None:
        ranges = iter(self.dirent_ranges)
        pack, add = spec.INODE.pack, self.strings.add
        self.order.reverse()
        for names, parent in zip(self.names, self.parents, strict=True):
            node = self.order.pop()
            data = count = 0
            kind = stat.S_IFMT(node.mode)
            if kind == stat.S_IFREG:
                self.content_size += node.size
                if self.content_size > spec.MAX_CONTENT_SIZE:
                    raise UnsupportedEntry(b"", f"the layer's files have more than {spec.MAX_CONTENT_SIZE} bytes together, holes included")
                if node.sparse is None:
                    data = node.data
                else:
                    data, count = self._pack_extents(node)
            elif kind == stat.S_IFDIR:
                data, count = next(ranges)
            elif kind == stat.S_IFLNK or node.flags & spec.LOWER_LINK:
                data = add(node.target)
            mtime_s, mtime_ns = divmod(node.mtime_ns, spec.NS_PER_S)
            self.inodes += pack(
                node.mode, node.uid, node.gid, names, mtime_s, mtime_ns, node.rdev, node.size, data, count,
                len(self.xattrs) // spec.XATTR.size, len(node.xattrs), node.flags, parent,
            )  # fmt: skip
            for name, value in node.xattrs:
                self.xattrs += spec.XATTR.pack(add(name), add(value), len(value), len(name), 0)

    def _pack_extents(self, node: Node) -> tuple[int, int]:
        first = len(self.extents) // spec.EXTENT.size
        stream_offset = node.data
        segments = node.sparse or ()
        for file_offset, length in segments:
            self.extents += spec.EXTENT.pack(file_offset, stream_offset, length)
            stream_offset += length
        return first, len(segments)


def build_toc(root: Directory, chunks: bytes, *, chunk_size: int, stream_size: int, chunks_end: int) -> bytes:
    """The raw TOC of a finished tree, which is taken apart on the way: half of the memory is the tree's. `chunks` is the packed chunk
    table.
    """
    tables = _Tables()
    tables.number_all(root)
    tables.pack_inodes()
    tables.strings.forget()
    parts: list[bytes | bytearray] = []
    directory: list[int] = []
    end = spec.HEADER_SIZE
    packed: tuple[bytes | bytearray, ...] = (
        tables.inodes,
        tables.dirents,
        tables.xattrs,
        tables.extents,
        chunks,
        tables.strings.table,
    )
    for table, record_size in zip(packed, spec.RECORD_SIZES, strict=True):
        start = spec.align(end, spec.TABLE_ALIGNMENT)
        directory += (start, len(table) // record_size)
        parts.append(bytes(start - end))
        parts.append(table)
        end = start + len(table)
    if end > spec.MAX_TOC_RAW_SIZE:
        raise UnsupportedEntry(b"", f"the layer's metadata has more than {spec.MAX_TOC_RAW_SIZE} bytes; split the layer")
    header = spec.HEADER.pack(
        spec.TOC_MAGIC, spec.VERSION, spec.HEADER_SIZE, 0, 0, end, stream_size, tables.content_size, chunks_end, chunk_size, 0,
        *directory, b"",
    )  # fmt: skip
    return b"".join((header, *parts))


def build_footer(toc: StoredToc, toc_offset: int) -> bytes:
    """The 80 bytes at the end of the blob: docs/format.md §1."""
    values = (toc_offset, len(toc.stored), toc.raw_size, toc.digest, spec.VERSION, 0)
    head = spec.FOOTER.pack(*values, 0, 0, spec.FOOTER_MAGIC)[: spec.FOOTER_CRC_RANGE]
    return spec.FOOTER.pack(*values, zlib.crc32(head), 0, spec.FOOTER_MAGIC)
