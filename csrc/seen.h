/* Which chunks of a layer were read, in the order of their first READ, since the layer was opened: what profiles are made of (weefs/profiles.py).
 *
 * A layer is opened anew only when the kernel holds no file of it, so no page either: every READ that its readers need comes here, once per
 * page. What is noted here is then all that was read.
 *
 * FUSE threads note without a lock; a chunk that was noted before costs a look at its bit. The bit decides who notes; who does takes the next
 * rank and then writes the chunk there, so that a rank may be taken and not written yet: whoever reads stops before it. */
#ifndef WEEFS_SEEN_H
#define WEEFS_SEEN_H

#include <stdatomic.h>
#include <stdint.h>

/* All atomic but the pointers and `n_chunks`, which do not change between seen_open() and seen_close(). */
struct seen {
	_Atomic uint64_t *bits;		/* bit i % 64 of word i / 64 */
	_Atomic uint32_t *order;	/* by rank: the chunk + 1; 0: not written yet */
	_Atomic uint32_t n;		/* ranks taken */
	_Atomic uint64_t raw;		/* stream bytes of the chunks that have a rank */
	uint32_t n_chunks;
};

/* -ENOMEM. seen_close() takes NULL and what was not opened. */
int seen_open(struct seen *seen, uint32_t n_chunks);
void seen_close(struct seen *seen);

void seen_add(struct seen *seen, uint32_t chunk, uint32_t raw_size);

/* A chunk is read, be it present or not. */
static inline void seen_note(struct seen *seen, uint32_t chunk, uint32_t raw_size)
{
	if (!(atomic_load_explicit(&seen->bits[chunk / 64], memory_order_relaxed) >> (chunk % 64) & 1))
		seen_add(seen, chunk, raw_size);
}

/* Chunks from rank `since` on, at most `n`; how many. */
uint32_t seen_list(const struct seen *seen, uint32_t since, uint32_t *ret_chunks, uint32_t n);

#endif
