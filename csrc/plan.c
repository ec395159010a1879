/* Builds the merged view of a plan (plan.h says what it is), applying layers from the base up. */
#include "plan.h"

#include <assert.h>
#include <errno.h>
#include <sys/stat.h>

#include "util.h"

#define MAX_SYMLINKS 40
#define DT_LOWER_LINK 0u
#define DT_DIRECTORY 4u
#define DT_SYMLINK 10u

/* How the number of names of a file changes from its layer to the plan. */
struct link_change {
	uint64_t file;
	int64_t names;
};

struct builder {
	struct plan *plan;
	struct weefs_error *error;
	uint32_t directories_size;	/* allocated */
	struct link_change *changes;
	size_t n_changes, changes_size;
	uint32_t overrides_size;
};

static int grow(void **array, size_t needed, size_t *size, size_t record)
{
	size_t larger = *size ? *size * 2 : 16;
	void *moved;

	if (needed <= *size)
		return 0;
	if (larger < needed)
		larger = needed;
	moved = reallocarray(*array, larger, record);
	if (!moved)
		return -ENOMEM;
	*array = moved;
	*size = larger;
	return 0;
}

int plan_find_layer(const struct plan *plan, uint32_t slot)
{
	for (uint32_t i = 0; i < plan->n_layers; i++)
		if (plan->layers[i].slot == slot)
			return (int)i;
	return -1;
}

/* Of a node that this plan made. */
static const struct plan_layer *layer_of(const struct plan *plan, uint32_t slot)
{
	int index = plan_find_layer(plan, slot);

	assert(index >= 0);
	return &plan->layers[index];
}

static const struct toc_inode *inode_of(const struct plan *plan, uint64_t file)
{
	struct node node = node_decode(file);

	return &layer_of(plan, node.layer)->toc->inodes[node.index];
}

/* The first reason is as good as any. */
static void not_stackable(struct plan *plan, const char *why)
{
	if (!plan->not_stackable)
		plan->not_stackable = why;
}

/* ---- link counts ---- */

static int change_links(struct builder *b, uint64_t file, int64_t names)
{
	int r = grow((void **)&b->changes, b->n_changes + 1, &b->changes_size, sizeof(*b->changes));

	if (r)
		return r;
	b->changes[b->n_changes++] = (struct link_change){.file = file, .names = names};
	return 0;
}

static int compare_overrides(const void *a, const void *b)
{
	uint64_t x = ((const struct plan_override *)a)->file, y = ((const struct plan_override *)b)->file;

	return (x > y) - (x < y);
}

/* The file that a lower link means. While a plan is built, the overrides are its lower links, those of one layer together and sorted. */
static uint64_t lower_link_target(const struct plan *plan, const struct plan_layer *layer, uint32_t inode)
{
	const struct plan_override key = {.file = node_file(layer->slot, inode)};
	const struct plan_override *found;

	found = bsearch(&key, plan->overrides + layer->first_link, layer->n_links, sizeof(key), compare_overrides);
	assert(found);
	return found->target;
}

/* Notes that the names below (slot, inode) show no longer. Depth is bounded by the validated length of paths. */
static int hide_tree(struct builder *b, const struct plan_layer *layer, uint32_t inode)
{
	const struct toc *toc = layer->toc;
	const struct toc_inode *directory = &toc->inodes[inode];

	if (toc->n_linked == 0 && toc->n_lower_links == 0)
		return 0;
	for (uint64_t i = directory->data; i < directory->data + directory->count; i++) {
		const struct toc_dirent *dirent = &toc->dirents[i];
		const struct toc_inode *child;
		int r = 0;

		if (dirent->inode == TOC_NO_INODE)
			continue;
		child = &toc->inodes[dirent->inode];
		if (inode_is_directory(child))
			r = hide_tree(b, layer, dirent->inode);
		else if (child->flags & INODE_LOWER_LINK)
			r = change_links(b, lower_link_target(b->plan, layer, dirent->inode), -1);
		else if (child->nlink > 1)
			r = change_links(b, node_file(layer->slot, dirent->inode), -1);
		if (r)
			return r;
	}
	return 0;
}

