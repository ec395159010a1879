/* Validation of a TOC and lookups in its tables: stop 2 of a read's path, where a name becomes an inode and an offset a chunk. */
#include "toc.h"

#include <errno.h>
#include <inttypes.h>
#include <sys/stat.h>

#include "util.h"

static const char *const table_names[TABLES] = {"inodes", "dirents", "xattrs", "extents", "chunks", "strings"};
static const uint32_t record_sizes[TABLES] = {
	sizeof(struct toc_inode),  sizeof(struct toc_dirent), sizeof(struct toc_xattr),
	sizeof(struct toc_extent), sizeof(struct toc_chunk),  1,
};
static const uint64_t record_limits[TABLES] = {TOC_MAX_INODES, UINT32_MAX - 1, UINT32_MAX - 1, UINT32_MAX - 1, UINT32_MAX - 1, UINT32_MAX};

#define BAD(...) fail(error, -EBADMSG, __VA_ARGS__)

static bool all_zero(const uint8_t *bytes, uint64_t n)
{
	for (uint64_t i = 0; i < n; i++)
		if (bytes[i])
			return false;
	return true;
}

static bool in_strings(const struct toc *toc, uint64_t offset, uint64_t length)
{
	return offset <= toc->n_strings && toc->n_strings - offset >= length;
}

static int check_header(const uint8_t *bytes, uint64_t size, struct toc *toc, struct weefs_error *error)
{
	const struct toc_header *header = (const struct toc_header *)bytes;
	uint64_t end = TOC_HEADER_SIZE;

	if (size < TOC_HEADER_SIZE)
		return BAD("TOC header: expected %u bytes, received %" PRIu64, TOC_HEADER_SIZE, size);
	if (memcmp(header->magic, TOC_MAGIC, sizeof(header->magic)) != 0)
		return BAD("TOC header: the magic is not " TOC_MAGIC);
	if (header->version != TOC_VERSION)
		return fail(error, -EOPNOTSUPP, "TOC header: version %u, this reader knows %u", header->version, TOC_VERSION);
	if (header->incompat != 0)
		return fail(error, -EOPNOTSUPP, "TOC header: unknown incompatible features %#" PRIx64, header->incompat);
	if (header->header_size != TOC_HEADER_SIZE)
		return BAD("TOC header: header_size is %u, expected %u", header->header_size, TOC_HEADER_SIZE);
	if (header->toc_size != size)
		return BAD("TOC header: toc_size is %" PRIu64 ", the TOC has %" PRIu64 " bytes", header->toc_size, size);
	if (header->reserved != 0 || !all_zero(header->reserved_tail, sizeof(header->reserved_tail)))
		return BAD("TOC header: reserved bytes are not zero");
	if (header->chunk_size == 0 || header->chunk_size % TOC_STREAM_ALIGN != 0 || header->chunk_size > TOC_MAX_CHUNK_SIZE)
		return BAD("TOC header: chunk_size is %u, expected a multiple of %u up to %u", header->chunk_size, TOC_STREAM_ALIGN, TOC_MAX_CHUNK_SIZE);

	for (int i = 0; i < TABLES; i++) {
		uint64_t begin = ALIGN_UP(end, 8);
		const struct toc_table *table = &header->tables[i];

		if (table->count > record_limits[i])
			return BAD("TOC header: %" PRIu64 " %s, at most %" PRIu64 " are allowed", table->count, table_names[i], record_limits[i]);
		if (table->offset != begin)
			return BAD("TOC header: table %s begins at %" PRIu64 ", expected %" PRIu64, table_names[i], table->offset, begin);
		if (begin > size || (size - begin) / record_sizes[i] < table->count)
			return BAD("TOC header: table %s (%" PRIu64 " records) ends beyond the TOC's %" PRIu64 " bytes", table_names[i], table->count, size);
		if (!all_zero(bytes + end, begin - end))
			return BAD("TOC header: the padding before table %s is not zero", table_names[i]);
		end = begin + table->count * record_sizes[i];
	}
	if (end != size)
		return BAD("TOC header: the tables end at %" PRIu64 ", the TOC at %" PRIu64, end, size);

	*toc = (struct toc){
		.header = header,
		.inodes = (const void *)(bytes + header->tables[TABLE_INODES].offset),
		.dirents = (const void *)(bytes + header->tables[TABLE_DIRENTS].offset),
		.xattrs = (const void *)(bytes + header->tables[TABLE_XATTRS].offset),
		.extents = (const void *)(bytes + header->tables[TABLE_EXTENTS].offset),
		.chunks = (const void *)(bytes + header->tables[TABLE_CHUNKS].offset),
		.strings = (const char *)(bytes + header->tables[TABLE_STRINGS].offset),
		.n_inodes = (uint32_t)header->tables[TABLE_INODES].count,
		.n_dirents = (uint32_t)header->tables[TABLE_DIRENTS].count,
		.n_xattrs = (uint32_t)header->tables[TABLE_XATTRS].count,
		.n_extents = (uint32_t)header->tables[TABLE_EXTENTS].count,
		.n_chunks = (uint32_t)header->tables[TABLE_CHUNKS].count,
		.n_strings = header->tables[TABLE_STRINGS].count,
	};
	if (toc->n_inodes == 0)
		return BAD("TOC header: no inodes, expected at least the root");
	return 0;
}

