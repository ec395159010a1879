/* From a range of a file to bytes: which chunks it needs, and the bytes when they are there. */
#ifndef WEEFS_READ_H
#define WEEFS_READ_H

#include "super.h"

/* The absent chunks that `size` bytes at `offset` of a regular inode need: at most `n` of them in `ret_chunks`. Returns their number. */
uint32_t read_missing(const struct layer *layer, const struct toc_inode *inode, uint64_t offset, uint32_t size, uint32_t *ret_chunks, uint32_t n);

/* Copies the bytes, whose chunks must be present; holes are zero. `size` must lie within the file. -EIO: the cache file is damaged. */
int read_present(const struct layer *layer, const struct toc_inode *inode, uint64_t offset, uint32_t size, uint8_t *buffer);

/* SEEK_DATA and SEEK_HOLE: -ENXIO as lseek(2) says. */
int read_seek(const struct toc *toc, const struct toc_inode *inode, uint64_t offset, bool hole, uint64_t *ret_offset);

#endif
