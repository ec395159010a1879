/* The side of the miss queue that fetches (stop 8 of a read's path): what is wanted is taken, what arrives is verified, written, and given to
 * those who wait. */
#include <errno.h>

#include "fuse.h"
#include "super.h"
#include "util.h"

int weefs_miss_fd(struct weefs *w)
{
	return w->misses.event_fd;
}

uint32_t weefs_take_misses(struct weefs *w, struct weefs_miss *ret_misses, uint32_t n)
{
	return miss_take(&w->misses, ret_misses, n);
}

uint32_t weefs_take_faults(struct weefs *w, struct weefs_fault *ret_faults, uint32_t n)
{
	return miss_take_faults(&w->misses, ret_faults, n);
}

void weefs_answer_faults(struct weefs *w, uint64_t through)
{
	struct pending *ready = miss_faulted(&w->misses, through);

	while (ready) {
		struct pending *next = ready->next;

		fuse_fail_read(w, &ready->request, EIO);
		miss_release(&w->misses, ready);
		ready = next;
	}
	miss_ring(&w->misses); /* a layer that only they kept may be idle now */
}

/* To be given back with super_unuse_layer(). */
static struct layer *layer_with_chunk(struct weefs *w, uint32_t slot, uint32_t chunk)
{
	struct layer *layer = super_use_layer(w, slot);

	if (layer && chunk < layer->toc.n_chunks)
		return layer;
	super_unuse_layer(w, layer);
	return NULL;
}

int weefs_claim(struct weefs *w, uint32_t slot, uint32_t chunk, struct weefs_miss *ret_miss)
{
	struct layer *layer = layer_with_chunk(w, slot, chunk);
	int r = layer ? miss_claim(&w->misses, layer, chunk, ret_miss) : -ENOENT;

	super_unuse_layer(w, layer);
	return r;
}

/* Whether a chunk may lengthen a range of the blob that begins with `first` and ends with `last`. */
static bool lengthens(const struct weefs_miss *first, const struct weefs_miss *last, const struct toc_chunk *next, uint64_t size)
{
	return next->blob_offset == last->blob_offset + last->stored_size && next->blob_offset + next->stored_size - first->blob_offset <= size;
}

int weefs_claim_run(struct weefs *w, uint32_t slot, uint32_t from, uint64_t size, struct weefs_miss *ret_misses, uint32_t n)
{
	struct layer *layer = super_use_layer(w, slot);
	int claimed = 0;

	if (!layer)
		return -ENOENT;
	for (uint32_t chunk = from; chunk < layer->toc.n_chunks && (uint32_t)claimed < n; chunk++) {
		bool absent = !cache_has(&layer->cache, chunk);

		if (claimed && (!absent || !lengthens(&ret_misses[0], &ret_misses[claimed - 1], &layer->toc.chunks[chunk], size)))
			break;
		if (absent && miss_claim(&w->misses, layer, chunk, &ret_misses[claimed]) == 1)
			claimed++;
		else if (claimed)
			break;
	}
	super_unuse_layer(w, layer);
	return claimed;
}

int weefs_unclaim(struct weefs *w, uint32_t slot, uint32_t chunk)
{
	struct layer *layer = layer_with_chunk(w, slot, chunk);

	if (!layer)
		return -ENOENT;
	miss_give_back(&w->misses, layer, chunk);
	super_unuse_layer(w, layer);
	return 0;
}

int weefs_describe_chunk(struct weefs *w, uint32_t slot, uint32_t chunk, struct weefs_miss *ret_chunk)
{
	struct layer *layer = layer_with_chunk(w, slot, chunk);

	if (!layer)
		return -ENOENT;
	miss_describe(layer, chunk, ret_chunk);
	super_unuse_layer(w, layer);
	return 0;
}

int weefs_first_reads(struct weefs *w, uint32_t slot, uint32_t since, uint32_t *ret_chunks, uint32_t n)
{
	struct layer *layer = super_use_layer(w, slot);
	int r = layer ? (int)seen_list(&layer->seen, since, ret_chunks, n < INT32_MAX ? n : INT32_MAX) : -ENOENT;

	super_unuse_layer(w, layer);
	return r;
}

static void answer_ready(struct weefs *w, struct pending *ready)
{
	while (ready) {
		struct pending *next = ready->next;

		fuse_answer_pending(w, ready);
		pending_free(&w->misses, ready);
		ready = next;
	}
}

