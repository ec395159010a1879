/* The table of contents of one layer: on-disk structures (docs/format.md §3), validation, and lookups in the
 * validated tables.
 *
 * toc_validate() walks every table once and is the only code that treats the bytes as hostile. What it accepts is
 * immutable and may be indexed without another look; everything else here takes a validated `struct toc`.
 */
#ifndef WEEFS_TOC_H
#define WEEFS_TOC_H

#include <stdbool.h>
#include <stdint.h>

#include "weefs.h"

#define TOC_MAGIC "WEENVTOC"
#define TOC_VERSION 1u
#define TOC_HEADER_SIZE 192u
#define TOC_MAX_INODES (1u << 26)
#define TOC_MAX_CHUNK_SIZE (16u << 20)
#define TOC_MAX_XATTR_VALUE 65536u
#define TOC_MAX_PATH 4095u
#define TOC_STREAM_ALIGN 4096u
#define TOC_NO_INODE UINT32_MAX

#define INODE_OPAQUE 1u
#define INODE_IMPLICIT 2u
#define INODE_SPARSE 4u
#define INODE_LOWER_LINK 8u

#define DT_WHITEOUT 14u

#define CHUNK_ZSTD 1u

struct toc_table {
	uint64_t offset;
	uint64_t count;
};

enum { TABLE_INODES, TABLE_DIRENTS, TABLE_XATTRS, TABLE_EXTENTS, TABLE_CHUNKS, TABLE_STRINGS, TABLES };

struct toc_header {
	char magic[8];
	uint32_t version;
	uint32_t header_size;
	uint64_t incompat;
	uint64_t compat;
	uint64_t toc_size;
	uint64_t stream_size;
	uint64_t content_size;
	uint64_t chunks_end;
	uint32_t chunk_size;
	uint32_t reserved;
	struct toc_table tables[TABLES];
	uint8_t reserved_tail[24];
};

struct toc_inode {
	uint32_t mode;
	uint32_t uid;
	uint32_t gid;
	uint32_t nlink;
	int64_t mtime_s;
	uint32_t mtime_ns;
	uint32_t rdev;
	uint64_t size;
	uint64_t data;
	uint32_t count;
	uint32_t xattr;
	uint16_t xattrs;
	uint16_t flags;
	uint32_t parent;
};

struct toc_dirent {
	uint32_t name;
	uint32_t inode;
	uint16_t name_length;
	uint8_t type;
	uint8_t reserved;
};

struct toc_xattr {
	uint32_t name;
	uint32_t value;
	uint32_t value_length;
	uint16_t name_length;
	uint16_t reserved;
};

struct toc_extent {
	uint64_t file_offset;
	uint64_t stream_offset;
	uint64_t length;
};

struct toc_chunk {
	uint64_t stream_offset;
	uint64_t blob_offset;
	uint32_t stored_size;
	uint32_t raw_size;
	uint8_t sha256[32];
	uint32_t flags;
	uint32_t reserved;
};

_Static_assert(sizeof(struct toc_header) == TOC_HEADER_SIZE, "docs/format.md 3.1");
_Static_assert(sizeof(struct toc_inode) == 64, "docs/format.md 3.2");
_Static_assert(sizeof(struct toc_dirent) == 12, "docs/format.md 3.3");
_Static_assert(sizeof(struct toc_xattr) == 16, "docs/format.md 3.4");
_Static_assert(sizeof(struct toc_extent) == 24, "docs/format.md 3.5");
_Static_assert(sizeof(struct toc_chunk) == 64, "docs/format.md 3.6");

/* Pointers into a TOC that somebody else keeps (a mapping, a buffer). Immutable once validated. */
struct toc {
	const struct toc_header *header;
	const struct toc_inode *inodes;
	const struct toc_dirent *dirents;
	const struct toc_xattr *xattrs;
	const struct toc_extent *extents;
	const struct toc_chunk *chunks;
	const char *strings;
	uint32_t n_inodes;
	uint32_t n_dirents;
	uint32_t n_xattrs;
	uint32_t n_extents;
	uint32_t n_chunks;
	uint32_t n_lower_links;		/* inodes with INODE_LOWER_LINK */
	uint32_t n_linked;		/* other inodes with nlink > 1, directories not counted */
	uint64_t n_strings;
};

/* Checks `size` bytes at `bytes` (8-byte aligned, as mappings and malloc'd buffers are) by every rule of docs/format.md §3.
 * 0; -EBADMSG with the rule that is broken; -EOPNOTSUPP for a newer version or an unknown incompatible bit; -ENOMEM. */
int toc_validate(const uint8_t *bytes, uint64_t size, struct toc *ret_toc, struct weefs_error *ret_error);

/* The index of the entry of `name` in the dirents of directory `inode`, or -1. */
int64_t toc_find(const struct toc *toc, const struct toc_inode *directory, const char *name, size_t length);

/* The first chunk whose end lies above `stream_offset`; n_chunks when there is none. */
uint32_t toc_chunk_at(const struct toc *toc, uint64_t stream_offset);

/* Byte-wise order of names, shorter first when one is the other's beginning. */
int toc_compare_names(const char *a, size_t a_length, const char *b, size_t b_length);

static inline bool inode_is_directory(const struct toc_inode *inode)
{
	return (inode->mode & 0170000) == 0040000;
}

#endif
