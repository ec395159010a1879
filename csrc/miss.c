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

int miss_init(struct miss_queue *queue, struct session *session)
{
	*queue = (struct miss_queue){.session = session, .last_queued = &queue->first_queued, .last_failed = &queue->first_failed};
	queue->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (queue->event_fd < 0)
		return -errno;
	pthread_mutex_init(&queue->lock, NULL);
	pthread_cond_init(&queue->room, NULL);
	return 0;
}

int miss_begin(struct miss_queue *queue)
{
	uint32_t n = queue->session->header->max_pending;

	if (queue->free_records)
		return 0;
	queue->free_records = calloc(n, sizeof(*queue->free_records));
	if (!queue->free_records)
		return -ENOMEM;
	/* Taken from the end: the lowest first, so that a quiet mount touches one page of the table. */
	for (uint32_t i = n; i--;)
		if (atomic_load(&queue->session->parked[i].unique) == 0)
			queue->free_records[queue->n_free_records++] = i;
	return 0;
}

void miss_stop(struct miss_queue *queue)
{
	pthread_mutex_lock(&queue->lock);
	queue->stopping = true;
	pthread_cond_broadcast(&queue->room);
	pthread_mutex_unlock(&queue->lock);
}

struct held *miss_hold(struct miss_queue *queue, const struct layer *layer, uint32_t chunk, const uint8_t *raw)
{
	const struct toc_chunk *record = &layer->toc.chunks[chunk];
	struct held *held = NULL;

	if (atomic_fetch_add(&queue->held_bytes, record->raw_size) + record->raw_size <= MISS_MAX_HELD_BYTES)
		held = malloc(sizeof(*held) + record->raw_size);
	if (!held) {
		atomic_fetch_sub(&queue->held_bytes, record->raw_size);
		return NULL;
	}
	*held = (struct held){.references = 1, .chunk = chunk, .size = record->raw_size, .stream_offset = record->stream_offset};
	memcpy(held->bytes, raw, record->raw_size);
	return held;
}

void miss_unhold(struct miss_queue *queue, struct held *held)
{
	if (!held || atomic_fetch_sub(&held->references, 1) != 1)
		return;
	atomic_fetch_sub(&queue->held_bytes, held->size);
	free(held);
}

void pending_free(struct miss_queue *queue, struct pending *pending)
{
	for (uint32_t i = 0; pending && i < pending->n_waiters; i++)
		miss_unhold(queue, pending->waiters[i].held);
	free(pending);
}

const struct held *pending_held(const struct pending *pending, uint32_t chunk)
{
	for (uint32_t i = 0; pending && pending->holds && i < pending->n_waiters; i++)
		if (pending->waiters[i].held && pending->waiters[i].held->chunk == chunk)
			return pending->waiters[i].held;
	return NULL;
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
					pending_free(queue, pending);
			}
			queue->buckets[i] = flight->next_in_bucket;
			free(flight);
		}
	while (queue->first_failed) {
		struct pending *pending = queue->first_failed;

		queue->first_failed = pending->next;
		pending_free(queue, pending); /* its flights have ended above */
	}
	free(queue->free_records);
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
	struct flight *flight = calloc(1, sizeof(*flight));

	if (!flight)
		return NULL;
	flight->layer = layer;
	flight->chunk = chunk;
	*find_flight(queue, layer, chunk) = flight;
	queue->n_flights++;
	atomic_fetch_add(&layer->busy, 1);
	return flight;
}

/* Undoes add_flight() for flights that are in no queue and have no waiters yet. */
static void drop_flights(struct miss_queue *queue, struct flight **flights, uint32_t n)
{
	while (n--) {
		struct flight **at = find_flight(queue, flights[n]->layer, flights[n]->chunk);

		*at = flights[n]->next_in_bucket;
		atomic_fetch_sub(&flights[n]->layer->busy, 1);
		free(flights[n]);
		queue->n_flights--;
	}
}

void miss_ring(struct miss_queue *queue)
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
}

/* Waits until the request can have a record. Under the lock. -ENODEV: the mount is gone. */
static int wait_for_room(struct miss_queue *queue, const struct read_request *request)
{
	while (request->record == SESSION_NO_RECORD && queue->n_free_records == 0 && !queue->stopping)
		pthread_cond_wait(&queue->room, &queue->lock);
	return queue->stopping ? -ENODEV : 0;
}

