/* Writes a tree as an EROFS image (erofs.h): one pass that gives every inode its place, then one over the inodes and one over the blocks
 * of names, written from the first byte to the last. */
#include "erofs.h"

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <sys/stat.h>

#include "util.h"

#define BLOCK 4096u
#define BLOCK_BITS 12u
#define SLOT 32u
#define SUPERBLOCK_OFFSET 1024u
#define MAGIC 0xE0F5E1E2u
#define COMPAT_CHECKSUM 1u
#define COMPAT_MTIME 2u
#define INCOMPAT_CHUNKED_FILE 4u
#define FORMAT_EXTENDED 1u
#define NULL_ADDRESS UINT32_MAX
#define MAX_CHUNK_BITS (BLOCK_BITS + 31u)
#define MAX_XATTR_NAME 255u
#define MAX_XATTR_COUNT 65535u
#define BUFFER_SIZE (1u << 20)
#define MAX_NAMES_PER_BLOCK (BLOCK / 13u + 1u)

enum layout_kind { FLAT_PLAIN = 0, FLAT_INLINE = 2, CHUNK_BASED = 4 };

struct superblock {
	uint32_t magic;
	uint32_t checksum;	/* CRC-32C from here to the end of the block, with 0 in this place */
	uint32_t feature_compat;
	uint8_t block_bits;
	uint8_t extra_slots;
	uint16_t root_nid;
	uint64_t inodes;
	uint64_t build_time;
	uint32_t build_time_ns;
	uint32_t blocks;
	uint32_t meta_block;
	uint32_t xattr_block;
	uint8_t uuid[16];
	char volume_name[16];
	uint32_t feature_incompat;
	uint8_t reserved[44];
};

struct disk_inode {
	uint16_t format;	/* bit 0: extended; bits 1-3: enum layout_kind */
	uint16_t xattr_count;	/* 0, or 1 + the bytes of the entries / 4 */
	uint16_t mode;
	uint16_t reserved;
	uint64_t size;
	uint32_t where;		/* first block, device number, or format of the chunks */
	uint32_t number;
	uint32_t uid;
	uint32_t gid;
	int64_t mtime_s;
	uint32_t mtime_ns;
	uint32_t nlink;
	uint8_t reserved_tail[16];
};

struct disk_dirent {
	uint32_t nid_low, nid_high;
	uint16_t name_offset;	/* in the block; that of the first one gives the number of dirents */
	uint8_t type;
	uint8_t reserved;
};

struct disk_xattr {
	uint8_t name_length;
	uint8_t index;		/* of the prefix */
	uint16_t value_length;
};

struct disk_xattr_header {
	uint32_t filter;
	uint8_t shared;
	uint8_t reserved[7];
};

_Static_assert(sizeof(struct superblock) == 128, "erofs_fs.h: erofs_super_block");
_Static_assert(offsetof(struct superblock, feature_incompat) == 80, "erofs_fs.h: erofs_super_block");
_Static_assert(sizeof(struct disk_inode) == 64, "erofs_fs.h: erofs_inode_extended");
_Static_assert(sizeof(struct disk_dirent) == 12, "erofs_fs.h: erofs_dirent");
_Static_assert(sizeof(struct disk_xattr) == 4, "erofs_fs.h: erofs_xattr_entry");
_Static_assert(sizeof(struct disk_xattr_header) == 12, "erofs_fs.h: erofs_xattr_ibody_header");

struct image {
	const struct tree *tree;
	uint32_t *nids;
	uint64_t inodes_end;	/* bytes */
	uint64_t blocks;	/* of the whole image */
	uint8_t *buffer;
	size_t used;
	uint64_t written;	/* before the buffer */
	int fd;
	struct superblock superblock;
	struct weefs_error *error;
};

/* ---- attributes ---- */

