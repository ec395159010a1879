/* The chunk cache of a layer: stop 4 of a read's path (a hit), and stop 7, the only way into it (verify, write, mark). */
#include "cache.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <stddef.h>
#include <sys/stat.h>
#include <zstd.h>

#include "util.h"

#define MAP_MAGIC "WEENVMAP"
#define MAP_VERSION 2u
#define MAP_HEADER_SIZE 4096u

struct map_header {
	char magic[8];
	uint32_t version;
	uint32_t chunks;
	uint64_t stream_size;
	uint8_t boot_id[16];
	uint32_t hand;	/* of the clock; counts only if it is one of a chunk */
	uint32_t reserved;
};

static void count_present(struct cache *cache, uint32_t chunk)
{
	atomic_fetch_add_explicit(&cache->present_chunks, 1, memory_order_relaxed);
	atomic_fetch_add_explicit(&cache->present_stored, cache->toc->chunks[chunk].stored_size, memory_order_relaxed);
	atomic_fetch_add_explicit(&cache->present_raw, cache->toc->chunks[chunk].raw_size, memory_order_relaxed);
}

static uint64_t map_words(const struct cache *cache)
{
	return ((uint64_t)cache->toc->n_chunks + 63) / 64;
}

uint64_t cache_chunk_room(const struct cache *cache, uint32_t chunk)
{
	return ALIGN_UP((uint64_t)cache->toc->chunks[chunk].raw_size, TOC_STREAM_ALIGN);
}

uint32_t cache_count_suspects(const struct cache *cache)
{
	uint32_t n = 0;

	for (uint64_t i = 0; i < map_words(cache); i++)
		n += (uint32_t)__builtin_popcountll(atomic_load(&cache->bits[BITS_SUSPECT][i]));
	return n;
}

static void budget_give(struct cache *cache, uint64_t size)
{
	if (cache->budget)
		atomic_fetch_sub(&cache->budget->used, size);
}

int cache_reserve(struct cache *cache, uint32_t chunk, struct weefs_error *error)
{
	uint64_t size = cache_chunk_room(cache, chunk), limit;

	if (!cache->budget)
		return 0;
	limit = atomic_load(&cache->budget->limit);
	if (atomic_fetch_add(&cache->budget->used, size) + size <= limit)
		return 0;
	budget_give(cache, size);
	return fail(error, -ENOSPC, "chunk %u: the cache is at its bound of %" PRIu64 " bytes", chunk, limit);
}

void cache_unreserve(struct cache *cache, uint32_t chunk)
{
	budget_give(cache, cache_chunk_room(cache, chunk));
}

static uint64_t bitmap_size(const struct cache *cache)
{
	return map_words(cache) * sizeof(uint64_t);
}

static uint64_t bitmap_at(const struct cache *cache, enum cache_bitmap bitmap)
{
	return MAP_HEADER_SIZE + bitmap * bitmap_size(cache);
}

static int write_all(int fd, const void *data, size_t size, uint64_t offset)
{
	const uint8_t *bytes = data;

	while (size) {
		ssize_t n = pwrite(fd, bytes, size, (off_t)offset);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		bytes += n;
		size -= (size_t)n;
		offset += (uint64_t)n;
	}
	return 0;
}

static int save_bitmap(struct cache *cache, enum cache_bitmap bitmap)
{
	return write_all(cache->map_fd, (void *)cache->bits[bitmap], bitmap_size(cache), bitmap_at(cache, bitmap));
}

int cache_save_word(struct cache *cache, enum cache_bitmap bitmap, uint64_t word)
{
	uint64_t bits = atomic_load(&cache->bits[bitmap][word]);

	return write_all(cache->map_fd, &bits, sizeof(bits), bitmap_at(cache, bitmap) + word * sizeof(bits));
}

static bool read_map(struct cache *cache, struct map_header *ret_header)
{
	size_t size = BITMAPS * bitmap_size(cache);

	return pread(cache->map_fd, ret_header, sizeof(*ret_header), 0) == (ssize_t)sizeof(*ret_header) &&
	       pread(cache->map_fd, (void *)cache->bits[0], size, MAP_HEADER_SIZE) == (ssize_t)size;
}

/* What was present before the machine crashed may not have reached the disk. */
static int suspect_all(struct cache *cache)
{
	int r;

	for (uint64_t i = 0; i < map_words(cache); i++) {
		atomic_fetch_or(&cache->bits[BITS_SUSPECT][i], atomic_load(&cache->bits[BITS_PRESENT][i]));
		atomic_store(&cache->bits[BITS_PRESENT][i], 0);
	}
	r = save_bitmap(cache, BITS_SUSPECT); /* first: a chunk whose bits are both off would keep its room for ever */
	return r ? r : save_bitmap(cache, BITS_PRESENT);
}

