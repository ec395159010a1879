/* The chunks of one layer on this node's disk: a sparse file of the logical stream and a bitmap of the chunks that
 * are in it.
 *
 * The map file is a header of 4,096 bytes and one bit per chunk, mapped shared. A bit is set after the chunk's bytes
 * were written, so a process that dies in between loses the chunk and nothing else. A machine that crashes may lose
 * the bytes and keep the bit: hence the boot id in the header; bits of an earlier boot are not believed.
 */
#ifndef WEEFS_CACHE_H
#define WEEFS_CACHE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "toc.h"

struct cache {
	const struct toc *toc;
	int data_fd;
	uint8_t *map;
	uint64_t map_size;
	_Atomic uint64_t *present;	/* in `map`; bit i % 64 of word i / 64 */
	_Atomic uint64_t present_chunks, present_stored, present_raw;
};

/* Takes duplicates of both descriptors; cache_close() takes NULL and half-opened ones. */
int cache_open(struct cache *cache, const struct toc *toc, int data_fd, int map_fd, const uint8_t boot_id[16], struct weefs_error *error);
void cache_close(struct cache *cache);

static inline bool cache_has(const struct cache *cache, uint32_t chunk)
{
	return atomic_load_explicit(&cache->present[chunk / 64], memory_order_acquire) >> (chunk % 64) & 1;
}

/* Decompresses, verifies and writes a chunk; does not mark it. -EBADMSG: not the chunk's bytes. */
int cache_write(const struct cache *cache, uint32_t chunk, const uint8_t *stored, size_t size, struct weefs_error *error);

/* Marks a written chunk as present. */
void cache_mark(struct cache *cache, uint32_t chunk);

/* Reads stream bytes whose chunks are present. */
int cache_read(const struct cache *cache, uint64_t stream_offset, uint8_t *buffer, uint64_t size);

#endif