static int check_chunks(const struct toc *toc, struct weefs_error *error)
{
	uint64_t blob = 0, stream = 0;

	for (uint32_t i = 0; i < toc->n_chunks; i++) {
		const struct toc_chunk *chunk = &toc->chunks[i];

		if (stream > (uint64_t)INT64_MAX - 2 * TOC_MAX_CHUNK_SIZE)
			return BAD("chunk %u: the stream is longer than 2^63 bytes", i);
		stream = ALIGN_UP(stream, TOC_STREAM_ALIGN);
		if (chunk->stream_offset != stream)
			return BAD("chunk %u: stream_offset is %" PRIu64 ", expected %" PRIu64, i, chunk->stream_offset, stream);
		if (chunk->blob_offset != blob)
			return BAD("chunk %u: blob_offset is %" PRIu64 ", expected %" PRIu64, i, chunk->blob_offset, blob);
		if (chunk->raw_size == 0 || chunk->raw_size > toc->header->chunk_size)
			return BAD("chunk %u: raw_size is %u, expected 1 to %u", i, chunk->raw_size, toc->header->chunk_size);
		if (chunk->stored_size == 0 || chunk->stored_size > chunk->raw_size)
			return BAD("chunk %u: stored_size is %u, expected 1 to %u", i, chunk->stored_size, chunk->raw_size);
		if ((chunk->flags & ~CHUNK_ZSTD) != 0 || chunk->reserved != 0)
			return BAD("chunk %u: unknown flags %#x or reserved bytes", i, chunk->flags);
		if (chunk->flags == 0 && chunk->stored_size != chunk->raw_size)
			return BAD("chunk %u: raw, but stored_size %u is not raw_size %u", i, chunk->stored_size, chunk->raw_size);
		stream += chunk->raw_size;
		blob += chunk->stored_size;
	}
	if (toc->header->stream_size != stream)
		return BAD("TOC header: stream_size is %" PRIu64 ", the chunks end at %" PRIu64, toc->header->stream_size, stream);
	if (toc->header->chunks_end != blob)
		return BAD("TOC header: chunks_end is %" PRIu64 ", the chunks end at %" PRIu64, toc->header->chunks_end, blob);
	return 0;
}

/* Where the next inode's records must begin: the ranges of the inodes tile the three tables. */
struct cursors {
	uint32_t dirent;
	uint32_t xattr;
	uint32_t extent;
	uint64_t content;
};

static int check_xattrs(const struct toc *toc, uint32_t number, struct cursors *at, struct weefs_error *error)
{
	const struct toc_inode *inode = &toc->inodes[number];

	if (inode->xattr != at->xattr || toc->n_xattrs - at->xattr < inode->xattrs)
		return BAD("inode %u: xattrs %u+%u, expected them at %u of %u", number, inode->xattr, inode->xattrs, at->xattr, toc->n_xattrs);
	for (uint32_t i = at->xattr; i < at->xattr + inode->xattrs; i++) {
		const struct toc_xattr *xattr = &toc->xattrs[i];

		if (xattr->name_length == 0 || xattr->name_length > 255 || !in_strings(toc, xattr->name, xattr->name_length) ||
		    memchr(toc->strings + xattr->name, 0, xattr->name_length))
			return BAD("xattr %u: its name (%u bytes at %u) is not a name", i, xattr->name_length, xattr->name);
		if (xattr->value_length > TOC_MAX_XATTR_VALUE || !in_strings(toc, xattr->value, xattr->value_length))
			return BAD("xattr %u: its value (%u bytes at %u) is too long or not in the strings", i, xattr->value_length, xattr->value);
		if (xattr->reserved != 0)
			return BAD("xattr %u: reserved bytes are not zero", i);
		if (i > at->xattr && toc_compare_names(toc->strings + xattr[-1].name, xattr[-1].name_length, toc->strings + xattr->name,
						       xattr->name_length) >= 0)
			return BAD("xattr %u: its name is not above the one before", i);
	}
	at->xattr += inode->xattrs;
	return 0;
}

