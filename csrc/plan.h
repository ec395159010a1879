/* The merged view of one plan: what its layers look like on top of each other.
 *
 * Only directories that more than one layer has are computed, when the plan is added; everything below a directory of
 * a single layer is read straight from that layer's TOC. Layers are applied from the base up, as an unpacker would
 * apply them, which decides the corner cases (docs/decisions/0002):
 *
 * - a whiteout, or an entry that is no directory, hides what is below; an opaque directory too;
 * - an implicit directory (the layer holds something below it, but no entry for it) changes no attributes, and where
 *   the layers below have a symlink it goes through it, as an unpacker's path lookup does;
 * - a lower link is the lower file itself, and link counts are the number of names that the plan shows.
 *
 * overlayfs, given the layers one by one, shows the same in most plans. Where it would not, the plan says why (`not_stackable`): it has no
 * lower links, takes the attributes of an implicit directory for meant, replaces a symlink by it, never hides anything by an opaque root,
 * counts hidden names of a file, and lists whiteouts where no directory is below. A root's own attributes do not matter: above it is
 * always an upper directory.
 *
 * Immutable once built. Names point into the TOCs of the layers, which must outlive the plan.
 */
#ifndef WEEFS_PLAN_H
#define WEEFS_PLAN_H

#include <stdint.h>

#include "node.h"
#include "toc.h"

#define PLAN_MAX_STACK 499u	/* layers: overlayfs takes 500, the objects among them */

struct plan_layer {
	const struct toc *toc;
	uint32_t slot;
	uint32_t first_link, n_links; /* its lower links among the overrides, while the plan is built */
};

struct plan_entry {
	uint64_t node;
	const char *name;
	uint16_t name_length;
	uint8_t type;	/* as d_type */
};

struct plan_directory {
	struct plan_entry *entries;	/* sorted by name */
	uint32_t count;
	uint32_t nlink;			/* 2 + subdirectories */
	uint32_t parent;		/* index of the parent in the plan's table; the root's is itself */
	uint32_t layer;			/* whose inode has the attributes: index in `layers` */
	uint32_t inode;
};

/* A file that is another one in this plan than in its layer: a lower link, or a file with another link count. Sorted by `file`. */
struct plan_override {
	uint64_t file;		/* node_file() of the inode that a layer's dirent names */
	uint64_t target;	/* node_file() of the inode that is meant */
	uint64_t node;		/* what LOOKUP answers */
};

/* Index: the number in a NODE_PLAN_FILE id. */
struct plan_file {
	uint64_t file;	/* node_file() of the inode */
	uint32_t nlink;
};

struct plan {
	char *name;
	uint32_t slot;
	uint64_t generation;
	struct plan_layer *layers;	/* base first */
	uint32_t n_layers;
	struct plan_directory *directories;	/* [0]: the root */
	uint32_t n_directories;
	struct plan_override *overrides;
	uint32_t n_overrides;
	struct plan_file *files;
	uint32_t n_files;
	uint64_t n_entries;	/* of the layers, before merging */
	uint64_t content_size;	/* of the layers */
	const char *not_stackable;	/* why overlayfs would not show the same from the layers themselves; NULL: it would */
};

/* Builds the plan of `n` layers, base first; `slot` becomes part of its node ids. -EXDEV, -ENOENT, -ELOOP, -ENOTDIR
 * with a sentence: the layers do not fit together; -ENOMEM. */
int plan_build(const char *name, uint32_t slot, const struct plan_layer *layers, uint32_t n, struct plan **ret_plan, struct weefs_error *ret_error);

/* NULL is allowed. */
void plan_free(struct plan *plan);

/* The index in `layers` of the layer with that slot, or -1. */
int plan_find_layer(const struct plan *plan, uint32_t slot);

/* What a dirent's inode is in this plan: its own node_file(), or what an override says. */
uint64_t plan_file_node(const struct plan *plan, uint32_t layer_slot, uint32_t inode);

/* The entry of `name` in a merged directory, or NULL. */
const struct plan_entry *plan_find(const struct plan_directory *directory, const char *name, size_t length);

#endif
