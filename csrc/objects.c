/* The directories of `/objects` (objects.h): a second way to the files of stop 1 of a read's path. */
#include "objects.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static const struct toc_inode *regular(const struct layer *layer, uint64_t number)
{
	const struct toc_inode *inode = number < layer->toc.n_inodes ? &layer->toc.inodes[number] : NULL;

	return inode && S_ISREG(inode->mode) ? inode : NULL;
}

bool objects_is_directory(uint64_t node)
{
	return node_decode(node).kind == NODE_OBJECTS;
}

bool objects_exists(struct weefs *w, uint64_t node)
{
	uint32_t slot = node_decode(node).layer;

	return slot == 0 || super_layer(w, slot);
}

uint64_t objects_generation(struct weefs *w, uint64_t node)
{
	const struct layer *layer = super_layer(w, node_decode(node).layer);

	return layer ? layer->generation : 0;
}

/* The layer of that name with the lowest slot: two of one name have one TOC. */
static struct layer *find_layer(struct weefs *w, const char *name, size_t length)
{
	for (uint32_t page = 0; page < SLOT_PAGES; page++) {
		_Atomic(void *) *layers = atomic_load_explicit(&w->layers.pages[page], memory_order_acquire);

		for (uint32_t i = 0; layers && i < SLOT_PAGE; i++) {
			struct layer *layer = atomic_load_explicit(&layers[i], memory_order_acquire);

			if (layer && layer->name[0] && strlen(layer->name) == length && memcmp(layer->name, name, length) == 0)
				return layer;
		}
	}
	return NULL;
}

/* Decimal, without leading zeros: one name for one file. */
static int parse_number(const char *name, size_t length, uint64_t *ret_number)
{
	uint64_t number = 0;

	if (length == 0 || length > 10 || (length > 1 && name[0] == '0'))
		return -ENOENT;
	for (size_t i = 0; i < length; i++) {
		if (name[i] < '0' || name[i] > '9')
			return -ENOENT;
		number = number * 10 + (uint64_t)(name[i] - '0');
	}
	*ret_number = number;
	return 0;
}

int objects_lookup(struct weefs *w, uint64_t directory, const char *name, size_t length, uint64_t *ret_node)
{
	uint32_t slot = node_decode(directory).layer;
	struct layer *layer = slot ? super_layer(w, slot) : find_layer(w, name, length);
	uint64_t number = 0;

	if (!layer)
		return slot ? -ESTALE : -ENOENT;
	if (slot && (parse_number(name, length, &number) || !regular(layer, number)))
		return -ENOENT;
	*ret_node = slot ? node_file(slot, (uint32_t)number) : node_objects(layer->slot);
	return 0;
}

int objects_list(struct weefs *w, uint64_t directory, uint64_t index, char *buffer, struct listed *ret)
{
	uint32_t slot = node_decode(directory).layer;
	struct layer *layer = super_layer(w, slot ? slot : index <= NODE_MAX_SLOT ? (uint32_t)index : 0);

	if (slot == 0) {
		if (index > atomic_load(&w->layers.used))
			return -ENOENT;
		if (!layer || !layer->name[0])
			return 1;
		*ret = (struct listed){.name = layer->name, .name_length = (uint32_t)strlen(layer->name), .type = S_IFDIR >> 12,
				       .node = node_objects(layer->slot)};
		return 0;
	}
	if (!layer || index >= layer->toc.n_inodes)
		return -ENOENT;
	if (!regular(layer, index))
		return 1;
	snprintf(buffer, OBJECTS_LISTED_SIZE, "%" PRIu64, index);
	*ret = (struct listed){.name = buffer, .name_length = (uint32_t)strlen(buffer), .type = S_IFREG >> 12, .node = node_file(slot, (uint32_t)index)};
	return 0;
}

bool objects_shadowed(struct weefs *w, const uint32_t *slots, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		const struct toc *toc = &super_layer(w, slots[i])->toc;

		for (uint32_t j = 0; j < n; j++) {
			const char *name = super_layer(w, slots[j])->name;

			if (name[0] && toc_find(toc, &toc->inodes[0], name, strlen(name)) >= 0)
				return true;
		}
	}
	return false;
}