/* Writes the request down where a successor finds it. Under the lock, with room. */
static void record(struct miss_queue *queue, struct read_request *request)
{
	struct parked parked = {
		.unique = request->unique,
		.clone = request->clone,
		.pid = request->pid,
		.layer = request->layer->slot,
		.inode = request->inode,
		.offset = request->offset,
		.size = request->size,
		.since_ns = request->since_ns,
	};

	if (request->record != SESSION_NO_RECORD)
		return;
	request->record = queue->free_records[--queue->n_free_records];
	session_park(queue->session, request->record, &parked);
}

void miss_done(struct miss_queue *queue, const struct read_request *request)
{
	if (request->record == SESSION_NO_RECORD)
		return;
	session_unpark(queue->session, request->record);
	pthread_mutex_lock(&queue->lock);
	queue->free_records[queue->n_free_records++] = request->record;
	pthread_cond_signal(&queue->room);
	pthread_mutex_unlock(&queue->lock);
}

static void enqueue(struct miss_queue *queue, struct flight *flight)
{
	flight->queued = true;
	*queue->last_queued = flight;
	queue->last_queued = &flight->next_queued;
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
	for (uint32_t i = 0; i < n_fresh; i++)
		enqueue(queue, fresh[i]);
	for (uint32_t i = 0; i < n; i++) {
		struct flight *flight = *find_flight(queue, layer, chunks[i]);
		struct waiter *waiter = &pending->waiters[pending->waiting];

		if (!flight)
			continue;
		*waiter = (struct waiter){.pending = pending, .next = flight->waiters};
		flight->waiters = waiter;
		pending->waiting++;
		pending->n_waiters++;
	}
	if (n_fresh)
		miss_ring(queue);
	free(fresh);
	return 0;
}

/* With room for `n` waiters; NULL without memory. */
static struct pending *pending_new(const struct read_request *request, uint32_t n)
{
	struct pending *pending = calloc(1, sizeof(*pending) + n * sizeof(struct waiter));

	if (pending)
		pending->request = *request;
	return pending;
}

