/* Counting: what was asked, how it ended and how long it took.
 *
 * The counters are in the memory that outlives the process (session.h), so a sum never falls when a successor takes over, however its
 * predecessor ended. Each FUSE thread has a block of its own; what other threads do goes to one block of all. Everything is atomic, in
 * relaxed order, and nothing is allocated or locked: a reader of the sums sees each counter at some moment, not all at the same.
 */
#ifndef WEEFS_STATS_H
#define WEEFS_STATS_H

#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "weefs.h"

#define STATS_OPERATIONS 64u
#define STATS_BUCKETS 32u
#define STATS_SOURCES 8u

struct stats_histogram {
	_Atomic uint64_t buckets[STATS_BUCKETS];
	_Atomic uint64_t sum_ns;
};

struct stats_operation {
	_Atomic uint64_t requests, errors;
	struct stats_histogram answered;
};

/* Of one FUSE thread. */
struct stats_thread {
	struct stats_operation operations[STATS_OPERATIONS];
	_Atomic uint64_t read_bytes;
};

struct stats_source {
	_Atomic uint64_t misses, ahead, requests, bytes, metadata_requests, metadata_bytes, retries, given_up;
	struct stats_histogram fetches;
};

/* Of all other threads, and of what concerns no single one. */
struct stats_shared {
	struct stats_histogram waited;	/* READs that were parked: from their arrival to their answer */
	_Atomic uint64_t late_read_bytes, late_errors;
	_Atomic uint64_t reads_waited, reads_failed, reads_interrupted;
	_Atomic uint64_t published, unwritten, rejected, evicted_bytes;
	struct stats_source sources[STATS_SOURCES];
};

/* CLOCK_MONOTONIC: the same for all processes of a boot. */
static inline uint64_t stats_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* `since` may be another process's, and is not believed: never negative. */
static inline uint64_t stats_since_ns(uint64_t since, uint64_t now)
{
	return now > since ? now - since : 0;
}

static inline void stats_add(_Atomic uint64_t *counter, uint64_t n)
{
	atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

static inline uint64_t stats_get(const _Atomic uint64_t *counter)
{
	return atomic_load_explicit(counter, memory_order_relaxed);
}

/* Bucket i has what took longer than 2^(i-1) microseconds and at most 2^i; the first has all up to one, the last all beyond 2^30. */
static inline uint32_t stats_bucket(uint64_t ns)
{
	uint32_t bucket = ns <= 1000 ? 0 : 64 - (uint32_t)__builtin_clzll((ns - 1) / 1000);

	return bucket < STATS_BUCKETS ? bucket : STATS_BUCKETS - 1;
}

static inline void stats_observe(struct stats_histogram *histogram, uint64_t ns)
{
	stats_add(&histogram->buckets[stats_bucket(ns)], 1);
	stats_add(&histogram->sum_ns, ns);
}

#endif