/* Writes the chunk and marks it. */
static int write_chunk(struct layer *layer, uint32_t chunk, const uint8_t *raw, struct weefs_error *error)
{
	uint32_t times;
	int r = cache_reserve(&layer->cache, chunk, error);

	if (r)
		return r;
	do {
		times = cache_times_lost(&layer->cache);
		r = cache_write(&layer->cache, chunk, raw, error);
	} while (r == 0 && !cache_mark(&layer->cache, chunk, times));
	if (r)
		cache_unreserve(&layer->cache, chunk);
	return r;
}

/* The same, or gets hold of it in memory when the cache cannot take it. */
static int store_chunk(struct weefs *w, struct layer *layer, uint32_t chunk, const uint8_t *raw, struct held **ret_held, struct weefs_error *error)
{
	int r = write_chunk(layer, chunk, raw, error);

	if (r == 0) {
		stats_add(&w->session.shared->published, 1);
		return 0;
	}
	*ret_held = miss_hold(&w->misses, layer, chunk, raw);
	if (!*ret_held)
		return r;
	stats_add(&w->session.shared->unwritten, 1);
	return 0;
}

/* Chunks of full size are inside of large files: they do not stay in the page cache of the data file (cache.h). */
static void settle_chunk(struct weefs *w, const struct layer *layer, uint32_t chunk)
{
	struct settling now = {layer->slot, chunk, layer->generation}, before;
	struct layer *earlier;

	if (layer->toc.chunks[chunk].raw_size < layer->toc.header->chunk_size)
		return;
	cache_settle(&layer->cache, chunk);
	pthread_mutex_lock(&w->lock);
	before = w->settling[w->settled % CACHE_SETTLING];
	w->settling[w->settled++ % CACHE_SETTLING] = now;
	pthread_mutex_unlock(&w->lock);
	earlier = before.layer ? super_use_layer(w, before.layer) : NULL;
	if (earlier && earlier->generation == before.generation)
		cache_drop_chunk(&earlier->cache, before.chunk);
	super_unuse_layer(w, earlier);
}

/* A chunk that was verified: `raw`; NULL: that was present a moment ago. */
static int publish(struct weefs *w, struct layer *layer, uint32_t chunk, const uint8_t *raw, struct weefs_error *error)
{
	struct held *held = NULL;
	int r = raw ? store_chunk(w, layer, chunk, raw, &held, error) : 0;

	if (r)
		return r;
	answer_ready(w, miss_arrived(&w->misses, layer, chunk, held));
	if (raw && !held)
		settle_chunk(w, layer, chunk);
	r = held != NULL;
	miss_unhold(&w->misses, held);
	return r;
}

static int refused(struct weefs *w, int r)
{
	stats_add(&w->session.shared->rejected, r == -EBADMSG);
	return r;
}

/* Where the bytes of a chunk are: in memory as the blob has them, in memory uncompressed, or uncompressed in a file. */
struct arrival {
	const uint8_t *stored, *raw; /* both NULL: in the file */
	size_t size;
	int fd;
	uint64_t offset;
};

static int publish_stored(struct weefs *w, struct layer *layer, uint32_t chunk, const struct arrival *arrival, struct weefs_error *error)
{
	cleanup_free uint8_t *buffer = NULL;
	const uint8_t *raw = NULL;
	int r = refused(w, cache_verify(&layer->cache, chunk, arrival->stored, arrival->size, &raw, &buffer, error));

	return r ? r : publish(w, layer, chunk, raw, error);
}

static int publish_raw(struct weefs *w, struct layer *layer, uint32_t chunk, const struct arrival *arrival, struct weefs_error *error)
{
	uint32_t expected = layer->toc.chunks[chunk].raw_size;
	int r;

	if (arrival->size != expected)
		r = fail(error, -EBADMSG, "chunk %u: expected %u bytes, received %zu", chunk, expected, arrival->size);
	else
		r = cache_verify_raw(&layer->cache, chunk, arrival->raw, error);
	return r ? refused(w, r) : publish(w, layer, chunk, arrival->raw, error);
}

