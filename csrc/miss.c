/* The single-flight queue: stop 5 of a read's path, where a miss waits (miss.h has the states). */
#include "miss.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "super.h"

struct flight {
	struct flight *next_in_bucket;
	struct flight *next_queued;
	struct waiter *waiters;
	struct layer *layer;
	uint32_t chunk;
	bool queued;	/* not taken yet */
};

int miss_init(struct miss_queue *queue, uint32_t max_pending)
{
	*queue = (struct miss_queue){.max_pending = max_pending, .last_queued = &queue->first_queued};
	queue->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (queue->event_fd < 0)
		return -errno;
	pthread_mutex_init(&queue->lock, NULL);
	pthread_cond_init(&queue->room, NULL);
	return 0;
}

void miss_stop(struct miss_queue *queue)
{
	pthread_mutex_lock(&queue->lock);
	queue->stopping = true;
	pthread_cond_broadcast(&queue->room);
	pthread_mutex_unlock(&queue->lock);
}

void miss_destroy(struct miss_queue *queue)
{
	for (uint32_t i = 0; i < MISS_BUCKETS; i++)
		while (queue->buckets[i]) {
			struct flight *flight = queue->buckets[i];
			struct waiter *waiter = flight->waiters;

			while (waiter) {
				struct pending *pending = waiter->pending;

				waiter = waiter->next;
				if (--pending->waiting == 0)
					free(pending);
			}
			queue->buckets[i] = flight->next_in_bucket;
			free(flight);
		}
	close(queue->event_fd);
	pthread_cond_destroy(&queue->room);
	pthread_mutex_destroy(&queue->lock);
}

static struct flight **find_flight(struct miss_queue *queue, const struct layer *layer, uint32_t chunk)
{
	uint32_t hash = (layer->slot * 0x9e3779b1u) ^ (chunk * 0x85ebca6bu);
	struct flight **at = &queue->buckets[(hash ^ hash >> 15) % MISS_BUCKETS];

	while (*at && ((*at)->layer != layer || (*at)->chunk != chunk))
		at = &(*at)->next_in_bucket;
	return at;
}

static struct flight *add_flight(struct miss_queue *queue, struct layer *layer, uint32_t chunk)
{
	struct flight **at = find_flight(queue, layer, chunk);

	*at = calloc(1, sizeof(**at));
	if (!*at)
		return NULL;
	(*at)->layer = layer;
	(*at)->chunk = chunk;
	queue->n_flights++;
	return *at;
}

/* Undoes add_flight() for flights that are in no queue and have no waiters yet. */
static void drop_flights(struct miss_queue *queue, struct flight **flights, uint32_t n)
{
	while (n--) {
		struct flight **at = find_flight(queue, flights[n]->layer, flights[n]->chunk);

		*at = flights[n]->next_in_bucket;
		free(flights[n]);
		queue->n_flights--;
	}
}

static void ring(struct miss_queue *queue)
{
	uint64_t one = 1;
	/* EAGAIN: the counter is full, so the other side is already awake. */
	ssize_t ignored = write(queue->event_fd, &one, sizeof(one));

	(void)ignored;
}

static void link_pending(struct miss_queue *queue, struct pending *pending)
{
	pending->next = queue->pending;
	if (queue->pending)
		queue->pending->previous = pending;
	queue->pending = pending;
	queue->n_pending++;
}

/* Marks it as answered: nobody may answer it after this. */
static void unlink_pending(struct miss_queue *queue, struct pending *pending)
{
	if (pending->previous)
		pending->previous->next = pending->next;
	else
		queue->pending = pending->next;
	if (pending->next)
		pending->next->previous = pending->previous;
	pending->previous = pending->next = NULL;
	pending->done = true;
	queue->n_pending--;
	pthread_cond_signal(&queue->room);
}