static const struct {
	const char *text;
	uint8_t index;
	bool whole;	/* the name itself, not a prefix */
} prefixes[] = {
	{"user.", 1, false}, {"trusted.", 4, false}, {"security.", 6, false},
	{"system.posix_acl_access", 2, true}, {"system.posix_acl_default", 3, true},
};

#define INDEX_TRUSTED 4u
#define INSTRUCTING "trusted.overlay."
#define ESCAPE "overlay."

struct xattr {
	uint8_t index;
	const char *lead;	/* before `name`; "" or the escape */
	const char *name;	/* behind the prefix */
	size_t name_length;	/* of both */
	const char *value;
	size_t value_length;
	char redirect[64];
};

/* Regular files with contents say where they are; opaque directories that they are. */
static uint32_t own_xattrs(const struct tree_inode *inode)
{
	if (!inode->inode)
		return 0;
	return S_ISREG(inode->inode->mode) && inode->inode->size ? 2 : inode->opaque;
}

static void own_xattr(const struct tree_inode *inode, uint32_t number, struct xattr *ret)
{
	*ret = (struct xattr){.index = INDEX_TRUSTED, .lead = "", .value = ""};
	if (inode->opaque) {
		ret->name = "overlay.opaque";
		ret->value = "y";
		ret->value_length = 1;
	} else if (number == 0) {
		ret->name = "overlay.metacopy";
	} else {
		ret->name = "overlay.redirect";
		ret->value_length = (size_t)snprintf(ret->redirect, sizeof(ret->redirect), "/%s/%" PRIu32, inode->layer, inode->number);
		ret->value = ret->redirect;
	}
	ret->name_length = strlen(ret->name);
}

/* The `number`th attribute. What would instruct an overlay has one more "overlay." in its name, as the kernel itself escapes it. */
static int get_xattr(const struct image *image, const struct tree_inode *inode, uint32_t number, struct xattr *ret)
{
	uint32_t own = own_xattrs(inode);
	const struct toc_xattr *xattr;
	const char *name;
	size_t prefix = 0;

	if (number < own) {
		own_xattr(inode, number, ret);
		return 0;
	}
	xattr = &inode->toc->xattrs[inode->inode->xattr + number - own];
	name = inode->toc->strings + xattr->name;
	*ret = (struct xattr){.lead = "", .value = inode->toc->strings + xattr->value, .value_length = xattr->value_length};
	for (size_t i = 0; i < sizeof(prefixes) / sizeof(*prefixes) && !ret->index; i++) {
		prefix = strlen(prefixes[i].text);
		if (xattr->name_length >= prefix && memcmp(name, prefixes[i].text, prefix) == 0 &&
		    (xattr->name_length > prefix) == !prefixes[i].whole)
			ret->index = prefixes[i].index;
	}
	if (!ret->index)
		return fail(image->error, -EOPNOTSUPP, "the attribute '%.*s': EROFS knows user, trusted, security and ACLs", (int)xattr->name_length, name);
	ret->name = name + prefix;
	if (xattr->name_length >= strlen(INSTRUCTING) && memcmp(name, INSTRUCTING, strlen(INSTRUCTING)) == 0)
		ret->lead = ESCAPE;
	ret->name_length = strlen(ret->lead) + xattr->name_length - prefix;
	if (ret->name_length > MAX_XATTR_NAME || ret->value_length > UINT16_MAX)
		return fail(image->error, -EOPNOTSUPP, "the attribute '%.*s': %zu bytes of name and %zu of value, EROFS holds %u and %u",
			    (int)xattr->name_length, name, ret->name_length, ret->value_length, MAX_XATTR_NAME, UINT16_MAX);
	return 0;
}

static uint32_t count_xattrs(const struct tree_inode *inode)
{
	return own_xattrs(inode) + (inode->inode ? inode->inode->xattrs : 0);
}

