"""The reference reader of a TOC: slow and obvious, it checks every rule of docs/format.md §3 before it shows anything.

The C core is tested against it, and the two accept the same TOCs; so nothing here is clever: each table is unpacked into a
list of records with names, and each rule is one `require` under the number of its section. Two rules of §3 carry the
tree: the directories' ranges tile the entries, and a directory's one name lies in a directory with a lower number. So
whoever walks by number reaches each directory from one that was reached before, and there are no cycles.
"""

from __future__ import annotations

import stat
import zlib
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from attrs import field, frozen

from . import spec
from .errors import FormatError, printable

_D_TYPES = {
    stat.S_IFIFO: 1,
    stat.S_IFCHR: 2,
    stat.S_IFDIR: 4,
    stat.S_IFBLK: 6,
    stat.S_IFREG: 8,
    stat.S_IFLNK: 10,
    stat.S_IFSOCK: 12,
}
_ALL_FLAGS = spec.OPAQUE | spec.IMPLICIT | spec.SPARSE | spec.LOWER_LINK


class Footer(NamedTuple):
    """§1, without magic, version and checksum, which are checked."""

    toc_offset: int
    toc_stored_size: int
    toc_raw_size: int
    toc_sha256: bytes


class Header(NamedTuple):
    """§3.1"""

    compat: int
    toc_size: int
    stream_size: int
    content_size: int
    chunks_end: int
    chunk_size: int


class Inode(NamedTuple):
    """§3.2, field by field; `records` is its `count`."""

    mode: int
    uid: int
    gid: int
    nlink: int
    mtime_s: int
    mtime_ns: int
    rdev: int
    size: int
    data: int
    records: int
    xattr: int
    xattrs: int
    flags: int
    parent: int

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_regular(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)

    @property
    def is_lower_link(self) -> bool:
        return bool(self.flags & spec.LOWER_LINK)

    @property
    def total_mtime_ns(self) -> int:
        """The time in nanoseconds since the epoch."""
        return self.mtime_s * spec.NS_PER_S + self.mtime_ns


class Dirent(NamedTuple):
    """§3.3 with its name; `inode` is None for a whiteout."""

    name: bytes
    inode: int | None
    type: int


class Extent(NamedTuple):
    """§3.5"""

    file_offset: int
    stream_offset: int
    length: int


class Chunk(NamedTuple):
    """§3.6"""

    stream_offset: int
    blob_offset: int
    stored_size: int
    raw_size: int
    sha256: bytes
    flags: int


def decode_footer(data: bytes, *, blob_size: int | None = None) -> Footer:
    """The last 80 bytes of a layer, checked; with `blob_size` against the size of the blob too. FormatError."""

    def fail(expected: object, received: object) -> NoReturn:
        raise FormatError("footer", None, expected, received)

    if len(data) != spec.FOOTER_SIZE:
        fail(f"{spec.FOOTER_SIZE} bytes", len(data))
    offset, stored, raw, sha256, version, reserved, crc, reserved_2, magic = spec.FOOTER.unpack(data)
    if magic != spec.FOOTER_MAGIC:
        fail(f"the magic {spec.FOOTER_MAGIC!r}", magic)
    if crc != (computed := zlib.crc32(data[: spec.FOOTER_CRC_RANGE])):
        fail(f"the checksum {computed:08x}", f"{crc:08x}")
    if version != spec.VERSION:
        fail(f"version {spec.VERSION}", version)
    if reserved or reserved_2:
        fail("reserved bytes of zero", (reserved, reserved_2))
    if not spec.HEADER_SIZE <= raw <= spec.MAX_TOC_RAW_SIZE:
        fail(f"a TOC of {spec.HEADER_SIZE} to {spec.MAX_TOC_RAW_SIZE} bytes", raw)
    if stored == 0:
        fail("a stored TOC", "one of 0 bytes")
    if blob_size is not None and offset + stored + spec.FOOTER_SIZE != blob_size:
        fail(f"offset, size and footer that add up to the blob's {blob_size} bytes", offset + stored + spec.FOOTER_SIZE)
    return Footer(offset, stored, raw, sha256)