int miss_wait(struct miss_queue *queue, const struct read_request *request, const uint32_t *chunks, uint32_t n)
{
	struct pending *pending = pending_new(request, n);
	int r;

	if (!pending)
		return -ENOMEM;
	pthread_mutex_lock(&queue->lock);
	r = wait_for_room(queue, request);
	if (r == 0)
		r = join_flights(queue, pending, chunks, n);
	if (r == 0 && pending->waiting) {
		record(queue, &pending->request);
		link_pending(queue, pending);
		stats_add(&queue->session->shared->reads_waited, 1);
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
	atomic_fetch_sub(&layer->busy, 1);
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

struct pending *miss_arrived(struct miss_queue *queue, struct layer *layer, uint32_t chunk, struct held *held)
{
	struct pending *ready = NULL;
	struct flight *flight;

	pthread_mutex_lock(&queue->lock);
	flight = remove_flight(queue, layer, chunk);
	for (struct waiter *waiter = flight ? flight->waiters : NULL; waiter;) {
		struct pending *pending = waiter->pending;

		if (held && !pending->done) {
			atomic_fetch_add(&held->references, 1);
			waiter->held = held;
			pending->holds = true;
		}
		waiter = waiter->next;
		if (--pending->waiting)
			continue;
		if (pending->done) {
			pending_free(queue, pending);
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

/* Appends a request that is in no other list to the failed. It stays counted until miss_release(), since its other flights may
 * end meanwhile, and keeps its layer. Under the lock. */
static void add_failed(struct miss_queue *queue, struct pending *pending, uint32_t chunk, int error)
{
	pending->done = true;
	pending->waiting++;
	atomic_fetch_add(&pending->request.layer->busy, 1);
	pending->fault = (struct weefs_fault){
		.number = atomic_fetch_add(&queue->session->header->faults, 1) + 1,
		.layer = pending->request.layer->slot,
		.chunk = chunk,
		.pid = pending->request.pid,
		.error = error,
	};
	pending->next = NULL;
	*queue->last_failed = pending;
	queue->last_failed = &pending->next;
	if (!queue->first_untaken)
		queue->first_untaken = pending;
	stats_add(&queue->session->shared->reads_failed, 1);
	miss_ring(queue);
}

void miss_failed(struct miss_queue *queue, struct layer *layer, uint32_t chunk, int error)
{
	struct flight *flight;

	pthread_mutex_lock(&queue->lock);
	flight = remove_flight(queue, layer, chunk);
	for (struct waiter *waiter = flight ? flight->waiters : NULL; waiter;) {
		struct pending *pending = waiter->pending;

		waiter = waiter->next;
		pending->waiting--;
		if (!pending->done) {
			unlink_pending(queue, pending);
			add_failed(queue, pending, chunk, error);
		} else if (pending->waiting == 0) {
			pending_free(queue, pending);
		}
	}
	pthread_mutex_unlock(&queue->lock);
	free(flight);
}

int miss_fault(struct miss_queue *queue, const struct read_request *request, uint32_t chunk, int error)
{
	struct pending *pending = pending_new(request, 0);
	int r;

	if (!pending)
		return -ENOMEM;
	pthread_mutex_lock(&queue->lock);
	r = wait_for_room(queue, request);
	if (r == 0) {
		record(queue, &pending->request);
		add_failed(queue, pending, chunk, error);
		pending = NULL;
	}
	pthread_mutex_unlock(&queue->lock);
	free(pending);
	return r;
}

struct pending *miss_faulted(struct miss_queue *queue, uint64_t through)
{
	struct pending *first = NULL, **last = &first;

	pthread_mutex_lock(&queue->lock);
	while (queue->first_failed && queue->first_failed != queue->first_untaken && queue->first_failed->fault.number <= through) {
		*last = queue->first_failed;
		last = &queue->first_failed->next;
		queue->first_failed = *last;
	}
	*last = NULL;
	if (!queue->first_failed)
		queue->last_failed = &queue->first_failed;
	pthread_mutex_unlock(&queue->lock);
	return first;
}

void miss_release(struct miss_queue *queue, struct pending *pending)
{
	bool last;

	pthread_mutex_lock(&queue->lock);
	atomic_fetch_sub(&pending->request.layer->busy, 1);
	last = --pending->waiting == 0;
	pthread_mutex_unlock(&queue->lock);
	if (last)
		pending_free(queue, pending);
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
		stats_add(&queue->session->shared->reads_interrupted, 1);
	}
	pthread_mutex_unlock(&queue->lock);
	return pending != NULL;
}

static uint64_t oldest_of(const struct pending *pending, uint64_t oldest)
{
	for (; pending; pending = pending->next)
		if (oldest == 0 || pending->request.since_ns < oldest)
			oldest = pending->request.since_ns;
	return oldest;
}

uint64_t miss_oldest(const struct miss_queue *queue)
{
	return oldest_of(queue->first_failed, oldest_of(queue->pending, 0));
}

void miss_describe(const struct layer *layer, uint32_t chunk, struct weefs_miss *ret_miss)
{
	const struct toc_chunk *record = &layer->toc.chunks[chunk];

	*ret_miss = (struct weefs_miss){.layer = layer->slot,
					.chunk = chunk,
					.stored_size = record->stored_size,
					.raw_size = record->raw_size,
					.blob_offset = record->blob_offset,
					.stream_offset = record->stream_offset};
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
		miss_describe(flight->layer, flight->chunk, &ret_misses[taken++]);
	}
	pthread_mutex_unlock(&queue->lock);
	return taken;
}

uint32_t miss_take_faults(struct miss_queue *queue, struct weefs_fault *ret_faults, uint32_t n)
{
	uint32_t taken = 0;

	pthread_mutex_lock(&queue->lock);
	for (; taken < n && queue->first_untaken; queue->first_untaken = queue->first_untaken->next)
		ret_faults[taken++] = queue->first_untaken->fault;
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
		miss_describe(layer, chunk, ret_miss);
	return r;
}

void miss_give_back(struct miss_queue *queue, struct layer *layer, uint32_t chunk)
{
	struct flight *flight;

	pthread_mutex_lock(&queue->lock);
	flight = *find_flight(queue, layer, chunk);
	if (flight && flight->waiters && !flight->queued) {
		enqueue(queue, flight);
		miss_ring(queue);
		flight = NULL;
	} else if (flight && !flight->queued) {
		remove_flight(queue, layer, chunk);
	} else {
		flight = NULL;
	}
	pthread_mutex_unlock(&queue->lock);
	free(flight);
}