/* Bytes of all attributes with their header; 0 without any. */
static int xattrs_size(const struct image *image, const struct tree_inode *inode, uint32_t *ret_size)
{
	uint64_t size = sizeof(struct disk_xattr_header);
	struct xattr xattr;

	*ret_size = 0;
	for (uint32_t i = 0; i < count_xattrs(inode); i++) {
		int r = get_xattr(image, inode, i, &xattr);

		if (r)
			return r;
		size += ALIGN_UP(sizeof(struct disk_xattr) + xattr.name_length + xattr.value_length, (size_t)4);
	}
	if ((size - sizeof(struct disk_xattr_header)) / 4 + 1 > MAX_XATTR_COUNT)
		return fail(image->error, -EOPNOTSUPP, "attributes of %" PRIu64 " bytes on one inode, EROFS holds %u", size, MAX_XATTR_COUNT * 4);
	if (count_xattrs(inode))
		*ret_size = (uint32_t)size;
	return 0;
}

/* ---- names ---- */

/* Goes through the names of a directory in the image's order, "." and ".." among them. */
struct names {
	const struct image *image;
	uint32_t directory, next;
	uint32_t dots;	/* how many of the two were given */
};

static bool next_name(struct names *names, struct tree_name *ret)
{
	const struct tree_inode *directory = &names->image->tree->inodes[names->directory];
	const struct tree_name *name = names->next < directory->count ? &names->image->tree->names[directory->first + names->next] : NULL;
	struct tree_name dot = {.name = "..", .length = (uint16_t)(names->dots + 1), .type = S_IFDIR >> 12,
				.inode = names->dots ? directory->parent : names->directory};

	if (names->dots < 2 && (!name || toc_compare_names(dot.name, dot.length, name->name, name->length) < 0)) {
		names->dots++;
		*ret = dot;
		return true;
	}
	if (!name)
		return false;
	names->next++;
	*ret = *name;
	return true;
}

/* The names of the next block: as many as fit. 0 behind the last. */
static uint32_t next_block(struct names *names, struct tree_name *ret_names, uint32_t *ret_bytes)
{
	uint32_t n = 0, bytes = 0;

	for (;;) {
		struct names before = *names;
		uint32_t needed;

		if (!next_name(names, &ret_names[n]))
			break;
		needed = (uint32_t)sizeof(struct disk_dirent) + ret_names[n].length;
		if (bytes + needed > BLOCK) {
			*names = before;
			break;
		}
		bytes += needed;
		n++;
	}
	*ret_bytes = bytes;
	return n;
}

static uint64_t names_size(const struct image *image, uint32_t directory)
{
	struct names names = {.image = image, .directory = directory};
	struct tree_name block[MAX_NAMES_PER_BLOCK];
	uint64_t size = 0;
	uint32_t bytes;

	while (next_block(&names, block, &bytes))
		size = ALIGN_UP(size, (uint64_t)BLOCK) + bytes;
	return size;
}

/* ---- places ---- */

struct layout {
	enum layout_kind kind;
	uint32_t xattrs;	/* bytes */
	uint64_t size;
	uint64_t blocks;	/* behind the inodes */
	uint64_t tail;		/* bytes behind the attributes: what is inline, or the places of the chunks */
	uint32_t chunk_bits;	/* CHUNK_BASED */
};

/* The largest chunks that the format has: one covers a file of 8 TiB, and each is a hole of 4 bytes. */
static void layout_holes(struct layout *layout)
{
	uint32_t bits = BLOCK_BITS;

	while (bits < MAX_CHUNK_BITS && layout->size > UINT64_C(1) << bits)
		bits++;
	layout->kind = CHUNK_BASED;
	layout->chunk_bits = bits - BLOCK_BITS;
	layout->tail = 4 * ((layout->size - 1) / (UINT64_C(1) << bits) + 1);
}

static void layout_data(struct layout *layout)
{
	uint64_t tail = layout->size % BLOCK;

	layout->blocks = (layout->size + BLOCK - 1) / BLOCK;
	if (tail && sizeof(struct disk_inode) + layout->xattrs + tail <= BLOCK) {
		layout->kind = FLAT_INLINE;
		layout->blocks--;
		layout->tail = tail;
	}
}