static int check_sparse(const struct toc *toc, uint32_t number, struct cursors *at, struct weefs_error *error)
{
	const struct toc_inode *inode = &toc->inodes[number];
	uint64_t end = 0;

	if (inode->data != at->extent || toc->n_extents - at->extent < inode->count)
		return BAD("inode %u: extents %" PRIu64 "+%u, expected them at %u of %u", number, inode->data, inode->count, at->extent, toc->n_extents);
	for (uint32_t i = at->extent; i < at->extent + inode->count; i++) {
		const struct toc_extent *extent = &toc->extents[i];

		if (extent->length == 0 || extent->file_offset < end || extent->file_offset > inode->size ||
		    inode->size - extent->file_offset < extent->length)
			return BAD("extent %u: bytes %" PRIu64 "+%" PRIu64 " overlap the one before or leave the file's %" PRIu64, i,
				   extent->file_offset, extent->length, inode->size);
		if (extent->stream_offset > toc->header->stream_size || toc->header->stream_size - extent->stream_offset < extent->length)
			return BAD("extent %u: its data leaves the stream", i);
		end = extent->file_offset + extent->length;
	}
	at->extent += inode->count;
	return 0;
}

static int check_regular(const struct toc *toc, uint32_t number, struct cursors *at, struct weefs_error *error)
{
	const struct toc_inode *inode = &toc->inodes[number];

	if (inode->size > (uint64_t)INT64_MAX || at->content > UINT64_MAX - inode->size)
		return BAD("inode %u: size %" PRIu64 " is beyond 2^63 or the sum of the sizes beyond 2^64", number, inode->size);
	at->content += inode->size;
	if (inode->flags & INODE_SPARSE)
		return check_sparse(toc, number, at, error);
	if (inode->count != 0)
		return BAD("inode %u: count is %u, expected 0", number, inode->count);
	if (inode->size == 0 && inode->data != 0)
		return BAD("inode %u: empty, but its data is at %" PRIu64, number, inode->data);
	if (inode->data > toc->header->stream_size || toc->header->stream_size - inode->data < inode->size)
		return BAD("inode %u: its data (%" PRIu64 "+%" PRIu64 ") leaves the stream", number, inode->data, inode->size);
	return 0;
}

static int check_inode(const struct toc *toc, uint32_t number, struct cursors *at, struct weefs_error *error)
{
	const struct toc_inode *inode = &toc->inodes[number];
	uint32_t type = inode->mode & S_IFMT, flags = inode->flags, allowed = 0;
	bool target = type == S_IFLNK || type == 0;
	int r;

	if (inode->mode & ~(uint32_t)(S_IFMT | 07777))
		return BAD("inode %u: mode is %#o", number, inode->mode);
	switch (type) {
	case S_IFDIR: allowed = INODE_OPAQUE | INODE_IMPLICIT; break;
	case S_IFREG: allowed = INODE_SPARSE; break;
	case 0: allowed = INODE_LOWER_LINK; break;
	case S_IFLNK: case S_IFCHR: case S_IFBLK: case S_IFIFO: case S_IFSOCK: break;
	default: return BAD("inode %u: mode is %#o, which is no file type", number, inode->mode);
	}
	if ((flags & ~allowed) != 0 || (type == 0 && (flags != INODE_LOWER_LINK || inode->mode != 0)))
		return BAD("inode %u: flags %#x do not go with mode %#o", number, flags, inode->mode);
	if (inode->mtime_ns >= 1000000000u)
		return BAD("inode %u: mtime_ns is %u", number, inode->mtime_ns);
	if (inode->rdev != 0 && type != S_IFCHR && type != S_IFBLK)
		return BAD("inode %u: rdev is %#x, but it is no device", number, inode->rdev);
	if (type == S_IFCHR && inode->rdev == 0)
		return BAD("inode %u: a character device 0:0, which overlayfs takes for a whiteout", number);
	if (inode->parent >= toc->n_inodes || !inode_is_directory(&toc->inodes[inode->parent]))
		return BAD("inode %u: its parent %u is no directory", number, inode->parent);
	if (type == S_IFREG) {
		r = check_regular(toc, number, at, error);
	} else if (target) {
		r = inode->size == 0 || inode->size > TOC_MAX_PATH || inode->count != 0 || !in_strings(toc, inode->data, inode->size) ||
				    memchr(toc->strings + inode->data, 0, inode->size)
			    ? BAD("inode %u: its target (%" PRIu64 " bytes at %" PRIu64 ") is no path", number, inode->size, inode->data)
			    : 0;
	} else if (type == S_IFDIR) {
		r = inode->size != 0 || inode->data != at->dirent || toc->n_dirents - at->dirent < inode->count
			    ? BAD("inode %u: dirents %" PRIu64 "+%u, expected them at %u of %u", number, inode->data, inode->count, at->dirent, toc->n_dirents)
			    : 0;
		if (r == 0)
			at->dirent += inode->count;
	} else {
		r = inode->size != 0 || inode->data != 0 || inode->count != 0 ? BAD("inode %u: a special file with data", number) : 0;
	}
	return r ? r : check_xattrs(toc, number, at, error);
}