static int begin_map(struct cache *cache)
{
	memset((void *)cache->bits[0], 0, BITMAPS * bitmap_size(cache));
	if (ftruncate(cache->data_fd, 0) < 0 || ftruncate(cache->data_fd, (off_t)cache->toc->header->stream_size) < 0)
		return -errno;
	return write_all(cache->map_fd, (void *)cache->bits[0], BITMAPS * bitmap_size(cache), MAP_HEADER_SIZE);
}

static void count_all(struct cache *cache)
{
	uint64_t room = 0;

	for (uint32_t i = 0; i < cache->toc->n_chunks; i++) {
		if (cache_has(cache, i))
			count_present(cache, i);
		if (cache_has(cache, i) || cache_suspects(cache, i))
			room += cache_chunk_room(cache, i);
	}
	atomic_store(&cache->room, room);
	if (cache->budget)
		atomic_fetch_add(&cache->budget->used, room);
}

/* Takes the bits of the map file over when they are of this stream, or begins a new one. */
static int adopt_map(struct cache *cache, const uint8_t boot_id[16])
{
	struct map_header found = {0};
	struct map_header expected = {.magic = MAP_MAGIC, .version = MAP_VERSION, .chunks = cache->toc->n_chunks, .stream_size = cache->toc->header->stream_size};
	bool is_ours = read_map(cache, &found) && memcmp(&found, &expected, offsetof(struct map_header, boot_id)) == 0;
	bool this_boot = memcmp(found.boot_id, boot_id, sizeof(found.boot_id)) == 0;
	int r = 0;

	memcpy(expected.boot_id, boot_id, sizeof(expected.boot_id));
	if (!is_ours)
		r = begin_map(cache);
	else if (!this_boot)
		r = suspect_all(cache);
	if (r == 0 && (!is_ours || !this_boot))
		r = write_all(cache->map_fd, &expected, sizeof(expected), 0);
	if (r)
		return r;
	count_all(cache);
	if (is_ours && found.hand < cache->toc->n_chunks)
		cache->hand = found.hand;
	return 0;
}

/* Another description of the same file, without readahead; -1 where that cannot be had. */
static int open_random(int data_fd)
{
	char path[32];
	int fd;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", data_fd);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd >= 0)
		posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
	return fd;
}

int cache_open(struct cache *cache, const struct toc *toc, int data_fd, int map_fd, const uint8_t boot_id[16], struct cache_budget *budget,
	       struct weefs_error *error)
{
	uint64_t stream_size = toc->header->stream_size, map_size;
	struct stat data, map;
	int r;

	*cache = (struct cache){.toc = toc, .data_fd = -1, .map_fd = -1, .random_fd = -1, .budget = budget};
	pthread_mutex_init(&cache->lock, NULL);
	map_size = bitmap_at(cache, BITMAPS);
	cache->bits[0] = calloc(BITMAPS * map_words(cache) + 1, sizeof(uint64_t));
	for (int i = 1; cache->bits[0] && i < BITMAPS; i++)
		cache->bits[i] = cache->bits[i - 1] + map_words(cache);
	if (!cache->bits[0])
		return fail(error, -ENOMEM, "cache map of the layer: no memory for %u chunks", toc->n_chunks);
	if (fstat(data_fd, &data) < 0 || fstat(map_fd, &map) < 0)
		return fail(error, -errno, "cache files of the layer: %s", strerror(errno));
	/* A data file of another size cannot be this layer's: what the map says of it is void. The map goes first, so
	 * that no order of failures leaves a map that promises what the data does not hold. */
	if ((uint64_t)data.st_size != stream_size || (uint64_t)map.st_size != map_size) {
		if (ftruncate(map_fd, 0) < 0 || ftruncate(data_fd, (off_t)stream_size) < 0 || ftruncate(map_fd, (off_t)map_size) < 0)
			return fail(error, -errno, "cache files of the layer: cannot make them %" PRIu64 " and %" PRIu64 " bytes: %s", stream_size,
				    map_size, strerror(errno));
	}
	cache->data_fd = fcntl(data_fd, F_DUPFD_CLOEXEC, 0);
	cache->map_fd = cache->data_fd < 0 ? -1 : fcntl(map_fd, F_DUPFD_CLOEXEC, 0);
	if (cache->map_fd < 0)
		return fail(error, -errno, "cache files of the layer: %s", strerror(errno));
	cache->random_fd = open_random(cache->data_fd);
	r = adopt_map(cache, boot_id);
	return r ? fail(error, r, "cache map of the layer: %s", strerror(-r)) : 0;
}

