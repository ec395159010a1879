/* Flattens a layer or a plan into one list of inodes and one of names (tree.h). */
#include "tree.h"

#include <errno.h>
#include <sys/stat.h>

#include "super.h"
#include "util.h"

#define DT_CHARACTER 2u

void tree_free(struct tree *tree)
{
	free(tree->inodes);
	free(tree->names);
	*tree = (struct tree){0};
}

/* ---- a layer ---- */

static void add_layer_names(const struct toc *toc, struct tree *tree, struct tree_inode *directory, uint32_t whiteout)
{
	const struct toc_dirent *dirents = toc->dirents + directory->inode->data;

	directory->first = tree->n_names;
	for (uint32_t i = 0; i < directory->inode->count; i++) {
		bool is_whiteout = dirents[i].inode == TOC_NO_INODE;

		if (is_whiteout && directory->opaque)
			continue;
		tree->inodes[whiteout].nlink += is_whiteout;
		tree->names[tree->n_names++] = (struct tree_name){
			.name = toc->strings + dirents[i].name,
			.length = dirents[i].name_length,
			.type = is_whiteout ? DT_CHARACTER : dirents[i].type,
			.inode = is_whiteout ? whiteout : dirents[i].inode,
		};
	}
	directory->count = tree->n_names - directory->first;
}

int tree_of_layer(const struct toc *toc, const char *layer, struct tree *ret_tree, struct weefs_error *error)
{
	uint32_t whiteout = toc->n_inodes;
	struct tree tree = {0};

	if (toc->n_lower_links)
		return fail(error, -EOPNOTSUPP, "the layer has %u hard links into layers below it, which its own image cannot hold", toc->n_lower_links);
	tree.inodes = calloc((size_t)toc->n_inodes + 1, sizeof(*tree.inodes));
	tree.names = calloc((size_t)toc->n_dirents + 1, sizeof(*tree.names));
	if (!tree.inodes || !tree.names) {
		tree_free(&tree);
		return fail(error, -ENOMEM, "no memory for the tree of %u inodes", toc->n_inodes);
	}
	for (uint32_t i = 0; i < toc->n_inodes; i++) {
		tree.inodes[i] = (struct tree_inode){
			.toc = toc,
			.inode = &toc->inodes[i],
			.layer = layer,
			.number = i,
			.nlink = toc->inodes[i].nlink,
			.parent = toc->inodes[i].parent,
			.opaque = toc->inodes[i].flags & INODE_OPAQUE,
		};
		if (inode_is_directory(&toc->inodes[i]))
			add_layer_names(toc, &tree, &tree.inodes[i], whiteout);
	}
	tree.n_inodes = toc->n_inodes + (tree.inodes[whiteout].nlink != 0);
	*ret_tree = tree;
	return 0;
}

/* ---- a plan ---- */

struct walk {
	struct weefs *w;
	struct tree tree;
	uint64_t *nodes;	/* of each inode */
	size_t inodes_size, nodes_size, names_size;
	uint32_t *linked;	/* open addressing over the inodes of files with several names: index + 1, 0 is free */
	uint32_t linked_size, n_linked;
	struct weefs_error *error;
};

static int grow(void **array, size_t needed, size_t *size, size_t record)
{
	size_t larger = *size ? *size * 2 : 1024;
	void *moved;

	if (needed <= *size)
		return 0;
	moved = reallocarray(*array, larger, record);
	if (!moved)
		return -ENOMEM;
	*array = moved;
	*size = larger;
	return 0;
}

static uint32_t *linked_place(const struct walk *walk, uint64_t node)
{
	uint32_t at = (uint32_t)(node * UINT64_C(0x9e3779b97f4a7c15) >> 32) & (walk->linked_size - 1);

	while (walk->linked[at] && walk->nodes[walk->linked[at] - 1] != node)
		at = (at + 1) & (walk->linked_size - 1);
	return &walk->linked[at];
}

/* At most half full, so that a place is found soon. */
static int linked_grow(struct walk *walk)
{
	uint32_t *old = walk->linked, old_size = walk->linked_size;
	uint32_t size = old_size ? old_size * 2 : 1024;

	if (walk->n_linked < old_size / 2)
		return 0;
	walk->linked = calloc(size, sizeof(*walk->linked));
	if (!walk->linked) {
		walk->linked = old;
		return -ENOMEM;
	}
	walk->linked_size = size;
	for (uint32_t i = 0; i < old_size; i++)
		if (old[i])
			*linked_place(walk, walk->nodes[old[i] - 1]) = old[i];
	free(old);
	return 0;
}

