/* First reads of chunks, in their order (seen.h). */
#include "seen.h"

#include <errno.h>
#include <stdlib.h>

int seen_open(struct seen *seen, uint32_t n_chunks)
{
	*seen = (struct seen){.n_chunks = n_chunks};
	seen->bits = calloc(n_chunks / 64 + 1, sizeof(*seen->bits));
	seen->order = calloc((size_t)n_chunks + 1, sizeof(*seen->order));
	if (seen->bits && seen->order)
		return 0;
	seen_close(seen);
	return -ENOMEM;
}

void seen_close(struct seen *seen)
{
	if (!seen)
		return;
	free((void *)seen->bits);
	free((void *)seen->order);
	*seen = (struct seen){0};
}

void seen_add(struct seen *seen, uint32_t chunk, uint32_t raw_size)
{
	uint64_t bit = UINT64_C(1) << (chunk % 64);

	if (atomic_fetch_or_explicit(&seen->bits[chunk / 64], bit, memory_order_relaxed) & bit)
		return;
	/* Each chunk takes one rank, so there is one for each. */
	atomic_store_explicit(&seen->order[atomic_fetch_add(&seen->n, 1)], chunk + 1, memory_order_release);
	atomic_fetch_add_explicit(&seen->raw, raw_size, memory_order_relaxed);
}

uint32_t seen_list(const struct seen *seen, uint32_t since, uint32_t *ret_chunks, uint32_t n)
{
	uint32_t listed = 0;

	for (; listed < n && since < seen->n_chunks; listed++, since++) {
		uint32_t chunk = atomic_load_explicit(&seen->order[since], memory_order_acquire);

		if (chunk == 0)
			break;
		ret_chunks[listed] = chunk - 1;
	}
	return listed;
}