void cache_close(struct cache *cache)
{
	if (!cache || !cache->bits[0])
		return;
	if (cache->map_fd >= 0) {
		/* Where this fails, some chunks are chosen a round early or late. */
		(void)save_bitmap(cache, BITS_TOUCHED);
		(void)write_all(cache->map_fd, &cache->hand, sizeof(cache->hand), offsetof(struct map_header, hand));
		close(cache->map_fd);
	}
	if (cache->data_fd >= 0)
		close(cache->data_fd);
	if (cache->random_fd >= 0)
		close(cache->random_fd);
	free((void *)cache->bits[0]);
	budget_give(cache, atomic_load(&cache->room));
	pthread_mutex_destroy(&cache->lock);
	*cache = (struct cache){.data_fd = -1, .map_fd = -1, .random_fd = -1};
}

static bool has_its_size(const struct cache *cache)
{
	struct stat st;

	return fstat(cache->data_fd, &st) == 0 && (uint64_t)st.st_size == cache->toc->header->stream_size;
}

/* Everything in the data file is absent from now on. The bits go before the file gets its size back: a reader that still
 * finds a bit gets a short read, or sees afterwards that the cache was voided. */
static int cache_void(struct cache *cache)
{
	int r = 0;

	pthread_mutex_lock(&cache->lock);
	if (!has_its_size(cache)) {
		for (uint64_t i = 0; i < map_words(cache); i++) {
			atomic_store(&cache->bits[BITS_PRESENT][i], 0);
			atomic_store(&cache->bits[BITS_SUSPECT][i], 0);
		}
		cache_spoil(cache, 0, cache->toc->n_chunks);
		atomic_fetch_add(&cache->times_lost, 1);
		atomic_store(&cache->present_chunks, 0);
		atomic_store(&cache->present_stored, 0);
		atomic_store(&cache->present_raw, 0);
		budget_give(cache, atomic_exchange(&cache->room, 0));
		r = save_bitmap(cache, BITS_PRESENT);
		if (r == 0)
			r = save_bitmap(cache, BITS_SUSPECT);
		if (r == 0 && ftruncate(cache->data_fd, (off_t)cache->toc->header->stream_size) < 0)
			r = -errno;
	}
	pthread_mutex_unlock(&cache->lock);
	return r;
}

int cache_verify_raw(const struct cache *cache, uint32_t index, const uint8_t *raw, struct weefs_error *error)
{
	const struct toc_chunk *chunk = &cache->toc->chunks[index];
	uint8_t digest[32];

	if (EVP_Digest(raw, chunk->raw_size, digest, NULL, EVP_sha256(), NULL) != 1)
		return fail(error, -ENOMEM, "chunk %u: SHA-256 failed", index);
	if (memcmp(digest, chunk->sha256, sizeof(digest)) != 0)
		return fail(error, -EBADMSG, "chunk %u: SHA-256 is %02x%02x%02x%02x…, expected %02x%02x%02x%02x…", index, digest[0], digest[1],
			    digest[2], digest[3], chunk->sha256[0], chunk->sha256[1], chunk->sha256[2], chunk->sha256[3]);
	return 0;
}

int cache_verify(const struct cache *cache, uint32_t index, const uint8_t *stored, size_t size, const uint8_t **ret_raw, uint8_t **ret_buffer,
		 struct weefs_error *error)
{
	const struct toc_chunk *chunk = &cache->toc->chunks[index];
	cleanup_free uint8_t *buffer = NULL;
	const uint8_t *raw = stored;
	int r;

