/* Which layers in the cache have a chunk of a given digest: a hash table from the beginning of a digest to places.
 *
 * It says where to look, not what is there: whoever takes a chunk from such a place verifies it, so that an entry of a layer that is gone, or of
 * another chunk whose digest begins alike, costs a read and nothing else. */
#ifndef WEEFS_DIGESTS_H
#define WEEFS_DIGESTS_H

#include <pthread.h>
#include <stdint.h>

#include "toc.h"

/* `layer` is the caller's number for a layer, not 0. */
struct digest_entry {
	uint64_t digest;	/* the first 8 bytes of it */
	uint32_t layer;		/* 0: free */
	uint32_t block;		/* where it begins in the layer's stream, in units of TOC_STREAM_ALIGN */
};

struct digests {
	pthread_mutex_t lock;
	struct digest_entry *entries;	/* open addressing, a power of two */
	uint64_t size, used;
};

void digests_init(struct digests *digests);
void digests_destroy(struct digests *digests);

/* Adds all chunks of a layer, but those of which enough places are known. -ENOMEM: none was added. */
int digests_add(struct digests *digests, uint32_t layer, const struct toc *toc);
void digests_remove(struct digests *digests, uint32_t layer);

/* Up to `n` places of a chunk, in other layers than `but`. */
uint32_t digests_find(struct digests *digests, const uint8_t sha256[32], uint32_t but, struct weefs_copy *ret_copies, uint32_t n);

#endif