static int add_inode(struct walk *walk, const struct object *object, uint32_t parent, uint32_t *ret_index)
{
	uint32_t index = walk->tree.n_inodes;

	if (index >= TOC_MAX_INODES)
		return fail(walk->error, -ENOSPC, "the plan has more than %u inodes", TOC_MAX_INODES);
	if (grow((void **)&walk->tree.inodes, index + 1u, &walk->inodes_size, sizeof(*walk->tree.inodes)) ||
	    grow((void **)&walk->nodes, index + 1u, &walk->nodes_size, sizeof(*walk->nodes)))
		return -ENOMEM;
	walk->nodes[index] = object->node;
	walk->tree.inodes[index] = (struct tree_inode){
		.toc = &object->layer->toc,
		.inode = object->inode,
		.layer = object->layer->name,
		.number = object->number,
		.nlink = object->nlink,
		.parent = parent,
	};
	walk->tree.n_inodes++;
	*ret_index = index;
	return 0;
}

/* The inode of a node that a name leads to: known if the file has another name that was met before. */
static int find_inode(struct walk *walk, uint64_t node, uint32_t parent, uint32_t *ret_index)
{
	struct object object;
	uint32_t *place;
	int r = super_object(walk->w, node, &object);

	if (r)
		return r;
	if (inode_is_directory(object.inode) || object.nlink < 2)
		return add_inode(walk, &object, parent, ret_index);
	r = linked_grow(walk);
	if (r)
		return r;
	place = linked_place(walk, node);
	if (*place) {
		*ret_index = *place - 1;
		return 0;
	}
	r = add_inode(walk, &object, parent, ret_index);
	if (r == 0) {
		*place = *ret_index + 1;
		walk->n_linked++;
	}
	return r;
}

static int add_directory(struct walk *walk, uint32_t index)
{
	struct object directory;
	struct listed listed;
	uint32_t inode;
	int r = super_object(walk->w, walk->nodes[index], &directory);

	if (r)
		return r;
	walk->tree.inodes[index].first = walk->tree.n_names;
	for (uint64_t i = 0; (r = super_list(&directory, i, &listed)) >= 0; i++) {
		if (r > 0)
			continue;
		r = find_inode(walk, listed.node, index, &inode);
		if (r)
			return r;
		if (walk->tree.n_names == UINT32_MAX)
			return fail(walk->error, -ENOSPC, "the plan has more than %u names", UINT32_MAX);
		if (grow((void **)&walk->tree.names, walk->tree.n_names + (size_t)1, &walk->names_size, sizeof(*walk->tree.names)))
			return -ENOMEM;
		walk->tree.names[walk->tree.n_names++] = (struct tree_name){
			.name = listed.name, .length = (uint16_t)listed.name_length, .type = listed.type, .inode = inode};
	}
	walk->tree.inodes[index].count = walk->tree.n_names - walk->tree.inodes[index].first;
	return r == -ENOENT ? 0 : r;
}

int tree_of_plan(struct weefs *w, const struct plan *plan, struct tree *ret_tree, struct weefs_error *error)
{
	struct walk walk = {.w = w, .error = error};
	struct object root;
	uint32_t index;
	int r = super_object(w, node_merged(plan->slot, 0), &root);

	if (r == 0)
		r = add_inode(&walk, &root, 0, &index);
	/* Breadth first: what a directory adds is visited later in the same list. */
	for (uint32_t i = 0; r == 0 && i < walk.tree.n_inodes; i++)
		if (inode_is_directory(walk.tree.inodes[i].inode))
			r = add_directory(&walk, i);
	free(walk.linked);
	free(walk.nodes);
	if (r == 0) {
		*ret_tree = walk.tree;
		return 0;
	}
	tree_free(&walk.tree);
	if (r == -ENOMEM)
		fail(error, r, "no memory for the tree of a plan");
	else if (r == -ESTALE)
		fail(error, r, "the plan refers to a layer that is not there");
	return r;
}
