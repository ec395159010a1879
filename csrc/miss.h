/* READ requests that wait for chunks, and the chunks that they wait for: the single-flight queue between the FUSE
 * threads and whoever fetches.
 *
 *              reader needs it            weefs_take_misses()
 *   (absent) ------------------> QUEUED ------------------> TAKEN --- publish --> present, its waiters are answered
 *       |                          ^                          |
 *       |                          +------ weefs_unclaim() ---|   (absent again if nobody waits)
 *       |                                                     |
 *       +-------------------- weefs_claim() ----------------> |------- fail ----> absent, its waiters get EIO
 *
 * A chunk has at most one flight. A request waits for all its absent chunks at once and is answered when the last
 * arrives, by the thread that published it; or with EINTR when its reader is interrupted; or, when one fails, with EIO, but
 * only after it was taken as a fault and given back with miss_faulted(), so that its reader still waits while it is
 * reported. In the last two cases it stays until its flights have ended, but is `done`.
 *
 * A request that waits has a record in the memory that outlives the process (session.h), from before its buffer is cleared
 * until it was answered: miss_done() says so.
 *
 * Bounds: as many requests wait as there are records; the next FUSE thread that would add one waits in miss_wait() itself,
 * and with it the kernel's queue.
 */
#ifndef WEEFS_MISS_H
#define WEEFS_MISS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "session.h"
#include "weefs.h"

struct layer;
struct flight;

/* What must be known to answer a READ later. */
struct read_request {
	uint64_t unique;
	int fd;		/* the answer goes to the clone that delivered the request */
	uint32_t clone;	/* whose index this is */
	uint32_t record;	/* in the session's table, or SESSION_NO_RECORD */
	uint32_t pid;
	struct layer *layer;
	uint32_t inode;
	uint32_t size;
	uint64_t offset;
	uint64_t since_ns;	/* when it arrived, of stats_now_ns() */
};

/* The bytes of a verified chunk that the cache has no room for, shared by the requests that wait for it. */
struct held {
	_Atomic uint32_t references;
	uint32_t chunk, size;
	uint64_t stream_offset;
	uint8_t bytes[];
};

struct waiter {
	struct pending *pending;
	struct waiter *next;
	struct held *held;	/* its chunk, when it arrived and could not be written */
};

struct pending {
	struct read_request request;
	struct pending *previous, *next;	/* in miss_queue.pending, unless done; `next` also chains the failed and those to be answered */
	struct weefs_fault fault;		/* of a failed one */
	uint32_t n_waiters;			/* in use of `waiters` */
	uint32_t waiting;			/* flights that have not ended */
	bool done;				/* answered, or to be answered with EIO */
	bool holds;				/* one of its waiters has a chunk */
	struct waiter waiters[];		/* one per flight */
};

#define MISS_BUCKETS 4096u
#define MISS_MAX_HELD_BYTES (UINT64_C(64) << 20)

struct miss_queue {
	pthread_mutex_t lock;		/* of all below */
	pthread_cond_t room;		/* signalled when a request is no longer pending */
	struct flight *buckets[MISS_BUCKETS];
	struct flight *first_queued, **last_queued;
	struct pending *pending;
	struct pending *first_failed, **last_failed, *first_untaken;	/* failed ones by number; from where they were not taken as faults yet */
	uint32_t *free_records, n_free_records;
	uint32_t n_pending, n_flights;
	_Atomic uint64_t held_bytes;	/* needs no lock */
	struct session *session;
	int event_fd;
	bool stopping;	/* the mount is gone: nobody waits for room any more */
};

int miss_init(struct miss_queue *queue, struct session *session);
void miss_destroy(struct miss_queue *queue);

/* Lets FUSE threads that wait for room go, so that they can be waited for. */
void miss_stop(struct miss_queue *queue);

/* Finds the records that are free, once, before the first request. */
int miss_begin(struct miss_queue *queue);

/* Parks a request until `chunks` are there. 0: parked, the request is somebody else's now. 1: they are all there. -ENOMEM; -ENODEV after
 * miss_stop(). */
int miss_wait(struct miss_queue *queue, const struct read_request *request, const uint32_t *chunks, uint32_t n);

/* Ends a flight whose chunk is present now, or `held`: returns the requests that can be answered, chained by `next`; the caller answers
 * them and frees them with pending_free(). */
struct pending *miss_arrived(struct miss_queue *queue, struct layer *layer, uint32_t chunk, struct held *held);

/* A chunk that the cache has no room for: with one reference, the caller's. NULL: too much is held already. */
struct held *miss_hold(struct miss_queue *queue, const struct layer *layer, uint32_t chunk, const uint8_t *raw);
void miss_unhold(struct miss_queue *queue, struct held *held);
void pending_free(struct miss_queue *queue, struct pending *pending);

/* The chunk that the request holds, or NULL. `pending` may be NULL. */
const struct held *pending_held(const struct pending *pending, uint32_t chunk);

/* The request was answered: its record, if it has one, is free. */
void miss_done(struct miss_queue *queue, const struct read_request *request);

/* Ends a flight without its chunk: its requests become faults. */
void miss_failed(struct miss_queue *queue, struct layer *layer, uint32_t chunk, int error);

/* Makes a fault of a request that waits for nothing: the cache's own failure. */
int miss_fault(struct miss_queue *queue, const struct read_request *request, uint32_t chunk, int error);

/* The faults up to this number were reported: returns their requests, to be answered with EIO, chained as above. The caller
 * gives each back to miss_release(). */
struct pending *miss_faulted(struct miss_queue *queue, uint64_t through);
void miss_release(struct miss_queue *queue, struct pending *pending);

/* Wakes whoever takes misses. */
void miss_ring(struct miss_queue *queue);

/* Takes the request `unique` out, for an interrupt: fills `ret_request` and returns true when it waited. */
bool miss_interrupt(struct miss_queue *queue, uint64_t unique, struct read_request *ret_request);

/* When the request that waits longest arrived; 0: none waits. Under the lock. */
uint64_t miss_oldest(const struct miss_queue *queue);

uint32_t miss_take(struct miss_queue *queue, struct weefs_miss *ret_misses, uint32_t n);
uint32_t miss_take_faults(struct miss_queue *queue, struct weefs_fault *ret_faults, uint32_t n);

/* Begins a flight that is the caller's: 1; 0 when the chunk is present or has a flight; -ENOMEM. */
int miss_claim(struct miss_queue *queue, struct layer *layer, uint32_t chunk, struct weefs_miss *ret_miss);

/* A chunk, whatever state it is in. */
void miss_describe(const struct layer *layer, uint32_t chunk, struct weefs_miss *ret_miss);

/* Ends a flight whose claimant could not get the chunk, if no request waits for it; else it is to be taken as a miss. */
void miss_give_back(struct miss_queue *queue, struct layer *layer, uint32_t chunk);

#endif
