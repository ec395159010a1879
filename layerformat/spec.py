"""The layouts and constants of docs/format.md, in one place; nothing else in the package knows an offset.

Every table is a `struct.Struct` of its record; the names of the fields stand beside it in the order of the record.
"""

from __future__ import annotations

import struct
from typing import Final

VERSION: Final = 1

# §1 Footer
FOOTER: Final = struct.Struct("<QQQ32sIIII8s")  # toc_offset stored raw sha256 version reserved crc32 reserved magic
FOOTER_SIZE: Final = 80
FOOTER_CRC_RANGE: Final = 64
FOOTER_MAGIC: Final = b"WEENVLY1"
MAX_TOC_RAW_SIZE: Final = 1 << 32

# §2 Stream and chunks
ALIGNMENT: Final = 4096
DEFAULT_CHUNK_SIZE: Final = 256 * 1024
MAX_CHUNK_SIZE: Final = 16 * 1024 * 1024

# §3.1 Header: magic version header_size incompat compat toc_size stream_size content_size chunks_end chunk_size reserved,
# then six pairs of offset and count, then 24 reserved bytes.
HEADER: Final = struct.Struct("<8sIIQQQQQQII12Q24s")
HEADER_SIZE: Final = 192
TOC_MAGIC: Final = b"WEENVTOC"
COLUMNS_MAGIC: Final = b"WEENVTBC"  # of a TOC that is stored by columns, §1.1
KNOWN_INCOMPAT: Final = 0
TABLE_ALIGNMENT: Final = 8
TABLES: Final = ("inodes", "dirents", "xattrs", "extents", "chunks", "strings")

# §3.2 Inodes: mode uid gid nlink mtime_s mtime_ns rdev size data count xattr xattrs flags parent
INODE: Final = struct.Struct("<IIIIqIIQQIIHHI")
MAX_INODES: Final = 1 << 26
MAX_ID: Final = (1 << 32) - 1
MAX_FILE_SIZE: Final = (1 << 63) - 1
MAX_CONTENT_SIZE: Final = (1 << 64) - 1
MAX_MAJOR: Final = (1 << 12) - 1
MAX_MINOR: Final = (1 << 20) - 1
NS_PER_S: Final = 1_000_000_000

OPAQUE: Final = 1
IMPLICIT: Final = 2
SPARSE: Final = 4
LOWER_LINK: Final = 8

IMPLICIT_MODE: Final = 0o755

# §3.3 Directory entries: name inode name_length type reserved
DIRENT: Final = struct.Struct("<IIHBB")
NO_INODE: Final = 0xFFFFFFFF
DT_WHITEOUT: Final = 14
DT_LOWER_LINK: Final = 0
MAX_NAME: Final = 255

# §3.4 Extended attributes: name value value_length name_length reserved
XATTR: Final = struct.Struct("<IIIHH")
MAX_XATTR_NAME: Final = 255
MAX_XATTR_VALUE: Final = 65536
MAX_XATTRS: Final = (1 << 16) - 1

# §3.5 Extents: file_offset stream_offset length
EXTENT: Final = struct.Struct("<QQQ")

# §3.6 Chunks: stream_offset blob_offset stored_size raw_size sha256 flags reserved
CHUNK: Final = struct.Struct("<QQII32sII")
CHUNK_ZSTD: Final = 1

# §3.7 Strings, §4 Limits
MAX_STRINGS: Final = (1 << 32) - 1
MAX_PATH: Final = 4095
MAX_TARGET: Final = 4095

# §6 Whiteouts in tar
WHITEOUT_PREFIX: Final = b".wh."
OPAQUE_MARKER: Final = b".wh..wh..opq"
AUFS_PREFIX: Final = b".wh..wh."

assert FOOTER.size == FOOTER_SIZE
assert HEADER.size == HEADER_SIZE
assert (INODE.size, DIRENT.size, XATTR.size, EXTENT.size, CHUNK.size) == (64, 12, 16, 24, 64)

RECORD_SIZES: Final = (INODE.size, DIRENT.size, XATTR.size, EXTENT.size, CHUNK.size, 1)


def align(value: int, to: int = ALIGNMENT) -> int:
    """`value` rounded up to a multiple of `to`."""
    return -(-value // to) * to


def check_chunk_size(chunk_size: int) -> None:
    """ValueError unless `chunk_size` (bytes) is one that the format allows."""
    if chunk_size <= 0 or chunk_size % ALIGNMENT or chunk_size > MAX_CHUNK_SIZE:
        raise ValueError(f"chunk size: expected a multiple of {ALIGNMENT} up to {MAX_CHUNK_SIZE}, received {chunk_size}")
