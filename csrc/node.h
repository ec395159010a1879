/* What a FUSE node id means: a pure function of the registered layers and plans, so that nothing is allocated on LOOKUP and a restarted server
 * answers old ids correctly.
 *
 *   63 62 | 61 ........ 44 | 43 ........ 26 | 25 ......... 0
 *   ------+----------------+----------------+---------------
 *     0   |       0        |  layer slot    |  inode           a file: the same id in every plan, so one page cache for all environments
 *     1   |   plan slot    |  layer slot    |  inode           a directory that only one layer of the plan has
 *     2   |   plan slot    |  0 (12 bits), index (32 bits)     a merged directory of the plan
 *     3   |   plan slot    |  0 (12 bits), index (32 bits)     a file whose link count is another in this plan than in its layer
 *
 * Directories must not share an id between plans: the kernel would move the dentry from one parent to the other. Slots count from 1, so FUSE's
 * root id 1 (kind 0, layer slot 0, inode 1) is nobody's file.
 */
#ifndef WEEFS_NODE_H
#define WEEFS_NODE_H

#include <stdint.h>

#define NODE_INODE_BITS 26
#define NODE_SLOT_BITS 18
#define NODE_MAX_SLOT ((1u << NODE_SLOT_BITS) - 1)
#define NODE_ROOT 1u

enum node_kind { NODE_FILE, NODE_DIRECTORY, NODE_MERGED, NODE_PLAN_FILE };

struct node {
	enum node_kind kind;
	uint32_t plan;	/* slot; 0 for NODE_FILE */
	uint32_t layer; /* slot; 0 for NODE_MERGED and NODE_PLAN_FILE */
	uint32_t index; /* inode number, or index in one of the plan's tables */
};

static inline uint64_t node_id(enum node_kind kind, uint32_t plan, uint32_t layer, uint32_t index)
{
	return (uint64_t)kind << 62 | (uint64_t)plan << 44 | (uint64_t)layer << NODE_INODE_BITS | index;
}

static inline uint64_t node_file(uint32_t layer, uint32_t inode)
{
	return node_id(NODE_FILE, 0, layer, inode);
}

static inline struct node node_decode(uint64_t id)
{
	enum node_kind kind = (enum node_kind)(id >> 62);
	struct node node = {.kind = kind, .plan = id >> 44 & NODE_MAX_SLOT};

	if (kind == NODE_FILE || kind == NODE_DIRECTORY) {
		node.layer = id >> NODE_INODE_BITS & NODE_MAX_SLOT;
		node.index = id & ((1u << NODE_INODE_BITS) - 1);
	} else {
		node.index = (uint32_t)id;
	}
	return node;
}

#endif
