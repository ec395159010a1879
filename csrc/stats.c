/* The sums of what was counted (stats.h), for whoever asks. */
#include "stats.h"

#include <errno.h>
#include <linux/fuse.h>

#include "super.h"

_Static_assert(sizeof(((struct weefs_statistics *)NULL)->operations) / sizeof(struct weefs_operation) == STATS_OPERATIONS, "weefs.h");
_Static_assert(sizeof(((struct weefs_statistics *)NULL)->sources) / sizeof(struct weefs_source) == STATS_SOURCES, "weefs.h");
_Static_assert(sizeof(((struct weefs_histogram *)NULL)->buckets) / sizeof(uint64_t) == STATS_BUCKETS, "weefs.h");

static void add_histogram(const struct stats_histogram *histogram, struct weefs_histogram *sum)
{
	for (uint32_t i = 0; i < STATS_BUCKETS; i++)
		sum->buckets[i] += stats_get(&histogram->buckets[i]);
	sum->sum_ns += stats_get(&histogram->sum_ns);
}

static void add_thread(const struct stats_thread *thread, struct weefs_statistics *sum)
{
	for (uint32_t opcode = 0; opcode < STATS_OPERATIONS; opcode++) {
		const struct stats_operation *operation = &thread->operations[opcode];

		if (stats_get(&operation->requests) == 0)
			continue;
		sum->operations[opcode].requests += stats_get(&operation->requests);
		sum->operations[opcode].errors += stats_get(&operation->errors);
		add_histogram(&operation->answered, &sum->operations[opcode].answered);
	}
	sum->read_bytes += stats_get(&thread->read_bytes);
}

static void add_source(const struct stats_source *source, struct weefs_source *sum)
{
	sum->traffic = (struct weefs_traffic){
		.misses = stats_get(&source->misses),
		.ahead = stats_get(&source->ahead),
		.requests = stats_get(&source->requests),
		.bytes = stats_get(&source->bytes),
		.metadata_requests = stats_get(&source->metadata_requests),
		.metadata_bytes = stats_get(&source->metadata_bytes),
		.retries = stats_get(&source->retries),
		.given_up = stats_get(&source->given_up),
	};
	add_histogram(&source->fetches, &sum->fetches);
}

static uint64_t slots_taken(const struct slots *slots)
{
	uint64_t taken = 0;

	for (uint32_t i = 0; i <= atomic_load(&slots->used) / 64; i++)
		taken += (uint64_t)__builtin_popcountll(slots->taken[i]);
	return taken;
}

/* What is so now. */
static void look_around(struct weefs *w, struct weefs_statistics *ret)
{
	uint64_t oldest, now;

	pthread_mutex_lock(&w->misses.lock);
	ret->pending = w->misses.n_pending;
	ret->in_flight = w->misses.n_flights;
	oldest = miss_oldest(&w->misses);
	pthread_mutex_unlock(&w->misses.lock);
	now = stats_now_ns();
	ret->oldest_waiting_ns = oldest ? stats_since_ns(oldest, now) : 0;
	for (uint32_t i = 0; i < atomic_load(&w->n_workers); i++) {
		uint64_t since = stats_get(&w->workers[i]->since_ns), age = since ? stats_since_ns(since, now) : 0;

		if (age > ret->oldest_handled_ns)
			ret->oldest_handled_ns = age;
	}
	pthread_mutex_lock(&w->lock);
	ret->layer_slots = slots_taken(&w->layers);
	ret->plan_slots = slots_taken(&w->plans);
	pthread_mutex_unlock(&w->lock);
}

void weefs_get_statistics(struct weefs *w, struct weefs_statistics *ret)
{
	const struct stats_shared *shared = w->session.shared;

	*ret = (struct weefs_statistics){
		.read_bytes = stats_get(&shared->late_read_bytes),
		.late_read_bytes = stats_get(&shared->late_read_bytes),
		.reads_waited = stats_get(&shared->reads_waited),
		.reads_failed = stats_get(&shared->reads_failed),
		.reads_interrupted = stats_get(&shared->reads_interrupted),
		.chunks_published = stats_get(&shared->published),
		.chunks_unwritten = stats_get(&shared->unwritten),
		.chunks_rejected = stats_get(&shared->rejected),
		.evicted_bytes = stats_get(&shared->evicted_bytes),
	};
	for (uint32_t i = 0; i < atomic_load(&w->n_workers); i++)
		add_thread(session_thread(&w->session, i), ret);
	ret->operations[FUSE_READ].errors += stats_get(&shared->late_errors);
	add_histogram(&shared->waited, &ret->waited);
	for (uint32_t i = 0; i < STATS_SOURCES; i++)
		add_source(&shared->sources[i], &ret->sources[i]);
	look_around(w, ret);
}

int weefs_count_traffic(struct weefs *w, uint32_t number, const struct weefs_traffic *traffic, uint64_t fetch_ns)
{
	struct stats_source *source;

	if (number >= STATS_SOURCES)
		return -EINVAL;
	source = &w->session.shared->sources[number];
	stats_add(&source->misses, traffic->misses);
	stats_add(&source->ahead, traffic->ahead);
	stats_add(&source->requests, traffic->requests);
	stats_add(&source->bytes, traffic->bytes);
	stats_add(&source->metadata_requests, traffic->metadata_requests);
	stats_add(&source->metadata_bytes, traffic->metadata_bytes);
	stats_add(&source->retries, traffic->retries);
	stats_add(&source->given_up, traffic->given_up);
	if (fetch_ns)
		stats_observe(&source->fetches, fetch_ns);
	return 0;
}
