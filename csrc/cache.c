/* The chunk cache of a layer: stop 4 of a read's path (a hit), and stop 7, the only way into it (verify, write, mark). */
#include "cache.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <sys/mman.h>
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

static void adopt_map(struct cache *cache, const uint8_t boot_id[16])
{
	struct map_header expected = {.magic = MAP_MAGIC, .version = 1, .chunks = cache->toc->n_chunks, .stream_size = cache->toc->header->stream_size};

	memcpy(expected.boot_id, boot_id, sizeof(expected.boot_id));
	if (memcmp(cache->map, &expected, sizeof(expected)) != 0) {
		memset(cache->map, 0, cache->map_size);
		memcpy(cache->map, &expected, sizeof(expected));
		return;
	}
	for (uint32_t i = 0; i < cache->toc->n_chunks; i++)
		if (cache_has(cache, i))
			count_chunk(cache, i);
}

int cache_open(struct cache *cache, const struct toc *toc, int data_fd, int map_fd, const uint8_t boot_id[16], struct weefs_error *error)
{
	uint64_t stream_size = toc->header->stream_size, map_size = MAP_HEADER_SIZE + ALIGN_UP(((uint64_t)toc->n_chunks + 7) / 8, 8);
	struct stat data, map;
	void *mapping;

	*cache = (struct cache){.toc = toc, .data_fd = -1};
	if (fstat(data_fd, &data) < 0 || fstat(map_fd, &map) < 0)
		return fail(error, -errno, "cache files of the layer: %s", strerror(errno));
	/* A data file of another size cannot be this layer's: what the map says of it is void. The map goes first, so
	 * that no order of failures leaves a map that promises what the data does not hold. */
	if ((uint64_t)data.st_size != stream_size || (uint64_t)map.st_size != map_size) {
		if (ftruncate(map_fd, 0) < 0 || ftruncate(data_fd, (off_t)stream_size) < 0 || ftruncate(map_fd, (off_t)map_size) < 0)
			return fail(error, -errno, "cache files of the layer: cannot make them %" PRIu64 " and %" PRIu64 " bytes: %s", stream_size,
				    map_size, strerror(errno));
	}
	/* Blocks now, not SIGBUS later, when the disk is full. */
	if (posix_fallocate(map_fd, 0, (off_t)map_size) != 0)
		return fail(error, -ENOSPC, "cache map of the layer: no room for %" PRIu64 " bytes", map_size);
	mapping = mmap(NULL, map_size, PROT_READ | PROT_WRITE, MAP_SHARED, map_fd, 0);
	if (mapping == MAP_FAILED)
		return fail(error, -errno, "cache map of the layer: %s", strerror(errno));
	cache->map = mapping;
	cache->map_size = map_size;
	cache->present = (_Atomic uint64_t *)(cache->map + MAP_HEADER_SIZE);
	cache->data_fd = fcntl(data_fd, F_DUPFD_CLOEXEC, 0);
	if (cache->data_fd < 0)
		return fail(error, -errno, "cache file of the layer: %s", strerror(errno));
	adopt_map(cache, boot_id);
	return 0;
}

void cache_close(struct cache *cache)
{
	if (!cache)
		return;
	if (cache->map)
		munmap(cache->map, cache->map_size);
	if (cache->data_fd >= 0)
		close(cache->data_fd);
	*cache = (struct cache){.data_fd = -1};
}

static int write_all(int fd, const uint8_t *bytes, size_t size, uint64_t offset)
{
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

int cache_write(const struct cache *cache, uint32_t index, const uint8_t *stored, size_t size, struct weefs_error *error)
{
	const struct toc_chunk *chunk = &cache->toc->chunks[index];
	cleanup_free uint8_t *buffer = NULL;
	const uint8_t *raw = stored;
	uint8_t digest[32];
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
	if (EVP_Digest(raw, chunk->raw_size, digest, NULL, EVP_sha256(), NULL) != 1)
		return fail(error, -ENOMEM, "chunk %u: SHA-256 failed", index);
	if (memcmp(digest, chunk->sha256, sizeof(digest)) != 0)
		return fail(error, -EBADMSG, "chunk %u: SHA-256 is %02x%02x%02x%02x…, expected %02x%02x%02x%02x…", index, digest[0], digest[1],
			    digest[2], digest[3], chunk->sha256[0], chunk->sha256[1], chunk->sha256[2], chunk->sha256[3]);
	r = write_all(cache->data_fd, raw, chunk->raw_size, chunk->stream_offset);
	return r ? fail(error, r, "chunk %u: cannot write it to the cache: %s", index, strerror(-r)) : 0;
}

void cache_mark(struct cache *cache, uint32_t chunk)
{
	uint64_t bit = UINT64_C(1) << (chunk % 64);

	if (!(atomic_fetch_or_explicit(&cache->present[chunk / 64], bit, memory_order_release) & bit))
		count_chunk(cache, chunk);
}

int cache_read(const struct cache *cache, uint64_t stream_offset, uint8_t *buffer, uint64_t size)
{
	while (size) {
		ssize_t n = pread(cache->data_fd, buffer, size, (off_t)stream_offset);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return -EIO;
		buffer += n;
		size -= (uint64_t)n;
		stream_offset += (uint64_t)n;
	}
	return 0;
}