static int get_layout(const struct image *image, uint32_t index, struct layout *ret)
{
	const struct tree_inode *inode = &image->tree->inodes[index];
	int r;

	*ret = (struct layout){.kind = FLAT_PLAIN};
	r = xattrs_size(image, inode, &ret->xattrs);
	if (r || !inode->inode)
		return r;
	ret->size = inode_is_directory(inode->inode) ? names_size(image, index) : inode->inode->size;
	if (S_ISREG(inode->inode->mode) && ret->size)
		layout_holes(ret);
	else if (S_ISDIR(inode->inode->mode) || S_ISLNK(inode->inode->mode))
		layout_data(ret);
	return 0;
}

/* Where an inode goes that comes behind byte `end`. */
static uint64_t place(uint64_t end, const struct layout *layout)
{
	uint64_t at = ALIGN_UP(end, (uint64_t)SLOT);
	uint64_t size = sizeof(struct disk_inode) + layout->xattrs + layout->tail;
	bool crosses = at % BLOCK + size > BLOCK;

	return crosses ? ALIGN_UP(at, (uint64_t)BLOCK) : at;
}

static int place_all(struct image *image)
{
	uint64_t end = SUPERBLOCK_OFFSET + sizeof(struct superblock), blocks = 0;

	for (uint32_t i = 0; i < image->tree->n_inodes; i++) {
		struct layout layout;
		int r = get_layout(image, i, &layout);

		if (r)
			return r;
		end = place(end, &layout);
		image->nids[i] = (uint32_t)(end / SLOT);
		end += sizeof(struct disk_inode) + layout.xattrs + layout.tail;
		blocks += layout.blocks;
		if (end + blocks * BLOCK > EROFS_MAX_IMAGE)
			return fail(image->error, -EFBIG, "the image would have more than %" PRIu64 " bytes", EROFS_MAX_IMAGE);
	}
	image->inodes_end = end;
	image->blocks = ALIGN_UP(end, (uint64_t)BLOCK) / BLOCK + blocks;
	return 0;
}

/* ---- writing ---- */

static uint32_t crc32c(const uint8_t *bytes, size_t n)
{
	uint32_t crc = UINT32_MAX;

	for (size_t i = 0; i < n; i++) {
		crc ^= bytes[i];
		for (int bit = 0; bit < 8; bit++)
			crc = crc >> 1 ^ (0x82f63b78u & -(crc & 1));
	}
	return crc;
}

/* The checksum covers what lies behind the superblock in its block: it is made when that is complete, before it is written. */
static void seal(uint8_t *block)
{
	uint32_t crc = crc32c(block + SUPERBLOCK_OFFSET, BLOCK - SUPERBLOCK_OFFSET);

	memcpy(block + SUPERBLOCK_OFFSET + offsetof(struct superblock, checksum), &crc, sizeof(crc));
}

static int flush(struct image *image)
{
	size_t done = 0;

	if (image->written == 0)
		seal(image->buffer);
	while (done < image->used) {
		ssize_t n = pwrite(image->fd, image->buffer + done, image->used - done, (off_t)(image->written + done));

		if (n < 0 && errno != EINTR)
			return fail(image->error, -errno, "image, at byte %" PRIu64 ": %s", image->written + done, strerror(errno));
		done += n > 0 ? (size_t)n : 0;
	}
	image->written += image->used;
	image->used = 0;
	return 0;
}

/* NULL: zeros. */
static int put(struct image *image, const void *bytes, uint64_t size)
{
	const uint8_t *from = bytes;

	while (size) {
		size_t n = BUFFER_SIZE - image->used < size ? BUFFER_SIZE - image->used : (size_t)size;

		if (from) {
			memcpy(image->buffer + image->used, from, n);
			from += n;
		} else {
			memset(image->buffer + image->used, 0, n);
		}
		image->used += n;
		size -= n;
		if (image->used == BUFFER_SIZE) {
			int r = flush(image);

			if (r)
				return r;
		}
	}
	return 0;
}

