/* One tree of inodes and names in the order in which an image holds them: a layer by itself, or a whole plan as it is shown.
 *
 * What the writer of images (erofs.h) takes, so that it knows nothing of layers over layers. Names and attributes point into the TOCs,
 * which must outlive the tree. Memory: 48 bytes for each inode and 16 for each name, and 12 more for each inode while a plan is walked.
 */
#ifndef WEEFS_TREE_H
#define WEEFS_TREE_H

#include <stdbool.h>
#include <stdint.h>

#include "toc.h"

struct weefs;
struct plan;

struct tree_inode {
	const struct toc *toc;
	const struct toc_inode *inode;	/* NULL: a whiteout */
	const char *layer;		/* its directory below /objects */
	uint32_t number;		/* of `inode` in `toc` */
	uint32_t nlink;
	uint32_t first, count;		/* directories: of `names` */
	uint32_t parent;		/* directories: of `inodes`; the root's is itself */
	bool opaque;			/* hides what lower layers of a stack have */
};

struct tree_name {
	const char *name;
	uint32_t inode;			/* of `inodes` */
	uint16_t length;
	uint8_t type;			/* as d_type */
};

struct tree {
	struct tree_inode *inodes;	/* [0]: the root */
	struct tree_name *names;	/* those of a directory together, sorted by byte, shorter first */
	uint32_t n_inodes, n_names;
};

/* A layer as overlayfs wants it in a stack: whiteouts are there (all names of one inode), opaque directories are marked, and whiteouts in
 * these are left out, since they hide nothing. -EOPNOTSUPP with a sentence: hard links into lower layers; -ENOMEM. */
int tree_of_layer(const struct toc *toc, const char *layer, struct tree *ret_tree, struct weefs_error *ret_error);

/* A plan as its directory shows it. Neither the plan nor its layers may go meanwhile, nor while the tree is used. -ENOSPC; -ENOMEM. */
int tree_of_plan(struct weefs *w, const struct plan *plan, struct tree *ret_tree, struct weefs_error *ret_error);

/* Fine for one that was never filled. */
void tree_free(struct tree *tree);

#endif