static int hide_entry(struct builder *b, const struct plan_entry *entry)
{
	struct node node = node_decode(entry->node);
	int r = 0;

	switch (node.kind) {
	case NODE_DIRECTORY:
		return hide_tree(b, layer_of(b->plan, node.layer), node.index);
	case NODE_MERGED:
		for (uint32_t i = 0; r == 0 && i < b->plan->directories[node.index].count; i++)
			r = hide_entry(b, &b->plan->directories[node.index].entries[i]);
		b->plan->directories[node.index].count = 0; /* unreachable from here on */
		return r;
	default:
		/* Recorded for every file: a name that was added by a link from a higher layer does not show in the inode's own nlink. */
		return change_links(b, entry->node, -1);
	}
}

/* ---- directories ---- */

static struct plan_entry make_entry(const struct plan *plan, const struct plan_layer *layer, const struct toc_dirent *dirent)
{
	struct plan_entry entry = {.name = layer->toc->strings + dirent->name, .name_length = dirent->name_length, .type = dirent->type};

	if (dirent->type == DT_DIRECTORY)
		entry.node = node_directory(plan->slot, layer->slot, dirent->inode);
	else
		entry.node = node_file(layer->slot, dirent->inode);
	if (dirent->type == DT_LOWER_LINK) {
		entry.node = lower_link_target(plan, layer, dirent->inode);
		entry.type = (uint8_t)((inode_of(plan, entry.node)->mode & S_IFMT) >> 12);
	}
	return entry;
}

/* Adds a merged directory with the entries that (layer, inode) has by itself. */
static int add_directory(struct builder *b, const struct plan_layer *layer, uint32_t inode, uint32_t parent, uint32_t *ret_index)
{
	struct plan *plan = b->plan;
	const struct toc_inode *directory = &layer->toc->inodes[inode];
	size_t size = b->directories_size;
	struct plan_entry *entries;
	uint32_t count = 0;

	if (plan->n_directories > NODE_MAX_INDEX)
		return fail(b->error, -ENOSPC, "the layers have more than %u directories in common", NODE_MAX_INDEX);
	if (grow((void **)&plan->directories, plan->n_directories + 1u, &size, sizeof(*plan->directories)))
		return -ENOMEM;
	b->directories_size = (uint32_t)size;
	entries = calloc(directory->count ? directory->count : 1, sizeof(*entries));
	if (!entries)
		return -ENOMEM;
	for (uint64_t i = directory->data; i < directory->data + directory->count; i++)
		if (layer->toc->dirents[i].inode != TOC_NO_INODE)
			entries[count++] = make_entry(plan, layer, &layer->toc->dirents[i]);
	plan->directories[plan->n_directories] = (struct plan_directory){
		.entries = entries, .count = count, .parent = parent, .layer = (uint32_t)(layer - plan->layers), .inode = inode};
	*ret_index = plan->n_directories++;
	return 0;
}

/* Makes the directory `entry` of `parent` a merged one, if it is not yet. */
static int promote(struct builder *b, uint32_t parent, uint32_t entry, uint32_t *ret_index)
{
	struct node node = node_decode(b->plan->directories[parent].entries[entry].node);
	int r;

	if (node.kind == NODE_MERGED) {
		*ret_index = node.index;
		return 0;
	}
	r = add_directory(b, layer_of(b->plan, node.layer), node.index, parent, ret_index);
	if (r == 0)
		b->plan->directories[parent].entries[entry].node = node_merged(b->plan->slot, *ret_index);
	return r;
}

const struct plan_entry *plan_find(const struct plan_directory *directory, const char *name, size_t length)
{
	uint32_t low = 0, high = directory->count;

	while (low < high) {
		uint32_t middle = low + (high - low) / 2;
		const struct plan_entry *entry = &directory->entries[middle];
		int order = toc_compare_names(entry->name, entry->name_length, name, length);

		if (order == 0)
			return entry;
		if (order < 0)
			low = middle + 1;
		else
			high = middle;
	}
	return NULL;
}

/* ---- paths through the plan so far ---- */

/* Follows `path` from merged directory `at` as a lookup inside the root does, making every directory on its way a
 * merged one (they are few: this is for lower links and for implicit directories over symlinks). The last component
 * is not followed when it is a symlink, unless `follow`. */