/* Adds the request to the flights of its absent chunks, beginning those that nobody has begun. All or nothing. */
static int join_flights(struct miss_queue *queue, struct pending *pending, const uint32_t *chunks, uint32_t n)
{
	struct layer *layer = pending->request.layer;
	struct flight **fresh = calloc(n, sizeof(struct flight *));
	uint32_t n_fresh = 0;

	if (!fresh)
		return -ENOMEM;
	for (uint32_t i = 0; i < n; i++) {
		if (cache_has(&layer->cache, chunks[i]) || *find_flight(queue, layer, chunks[i]))
			continue;
		fresh[n_fresh] = add_flight(queue, layer, chunks[i]);
		if (!fresh[n_fresh]) {
			drop_flights(queue, fresh, n_fresh);
			free(fresh);
			return -ENOMEM;
		}
		n_fresh++;
	}
	for (uint32_t i = 0; i < n_fresh; i++) {
		fresh[i]->queued = true;
		*queue->last_queued = fresh[i];
		queue->last_queued = &fresh[i]->next_queued;
	}
	for (uint32_t i = 0; i < n; i++) {
		struct flight *flight = *find_flight(queue, layer, chunks[i]);
		struct waiter *waiter = &pending->waiters[pending->waiting];

		if (!flight)
			continue;
		*waiter = (struct waiter){.pending = pending, .next = flight->waiters};
		flight->waiters = waiter;
		pending->waiting++;
	}
	if (n_fresh)
		ring(queue);
	free(fresh);
	return 0;
}

int miss_wait(struct miss_queue *queue, const struct read_request *request, const uint32_t *chunks, uint32_t n)
{
	struct pending *pending = calloc(1, sizeof(*pending) + n * sizeof(struct waiter));
	int r;

	if (!pending)
		return -ENOMEM;
	pending->request = *request;
	pthread_mutex_lock(&queue->lock);
	while (queue->n_pending >= queue->max_pending && !queue->stopping)
		pthread_cond_wait(&queue->room, &queue->lock);
	r = queue->stopping ? -ENODEV : join_flights(queue, pending, chunks, n);
	if (r == 0 && pending->waiting) {
		link_pending(queue, pending);
		queue->waited++;
		pending = NULL;
	} else if (r == 0) {
		r = 1; /* they arrived before we had the lock */
	}
	pthread_mutex_unlock(&queue->lock);
	free(pending);
	return r;
}

/* Takes a flight out of the table and, when nobody has taken it yet, out of the queue. */
static struct flight *remove_flight(struct miss_queue *queue, struct layer *layer, uint32_t chunk)
{
	struct flight **at = find_flight(queue, layer, chunk), *flight = *at;

	if (!flight)
		return NULL;
	*at = flight->next_in_bucket;
	queue->n_flights--;
	if (flight->queued) {
		struct flight **queued = &queue->first_queued;

		while (*queued != flight)
			queued = &(*queued)->next_queued;
		*queued = flight->next_queued;
		if (!flight->next_queued)
			queue->last_queued = queued;
	}
	return flight;
}

struct pending *miss_arrived(struct miss_queue *queue, struct layer *layer, uint32_t chunk)
{
	struct pending *ready = NULL;
	struct flight *flight;

	pthread_mutex_lock(&queue->lock);
	cache_mark(&layer->cache, chunk);
	flight = remove_flight(queue, layer, chunk);
	for (struct waiter *waiter = flight ? flight->waiters : NULL; waiter;) {
		struct pending *pending = waiter->pending;

		waiter = waiter->next;
		if (--pending->waiting)
			continue;
		if (pending->done) {
			free(pending);
			continue;
		}
		unlink_pending(queue, pending);
		pending->next = ready;
		ready = pending;
	}
	pthread_mutex_unlock(&queue->lock);
	free(flight);
	return ready;
}

static void add_fault(struct miss_queue *queue, struct weefs_fault fault)
{
	if (queue->n_faults == MISS_FAULTS) {
		queue->first_fault = (queue->first_fault + 1) % MISS_FAULTS;
		queue->n_faults--;
	}
	queue->faults[(queue->first_fault + queue->n_faults++) % MISS_FAULTS] = fault;
}