	if (size != chunk->stored_size)
		return fail(error, -EBADMSG, "chunk %u: expected %u stored bytes, received %zu", index, chunk->stored_size, size);
	if (chunk->flags & CHUNK_ZSTD) {
		size_t n;

		buffer = malloc(chunk->raw_size);
		if (!buffer)
			return fail(error, -ENOMEM, "chunk %u: no memory for %u bytes", index, chunk->raw_size);
		if (ZSTD_findFrameCompressedSize(stored, size) != size)
			return fail(error, -EBADMSG, "chunk %u: its %zu bytes are not one zstd frame", index, size);
		n = ZSTD_decompress(buffer, chunk->raw_size, stored, size);
		if (ZSTD_isError(n) || n != chunk->raw_size)
			return fail(error, -EBADMSG, "chunk %u: expected %u bytes after decompression: %s", index, chunk->raw_size,
				    ZSTD_isError(n) ? ZSTD_getErrorName(n) : "received fewer");
		raw = buffer;
	}
	r = cache_verify_raw(cache, index, raw, error);
	if (r)
		return r;
	*ret_raw = raw;
	*ret_buffer = buffer;
	buffer = NULL;
	return 0;
}

/* Looked at before and after: to write behind the end of a file that was cut off would make a hole of what was before it. */
int cache_write(struct cache *cache, uint32_t index, const uint8_t *raw, struct weefs_error *error)
{
	const struct toc_chunk *chunk = &cache->toc->chunks[index];
	int r = 0;

	do {
		if (!has_its_size(cache))
			r = cache_void(cache);
		if (r == 0)
			r = write_all(cache->data_fd, raw, chunk->raw_size, chunk->stream_offset);
	} while (r == 0 && !has_its_size(cache));
	return r ? fail(error, r, "chunk %u: cannot write it to the cache: %s", index, strerror(-r)) : 0;
}

bool cache_mark(struct cache *cache, uint32_t chunk, uint32_t times_lost)
{
	uint64_t word = chunk / 64, bit = UINT64_C(1) << (chunk % 64);
	bool written, counted;

	pthread_mutex_lock(&cache->lock);
	written = atomic_load(&cache->times_lost) == times_lost;
	if (written) {
		counted = cache_has(cache, chunk) || cache_suspects(cache, chunk);
		if (!(atomic_fetch_or(&cache->bits[BITS_PRESENT][word], bit) & bit))
			count_present(cache, chunk);
		/* One that cannot be saved is fetched again by the next process. */
		(void)cache_save_word(cache, BITS_PRESENT, word);
		if (atomic_fetch_and(&cache->bits[BITS_SUSPECT][word], ~bit) & bit)
			(void)cache_save_word(cache, BITS_SUSPECT, word);
		if (counted)
			cache_unreserve(cache, chunk);
		else
			atomic_fetch_add(&cache->room, cache_chunk_room(cache, chunk));
	}
	pthread_mutex_unlock(&cache->lock);
	return written;
}

static bool is_random(const struct cache *cache, uint64_t size)
{
	return size < CACHE_LARGE_READ && cache->random_fd >= 0;
}

int cache_read(struct cache *cache, uint64_t stream_offset, uint8_t *buffer, uint64_t size, bool large)
{
	int fd = large && is_random(cache, size) ? cache->random_fd : cache->data_fd;
	int r = pread_whole(fd, buffer, size, stream_offset);

	if (r != -EBADMSG)
		return r;
	r = cache_void(cache); /* it was cut off */
	return r ? r : -ESTALE;
}

static void drop(const struct cache *cache, uint64_t begin, uint64_t end)
{
	if (begin < end)
		posix_fadvise(cache->data_fd, (off_t)begin, (off_t)(end - begin), POSIX_FADV_DONTNEED);
}

/* Reads may be answered out of order: two windows are dropped each time, so that what one came too early for the next one takes. */
void cache_drop(const struct cache *cache, uint64_t stream_offset, uint64_t size, bool last)
{
	uint64_t end = stream_offset + size, window = end - end % CACHE_WINDOW;

	if (is_random(cache, size))
		drop(cache, stream_offset, ALIGN_UP(end, TOC_STREAM_ALIGN));
	else if (stream_offset < window || stream_offset % CACHE_WINDOW == 0)
		drop(cache, window < 2 * CACHE_WINDOW ? 0 : window - 2 * CACHE_WINDOW, window);
	if (last)
		drop(cache, window < CACHE_WINDOW ? 0 : window - CACHE_WINDOW, window + CACHE_WINDOW);
}

void cache_settle(const struct cache *cache, uint32_t chunk)
{
	const struct toc_chunk *record = &cache->toc->chunks[chunk];

	sync_file_range(cache->data_fd, (off_t)record->stream_offset, record->raw_size, SYNC_FILE_RANGE_WRITE);
}

void cache_drop_chunk(const struct cache *cache, uint32_t chunk)
{
	const struct toc_chunk *record = &cache->toc->chunks[chunk];

	drop(cache, record->stream_offset, record->stream_offset + record->raw_size);
}
