/* The chunks of one layer on this node's disk: a sparse file of the logical stream and a bitmap of the chunks that
 * are in it.
 *
 * The map file is a header of 4,096 bytes and one bit per chunk. The bits in use are in memory and written through, not mapped:
 * a file that is cut off under a mapping ends the process. A bit is set after the chunk's bytes were written, so a process that
 * dies in between loses the chunk and nothing else. A machine that crashes may lose the bytes and keep the bit: hence the boot
 * id in the header; bits of an earlier boot are not believed.
 *
 * A data file that is found to be of another size than the stream was changed by somebody else: all its chunks are absent from
 * then on. A reader compares cache_times_voided() before it looks at the bits and after it has read.
 */
#ifndef WEEFS_CACHE_H
#define WEEFS_CACHE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "toc.h"

/* Bytes in memory. The contents of a large file would be in the page cache twice: as pages of the mount's file, and as pages of the
 * data file that they were read from. So the data file's are dropped when the answer has been sent. The kernel drops only whole folios,
 * and how large those are depends on how they came:
 *
 *   large reads    a sequential reader's: from `data_fd`, with the kernel's readahead on the data file. Its folios are of up to
 *                  CACHE_WINDOW, aligned: what lies before a window is dropped when the next one is entered.
 *   small reads    at random: from `random_fd`, a description of its own on which the kernel reads ahead nothing, so that exactly the
 *                  pages that were read are there and are dropped.
 *   written chunks their pages cannot be dropped before they are on disk: written back at once, dropped CACHE_SETTLING chunks later.
 *
 * Small files stay: the other files of their chunk will be wanted, and are no pages of the mount yet. */
#define CACHE_LARGE_FILE (1u << 20)
#define CACHE_LARGE_READ (256u << 10)
#define CACHE_WINDOW (2u << 20)
#define CACHE_SETTLING 256u

struct cache {
	const struct toc *toc;
	int data_fd, map_fd;
	int random_fd;			/* of the data file; -1: there is none, and small reads take `data_fd` */
	pthread_mutex_t lock;		/* of the map file and of voiding */
	_Atomic uint64_t *present;	/* bit i % 64 of word i / 64 */
	_Atomic uint32_t times_voided;
	_Atomic uint64_t present_chunks, present_stored, present_raw;
};

/* Takes duplicates of both descriptors; cache_close() takes NULL and half-opened ones. */
int cache_open(struct cache *cache, const struct toc *toc, int data_fd, int map_fd, const uint8_t boot_id[16], struct weefs_error *error);
void cache_close(struct cache *cache);

static inline bool cache_has(const struct cache *cache, uint32_t chunk)
{
	return atomic_load_explicit(&cache->present[chunk / 64], memory_order_acquire) >> (chunk % 64) & 1;
}

static inline uint32_t cache_times_voided(const struct cache *cache)
{
	return atomic_load(&cache->times_voided);
}

/* Decompresses and verifies a chunk: its bytes are in `ret_raw`, which is `stored` itself or, when `ret_buffer` is not NULL, that
 * one, the caller's to free. -EBADMSG: not the chunk's bytes. */
int cache_verify(const struct cache *cache, uint32_t chunk, const uint8_t *stored, size_t size, const uint8_t **ret_raw, uint8_t **ret_buffer,
		 struct weefs_error *error);

/* Writes a verified chunk; does not mark it. -ENOSPC, -EDQUOT, -EIO and what else write(2) says. */
int cache_write(struct cache *cache, uint32_t chunk, const uint8_t *raw, struct weefs_error *error);

/* Marks a written chunk as present, unless the cache was voided since the caller asked cache_times_voided(), before it wrote:
 * then false, and the chunk must be written again. */
bool cache_mark(struct cache *cache, uint32_t chunk, uint32_t times_voided);

/* Reads stream bytes whose chunks are present. `large`: of a large file, cache_drop() follows. -ESTALE: they were, but the file was cut off;
 * they are absent now. -EIO, and what else read(2) says. */
int cache_read(struct cache *cache, uint64_t stream_offset, uint8_t *buffer, uint64_t size, bool large);

/* These bytes of a large file, read by cache_read() in one call, are in the mount's page cache. `last`: they are the end of the file. */
void cache_drop(const struct cache *cache, uint64_t stream_offset, uint64_t size, bool last);

/* Begins to write a chunk back; and drops one whose writing was begun long ago. */
void cache_settle(const struct cache *cache, uint32_t chunk);
void cache_drop_chunk(const struct cache *cache, uint32_t chunk);

#endif