static int walk(struct builder *b, uint32_t at, const char *path, size_t length, bool follow, int *links, uint32_t *ret_directory,
		uint32_t *ret_entry)
{
	size_t begin = 0, end;

	*ret_entry = UINT32_MAX;
	if (length && path[0] == '/')
		at = 0;
	for (; begin < length; begin = end + 1) {
		const struct plan_entry *entry;
		const struct toc_inode *inode;
		size_t part;
		bool last;
		int r;

		for (end = begin; end < length && path[end] != '/'; end++)
			;
		part = end - begin;
		last = end >= length || strspn(path + end, "/") >= length - end;
		if (part == 0 || (part == 1 && path[begin] == '.'))
			continue;
		*ret_entry = UINT32_MAX;
		if (part == 2 && path[begin] == '.' && path[begin + 1] == '.') {
			at = b->plan->directories[at].parent;
			continue;
		}
		entry = plan_find(&b->plan->directories[at], path + begin, part);
		if (!entry)
			return -ENOENT;
		*ret_entry = (uint32_t)(entry - b->plan->directories[at].entries);
		if (entry->type == DT_SYMLINK && (!last || follow)) {
			struct node node = node_decode(entry->node);
			const struct toc *toc = layer_of(b->plan, node.layer)->toc;

			if (++*links > MAX_SYMLINKS)
				return -ELOOP;
			inode = &toc->inodes[node.index];
			r = walk(b, at, toc->strings + inode->data, inode->size, true, links, &at, ret_entry);
			if (r)
				return r;
			if (*ret_entry != UINT32_MAX && !last)
				return -ENOTDIR;
		} else if (entry->type == DT_DIRECTORY) {
			r = promote(b, at, *ret_entry, &at);
			if (r)
				return r;
			*ret_entry = UINT32_MAX;
		} else if (!last) {
			return -ENOTDIR;
		}
	}
	*ret_directory = at;
	return 0;
}

/* Finds what the lower links of a layer mean, in the plan as it is below that layer. */
static int resolve_lower_links(struct builder *b, struct plan_layer *layer)
{
	struct plan *plan = b->plan;
	const struct toc *toc = layer->toc;

	layer->first_link = plan->n_overrides;
	if (toc->n_lower_links && layer_of(plan, layer->slot) != layer)
		return fail(b->error, -EXDEV, "a layer with hard links into lower layers is twice in the plan, as number %u and %u; expected it once",
			    (uint32_t)(layer_of(plan, layer->slot) - plan->layers), (uint32_t)(layer - plan->layers));
	for (uint32_t i = 0; toc->n_lower_links && i < toc->n_inodes; i++) {
		const struct toc_inode *inode = &toc->inodes[i];
		const char *target = toc->strings + inode->data;
		size_t size = b->overrides_size;
		uint32_t directory, entry;
		int links = 0, r;

		if (!(inode->flags & INODE_LOWER_LINK))
			continue;
		not_stackable(plan, "a layer has hard links into layers below it");
		r = plan->n_directories ? walk(b, 0, target, inode->size, false, &links, &directory, &entry) : -ENOENT;
		if (r == 0 && entry == UINT32_MAX)
			r = -EISDIR;
		if (r == -ENOMEM)
			return r;
		if (r)
			return fail(b->error, -EXDEV,
				    "layer %u of the plan has a hard link to '%.*s', which must be a file of a layer below it: %s",
				    (uint32_t)(layer - plan->layers), (int)inode->size, target, strerror(-r));
		if (grow((void **)&plan->overrides, plan->n_overrides + 1u, &size, sizeof(*plan->overrides)))
			return -ENOMEM;
		b->overrides_size = (uint32_t)size;
		plan->overrides[plan->n_overrides++] =
			(struct plan_override){.file = node_file(layer->slot, i), .target = plan->directories[directory].entries[entry].node};
		layer->n_links++;
		r = change_links(b, plan->overrides[plan->n_overrides - 1].target, inode->nlink);
		if (r)
			return r;
	}
	return 0;
}

/* ---- applying a layer ---- */

static int apply_directory(struct builder *b, const struct plan_layer *layer, uint32_t inode, uint32_t target);