static int publish_copy(struct weefs *w, struct layer *layer, uint32_t chunk, const struct arrival *arrival, struct weefs_error *error)
{
	uint32_t size = layer->toc.chunks[chunk].raw_size;
	cleanup_free uint8_t *raw = malloc(size);
	int r = raw ? pread_whole(arrival->fd, raw, size, arrival->offset) : -ENOMEM;

	if (r)
		return fail(error, r, "chunk %u: cannot read its copy: %s", chunk, strerror(-r));
	r = cache_verify_raw(&layer->cache, chunk, raw, error);
	return r ? r : publish(w, layer, chunk, raw, error);
}

static int publish_arrival(struct weefs *w, uint32_t slot, uint32_t chunk, const struct arrival *arrival, struct weefs_error *error)
{
	struct layer *layer = layer_with_chunk(w, slot, chunk);
	int r;

	if (!layer)
		return fail(error, -ENOENT, "no layer %u with a chunk %u", slot, chunk);
	if (cache_has(&layer->cache, chunk))
		r = publish(w, layer, chunk, NULL, error);
	else if (arrival->stored)
		r = publish_stored(w, layer, chunk, arrival, error);
	else if (arrival->raw)
		r = publish_raw(w, layer, chunk, arrival, error);
	else
		r = publish_copy(w, layer, chunk, arrival, error);
	super_unuse_layer(w, layer);
	return r;
}

int weefs_publish(struct weefs *w, uint32_t slot, uint32_t chunk, const uint8_t *stored, size_t size, struct weefs_error *error)
{
	return publish_arrival(w, slot, chunk, &(struct arrival){.stored = stored, .size = size}, error);
}

int weefs_publish_raw(struct weefs *w, uint32_t slot, uint32_t chunk, const uint8_t *raw, size_t size, struct weefs_error *error)
{
	return publish_arrival(w, slot, chunk, &(struct arrival){.raw = raw, .size = size}, error);
}

int weefs_publish_copy(struct weefs *w, uint32_t slot, uint32_t chunk, int fd, uint64_t offset, struct weefs_error *error)
{
	return publish_arrival(w, slot, chunk, &(struct arrival){.fd = fd, .offset = offset}, error);
}

int weefs_chunks_at(struct weefs *w, uint32_t slot, uint64_t offset, uint64_t size, uint32_t *ret_first, uint32_t *ret_end)
{
	struct layer *layer = super_use_layer(w, slot);
	uint64_t stream_size = layer ? layer->toc.header->stream_size : 0;
	int r = !layer ? -ENOENT : size == 0 || offset >= stream_size || size > stream_size - offset ? -ERANGE : 0;

	if (r == 0) {
		*ret_first = toc_chunk_at(&layer->toc, offset);
		*ret_end = toc_chunk_at(&layer->toc, offset + size - 1) + 1;
	}
	super_unuse_layer(w, layer);
	return r;
}

int weefs_hold(struct weefs *w, uint32_t slot, uint32_t first, uint32_t end)
{
	struct layer *layer = super_use_layer(w, slot);
	int r = !layer ? -ENOENT : first >= end || end > layer->toc.n_chunks ? -ERANGE : cache_hold(&layer->cache, first, end);

	super_unuse_layer(w, layer);
	return r;
}

int weefs_unhold(struct weefs *w, uint32_t slot, uint32_t hold)
{
	struct layer *layer = super_use_layer(w, slot);
	int r = !layer ? -ENOENT : hold >= CACHE_HOLDS ? -ERANGE : cache_unhold(&layer->cache, hold);

	super_unuse_layer(w, layer);
	return r;
}

int weefs_check_chunk(struct weefs *w, uint32_t slot, uint32_t chunk, struct weefs_error *error)
{
	struct layer *layer = layer_with_chunk(w, slot, chunk);
	int r;

	if (!layer)
		return fail(error, -ENOENT, "no layer %u with a chunk %u", slot, chunk);
	r = cache_check(&layer->cache, chunk, error);
	if (r == 1)
		answer_ready(w, miss_arrived(&w->misses, layer, chunk, NULL));
	super_unuse_layer(w, layer);
	return r;
}

int weefs_fail(struct weefs *w, uint32_t slot, uint32_t chunk, int error)
{
	struct layer *layer = layer_with_chunk(w, slot, chunk);

	if (!layer)
		return -ENOENT;
	miss_failed(&w->misses, layer, chunk, error);
	super_unuse_layer(w, layer);
	return 0;
}
