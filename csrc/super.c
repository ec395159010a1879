/* Slots, and what a node id means: stop 1 of a read's path, where an id becomes an object. */
#include "super.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "objects.h"

#define DT_DIRECTORY 4u
#define DT_LOWER_LINK 0u

static void *slot_get(struct slots *slots, uint32_t slot)
{
	_Atomic(void *) *page;

	if (slot == 0 || slot > NODE_MAX_SLOT)
		return NULL;
	page = atomic_load_explicit(&slots->pages[slot / SLOT_PAGE], memory_order_acquire);
	return page ? atomic_load(&page[slot % SLOT_PAGE]) : NULL; /* after the worker's section in the one order: see wait_for_readers() */
}

struct layer *super_layer(struct weefs *w, uint32_t slot)
{
	return slot_get(&w->layers, slot);
}

struct plan *super_plan(struct weefs *w, uint32_t slot)
{
	return slot_get(&w->plans, slot);
}

void super_hold(struct weefs *w, uint64_t node)
{
	_Atomic uint64_t *lookups = session_lookups(&w->session, node);

	if (lookups)
		atomic_fetch_add(lookups, 1);
}

void super_forget(struct weefs *w, uint64_t id, uint64_t n)
{
	_Atomic uint64_t *lookups = session_lookups(&w->session, id);
	struct node node = node_decode(id);
	struct layer *layer;

	if (!lookups || atomic_fetch_sub(lookups, n) != n || (node.kind != NODE_FILE && node.kind != NODE_OBJECTS))
		return;
	layer = super_layer(w, node.layer);
	if (layer && atomic_load(&layer->plans) == 0)
		miss_ring(&w->misses); /* it may be closed now */
}

struct layer *super_use_layer(struct weefs *w, uint32_t slot)
{
	struct layer *layer;

	pthread_mutex_lock(&w->lock);
	layer = super_layer(w, slot);
	if (layer)
		layer->users++;
	pthread_mutex_unlock(&w->lock);
	return layer;
}

void super_unuse_layer(struct weefs *w, struct layer *layer)
{
	bool idle;

	if (!layer)
		return;
	pthread_mutex_lock(&w->lock);
	idle = --layer->users == 0 && atomic_load(&layer->plans) == 0;
	pthread_mutex_unlock(&w->lock);
	if (idle)
		miss_ring(&w->misses);
}

struct plan *super_find_plan(struct weefs *w, const char *name, size_t length)
{
	for (uint32_t page = 0; page < SLOT_PAGES; page++) {
		_Atomic(void *) *plans = atomic_load_explicit(&w->plans.pages[page], memory_order_acquire);

		for (uint32_t i = 0; plans && i < SLOT_PAGE; i++) {
			struct plan *plan = atomic_load(&plans[i]);

			if (plan && strlen(plan->name) == length && memcmp(plan->name, name, length) == 0)
				return plan;
		}
	}
	return NULL;
}

static int merged_object(struct weefs *w, const struct plan *plan, uint32_t index, struct object *object)
{
	const struct plan_directory *merged;

	if (!plan || index >= plan->n_directories)
		return -ESTALE;
	merged = &plan->directories[index];
	object->plan = plan;
	object->merged = merged;
	object->layer = super_layer(w, plan->layers[merged->layer].slot);
	object->number = merged->inode;
	object->inode = &object->layer->toc.inodes[merged->inode];
	object->nlink = merged->nlink;
	object->node = node_merged(plan->slot, index);
	object->generation = plan->generation;
	return 0;
}

static int layer_object(struct weefs *w, uint32_t slot, uint32_t number, bool directory, struct object *object)
{
	struct layer *layer = super_layer(w, slot);

	if (!layer || number >= layer->toc.n_inodes || inode_is_directory(&layer->toc.inodes[number]) != directory)
		return -ESTALE;
	object->layer = layer;
	object->number = number;
	object->inode = &layer->toc.inodes[number];
	object->nlink = object->inode->nlink;
	object->generation = object->plan ? object->plan->generation : layer->generation;
	return 0;
}