struct pending *miss_failed(struct miss_queue *queue, struct layer *layer, uint32_t chunk, int error)
{
	struct pending *ready = NULL;
	struct flight *flight;

	pthread_mutex_lock(&queue->lock);
	flight = remove_flight(queue, layer, chunk);
	for (struct waiter *waiter = flight ? flight->waiters : NULL; waiter;) {
		struct pending *pending = waiter->pending;

		waiter = waiter->next;
		pending->waiting--;
		if (pending->done) {
			if (pending->waiting == 0)
				free(pending);
			continue;
		}
		unlink_pending(queue, pending);
		queue->failed++;
		add_fault(queue, (struct weefs_fault){.layer = layer->slot, .chunk = chunk, .pid = pending->request.pid, .error = error});
		/* Others of its flights may end while the caller answers: it stays counted until miss_release(). */
		pending->waiting++;
		pending->next = ready;
		ready = pending;
	}
	if (ready)
		ring(queue);
	pthread_mutex_unlock(&queue->lock);
	free(flight);
	return ready;
}

void miss_release(struct miss_queue *queue, struct pending *pending)
{
	bool last;

	pthread_mutex_lock(&queue->lock);
	last = --pending->waiting == 0;
	pthread_mutex_unlock(&queue->lock);
	if (last)
		free(pending);
}

bool miss_interrupt(struct miss_queue *queue, uint64_t unique, struct read_request *ret_request)
{
	struct pending *pending;

	pthread_mutex_lock(&queue->lock);
	for (pending = queue->pending; pending && pending->request.unique != unique; pending = pending->next)
		;
	if (pending) {
		*ret_request = pending->request;
		unlink_pending(queue, pending); /* its last flight frees it */
		queue->interrupted++;
	}
	pthread_mutex_unlock(&queue->lock);
	return pending != NULL;
}

static struct weefs_miss miss_of(const struct layer *layer, uint32_t chunk)
{
	const struct toc_chunk *record = &layer->toc.chunks[chunk];

	return (struct weefs_miss){.layer = layer->slot,
				   .chunk = chunk,
				   .stored_size = record->stored_size,
				   .raw_size = record->raw_size,
				   .blob_offset = record->blob_offset};
}

uint32_t miss_take(struct miss_queue *queue, struct weefs_miss *ret_misses, uint32_t n)
{
	uint32_t taken = 0;

	pthread_mutex_lock(&queue->lock);
	while (taken < n && queue->first_queued) {
		struct flight *flight = queue->first_queued;

		queue->first_queued = flight->next_queued;
		if (!queue->first_queued)
			queue->last_queued = &queue->first_queued;
		flight->next_queued = NULL;
		flight->queued = false;
		ret_misses[taken++] = miss_of(flight->layer, flight->chunk);
	}
	pthread_mutex_unlock(&queue->lock);
	return taken;
}

uint32_t miss_take_faults(struct miss_queue *queue, struct weefs_fault *ret_faults, uint32_t n)
{
	uint32_t taken = 0;

	pthread_mutex_lock(&queue->lock);
	while (taken < n && queue->n_faults) {
		ret_faults[taken++] = queue->faults[queue->first_fault];
		queue->first_fault = (queue->first_fault + 1) % MISS_FAULTS;
		queue->n_faults--;
	}
	pthread_mutex_unlock(&queue->lock);
	return taken;
}

int miss_claim(struct miss_queue *queue, struct layer *layer, uint32_t chunk, struct weefs_miss *ret_miss)
{
	int r = 0;

	pthread_mutex_lock(&queue->lock);
	if (!cache_has(&layer->cache, chunk) && !*find_flight(queue, layer, chunk))
		r = add_flight(queue, layer, chunk) ? 1 : -ENOMEM;
	pthread_mutex_unlock(&queue->lock);
	if (r == 1)
		*ret_miss = miss_of(layer, chunk);
	return r;
}
