/* From a range of a file to bytes: which chunks it needs, and the bytes when they are there. */
#ifndef WEEFS_READ_H
#define WEEFS_READ_H

#include "super.h"

/* In both: what `pending` holds counts as present; it may be NULL.
 *
 * The absent chunks that `size` bytes at `offset` of a regular inode need: at most `n` of them in `ret_chunks`. Returns their number. The others
 * are touched, unless the request had to wait for some. All are noted as read (seen.h), when the request is looked at first. */
uint32_t read_missing(struct layer *layer, const struct toc_inode *inode, uint64_t offset, uint32_t size, const struct pending *pending,
		      uint32_t *ret_chunks, uint32_t n);

/* Copies the bytes, whose chunks must be present; holes are zero. `size` must lie within the file. Fails as cache_read() does,
 * at the chunk `ret_damaged`. */
int read_present(struct layer *layer, const struct toc_inode *inode, uint64_t offset, uint32_t size, const struct pending *pending,
		 uint8_t *buffer, uint32_t *ret_damaged);

/* The kernel has the bytes of read_present() in the page cache of the mount: those of a large file are not kept twice (cache.h). */
void read_drop(const struct layer *layer, const struct toc_inode *inode, uint64_t offset, uint32_t size);

/* SEEK_DATA and SEEK_HOLE: -ENXIO as lseek(2) says. */
int read_seek(const struct toc *toc, const struct toc_inode *inode, uint64_t offset, bool hole, uint64_t *ret_offset);

#endif
