/* What a FUSE node id means: a pure function of the registered layers and plans, so that nothing is allocated on
 * LOOKUP and a restarted server answers old ids correctly.
 *
 *   63 62 | 61 ........ 44 | 43 ........ 26 | 25 ..... 0
 *   ------+----------------+----------------+-----------
 *     0   |       0        |   layer slot   |  inode      a file: the same id in every plan, so one page cache for all
 *     0   |   plan slot    |   layer slot   |  inode      a directory that only one layer of the plan has
 *     0   |   plan slot    |       0        |  index      a merged directory of the plan
 *     0   |   plan slot    |    2^18 - 1    |  index      a file whose link count is another in this plan than in its layer
 *     0   |    2^18 - 1    | layer slot, 0  |    0        a layer's directory below /objects; /objects itself
 *
 * Directories must not share an id between plans: the kernel would move the dentry from one parent to the other.
 * A slot is given to another plan or layer only when the kernel holds no id with it: an old id means the same or nothing.
 *
 * Slots count from 1 and the last slot is never given, so FUSE's root id 1 (plan 0, layer 0, inode 1) is
 * nobody's. The id is also the inode number that stat(2) shows; overlayfs needs its two highest bits (xino), to keep
 * numbers of layers apart.
 */
#ifndef WEEFS_NODE_H
#define WEEFS_NODE_H

#include <stdint.h>

#define NODE_INODE_BITS 26
#define NODE_SLOT_BITS 18
#define NODE_MAX_INDEX ((1u << NODE_INODE_BITS) - 1)
#define NODE_MAX_SLOT ((1u << NODE_SLOT_BITS) - 2)
#define NODE_PLAN_FILES ((1u << NODE_SLOT_BITS) - 1) /* in the place of the layer slot */
#define NODE_OBJECTS_PLAN ((1u << NODE_SLOT_BITS) - 1) /* in the place of the plan slot */
#define NODE_ROOT 1u

enum node_kind { NODE_NONE, NODE_FILE, NODE_DIRECTORY, NODE_MERGED, NODE_PLAN_FILE, NODE_OBJECTS };

struct node {
	enum node_kind kind;
	uint32_t plan;	/* slot; 0 for NODE_FILE */
	uint32_t layer; /* slot; NODE_FILE, NODE_DIRECTORY and NODE_OBJECTS only */
	uint32_t index; /* inode number, or index in one of the plan's tables */
};

static inline uint64_t node_pack(uint32_t plan, uint32_t layer, uint32_t index)
{
	return (uint64_t)plan << (NODE_SLOT_BITS + NODE_INODE_BITS) | (uint64_t)layer << NODE_INODE_BITS | index;
}

static inline uint64_t node_file(uint32_t layer, uint32_t inode)
{
	return node_pack(0, layer, inode);
}

static inline uint64_t node_directory(uint32_t plan, uint32_t layer, uint32_t inode)
{
	return node_pack(plan, layer, inode);
}

static inline uint64_t node_merged(uint32_t plan, uint32_t index)
{
	return node_pack(plan, 0, index);
}

static inline uint64_t node_plan_file(uint32_t plan, uint32_t index)
{
	return node_pack(plan, NODE_PLAN_FILES, index);
}

/* `layer` 0: the directory of the layers' directories. */
static inline uint64_t node_objects(uint32_t layer)
{
	return node_pack(NODE_OBJECTS_PLAN, layer, 0);
}

static inline struct node node_decode(uint64_t id)
{
	struct node node = {
		.plan = (uint32_t)(id >> (NODE_SLOT_BITS + NODE_INODE_BITS)),
		.layer = (uint32_t)(id >> NODE_INODE_BITS) & ((1u << NODE_SLOT_BITS) - 1),
		.index = (uint32_t)id & NODE_MAX_INDEX,
	};

	if (node.plan == NODE_OBJECTS_PLAN && node.layer <= NODE_MAX_SLOT && node.index == 0)
		node.kind = NODE_OBJECTS;
	else if (node.plan > NODE_MAX_SLOT || (node.plan == 0 && node.layer == 0))
		node.kind = NODE_NONE;
	else if (node.plan == 0)
		node.kind = NODE_FILE;
	else if (node.layer == 0)
		node.kind = NODE_MERGED;
	else
		node.kind = node.layer == NODE_PLAN_FILES ? NODE_PLAN_FILE : NODE_DIRECTORY;
	return node;
}

#endif
