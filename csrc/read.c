/* Ranges of files in the logical stream: stop 3 of a read's path, where a range becomes chunks, and the copying of
 * those that are present. */
#include "read.h"

#include <errno.h>
#include <string.h>

/* The data of a range, piece by piece: one for an ordinary file, one per extent for a sparse one. */
struct pieces {
	const struct toc *toc;
	const struct toc_inode *inode;
	uint64_t offset, end;
	uint32_t extent;
};

struct piece {
	uint64_t file_offset, stream_offset, length;
};

/* The first extent that ends above `offset`. */
static uint32_t extent_at(const struct toc *toc, const struct toc_inode *inode, uint64_t offset)
{
	uint32_t low = (uint32_t)inode->data, high = low + inode->count;

	while (low < high) {
		uint32_t middle = low + (high - low) / 2;

		if (toc->extents[middle].file_offset + toc->extents[middle].length > offset)
			high = middle;
		else
			low = middle + 1;
	}
	return low;
}

static struct pieces pieces_of(const struct toc *toc, const struct toc_inode *inode, uint64_t offset, uint32_t size)
{
	struct pieces pieces = {.toc = toc, .inode = inode, .offset = offset, .end = offset + size};

	if (inode->flags & INODE_SPARSE)
		pieces.extent = extent_at(toc, inode, offset);
	return pieces;
}

static bool next_piece(struct pieces *pieces, struct piece *ret_piece)
{
	const struct toc_inode *inode = pieces->inode;
	const struct toc_extent *extent;
	uint64_t begin, end;

	if (pieces->offset >= pieces->end)
		return false;
	if (!(inode->flags & INODE_SPARSE)) {
		*ret_piece = (struct piece){pieces->offset, inode->data + pieces->offset, pieces->end - pieces->offset};
		pieces->offset = pieces->end;
		return true;
	}
	if (pieces->extent >= inode->data + inode->count)
		return false;
	extent = &pieces->toc->extents[pieces->extent++];
	begin = extent->file_offset > pieces->offset ? extent->file_offset : pieces->offset;
	end = extent->file_offset + extent->length < pieces->end ? extent->file_offset + extent->length : pieces->end;
	if (begin >= end)
		return false;
	*ret_piece = (struct piece){begin, extent->stream_offset + (begin - extent->file_offset), end - begin};
	pieces->offset = end;
	return true;
}

uint32_t read_missing(struct layer *layer, const struct toc_inode *inode, uint64_t offset, uint32_t size, const struct pending *pending,
		      uint32_t *ret_chunks, uint32_t n)
{
	const struct toc *toc = &layer->toc;
	struct pieces pieces = pieces_of(toc, inode, offset, size);
	struct piece piece;
	uint32_t missing = 0, next = 0;

	while (next_piece(&pieces, &piece)) {
		uint32_t chunk = toc_chunk_at(toc, piece.stream_offset);

		/* Small extents may share a chunk: do not name it twice. Extents that go back in the stream are
		 * legal; miss_wait() copes with doubles. */
		if (chunk < next && missing && ret_chunks[missing - 1] == chunk)
			chunk = next;
		for (; chunk < toc->n_chunks && toc->chunks[chunk].stream_offset < piece.stream_offset + piece.length && missing < n; chunk++) {
			if (!pending)
				seen_note(&layer->seen, chunk, toc->chunks[chunk].raw_size);
			if (!cache_has(&layer->cache, chunk)) {
				if (!pending_held(pending, chunk))
					ret_chunks[missing++] = chunk;
			} else if (!pending) {
				cache_touch(&layer->cache, chunk);
			}
		}
		next = chunk;
	}
	return missing;
}

/* One piece; chunk by chunk only when some are held in memory. */
static int read_piece(struct layer *layer, uint64_t stream_offset, uint64_t length, bool large, const struct pending *pending, uint8_t *buffer,
		      uint32_t *ret_damaged)
{
	const struct toc *toc = &layer->toc;
	uint64_t n = length;
	int r = 0;

	for (; r == 0 && length; stream_offset += n, buffer += n, length -= n) {
		uint32_t chunk = toc_chunk_at(toc, stream_offset);
		const struct held *held = pending_held(pending, chunk);
		uint64_t left = toc->chunks[chunk].stream_offset + toc->chunks[chunk].raw_size - stream_offset;

		n = pending && pending->holds && left < length ? left : length;
		if (held) {
			memcpy(buffer, held->bytes + (stream_offset - held->stream_offset), n);
			continue;
		}
		r = cache_read(&layer->cache, stream_offset, buffer, n, large);
		if (r)
			*ret_damaged = chunk;
	}
	return r;
}

int read_present(struct layer *layer, const struct toc_inode *inode, uint64_t offset, uint32_t size, const struct pending *pending,
		 uint8_t *buffer, uint32_t *ret_damaged)
{
	struct pieces pieces = pieces_of(&layer->toc, inode, offset, size);
	struct piece piece;
	int r = 0;

	if (inode->flags & INODE_SPARSE)
		memset(buffer, 0, size);
	while (r == 0 && next_piece(&pieces, &piece))
		r = read_piece(layer, piece.stream_offset, piece.length, inode->size >= CACHE_LARGE_FILE, pending, buffer + (piece.file_offset - offset), ret_damaged);
	return r;
}

void read_drop(const struct layer *layer, const struct toc_inode *inode, uint64_t offset, uint32_t size)
{
	struct pieces pieces = pieces_of(&layer->toc, inode, offset, size);
	struct piece piece;

	if (inode->size < CACHE_LARGE_FILE)
		return;
	while (next_piece(&pieces, &piece))
		cache_drop(&layer->cache, piece.stream_offset, piece.length, piece.file_offset + piece.length == inode->size);
}

int read_seek(const struct toc *toc, const struct toc_inode *inode, uint64_t offset, bool hole, uint64_t *ret_offset)
{
	uint32_t end = (uint32_t)inode->data + inode->count;

	if (offset >= inode->size)
		return -ENXIO;
	if (!(inode->flags & INODE_SPARSE)) {
		*ret_offset = hole ? inode->size : offset;
		return 0;
	}
	for (uint32_t i = extent_at(toc, inode, offset); i < end; i++) {
		const struct toc_extent *extent = &toc->extents[i];

		if (!hole) {
			*ret_offset = extent->file_offset > offset ? extent->file_offset : offset;
			return 0;
		}
		if (extent->file_offset > offset)
			break;
		offset = extent->file_offset + extent->length;
	}
	if (!hole)
		return -ENXIO;
	*ret_offset = offset < inode->size ? offset : inode->size;
	return 0;
}
