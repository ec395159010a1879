/* The chunk cache of a layer: stop 4 of a read's path (a hit), and stop 7, the only way into it (verify, write, mark). */
#include "cache.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <sys/stat.h>
#include <zstd.h>

#include "util.h"

#define MAP_MAGIC "WEENVMAP"
#define MAP_HEADER_SIZE 4096u

struct map_header {
	char magic[8];
	uint32_t version;
	uint32_t chunks;
	uint64_t stream_size;
	uint8_t boot_id[16];
};

static void count_chunk(struct cache *cache, uint32_t chunk)
{
	atomic_fetch_add_explicit(&cache->present_chunks, 1, memory_order_relaxed);
	atomic_fetch_add_explicit(&cache->present_stored, cache->toc->chunks[chunk].stored_size, memory_order_relaxed);
	atomic_fetch_add_explicit(&cache->present_raw, cache->toc->chunks[chunk].raw_size, memory_order_relaxed);
}

static uint64_t map_words(const struct cache *cache)
{
	return ((uint64_t)cache->toc->n_chunks + 63) / 64;
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

/* Takes the bits of the map file over when they are of this stream and this boot, or begins a new one. */
static int adopt_map(struct cache *cache, const uint8_t boot_id[16])
{
	struct map_header found = {0};
	struct map_header expected = {.magic = MAP_MAGIC, .version = 1, .chunks = cache->toc->n_chunks, .stream_size = cache->toc->header->stream_size};
	size_t size = map_words(cache) * sizeof(uint64_t);
	int r;

	memcpy(expected.boot_id, boot_id, sizeof(expected.boot_id));
	if (pread(cache->map_fd, &found, sizeof(found), 0) == (ssize_t)sizeof(found) && memcmp(&found, &expected, sizeof(expected)) == 0 &&
	    pread(cache->map_fd, (void *)cache->present, size, MAP_HEADER_SIZE) == (ssize_t)size) {
		for (uint32_t i = 0; i < cache->toc->n_chunks; i++)
			if (cache_has(cache, i))
				count_chunk(cache, i);
		return 0;
	}
	memset((void *)cache->present, 0, size);
	r = write_all(cache->map_fd, cache->present, size, MAP_HEADER_SIZE);
	return r ? r : write_all(cache->map_fd, &expected, sizeof(expected), 0);
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

int cache_open(struct cache *cache, const struct toc *toc, int data_fd, int map_fd, const uint8_t boot_id[16], struct weefs_error *error)
{
	uint64_t stream_size = toc->header->stream_size, map_size = MAP_HEADER_SIZE + ALIGN_UP(((uint64_t)toc->n_chunks + 7) / 8, 8);
	struct stat data, map;
	int r;

	*cache = (struct cache){.toc = toc, .data_fd = -1, .map_fd = -1, .random_fd = -1};
	pthread_mutex_init(&cache->lock, NULL);
	cache->present = calloc(map_words(cache) + 1, sizeof(uint64_t));
	if (!cache->present)
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
	if (!cache || !cache->present)
		return;
	if (cache->map_fd >= 0)
		close(cache->map_fd);
	if (cache->data_fd >= 0)
		close(cache->data_fd);
	if (cache->random_fd >= 0)
		close(cache->random_fd);
	free((void *)cache->present);
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
		for (uint64_t i = 0; i < map_words(cache); i++)
			atomic_store(&cache->present[i], 0);
		atomic_fetch_add(&cache->times_voided, 1);
		atomic_store(&cache->present_chunks, 0);
		atomic_store(&cache->present_stored, 0);
		atomic_store(&cache->present_raw, 0);
		r = write_all(cache->map_fd, cache->present, map_words(cache) * sizeof(uint64_t), MAP_HEADER_SIZE);
		if (r == 0 && ftruncate(cache->data_fd, (off_t)cache->toc->header->stream_size) < 0)
			r = -errno;
	}
	pthread_mutex_unlock(&cache->lock);
	return r;
}

int cache_verify(const struct cache *cache, uint32_t index, const uint8_t *stored, size_t size, const uint8_t **ret_raw, uint8_t **ret_buffer,
		 struct weefs_error *error)
{
	const struct toc_chunk *chunk = &cache->toc->chunks[index];
	cleanup_free uint8_t *buffer = NULL;
	const uint8_t *raw = stored;
	uint8_t digest[32];

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
	if (EVP_Digest(raw, chunk->raw_size, digest, NULL, EVP_sha256(), NULL) != 1)
		return fail(error, -ENOMEM, "chunk %u: SHA-256 failed", index);
	if (memcmp(digest, chunk->sha256, sizeof(digest)) != 0)
		return fail(error, -EBADMSG, "chunk %u: SHA-256 is %02x%02x%02x%02x…, expected %02x%02x%02x%02x…", index, digest[0], digest[1],
			    digest[2], digest[3], chunk->sha256[0], chunk->sha256[1], chunk->sha256[2], chunk->sha256[3]);
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

bool cache_mark(struct cache *cache, uint32_t chunk, uint32_t times_voided)
{
	uint64_t bit = UINT64_C(1) << (chunk % 64), word;
	bool written;

	pthread_mutex_lock(&cache->lock);
	written = atomic_load(&cache->times_voided) == times_voided;
	if (written) {
		word = atomic_fetch_or(&cache->present[chunk / 64], bit);
		if (!(word & bit))
			count_chunk(cache, chunk);
		word |= bit;
		/* One that cannot be saved is fetched again by the next process. */
		(void)write_all(cache->map_fd, &word, sizeof(word), MAP_HEADER_SIZE + chunk / 64 * sizeof(word));
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

	while (size) {
		ssize_t n = pread(fd, buffer, size, (off_t)stream_offset);

		if (n < 0 && errno == EINTR)
			continue;
		if (n == 0) {
			int r = cache_void(cache);

			return r ? r : -ESTALE;
		}
		if (n < 0)
			return -errno;
		buffer += n;
		size -= (uint64_t)n;
		stream_offset += (uint64_t)n;
	}
	return 0;
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