/* A lower link's target: relative, without empty, `.` and `..` components. */
static bool is_clean_path(const char *path, size_t length)
{
	size_t begin = 0;

	for (size_t i = 0; i <= length; i++) {
		if (i < length && path[i] != '/')
			continue;
		if (i == begin || (i - begin == 1 && path[begin] == '.') || (i - begin == 2 && path[begin] == '.' && path[begin + 1] == '.'))
			return false;
		begin = i + 1;
	}
	return true;
}

static int check_name(const struct toc *toc, uint32_t index, uint32_t first, struct weefs_error *error)
{
	const struct toc_dirent *dirent = &toc->dirents[index];
	const char *name = toc->strings + dirent->name;
	uint32_t length = dirent->name_length;

	if (length == 0 || length > 255 || !in_strings(toc, dirent->name, length))
		return BAD("dirent %u: a name of %u bytes at %u", index, length, dirent->name);
	if (memchr(name, 0, length) || memchr(name, '/', length) || (length == 1 && name[0] == '.') || (length == 2 && memcmp(name, "..", 2) == 0) ||
	    (length >= 4 && memcmp(name, ".wh.", 4) == 0))
		return BAD("dirent %u: '%.*s' is not a name that a layer may hold", index, (int)length, name);
	if (index > first && toc_compare_names(toc->strings + dirent[-1].name, dirent[-1].name_length, name, length) >= 0)
		return BAD("dirent %u: '%.*s' is not above the name before", index, (int)length, name);
	return 0;
}

/* The entries of one directory. `lengths` has the length of each directory's path, `names` counts the names
 * (directories: subdirectories + 2), `at_parent` says whether one of them lies in the directory that the inode calls
 * its parent. */
static int check_directory(const struct toc *toc, uint32_t number, uint16_t *lengths, uint32_t *names, uint8_t *at_parent,
			   struct weefs_error *error)
{
	const struct toc_inode *directory = &toc->inodes[number];
	uint32_t first = (uint32_t)directory->data;

	for (uint32_t i = first; i < first + directory->count; i++) {
		const struct toc_dirent *dirent = &toc->dirents[i];
		const struct toc_inode *inode;
		uint32_t path_length = lengths[number] + 1u + dirent->name_length;
		int r = check_name(toc, i, first, error);

		if (r)
			return r;
		if (dirent->reserved != 0)
			return BAD("dirent %u: reserved bytes are not zero", i);
		if (path_length > TOC_MAX_PATH + 1)
			return BAD("dirent %u: its path is longer than %u bytes", i, TOC_MAX_PATH);
		if (dirent->inode == TOC_NO_INODE) {
			if (dirent->type != DT_WHITEOUT)
				return BAD("dirent %u: no inode, but its type is %u and not a whiteout's", i, dirent->type);
			continue;
		}
		if (dirent->inode == 0 || dirent->inode >= toc->n_inodes)
			return BAD("dirent %u: inode %u of %u", i, dirent->inode, toc->n_inodes);
		inode = &toc->inodes[dirent->inode];
		if (dirent->type != (inode->mode & S_IFMT) >> 12)
			return BAD("dirent %u: type %u, but inode %u has mode %#o", i, dirent->type, dirent->inode, inode->mode);
		if (!inode_is_directory(inode)) {
			names[dirent->inode]++;
			at_parent[dirent->inode] |= inode->parent == number;
			continue;
		}
		/* A directory's single entry lies in a lower-numbered directory: so there is a root and there are no cycles. */
		if (dirent->inode <= number || inode->parent != number || names[dirent->inode] != 0)
			return BAD("dirent %u: directory %u does not belong below directory %u", i, dirent->inode, number);
		names[dirent->inode] = 2;
		at_parent[dirent->inode] = 1;
		names[number]++;
		lengths[dirent->inode] = (uint16_t)path_length;
	}
	return 0;
}