@frozen(eq=False)
class Toc:
    """A valid TOC. Inode and chunk numbers index the tuples; `dirents` is by directory, `extents` and `xattrs` by inode."""

    header: Header
    inodes: tuple[Inode, ...]
    dirents: tuple[Dirent, ...]
    extents: tuple[Extent, ...]
    chunks: tuple[Chunk, ...]
    xattr_table: tuple[tuple[bytes, bytes], ...]
    strings: bytes = field(repr=False)

    @classmethod
    def parse(cls, raw: bytes) -> Toc:
        """Checks every rule of §3 and returns what the TOC says. FormatError names the table, the record and the rule."""
        return _Parser(raw).parse()

    def listdir(self, number: int) -> tuple[Dirent, ...]:
        """The entries of a directory, whiteouts included, names ascending."""
        inode = self.inodes[number]
        if not inode.is_directory:
            raise NotADirectoryError(f"inode {number} is not a directory")
        return self.dirents[inode.data : inode.data + inode.records]

    def xattrs(self, number: int) -> dict[bytes, bytes]:
        """The extended attributes of an inode, names ascending."""
        inode = self.inodes[number]
        return dict(self.xattr_table[inode.xattr : inode.xattr + inode.xattrs])

    def target(self, number: int) -> bytes:
        """What a symlink holds, or the path that a lower link names."""
        inode = self.inodes[number]
        if not inode.is_symlink and not inode.is_lower_link:
            raise ValueError(f"inode {number} is neither a symlink nor a lower link")
        return self.strings[inode.data : inode.data + inode.size]

    def segments(self, number: int) -> tuple[Extent, ...]:
        """Where the data of a regular file lies, holes left out."""
        inode = self.inodes[number]
        if inode.flags & spec.SPARSE:
            return self.extents[inode.data : inode.data + inode.records]
        return (Extent(0, inode.data, inode.size),) if inode.is_regular and inode.size else ()

    def lookup(self, path: bytes) -> int | None:
        """The inode at a path from the root, symlinks not followed; None when this layer does not hold it."""
        number = 0
        for name in path.split(b"/"):
            if not name:
                continue
            if not self.inodes[number].is_directory:
                return None
            found = [entry.inode for entry in self.listdir(number) if entry.name == name]
            if not found or found[0] is None:
                return None
            number = found[0]
        return number

    def walk(self) -> Iterator[tuple[bytes, int | None]]:
        """Every path with its inode (None: a whiteout), depth first, a directory before its entries; the root is b''."""
        yield b"", 0
        todo = [(b"", entry) for entry in reversed(self.listdir(0))]
        while todo:
            parent, entry = todo.pop()
            path = parent + entry.name
            yield path, entry.inode
            if entry.inode is not None and self.inodes[entry.inode].is_directory:
                todo += [(path + b"/", below) for below in reversed(self.listdir(entry.inode))]