/* A directory of the layer meets what the plan has under its name. 1: the old entry stays (and was merged into); 0: replace it. */
static int apply_over(struct builder *b, const struct plan_layer *layer, const struct toc_dirent *dirent, uint32_t target, uint32_t old)
{
	const struct toc_inode *inode = &layer->toc->inodes[dirent->inode];
	const struct plan_entry *entry = &b->plan->directories[target].entries[old];
	uint32_t index, last;
	int links = 0, r;

	if ((inode->flags & INODE_IMPLICIT) && (entry->type == DT_DIRECTORY || entry->type == DT_SYMLINK))
		not_stackable(b->plan, "a layer has no entry for a directory in which it changes something");
	if (entry->type == DT_DIRECTORY) {
		if ((inode->flags & (INODE_OPAQUE | INODE_IMPLICIT)) == INODE_OPAQUE)
			return 0;
		r = promote(b, target, old, &index);
	} else if (entry->type == DT_SYMLINK && (inode->flags & INODE_IMPLICIT)) {
		r = walk(b, target, entry->name, entry->name_length, true, &links, &index, &last);
		if (r == 0 && last != UINT32_MAX)
			r = -ENOTDIR;
		if (r && r != -ENOMEM)
			return fail(b->error, -EXDEV,
				    "layer %u of the plan has entries below '%.*s', which is a symlink in a layer below it that leads to no directory: %s",
				    (uint32_t)(layer - b->plan->layers), (int)dirent->name_length, layer->toc->strings + dirent->name, strerror(-r));
	} else {
		return 0;
	}
	if (r == 0)
		r = apply_directory(b, layer, dirent->inode, index);
	return r ? r : 1;
}

/* First the directories that stay and change inside: this may promote, move the table, and (through symlinks) change any other directory,
 * `target` included; the names that it deals with are marked in `merged`. */
static int apply_subdirectories(struct builder *b, const struct plan_layer *layer, const struct toc_inode *directory, uint32_t target, uint8_t *merged)
{
	for (uint32_t i = 0; i < directory->count; i++) {
		const struct toc_dirent *dirent = &layer->toc->dirents[directory->data + i];
		const struct plan_directory *into = &b->plan->directories[target];
		const struct plan_entry *old;
		int r;

		if (dirent->type != DT_DIRECTORY)
			continue;
		old = plan_find(into, layer->toc->strings + dirent->name, dirent->name_length);
		if (!old)
			continue;
		r = apply_over(b, layer, dirent, target, (uint32_t)(old - into->entries));
		if (r < 0)
			return r;
		merged[i] = (uint8_t)r;
	}
	return 0;
}

/* Then the entries that come, go, or are replaced: one merge of two sorted lists. */
static int apply_entries(struct builder *b, const struct plan_layer *layer, const struct toc_inode *directory, uint32_t target, const uint8_t *merged)
{
	struct plan *plan = b->plan;
	uint32_t old = 0, old_count = plan->directories[target].count, count = 0, i = 0;
	struct plan_entry *old_entries = plan->directories[target].entries;
	cleanup_free struct plan_entry *entries = calloc((size_t)old_count + directory->count + 1, sizeof(*entries));
	int r = 0;

	if (!entries)
		return -ENOMEM;
	while (r == 0 && (old < old_count || i < directory->count)) {
		const struct toc_dirent *dirent = i < directory->count ? &layer->toc->dirents[directory->data + i] : NULL;
		int order = !dirent ? -1 : old == old_count ? 1 : toc_compare_names(old_entries[old].name, old_entries[old].name_length,
								      layer->toc->strings + dirent->name, dirent->name_length);

		if (order < 0 || (order == 0 && merged[i])) {
			entries[count++] = old_entries[old++];
			i += order == 0;
			continue;
		}
		if (order == 0)
			r = hide_entry(b, &old_entries[old++]);
		if (dirent->inode != TOC_NO_INODE && !merged[i])
			entries[count++] = make_entry(plan, layer, dirent);
		i++;
	}
	if (r)
		return r;
	free(old_entries);
	plan->directories[target].entries = entries;
	plan->directories[target].count = count;
	entries = NULL;
	return 0;
}

