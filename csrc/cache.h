/* The chunks of one layer on this node's disk: a sparse file of the logical stream, and what is known of each chunk.
 *
 * The map file is a header of 4,096 bytes and three bitmaps, a bit per chunk. They are in memory and written through, not mapped: a file that
 * is cut off under a mapping ends the process.
 *
 *   present   its bytes are in the data file. Set after they were written, so a process that dies in between loses the chunk and nothing else
 *   touched   it was read since the clock's hand last passed (evict.c), not counting the read that it was fetched for: of what is read once,
 *             a scan, nothing shall stay for the sake of it. Written when the cache is closed
 *   suspect   it was present when the machine went down, which may have lost the bytes and kept the bit: hence the boot id in the header.
 *             Compared with its digest before it is present again
 *
 * Chunks get lost: when the data file is found to be of another size than the stream (somebody else changed it; all are absent then), and
 * when they are evicted. Bits go first, then cache_times_lost() counts up, then the bytes go. So a reader compares cache_times_lost() before
 * it looks at the bits and after it has read.
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

enum cache_bitmap { BITS_PRESENT, BITS_TOUCHED, BITS_SUSPECT, BITMAPS };

/* Ranges of the stream that are being sent to peers, straight from the data file: the clock passes their chunks over. */
#define CACHE_HOLDS 256u

struct cache_hold {
	uint32_t first, end;	/* chunks; empty: the place is free */
	bool spoiled;		/* one of them was lost all the same: it was damaged, or the file was cut off */
};

/* Of all caches of a node. `used`: the room of their present and suspect chunks, and of those that are being written. Bytes. */
struct cache_budget {
	_Atomic uint64_t used, limit;
};

struct cache {
	const struct toc *toc;
	int data_fd, map_fd;
	int random_fd;			/* of the data file; -1: there is none, and small reads take `data_fd` */
	pthread_mutex_t lock;		/* of the map file, of the hand, and of losing chunks */
	_Atomic uint64_t *bits[BITMAPS];	/* bit i % 64 of word i / 64 */
	_Atomic uint32_t times_lost;
	_Atomic uint64_t present_chunks, present_stored, present_raw;
	_Atomic uint64_t room;		/* of the present and the suspect chunks, in the budget */
	struct cache_budget *budget;	/* NULL: unbounded */
	uint32_t hand;			/* the clock's: the next chunk that it looks at */
	struct cache_hold holds[CACHE_HOLDS];	/* under `lock` */
	uint32_t n_holds;		/* in use of them; under `lock` */
};

/* Takes duplicates of both descriptors; cache_close() takes NULL and half-opened ones. */
int cache_open(struct cache *cache, const struct toc *toc, int data_fd, int map_fd, const uint8_t boot_id[16], struct cache_budget *budget,
	       struct weefs_error *error);
void cache_close(struct cache *cache);

static inline bool cache_bit(const struct cache *cache, enum cache_bitmap bitmap, uint32_t chunk)
{
	return atomic_load_explicit(&cache->bits[bitmap][chunk / 64], memory_order_acquire) >> (chunk % 64) & 1;
}

static inline bool cache_has(const struct cache *cache, uint32_t chunk)
{
	return cache_bit(cache, BITS_PRESENT, chunk);
}

static inline bool cache_suspects(const struct cache *cache, uint32_t chunk)
{
	return cache_bit(cache, BITS_SUSPECT, chunk);
}

/* A chunk is read. */
static inline void cache_touch(struct cache *cache, uint32_t chunk)
{
	if (!cache_bit(cache, BITS_TOUCHED, chunk))
		atomic_fetch_or_explicit(&cache->bits[BITS_TOUCHED][chunk / 64], UINT64_C(1) << (chunk % 64), memory_order_relaxed);
}

static inline uint32_t cache_times_lost(const struct cache *cache)
{
	return atomic_load(&cache->times_lost);
}

uint32_t cache_count_suspects(const struct cache *cache);

/* Bytes on disk of a chunk that is there. */
uint64_t cache_chunk_room(const struct cache *cache, uint32_t chunk);

/* Decompresses and verifies a chunk: its bytes are in `ret_raw`, which is `stored` itself or, when `ret_buffer` is not NULL, that
 * one, the caller's to free. -EBADMSG: not the chunk's bytes. */
int cache_verify(const struct cache *cache, uint32_t chunk, const uint8_t *stored, size_t size, const uint8_t **ret_raw, uint8_t **ret_buffer,
		 struct weefs_error *error);

/* The same of `raw_size` bytes that are not compressed. */
int cache_verify_raw(const struct cache *cache, uint32_t chunk, const uint8_t *raw, struct weefs_error *error);

/* Room for a chunk that is to be written. -ENOSPC: it would be over the bound. Given to cache_mark(), or back. */
int cache_reserve(struct cache *cache, uint32_t chunk, struct weefs_error *error);
void cache_unreserve(struct cache *cache, uint32_t chunk);

/* Writes a verified chunk; does not mark it. -ENOSPC, -EDQUOT, -EIO and what else write(2) says. */
int cache_write(struct cache *cache, uint32_t chunk, const uint8_t *raw, struct weefs_error *error);

/* Marks a written chunk, for which room was reserved, as present, unless chunks were lost since the caller asked cache_times_lost(), before it
 * wrote: then false, the chunk must be written again, and the room is still reserved. */
bool cache_mark(struct cache *cache, uint32_t chunk, uint32_t times_lost);

/* Reads stream bytes whose chunks are present. `large`: of a large file, cache_drop() follows. -ESTALE: they were, but the file was cut off;
 * they are absent now. -EIO, and what else read(2) says. */
int cache_read(struct cache *cache, uint64_t stream_offset, uint8_t *buffer, uint64_t size, bool large);

/* These bytes of a large file, read by cache_read() in one call, are in the mount's page cache. `last`: they are the end of the file. */
void cache_drop(const struct cache *cache, uint64_t stream_offset, uint64_t size, bool last);

/* For evict.c, under the lock. */
int cache_save_word(struct cache *cache, enum cache_bitmap bitmap, uint64_t word);

/* The clock. From its hand on, chunks that were touched lose that bit, others are dropped, until `goal` bytes are freed or the hand is behind
 * the last chunk, where it begins anew: then 1, else 0. -errno: nothing more could be freed; `ret_freed` is what was. */
int cache_sweep(struct cache *cache, uint64_t goal, uint64_t *ret_freed);

/* Reads a present or suspect chunk and compares its digest. 1: right, and present. 0: it is not there. -EBADMSG: it was damaged, and is
 * dropped. */
int cache_check(struct cache *cache, uint32_t chunk, struct weefs_error *error);

/* Keeps chunks that are present from being evicted until cache_unhold(): returns the number of the hold. -ENODATA: one is absent. -EBUSY: there
 * are CACHE_HOLDS already. */
int cache_hold(struct cache *cache, uint32_t first, uint32_t end);

/* 0: all were there all the time. -ESTALE: not. */
int cache_unhold(struct cache *cache, uint32_t hold);

/* Under the lock: these chunks are lost, whoever holds them. */
void cache_spoil(struct cache *cache, uint32_t first, uint32_t end);

/* Begins to write a chunk back; and drops one whose writing was begun long ago. */
void cache_settle(const struct cache *cache, uint32_t chunk);
void cache_drop_chunk(const struct cache *cache, uint32_t chunk);

#endif