int super_object(struct weefs *w, uint64_t id, struct object *ret_object)
{
	struct object object = {.node = id};
	struct node node = node_decode(id);
	const struct plan *plan;
	int r;

	if (id == NODE_ROOT) {
		uint32_t root = atomic_load_explicit(&w->root_plan, memory_order_acquire);

		if (root == 0)
			return -EISDIR;
		r = merged_object(w, super_plan(w, root), 0, &object);
		goto out;
	}
	if (node.kind == NODE_OBJECTS)
		return objects_exists(w, id) ? -EISDIR : -ESTALE;
	plan = node.kind == NODE_FILE ? NULL : super_plan(w, node.plan);
	if (node.kind != NODE_FILE && !plan)
		return -ESTALE;
	object.plan = plan;
	switch (node.kind) {
	case NODE_MERGED:
		r = merged_object(w, plan, node.index, &object);
		break;
	case NODE_PLAN_FILE:
		if (node.index >= plan->n_files)
			return -ESTALE;
		r = layer_object(w, node_decode(plan->files[node.index].file).layer, node_decode(plan->files[node.index].file).index, false, &object);
		object.nlink = plan->files[node.index].nlink;
		break;
	case NODE_DIRECTORY:
		r = plan_find_layer(plan, node.layer) < 0 ? -ESTALE : layer_object(w, node.layer, node.index, true, &object);
		break;
	default:
		r = layer_object(w, node.layer, node.index, false, &object);
		break;
	}
out:
	if (r == 0)
		*ret_object = object;
	return r;
}

/* The node of a dirent that only one layer has a say in. */
static uint64_t dirent_node(const struct object *directory, const struct toc_dirent *dirent)
{
	if (dirent->type == DT_DIRECTORY)
		return node_directory(directory->plan->slot, directory->layer->slot, dirent->inode);
	return plan_file_node(directory->plan, directory->layer->slot, dirent->inode);
}

int super_lookup(const struct object *directory, const char *name, size_t length, uint64_t *ret_node)
{
	int64_t index;

	if (!inode_is_directory(directory->inode))
		return -ENOTDIR;
	if (directory->merged) {
		const struct plan_entry *entry = plan_find(directory->merged, name, length);

		if (!entry)
			return -ENOENT;
		*ret_node = entry->node;
		return 0;
	}
	index = toc_find(&directory->layer->toc, directory->inode, name, length);
	if (index < 0 || directory->layer->toc.dirents[index].inode == TOC_NO_INODE)
		return -ENOENT;
	*ret_node = dirent_node(directory, &directory->layer->toc.dirents[index]);
	return 0;
}

/* The type of a lower link is its target's. */
static uint8_t file_type(const struct plan *plan, uint64_t id)
{
	struct node node = node_decode(id);
	const struct toc *toc;

	if (node.kind == NODE_PLAN_FILE)
		node = node_decode(plan->files[node.index].file);
	toc = plan->layers[plan_find_layer(plan, node.layer)].toc;
	return (uint8_t)((toc->inodes[node.index].mode & S_IFMT) >> 12);
}

int super_list(const struct object *directory, uint64_t index, struct listed *ret_listed)
{
	const struct toc *toc = &directory->layer->toc;
	const struct toc_dirent *dirent;

	if (directory->merged) {
		const struct plan_entry *entry;

		if (index >= directory->merged->count)
			return -ENOENT;
		entry = &directory->merged->entries[index];
		*ret_listed = (struct listed){.name = entry->name, .name_length = entry->name_length, .type = entry->type, .node = entry->node};
		return 0;
	}
	if (index >= directory->inode->count)
		return -ENOENT;
	dirent = &toc->dirents[directory->inode->data + index];
	if (dirent->inode == TOC_NO_INODE)
		return 1;
	*ret_listed = (struct listed){.name = toc->strings + dirent->name, .name_length = dirent->name_length, .type = dirent->type,
				      .node = dirent_node(directory, dirent)};
	if (dirent->type == DT_LOWER_LINK)
		ret_listed->type = file_type(directory->plan, ret_listed->node);
	return 0;
}

static uint64_t data_bytes(const struct object *object)
{
	const struct toc_inode *inode = object->inode;
	uint64_t bytes = 0;

	if (!(inode->flags & INODE_SPARSE))
		return S_ISREG(inode->mode) ? inode->size : 0;
	for (uint32_t i = 0; i < inode->count; i++)
		bytes += object->layer->toc.extents[inode->data + i].length;
	return bytes;
}

/* A symlink has all permission bits, as every filesystem of Linux gives it, whatever its layer says: nobody asks for them. */
static uint32_t shown_mode(const struct toc_inode *inode)
{
	return S_ISLNK(inode->mode) ? S_IFLNK | 0777 : inode->mode;
}

void super_attr(const struct object *object, struct weefs_attr *ret_attr)
{
	const struct toc_inode *inode = object->inode;

	*ret_attr = (struct weefs_attr){
		.node = object->node,
		.size = S_ISDIR(inode->mode) ? 4096 : inode->size,
		.blocks = (data_bytes(object) + 511) / 512,
		.mtime_s = inode->mtime_s,
		.mtime_ns = inode->mtime_ns,
		.mode = shown_mode(inode),
		.nlink = object->nlink,
		.uid = inode->uid,
		.gid = inode->gid,
		.rdev = inode->rdev,
	};
}
