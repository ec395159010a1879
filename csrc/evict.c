/* How chunks leave the cache of a layer: the clock that makes room, and the check that drops what is damaged. Both free their bytes by
 * punching holes into the data file.
 *
 * The clock (second chance): a hand goes round over the chunks; one that was read since it last came by stays this time, another goes. Which layer's turn
 * it is, is the caller's business (weefs/evict.py).
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>

#include "cache.h"
#include "util.h"

#define WORD_BITS 64u

static bool in_word(uint64_t bits, uint32_t bit)
{
	return bits >> bit & 1;
}

/* The bytes of chunks of one word; those that lie side by side with one call. */
static int punch(const struct cache *cache, uint32_t first, uint64_t chunks)
{
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < WORD_BITS; i++) {
		const struct toc_chunk *record = &cache->toc->chunks[first + i];
		uint64_t begin, end;

		if (!in_word(chunks, i))
			continue;
		begin = record->stream_offset;
		end = begin + cache_chunk_room(cache, first + i);
		while (i + 1 < WORD_BITS && in_word(chunks, i + 1) && record[1].stream_offset == end) {
			i++;
			record++;
			end += cache_chunk_room(cache, first + i);
		}
		if (fallocate(cache->data_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)begin, (off_t)(end - begin)) < 0)
			r = -errno;
	}
	return r;
}

static uint64_t uncount(struct cache *cache, uint32_t first, uint64_t chunks, uint64_t present)
{
	uint64_t freed = 0;

	for (uint32_t i = 0; i < WORD_BITS; i++) {
		const struct toc_chunk *record = &cache->toc->chunks[first + i];

		if (!in_word(chunks, i))
			continue;
		freed += cache_chunk_room(cache, first + i);
		if (!in_word(present, i))
			continue;
		atomic_fetch_sub(&cache->present_chunks, 1);
		atomic_fetch_sub(&cache->present_stored, record->stored_size);
		atomic_fetch_sub(&cache->present_raw, record->raw_size);
	}
	atomic_fetch_sub(&cache->room, freed);
	if (cache->budget)
		atomic_fetch_sub(&cache->budget->used, freed);
	return freed;
}

/* Chunks of word `word` that are present or suspect. First the bits, on disk too: a process that dies in between must not leave any that
 * promises what was punched. Lost before and after the punching: a chunk that arrives meanwhile is written again. */
static int drop(struct cache *cache, uint64_t word, uint64_t chunks, uint64_t *ret_freed)
{
	uint64_t present = atomic_fetch_and(&cache->bits[BITS_PRESENT][word], ~chunks) & chunks;
	uint64_t suspect = atomic_fetch_and(&cache->bits[BITS_SUSPECT][word], ~chunks) & chunks;
	int r = present ? cache_save_word(cache, BITS_PRESENT, word) : 0;

	if (r == 0 && suspect)
		r = cache_save_word(cache, BITS_SUSPECT, word);
	if (r) {
		atomic_fetch_or(&cache->bits[BITS_PRESENT][word], present);
		atomic_fetch_or(&cache->bits[BITS_SUSPECT][word], suspect);
		return r;
	}
	atomic_fetch_add(&cache->times_lost, 1);
	r = punch(cache, (uint32_t)word * WORD_BITS, chunks);
	atomic_fetch_add(&cache->times_lost, 1);
	*ret_freed += uncount(cache, (uint32_t)word * WORD_BITS, chunks, present);
	return r;
}

static bool is_held(const struct cache *cache, uint32_t chunk)
{
	for (uint32_t i = 0; cache->n_holds && i < CACHE_HOLDS; i++)
		if (cache->holds[i].first <= chunk && chunk < cache->holds[i].end)
			return true;
	return false;
}

int cache_hold(struct cache *cache, uint32_t first, uint32_t end)
{
	int r = -EBUSY;

	pthread_mutex_lock(&cache->lock);
	for (uint32_t i = 0; r == -EBUSY && i < CACHE_HOLDS; i++)
		if (cache->holds[i].first >= cache->holds[i].end)
			r = (int)i;
	for (uint32_t chunk = first; r >= 0 && chunk < end; chunk++)
		if (!cache_has(cache, chunk))
			r = -ENODATA;
	if (r >= 0) {
		cache->holds[r] = (struct cache_hold){.first = first, .end = end};
		cache->n_holds++;
	}
	pthread_mutex_unlock(&cache->lock);
	for (uint32_t chunk = first; r >= 0 && chunk < end; chunk++)
		cache_touch(cache, chunk);
	return r;
}