static int put_zeros_to(struct image *image, uint64_t offset)
{
	return put(image, NULL, offset - image->written - image->used);
}

static int put_xattrs(struct image *image, const struct tree_inode *inode)
{
	const struct disk_xattr_header header = {0};
	int r = count_xattrs(inode) ? put(image, &header, sizeof(header)) : 0;

	for (uint32_t i = 0; r == 0 && i < count_xattrs(inode); i++) {
		struct xattr xattr;
		struct disk_xattr entry;
		size_t size;

		r = get_xattr(image, inode, i, &xattr);
		if (r)
			return r;
		entry = (struct disk_xattr){.name_length = (uint8_t)xattr.name_length, .index = xattr.index, .value_length = (uint16_t)xattr.value_length};
		size = sizeof(entry) + xattr.name_length + xattr.value_length;
		r = put(image, &entry, sizeof(entry));
		if (r == 0)
			r = put(image, xattr.lead, strlen(xattr.lead));
		if (r == 0)
			r = put(image, xattr.name, xattr.name_length - strlen(xattr.lead));
		if (r == 0)
			r = put(image, xattr.value, xattr.value_length);
		if (r == 0)
			r = put(image, NULL, ALIGN_UP(size, (size_t)4) - size);
	}
	return r;
}

/* The format's own numbers of file types, by d_type. */
static const uint8_t file_types[16] = {
	[S_IFREG >> 12] = 1, [S_IFDIR >> 12] = 2, [S_IFCHR >> 12] = 3, [S_IFBLK >> 12] = 4, [S_IFIFO >> 12] = 5, [S_IFSOCK >> 12] = 6, [S_IFLNK >> 12] = 7,
};

static int put_names(struct image *image, const struct tree_name *names, uint32_t n)
{
	uint32_t offset = n * (uint32_t)sizeof(struct disk_dirent);
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < n; i++) {
		const struct disk_dirent dirent = {.nid_low = image->nids[names[i].inode], .name_offset = (uint16_t)offset,
						   .type = file_types[names[i].type & 15]};

		r = put(image, &dirent, sizeof(dirent));
		offset += names[i].length;
	}
	for (uint32_t i = 0; r == 0 && i < n; i++)
		r = put(image, names[i].name, names[i].length);
	return r;
}

/* The last block of names (`inline_part`), or all that have one of their own. */
static int put_directory(struct image *image, uint32_t index, const struct layout *layout, bool inline_part)
{
	struct names names = {.image = image, .directory = index};
	struct tree_name block[MAX_NAMES_PER_BLOCK];
	uint32_t n, bytes;

	for (uint64_t number = 0; (n = next_block(&names, block, &bytes)); number++) {
		int r = 0;

		if ((number >= layout->blocks) == inline_part)
			r = put_names(image, block, n);
		if (r == 0 && number < layout->blocks && !inline_part)
			r = put(image, NULL, BLOCK - bytes);
		if (r)
			return r;
	}
	return 0;
}

static const char *target_of(const struct tree_inode *inode)
{
	return inode->toc->strings + inode->inode->data;
}

static int put_tail(struct image *image, uint32_t index, const struct layout *layout)
{
	const struct tree_inode *inode = &image->tree->inodes[index];
	const uint32_t hole = NULL_ADDRESS;
	int r = 0;

	if (layout->kind == FLAT_INLINE)
		return S_ISLNK(inode->inode->mode) ? put(image, target_of(inode), layout->size) : put_directory(image, index, layout, true);
	for (uint64_t i = 0; r == 0 && i < layout->tail; i += sizeof(hole))
		r = put(image, &hole, sizeof(hole));
	return r;
}