static int apply_directory(struct builder *b, const struct plan_layer *layer, uint32_t inode, uint32_t target)
{
	const struct toc_inode *directory = &layer->toc->inodes[inode];
	struct plan_directory *into = &b->plan->directories[target];
	cleanup_free uint8_t *merged = calloc(directory->count ? directory->count : 1, 1);
	int r = 0;

	if (!merged)
		return -ENOMEM;
	if (!(directory->flags & INODE_IMPLICIT)) {
		into->layer = (uint32_t)(layer - b->plan->layers);
		into->inode = inode;
	}
	if (directory->flags & INODE_OPAQUE) {
		for (uint32_t i = 0; r == 0 && i < into->count; i++)
			r = hide_entry(b, &into->entries[i]);
		into->count = 0;
	}
	if (r == 0)
		r = apply_subdirectories(b, layer, directory, target, merged);
	return r ? r : apply_entries(b, layer, directory, target, merged);
}

/* ---- finishing ---- */

static int compare_changes(const void *a, const void *b)
{
	uint64_t x = ((const struct link_change *)a)->file, y = ((const struct link_change *)b)->file;

	return (x > y) - (x < y);
}

/* The override of `file`, which overrides are sorted by; NULL when it is itself. */
static const struct plan_override *find_override(const struct plan *plan, uint64_t file)
{
	const struct plan_override key = {.file = file};

	return plan->n_overrides ? bsearch(&key, plan->overrides, plan->n_overrides, sizeof(key), compare_overrides) : NULL;
}

/* Sums the changes up; a file with another count than in its layer becomes the plan's own. */
static int settle_links(struct builder *b)
{
	struct plan *plan = b->plan;
	uint32_t lower_links = plan->n_overrides;
	size_t files_size = 0, overrides_size = b->overrides_size, n;

	if (b->n_changes)
		qsort(b->changes, b->n_changes, sizeof(*b->changes), compare_changes);
	for (size_t i = 0; i < b->n_changes; i += n) {
		uint64_t file = b->changes[i].file;
		const struct toc_inode *inode = inode_of(plan, file);
		int64_t names = inode->nlink;

		for (n = 0; i + n < b->n_changes && b->changes[i + n].file == file; n++)
			names += b->changes[i + n].names;
		if (names == inode->nlink || names <= 0)
			continue;
		if (plan->n_files > NODE_MAX_INDEX)
			return fail(b->error, -ENOSPC, "more than %u files have another link count in this plan", NODE_MAX_INDEX);
		if (grow((void **)&plan->files, plan->n_files + 1u, &files_size, sizeof(*plan->files)) ||
		    grow((void **)&plan->overrides, plan->n_overrides + 1u, &overrides_size, sizeof(*plan->overrides)))
			return -ENOMEM;
		plan->overrides[plan->n_overrides++] = (struct plan_override){
			.file = file, .target = file, .node = node_plan_file(plan->slot, plan->n_files)};
		plan->files[plan->n_files++] = (struct plan_file){.file = file, .nlink = (uint32_t)names};
	}
	if (plan->n_overrides)
		qsort(plan->overrides, plan->n_overrides, sizeof(*plan->overrides), compare_overrides);
	for (uint32_t i = 0; lower_links && i < plan->n_overrides; i++) {
		struct plan_override *o = &plan->overrides[i];
		const struct plan_override *target;

		if (o->node)
			continue;
		target = find_override(plan, o->target);
		o->node = target ? target->node : o->target;
	}
	return 0;
}

static void settle_directories(struct plan *plan)
{
	for (uint32_t i = 0; i < plan->n_directories; i++) {
		struct plan_directory *directory = &plan->directories[i];

		directory->nlink = 2;
		for (uint32_t j = 0; j < directory->count; j++) {
			struct plan_entry *entry = &directory->entries[j];
			const struct plan_override *o;

			if (entry->type == DT_DIRECTORY) {
				directory->nlink++;
				continue;
			}
			o = find_override(plan, entry->node);
			if (o)
				entry->node = o->node;
		}
	}
}