static int check_tree(const struct toc *toc, struct weefs_error *error)
{
	cleanup_free uint16_t *lengths = calloc(toc->n_inodes, sizeof(*lengths));
	cleanup_free uint32_t *names = calloc(toc->n_inodes, sizeof(*names));
	cleanup_free uint8_t *at_parent = calloc(toc->n_inodes, sizeof(*at_parent));

	if (!lengths || !names || !at_parent)
		return fail(error, -ENOMEM, "no memory to check %u inodes", toc->n_inodes);
	names[0] = 2;
	at_parent[0] = 1;
	for (uint32_t i = 0; i < toc->n_inodes; i++) {
		int r = inode_is_directory(&toc->inodes[i]) ? check_directory(toc, i, lengths, names, at_parent, error) : 0;

		if (r)
			return r;
	}
	for (uint32_t i = 0; i < toc->n_inodes; i++) {
		if (names[i] == 0 || names[i] != toc->inodes[i].nlink)
			return BAD("inode %u: nlink is %u, but it has %u names", i, toc->inodes[i].nlink, names[i]);
		if (!at_parent[i])
			return BAD("inode %u: its parent %u has no name of it", i, toc->inodes[i].parent);
	}
	return 0;
}

int toc_validate(const uint8_t *bytes, uint64_t size, struct toc *ret_toc, struct weefs_error *error)
{
	struct toc toc;
	struct cursors at = {0};
	int r = check_header(bytes, size, &toc, error);

	if (r == 0)
		r = check_chunks(&toc, error);
	if (r)
		return r;
	if (!inode_is_directory(&toc.inodes[0]) || toc.inodes[0].parent != 0)
		return BAD("inode 0: expected the root directory, mode is %#o", toc.inodes[0].mode);
	for (uint32_t i = 0; i < toc.n_inodes; i++) {
		const struct toc_inode *inode = &toc.inodes[i];

		r = check_inode(&toc, i, &at, error);
		if (r)
			return r;
		if (inode->flags & INODE_LOWER_LINK) {
			toc.n_lower_links++;
			if (inode->mode == 0 && !is_clean_path(toc.strings + inode->data, inode->size))
				return BAD("inode %u: a link to '%.*s', which is no clean path", i, (int)inode->size, toc.strings + inode->data);
		} else if (inode->nlink > 1 && !inode_is_directory(inode)) {
			toc.n_linked++;
		}
	}
	if (at.dirent != toc.n_dirents || at.xattr != toc.n_xattrs || at.extent != toc.n_extents)
		return BAD("TOC: records that belong to no inode: dirents from %u, xattrs from %u, extents from %u", at.dirent, at.xattr, at.extent);
	if (at.content != toc.header->content_size)
		return BAD("TOC header: content_size is %" PRIu64 ", the files sum up to %" PRIu64, toc.header->content_size, at.content);
	r = check_tree(&toc, error);
	if (r == 0)
		*ret_toc = toc;
	return r;
}

int toc_compare_names(const char *a, size_t a_length, const char *b, size_t b_length)
{
	int order = memcmp(a, b, a_length < b_length ? a_length : b_length);

	return order ? order : (a_length > b_length) - (a_length < b_length);
}

int64_t toc_find(const struct toc *toc, const struct toc_inode *directory, const char *name, size_t length)
{
	uint64_t low = directory->data, high = directory->data + directory->count;

	while (low < high) {
		uint64_t middle = low + (high - low) / 2;
		const struct toc_dirent *dirent = &toc->dirents[middle];
		int order = toc_compare_names(toc->strings + dirent->name, dirent->name_length, name, length);

		if (order == 0)
			return (int64_t)middle;
		if (order < 0)
			low = middle + 1;
		else
			high = middle;
	}
	return -1;
}

uint32_t toc_chunk_at(const struct toc *toc, uint64_t stream_offset)
{
	uint32_t low = 0, high = toc->n_chunks;

	while (low < high) {
		uint32_t middle = low + (high - low) / 2;

		if (toc->chunks[middle].stream_offset + toc->chunks[middle].raw_size > stream_offset)
			high = middle;
		else
			low = middle + 1;
	}
	return low;
}

int weefs_check_toc(const uint8_t *bytes, uint64_t size, struct weefs_error *ret_error)
{
	struct toc toc;

	return toc_validate(bytes, size, &toc, ret_error);
}