static int put_inode(struct image *image, uint32_t index, const struct layout *layout, uint64_t first_block)
{
	const struct tree_inode *inode = &image->tree->inodes[index];
	const struct toc_inode whiteout = {.mode = S_IFCHR}, *from = inode->inode ? inode->inode : &whiteout;
	struct disk_inode disk = {
		.format = (uint16_t)(FORMAT_EXTENDED | (uint32_t)layout->kind << 1),
		.xattr_count = layout->xattrs ? (uint16_t)((layout->xattrs - sizeof(struct disk_xattr_header)) / 4 + 1) : 0,
		.mode = (uint16_t)(S_ISLNK(from->mode) ? S_IFLNK | 0777 : from->mode),
		.size = layout->size,
		.number = index + 1,
		.uid = from->uid,
		.gid = from->gid,
		.mtime_s = from->mtime_s,
		.mtime_ns = from->mtime_ns,
		.nlink = inode->nlink,
	};
	int r;

	if (layout->kind == CHUNK_BASED)
		disk.where = layout->chunk_bits;
	else if (layout->blocks)
		disk.where = (uint32_t)first_block;
	else if (S_ISCHR(from->mode) || S_ISBLK(from->mode))
		disk.where = from->rdev;
	r = put_zeros_to(image, (uint64_t)image->nids[index] * SLOT);
	if (r == 0)
		r = put(image, &disk, sizeof(disk));
	if (r == 0)
		r = put_xattrs(image, inode);
	return r ? r : put_tail(image, index, layout);
}

static int put_inodes(struct image *image)
{
	uint64_t block = ALIGN_UP(image->inodes_end, (uint64_t)BLOCK) / BLOCK;

	for (uint32_t i = 0; i < image->tree->n_inodes; i++) {
		struct layout layout;
		int r = get_layout(image, i, &layout);

		if (r == 0)
			r = put_inode(image, i, &layout, block);
		if (r)
			return r;
		block += layout.blocks;
	}
	return put_zeros_to(image, ALIGN_UP(image->inodes_end, (uint64_t)BLOCK));
}

static int put_blocks(struct image *image)
{
	for (uint32_t i = 0; i < image->tree->n_inodes; i++) {
		const struct tree_inode *inode = &image->tree->inodes[i];
		struct layout layout;
		int r;

		if (!inode->inode || (!S_ISDIR(inode->inode->mode) && !S_ISLNK(inode->inode->mode)))
			continue;
		r = get_layout(image, i, &layout);
		if (r || layout.blocks == 0)
			goto next;
		if (S_ISDIR(inode->inode->mode)) {
			r = put_directory(image, i, &layout, false);
		} else {
			r = put(image, target_of(inode), layout.size);
			if (r == 0)
				r = put(image, NULL, layout.blocks * BLOCK - layout.size);
		}
next:
		if (r)
			return r;
	}
	return 0;
}

/* ---- the image ---- */

static int parse_uuid(const char *name, uint8_t *ret_uuid)
{
	static const char digits[] = "0123456789abcdef";

	if (strlen(name) != 32)
		return -EINVAL;
	for (int i = 0; i < 32; i++) {
		const char *digit = strchr(digits, name[i]);

		if (!digit)
			return -EINVAL;
		ret_uuid[i / 2] = (uint8_t)(ret_uuid[i / 2] << 4 | (digit - digits));
	}
	return 0;
}

/* What does not depend on the tree. */
static int make_superblock(const char *name, struct superblock *ret, struct weefs_error *error)
{
	*ret = (struct superblock){
		.magic = MAGIC,
		.feature_compat = COMPAT_CHECKSUM | COMPAT_MTIME,
		.block_bits = BLOCK_BITS,
		.feature_incompat = INCOMPAT_CHUNKED_FILE,
	};
	snprintf(ret->volume_name, sizeof(ret->volume_name), "weenv-%u", EROFS_WRITER_VERSION);
	if (parse_uuid(name, ret->uuid))
		return fail(error, -EINVAL, "the name of an image: expected 32 hexadecimal digits, received '%.64s'", name);
	return 0;
}

