/* The table of chunks by digest: what another layer in the cache has already is not fetched (weefs/copies.py). */
#include "digests.h"

#include <errno.h>

#include "util.h"

#define SMALLEST 1024u
#define PLACES_MAX 8u	/* of one digest: a chunk that every layer has would make its neighbours hard to find */

void digests_init(struct digests *digests)
{
	*digests = (struct digests){0};
	pthread_mutex_init(&digests->lock, NULL);
}

void digests_destroy(struct digests *digests)
{
	free(digests->entries);
	pthread_mutex_destroy(&digests->lock);
}

/* A digest is as good as random: no hash function is needed. */
static uint64_t beginning(const uint8_t sha256[32])
{
	uint64_t digest;

	memcpy(&digest, sha256, sizeof(digest));
	return digest;
}

static void put(struct digests *digests, const struct digest_entry *entry)
{
	uint64_t i = entry->digest & (digests->size - 1);
	uint32_t places = 0;

	for (; digests->entries[i].layer && places < PLACES_MAX; i = (i + 1) & (digests->size - 1))
		places += digests->entries[i].digest == entry->digest;
	if (places == PLACES_MAX)
		return;
	digests->entries[i] = *entry;
	digests->used++;
}

/* Whether a table of this size has room for so many: three quarters of it, where a digest that is not there is known not to be after 8 looks
 * at neighbours. */
static bool holds(uint64_t size, uint64_t entries)
{
	return 4 * entries <= 3 * size;
}

/* Puts all entries but those of `without` into a table that has room for `more` further ones. */
static int rebuild(struct digests *digests, uint64_t more, uint32_t without)
{
	struct digests fresh = {.size = SMALLEST};

	while (!holds(fresh.size, digests->used + more))
		fresh.size *= 2;
	fresh.entries = calloc(fresh.size, sizeof(*fresh.entries));
	if (!fresh.entries)
		return -ENOMEM;
	for (uint64_t i = 0; i < digests->size; i++)
		if (digests->entries[i].layer && digests->entries[i].layer != without)
			put(&fresh, &digests->entries[i]);
	free(digests->entries);
	digests->entries = fresh.entries;
	digests->size = fresh.size;
	digests->used = fresh.used;
	return 0;
}

int digests_add(struct digests *digests, uint32_t layer, const struct toc *toc)
{
	int r = 0;

	pthread_mutex_lock(&digests->lock);
	if (!holds(digests->size, digests->used + toc->n_chunks) || !digests->entries)
		r = rebuild(digests, toc->n_chunks, 0);
	for (uint32_t i = 0; r == 0 && i < toc->n_chunks; i++) {
		const struct toc_chunk *chunk = &toc->chunks[i];

		if (chunk->stream_offset / TOC_STREAM_ALIGN <= UINT32_MAX)
			put(digests, &(struct digest_entry){beginning(chunk->sha256), layer, (uint32_t)(chunk->stream_offset / TOC_STREAM_ALIGN)});
	}
	pthread_mutex_unlock(&digests->lock);
	return r;
}

void digests_remove(struct digests *digests, uint32_t layer)
{
	pthread_mutex_lock(&digests->lock);
	(void)rebuild(digests, 0, layer); /* without memory its entries stay, and lead nowhere */
	pthread_mutex_unlock(&digests->lock);
}

uint32_t digests_find(struct digests *digests, const uint8_t sha256[32], uint32_t but, struct weefs_copy *ret_copies, uint32_t n)
{
	uint64_t digest = beginning(sha256);
	uint32_t found = 0;

	pthread_mutex_lock(&digests->lock);
	for (uint64_t i = digest & (digests->size - 1); digests->size && digests->entries[i].layer && found < n; i = (i + 1) & (digests->size - 1)) {
		const struct digest_entry *entry = &digests->entries[i];

		if (entry->digest == digest && entry->layer != but)
			ret_copies[found++] = (struct weefs_copy){.layer = entry->layer, .offset = (uint64_t)entry->block * TOC_STREAM_ALIGN};
	}
	pthread_mutex_unlock(&digests->lock);
	return found;
}