static int build(struct builder *b)
{
	struct plan *plan = b->plan;

	for (uint32_t i = 0; i < plan->n_layers; i++) {
		struct plan_layer *layer = &plan->layers[i];
		uint32_t index;
		int r = resolve_lower_links(b, layer);

		if (i > 0 && (layer->toc->inodes[0].flags & INODE_OPAQUE))
			not_stackable(plan, "a layer hides everything below it");
		if (layer_of(plan, layer->slot) != layer)
			not_stackable(plan, "a layer is twice in the plan");
		if (r == 0)
			r = i == 0 ? add_directory(b, layer, 0, 0, &index) : apply_directory(b, layer, 0, 0);
		if (r)
			return r;
		plan->n_entries += layer->toc->n_dirents;
		plan->content_size += layer->toc->header->content_size;
	}
	return 0;
}

/* Whether (layer, inode) has a whiteout that is listed when no layer below has the directory. Depth as in hide_tree(). */
static bool has_loose_whiteout(const struct toc *toc, uint32_t number)
{
	const struct toc_inode *directory = &toc->inodes[number];

	for (uint64_t i = directory->data; i < directory->data + directory->count; i++) {
		const struct toc_dirent *dirent = &toc->dirents[i];

		if (dirent->inode == TOC_NO_INODE ? !(directory->flags & INODE_OPAQUE)
						  : dirent->type == DT_DIRECTORY && has_loose_whiteout(toc, dirent->inode))
			return true;
	}
	return false;
}

static bool has_whiteouts(const struct toc *toc)
{
	for (uint32_t i = 0; i < toc->n_dirents; i++)
		if (toc->dirents[i].inode == TOC_NO_INODE)
			return true;
	return false;
}

static int settle_stackable(struct plan *plan)
{
	cleanup_free uint8_t *whiteouts = calloc(plan->n_layers, 1);

	if (!whiteouts)
		return -ENOMEM;
	if (plan->n_files)
		not_stackable(plan, "a file has another number of names than in its layer");
	if (plan->n_layers > PLAN_MAX_STACK)
		not_stackable(plan, "it has more layers than overlayfs takes");
	for (uint32_t i = 0; i < plan->n_layers && !plan->not_stackable; i++)
		whiteouts[i] = has_whiteouts(plan->layers[i].toc);
	for (uint32_t i = 0; i < plan->n_directories && !plan->not_stackable; i++) {
		for (uint32_t j = 0; j < plan->directories[i].count; j++) {
			struct node node = node_decode(plan->directories[i].entries[j].node);
			int layer = node.kind == NODE_DIRECTORY ? plan_find_layer(plan, node.layer) : -1;

			if (layer >= 0 && whiteouts[layer] && has_loose_whiteout(plan->layers[layer].toc, node.index))
				not_stackable(plan, "a layer has a whiteout in a directory that no layer below it has");
		}
	}
	return 0;
}

int plan_build(const char *name, uint32_t slot, const struct plan_layer *layers, uint32_t n, struct plan **ret_plan, struct weefs_error *error)
{
	struct plan *plan = calloc(1, sizeof(*plan));
	struct builder b = {.plan = plan, .error = error};
	int r = -ENOMEM;

	if (!plan)
		goto out;
	plan->slot = slot;
	plan->name = strdup(name);
	plan->layers = calloc(n, sizeof(*layers));
	if (!plan->name || !plan->layers)
		goto out;
	for (uint32_t i = 0; i < n; i++)
		plan->layers[i] = (struct plan_layer){.toc = layers[i].toc, .slot = layers[i].slot};
	plan->n_layers = n;
	r = build(&b);
	if (r == 0)
		r = settle_links(&b);
	if (r)
		goto out;
	settle_directories(plan);
	r = settle_stackable(plan);
	if (r)
		goto out;
	*ret_plan = plan;
	plan = NULL;
out:
	if (r == -ENOMEM)
		fail(error, r, "no memory to merge %u layers", n);
	free(b.changes);
	plan_free(plan);
	return r;
}

void plan_free(struct plan *plan)
{
	if (!plan)
		return;
	for (uint32_t i = 0; i < plan->n_directories; i++)
		free(plan->directories[i].entries);
	free(plan->directories);
	free(plan->overrides);
	free(plan->files);
	free(plan->layers);
	free(plan->name);
	free(plan);
}

uint64_t plan_file_node(const struct plan *plan, uint32_t layer_slot, uint32_t inode)
{
	uint64_t file = node_file(layer_slot, inode);
	const struct plan_override *o = find_override(plan, file);

	return o ? o->node : file;
}