static int write_image(struct image *image)
{
	int r = place_all(image);

	if (r)
		return r;
	image->superblock.root_nid = (uint16_t)image->nids[0];
	image->superblock.inodes = image->tree->n_inodes;
	image->superblock.blocks = (uint32_t)image->blocks;
	r = put_zeros_to(image, SUPERBLOCK_OFFSET);
	if (r == 0)
		r = put(image, &image->superblock, sizeof(image->superblock));
	if (r == 0)
		r = put_inodes(image);
	if (r == 0)
		r = put_blocks(image);
	return r ? r : flush(image);
}

int erofs_write(const struct tree *tree, const char *name, int fd, struct weefs_image_info *ret_info, struct weefs_error *error)
{
	cleanup_free uint8_t *buffer = calloc(1, BUFFER_SIZE);
	cleanup_free uint32_t *nids = calloc(tree->n_inodes, sizeof(*nids));
	struct image image = {.tree = tree, .fd = fd, .buffer = buffer, .nids = nids, .error = error};
	int r = make_superblock(name, &image.superblock, error);

	if (r == 0 && (!buffer || !nids))
		r = fail(error, -ENOMEM, "no memory for an image of %" PRIu32 " inodes", tree->n_inodes);
	if (r == 0)
		r = write_image(&image);
	if (r == 0)
		*ret_info = (struct weefs_image_info){.size = image.written, .inodes = tree->n_inodes, .names = tree->n_names};
	return r;
}

int weefs_write_layer_image(const uint8_t *bytes, uint64_t size, const char *name, int fd, struct weefs_image_info *ret_info, struct weefs_error *error)
{
	struct tree tree = {0};
	struct toc toc;
	int r = toc_validate(bytes, size, &toc, error);

	if (r == 0)
		r = tree_of_layer(&toc, name, &tree, error);
	if (r == 0)
		r = erofs_write(&tree, name, fd, ret_info, error);
	tree_free(&tree);
	return r;
}

int weefs_check_image(int fd, const char *name, struct weefs_error *error)
{
	uint8_t block[BLOCK] __attribute__((aligned(8)));
	struct superblock *actual = (struct superblock *)(block + SUPERBLOCK_OFFSET), wanted;
	struct stat st;
	uint32_t checksum;
	ssize_t n;
	int r = make_superblock(name, &wanted, error);

	if (r)
		return r;
	if (fstat(fd, &st) < 0)
		return fail(error, -errno, "image: %s", strerror(errno));
	n = pread(fd, block, sizeof(block), 0);
	if (n < 0)
		return fail(error, -errno, "image: %s", strerror(errno));
	if (n != BLOCK || actual->magic != MAGIC)
		return fail(error, -EBADMSG, "image: expected an EROFS superblock");
	checksum = actual->checksum;
	actual->checksum = 0;
	if (crc32c(block + SUPERBLOCK_OFFSET, BLOCK - SUPERBLOCK_OFFSET) != checksum)
		return fail(error, -EBADMSG, "image: its first block does not have its checksum");
	if ((uint64_t)st.st_size != (uint64_t)actual->blocks * BLOCK)
		return fail(error, -EBADMSG, "image: expected %" PRIu64 " bytes, received %lld", (uint64_t)actual->blocks * BLOCK, (long long)st.st_size);
	if (memcmp(actual->uuid, wanted.uuid, sizeof(wanted.uuid)) != 0 || memcmp(actual->volume_name, wanted.volume_name, sizeof(wanted.volume_name)) != 0)
		return fail(error, -EBADMSG, "image: it is of another tree or of another version of the writer than %s of %.16s", name, wanted.volume_name);
	return 0;
}