class _Parser:
    """One pass per table, in an order in which each may rely on those before it."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.ranges: dict[str, tuple[int, int]] = {}

    def parse(self) -> Toc:
        self.header = self.parse_header()
        start, size = self.ranges["strings"]
        self.strings = self.raw[start : start + size]
        self.inodes = [Inode(*record) for record in spec.INODE.iter_unpack(self.table("inodes"))]
        self.chunks = self.parse_chunks()
        self.extents = [Extent(*record) for record in spec.EXTENT.iter_unpack(self.table("extents"))]
        self.check_inodes()
        self.xattrs = self.parse_xattrs()
        self.check_extents()
        self.dirents = self.parse_dirents()
        self.check_tree()
        return Toc(
            header=self.header,
            inodes=tuple(self.inodes),
            dirents=tuple(self.dirents),
            extents=tuple(self.extents),
            chunks=tuple(self.chunks),
            xattr_table=tuple(self.xattrs),
            strings=self.strings,
        )

    def require(self, condition: bool, table: str, index: int | None, expected: object, received: object) -> None:
        if not condition:
            raise FormatError(table, index, expected, received)

    def table(self, name: str) -> bytes:
        start, count = self.ranges[name]
        return self.raw[start : start + count * spec.RECORD_SIZES[spec.TABLES.index(name)]]

    # §3.1

    def parse_header(self) -> Header:
        raw, require = self.raw, self.require
        require(len(raw) >= spec.HEADER_SIZE, "header", None, f"at least {spec.HEADER_SIZE} bytes", len(raw))
        require(len(raw) <= spec.MAX_TOC_RAW_SIZE, "header", None, f"at most {spec.MAX_TOC_RAW_SIZE} bytes", len(raw))
        (
            magic,
            version,
            header_size,
            incompat,
            compat,
            toc_size,
            stream,
            content,
            chunks_end,
            chunk_size,
            reserved,
            *rest,
        ) = spec.HEADER.unpack_from(raw)
        require(magic == spec.TOC_MAGIC, "header", None, f"the magic {spec.TOC_MAGIC!r}", magic)
        require(version == spec.VERSION, "header", None, f"version {spec.VERSION}", version)
        require(header_size == spec.HEADER_SIZE, "header", None, f"a header of {spec.HEADER_SIZE} bytes", header_size)
        unknown = incompat & ~spec.KNOWN_INCOMPAT
        require(not unknown, "header", None, "no incompatible feature that this reader does not know", f"bits {unknown:#x}")
        require(toc_size == len(raw), "header", None, f"toc_size {len(raw)}", toc_size)
        require(reserved == 0 and not any(rest[-1]), "header", None, "reserved bytes of zero", "others")
        valid_chunk_size = 0 < chunk_size <= spec.MAX_CHUNK_SIZE and chunk_size % spec.ALIGNMENT == 0
        require(
            valid_chunk_size,
            "header",
            None,
            f"a chunk size that is a multiple of 4096 up to {spec.MAX_CHUNK_SIZE}",
            chunk_size,
        )
        end = spec.HEADER_SIZE
        for index, (name, record_size) in enumerate(zip(spec.TABLES, spec.RECORD_SIZES, strict=True)):
            offset, count = rest[2 * index : 2 * index + 2]
            start = spec.align(end, spec.TABLE_ALIGNMENT)
            require(offset == start, "header", None, f"table {name} at {start}", offset)
            require(
                start + count * record_size <= len(raw),
                "header",
                None,
                f"table {name} within the TOC",
                f"{count} records",
            )
            require(not any(raw[end:start]), "header", None, f"padding of zero before table {name}", raw[end:start].hex())
            self.ranges[name] = (start, count)
            end = start + count * record_size
        require(end == len(raw), "header", None, f"tables that end at {len(raw)}", end)
        inodes = self.ranges["inodes"][1]
        require(1 <= inodes <= spec.MAX_INODES, "header", None, f"1 to {spec.MAX_INODES} inodes", inodes)
        strings = self.ranges["strings"][1]
        require(strings <= spec.MAX_STRINGS, "header", None, f"at most {spec.MAX_STRINGS} bytes of strings", strings)
        return Header(compat, toc_size, stream, content, chunks_end, chunk_size)

    def string(self, offset: int, length: int, table: str, index: int) -> bytes:
        self.require(
            offset + length <= len(self.strings),
            table,
            index,
            "a string within the strings",
            f"{length} bytes at {offset}",
        )
        return self.strings[offset : offset + length]

    # §3.6

    def parse_chunks(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        blob_end = stream_end = 0
        for index, record in enumerate(spec.CHUNK.iter_unpack(self.table("chunks"))):
            chunk = Chunk(*record[:6])
            where = ("chunks", index)
            start = spec.align(stream_end)
            self.require(chunk.stream_offset == start, *where, f"stream_offset {start}", chunk.stream_offset)
            self.require(chunk.blob_offset == blob_end, *where, f"blob_offset {blob_end}", chunk.blob_offset)
            self.require(
                1 <= chunk.raw_size <= self.header.chunk_size,
                *where,
                f"raw_size 1 to {self.header.chunk_size}",
                chunk.raw_size,
            )
            self.require(
                1 <= chunk.stored_size <= chunk.raw_size,
                *where,
                f"stored_size 1 to {chunk.raw_size}",
                chunk.stored_size,
            )
            self.require(chunk.flags & ~spec.CHUNK_ZSTD == 0 and record[6] == 0, *where, "reserved bits of zero", record[5:])
            if not chunk.flags:
                self.require(
                    chunk.stored_size == chunk.raw_size,
                    *where,
                    f"a raw chunk of {chunk.raw_size} bytes",
                    chunk.stored_size,
                )
            stream_end = chunk.stream_offset + chunk.raw_size
            blob_end += chunk.stored_size
            chunks.append(chunk)
        self.require(self.header.stream_size == stream_end, "header", None, f"stream_size {stream_end}", self.header.stream_size)
        self.require(self.header.chunks_end == blob_end, "header", None, f"chunks_end {blob_end}", self.header.chunks_end)
        return chunks

    # §3.2

    def check_inodes(self) -> None:
        root = self.inodes[0]
        self.require(root.is_directory and root.parent == 0, "inodes", 0, "a directory as the root, its own parent", root)
        dirents = xattrs = extents = content = 0
        for index, inode in enumerate(self.inodes):
            where = ("inodes", index)
            self.check_inode(index, inode)
            if inode.is_directory:
                self.require(inode.data == dirents, *where, f"first dirent {dirents}", inode.data)
                dirents += inode.records
            elif inode.flags & spec.SPARSE:
                self.require(inode.data == extents, *where, f"first extent {extents}", inode.data)
                extents += inode.records
            if inode.is_regular:
                content += inode.size
            self.require(inode.xattr == xattrs, *where, f"first xattr {xattrs}", inode.xattr)
            xattrs += inode.xattrs
        for name, count in (("dirents", dirents), ("xattrs", xattrs), ("extents", extents)):
            actual = self.ranges[name][1]
            self.require(actual == count, name, None, f"{count} records, as the inodes say", actual)
        self.require(self.header.content_size == content, "header", None, f"content_size {content}", self.header.content_size)

    def check_inode(self, index: int, inode: Inode) -> None:
        """What can be said of an inode alone."""
        require, where = self.require, ("inodes", index)
        require(inode.flags & ~_ALL_FLAGS == 0, *where, "reserved flags of zero", f"{inode.flags:#x}")
        require(inode.mtime_ns < spec.NS_PER_S, *where, "nanoseconds below 10^9", inode.mtime_ns)
        if inode.is_lower_link:
            require(inode.flags == spec.LOWER_LINK, *where, "no other flag on a lower link", f"{inode.flags:#x}")
            require(inode.mode == 0, *where, "mode 0 of a lower link", f"{inode.mode:o}")
        else:
            require(inode.mode & ~0o177777 == 0, *where, "a mode of 16 bits", f"{inode.mode:o}")
            require(stat.S_IFMT(inode.mode) in _D_TYPES, *where, "a file type", f"{inode.mode:o}")
        if inode.flags & (spec.OPAQUE | spec.IMPLICIT):
            require(inode.is_directory, *where, "OPAQUE and IMPLICIT on directories only", f"{inode.mode:o}")
        if stat.S_ISCHR(inode.mode):
            require(inode.rdev != 0, *where, "a character device other than 0:0", inode.rdev)
        elif not stat.S_ISBLK(inode.mode):
            require(inode.rdev == 0, *where, "rdev 0", inode.rdev)
        if inode.is_regular:
            self.check_regular(inode, where)
        elif inode.is_symlink or inode.is_lower_link:
            require(1 <= inode.size <= spec.MAX_TARGET, *where, f"a target of 1 to {spec.MAX_TARGET} bytes", inode.size)
            require(inode.records == 0, *where, "count 0", inode.records)
            self.check_target(inode, index, self.string(inode.data, inode.size, *where))
        else:
            require(inode.size == 0, *where, "size 0", inode.size)
            if not inode.is_directory:
                require(inode.data == 0 and inode.records == 0, *where, "data and count 0", (inode.data, inode.records))
        if not inode.is_regular:
            require(not inode.flags & spec.SPARSE, *where, "SPARSE on regular files only", f"{inode.mode:o}")

    def check_regular(self, inode: Inode, where: tuple[str, int]) -> None:
        self.require(inode.size <= spec.MAX_FILE_SIZE, *where, f"a size up to {spec.MAX_FILE_SIZE}", inode.size)
        if inode.flags & spec.SPARSE:
            return  # its data are extents, checked with them
        self.require(inode.records == 0, *where, "count 0", inode.records)
        if inode.size == 0:
            self.require(inode.data == 0, *where, "stream offset 0 of an empty file", inode.data)
        stream_size = self.header.stream_size
        self.require(
            inode.data + inode.size <= stream_size,
            *where,
            f"data within the stream of {stream_size} bytes",
            (inode.data, inode.size),
        )

    def check_target(self, inode: Inode, index: int, target: bytes) -> None:
        self.require(b"\0" not in target, "inodes", index, "a target without NUL", printable(target))
        if inode.is_lower_link:
            parts = target.split(b"/")
            plain = all(part not in (b"", b".", b"..") for part in parts)
            self.require(plain, "inodes", index, "a path from the root without . .. and empty names", printable(target))

    # §3.4, §3.5

    def parse_xattrs(self) -> list[tuple[bytes, bytes]]:
        xattrs: list[tuple[bytes, bytes]] = []
        for index, record in enumerate(spec.XATTR.iter_unpack(self.table("xattrs"))):
            name_offset, value_offset, value_length, name_length, reserved = record
            self.require(reserved == 0, "xattrs", index, "reserved bytes of zero", reserved)
            self.require(1 <= name_length <= spec.MAX_XATTR_NAME, "xattrs", index, "a name of 1 to 255 bytes", name_length)
            self.require(value_length <= spec.MAX_XATTR_VALUE, "xattrs", index, "a value of up to 65536 bytes", value_length)
            name = self.string(name_offset, name_length, "xattrs", index)
            self.require(b"\0" not in name, "xattrs", index, "a name without NUL", printable(name))
            xattrs.append((name, self.string(value_offset, value_length, "xattrs", index)))
        for inode in self.inodes:
            for index in range(inode.xattr + 1, inode.xattr + inode.xattrs):
                before, name = xattrs[index - 1][0], xattrs[index][0]
                self.require(before < name, "xattrs", index, f"a name after {printable(before)}", printable(name))
        return xattrs

    def check_extents(self) -> None:
        for inode in self.inodes:
            if not inode.flags & spec.SPARSE:
                continue
            end = 0
            for index in range(inode.data, inode.data + inode.records):
                extent, where = self.extents[index], ("extents", index)
                self.require(extent.length > 0, *where, "a length", 0)
                self.require(extent.file_offset >= end, *where, f"file_offset from {end}", extent.file_offset)
                end = extent.file_offset + extent.length
                self.require(end <= inode.size, *where, f"an end within the {inode.size} bytes of the file", end)
                stream_end = extent.stream_offset + extent.length
                stream_size = self.header.stream_size
                self.require(stream_end <= stream_size, *where, f"data within the stream of {stream_size} bytes", stream_end)

    # §3.3

    def parse_dirents(self) -> list[Dirent]:
        dirents: list[Dirent] = []
        for index, record in enumerate(spec.DIRENT.iter_unpack(self.table("dirents"))):
            offset, number, length, kind, reserved = record
            where = ("dirents", index)
            self.require(reserved == 0, *where, "reserved bytes of zero", reserved)
            self.require(1 <= length <= spec.MAX_NAME, *where, f"a name of 1 to {spec.MAX_NAME} bytes", length)
            name = self.string(offset, length, *where)
            valid = name not in (b".", b"..") and b"/" not in name and b"\0" not in name
            self.require(valid, *where, "a name without / and NUL that is not . or ..", printable(name))
            hidden = name.startswith(spec.WHITEOUT_PREFIX)
            self.require(not hidden, *where, "a name that does not begin with .wh.", printable(name))
            if number == spec.NO_INODE:
                self.require(kind == spec.DT_WHITEOUT, *where, f"type {spec.DT_WHITEOUT} of a whiteout", kind)
                dirents.append(Dirent(name, None, kind))
                continue
            self.require(number < len(self.inodes), *where, f"an inode below {len(self.inodes)}", number)
            inode = self.inodes[number]
            expected = spec.DT_LOWER_LINK if inode.is_lower_link else _D_TYPES[stat.S_IFMT(inode.mode)]
            self.require(kind == expected, *where, f"type {expected} of inode {number}", kind)
            dirents.append(Dirent(name, number, kind))
        return dirents

    def check_tree(self) -> None:
        """Names in order, links, parents, and that everything hangs below the root: see the essay above."""
        links = [2 if inode.is_directory else 0 for inode in self.inodes]
        named = [index == 0 for index in range(len(self.inodes))]  # by the directory that is its parent
        path_bytes = [0] * len(self.inodes)  # of directories, with the slash before each name
        for number, inode in enumerate(self.inodes):
            if not inode.is_directory:
                continue
            before = b""
            for index in range(inode.data, inode.data + inode.records):
                entry, where = self.dirents[index], ("dirents", index)
                self.require(before < entry.name, *where, f"a name after {printable(before)}", printable(entry.name))
                before = entry.name
                length = path_bytes[number] + 1 + len(entry.name)
                self.require(length <= spec.MAX_PATH + 1, *where, f"a path of up to {spec.MAX_PATH} bytes", length - 1)
                if entry.inode is None:
                    continue
                child = self.inodes[entry.inode]
                if child.is_directory:
                    self.require(entry.inode > number, *where, "a directory with a number above its parent's", entry.inode)
                    self.require(child.parent == number, *where, f"a directory whose parent is {number}", child.parent)
                    self.require(not named[entry.inode], *where, "one name only of a directory", entry.inode)
                    path_bytes[entry.inode] = length
                self.require(entry.inode != 0, *where, "no name of the root", 0)
                links[number if child.is_directory else entry.inode] += 1
                named[entry.inode] |= child.parent == number
        for number, inode in enumerate(self.inodes):
            self.require(named[number], "inodes", number, "a name in the directory that is its parent", inode.parent)
            self.require(inode.nlink == links[number], "inodes", number, f"nlink {links[number]}", inode.nlink)