int cache_unhold(struct cache *cache, uint32_t hold)
{
	int r;

	pthread_mutex_lock(&cache->lock);
	r = cache->holds[hold].spoiled ? -ESTALE : 0;
	if (cache->holds[hold].first < cache->holds[hold].end)
		cache->n_holds--;
	cache->holds[hold] = (struct cache_hold){0};
	pthread_mutex_unlock(&cache->lock);
	return r;
}

void cache_spoil(struct cache *cache, uint32_t first, uint32_t end)
{
	for (uint32_t i = 0; i < CACHE_HOLDS; i++)
		if (cache->holds[i].first < end && first < cache->holds[i].end)
			cache->holds[i].spoiled = true;
}

/* From the hand to the end of its word, at most. */
static int sweep_word(struct cache *cache, uint64_t goal, uint64_t *ret_freed)
{
	uint64_t word = cache->hand / WORD_BITS, victims = 0, room = 0;
	uint64_t there = atomic_load(&cache->bits[BITS_PRESENT][word]) | atomic_load(&cache->bits[BITS_SUSPECT][word]);

	do {
		uint32_t chunk = cache->hand++;
		uint64_t bit = UINT64_C(1) << chunk % WORD_BITS;

		if (!(there & bit) || is_held(cache, chunk) || atomic_fetch_and(&cache->bits[BITS_TOUCHED][word], ~bit) & bit)
			continue;
		victims |= bit;
		room += cache_chunk_room(cache, chunk);
	} while (room < goal && cache->hand % WORD_BITS && cache->hand < cache->toc->n_chunks);
	return victims ? drop(cache, word, victims, ret_freed) : 0;
}

int cache_sweep(struct cache *cache, uint64_t goal, uint64_t *ret_freed)
{
	int r = 0;

	*ret_freed = 0;
	pthread_mutex_lock(&cache->lock);
	while (r == 0 && *ret_freed < goal && cache->hand < cache->toc->n_chunks)
		r = sweep_word(cache, goal - *ret_freed, ret_freed);
	if (r == 0 && cache->hand >= cache->toc->n_chunks) {
		cache->hand = 0;
		r = 1;
	}
	pthread_mutex_unlock(&cache->lock);
	return r;
}

static int drop_damaged(struct cache *cache, uint32_t chunk, uint32_t times_lost)
{
	uint64_t freed = 0;
	int r = -EAGAIN;

	pthread_mutex_lock(&cache->lock);
	if (cache_times_lost(cache) == times_lost) {
		cache_spoil(cache, chunk, chunk + 1);
		r = drop(cache, chunk / WORD_BITS, UINT64_C(1) << chunk % WORD_BITS, &freed);
	}
	pthread_mutex_unlock(&cache->lock);
	return r ? r : -EBADMSG;
}

int cache_check(struct cache *cache, uint32_t chunk, struct weefs_error *error)
{
	const struct toc_chunk *record = &cache->toc->chunks[chunk];
	cleanup_free uint8_t *raw = malloc(record->raw_size);
	int r = raw ? -EAGAIN : -ENOMEM;

	while (r == -EAGAIN || r == -ESTALE) {
		uint32_t times_lost = cache_times_lost(cache);
		bool suspect = cache_suspects(cache, chunk);

		if (!suspect && !cache_has(cache, chunk))
			return 0;
		r = cache_read(cache, record->stream_offset, raw, record->raw_size, false);
		if (r == 0)
			r = cache_verify_raw(cache, chunk, raw, error);
		if (r == 0 && suspect) {
			r = cache_reserve(cache, chunk, error); /* given back by the mark: it is counted already */
			if (r == 0 && !cache_mark(cache, chunk, times_lost)) {
				cache_unreserve(cache, chunk);
				r = -EAGAIN;
			}
		} else if (r == -EBADMSG) {
			r = drop_damaged(cache, chunk, times_lost);
		}
	}
	return r ? r : 1;
}
