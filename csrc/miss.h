/* READ requests that wait for chunks, and the chunks that they wait for: the single-flight queue between the FUSE
 * threads and whoever fetches.
 *
 *              reader needs it            weefs_take_misses()
 *   (absent) ------------------> QUEUED ------------------> TAKEN --- publish --> present, its waiters are answered
 *       |                                                     |
 *       +-------------------- weefs_claim() ----------------> |------- fail ----> absent, its waiters get EIO
 *
 * A chunk has at most one flight. A request waits for all its absent chunks at once and is answered when the last
 * arrives, by the thread that published it; or at once with EIO when one fails; or with EINTR when its reader is
 * interrupted. In the last two cases the record stays until its flights have ended, but is `done`.
 *
 * Bounds: at most `max_pending` requests wait; the next FUSE thread that would add one waits in miss_wait() itself,
 * and with it the kernel's queue.
 */
#ifndef WEEFS_MISS_H
#define WEEFS_MISS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "weefs.h"

struct layer;
struct flight;

/* What must be known to answer a READ later. */
struct read_request {
	uint64_t unique;
	int fd;		/* the answer goes to the clone that delivered the request */
	uint32_t pid;
	struct layer *layer;
	uint32_t inode;
	uint32_t size;
	uint64_t offset;
};

struct waiter {
	struct pending *pending;
	struct waiter *next;
};

struct pending {
	struct read_request request;
	struct pending *previous, *next;	/* in miss_queue.pending, unless done; `next` also chains the ones to be answered */
	uint32_t waiting;			/* flights that have not ended */
	bool done;				/* answered already */
	struct waiter waiters[];		/* one per flight */
};

#define MISS_BUCKETS 4096u
#define MISS_FAULTS 1024u

struct miss_queue {
	pthread_mutex_t lock;		/* of all below */
	pthread_cond_t room;		/* signalled when a request is no longer pending */
	struct flight *buckets[MISS_BUCKETS];
	struct flight *first_queued, **last_queued;
	struct pending *pending;
	struct weefs_fault faults[MISS_FAULTS];	/* a ring; the oldest is dropped when it is full */
	uint32_t first_fault, n_faults;
	uint32_t n_pending, n_flights, max_pending;
	uint64_t interrupted, failed, waited;
	int event_fd;
	bool stopping;	/* the mount is gone: nobody waits for room any more */
};

int miss_init(struct miss_queue *queue, uint32_t max_pending);
void miss_destroy(struct miss_queue *queue);

/* Lets FUSE threads that wait for room go, so that they can be waited for. */
void miss_stop(struct miss_queue *queue);

/* Parks a request until `chunks` are there. 0: parked, the request is somebody else's now. 1: they are all there. -ENOMEM; -ENODEV after
 * miss_stop(). */
int miss_wait(struct miss_queue *queue, const struct read_request *request, const uint32_t *chunks, uint32_t n);

/* Marks a written chunk as present and returns the requests that can be answered now, chained by `next`; the caller
 * answers and frees them. */
struct pending *miss_arrived(struct miss_queue *queue, struct layer *layer, uint32_t chunk);

/* Ends a flight without its chunk; returns the requests to be answered with EIO, chained as above. The caller gives
 * each back to miss_release(). */
struct pending *miss_failed(struct miss_queue *queue, struct layer *layer, uint32_t chunk, int error);
void miss_release(struct miss_queue *queue, struct pending *pending);

/* Takes the request `unique` out, for an interrupt: fills `ret_request` and returns true when it waited. */
bool miss_interrupt(struct miss_queue *queue, uint64_t unique, struct read_request *ret_request);

uint32_t miss_take(struct miss_queue *queue, struct weefs_miss *ret_misses, uint32_t n);
uint32_t miss_take_faults(struct miss_queue *queue, struct weefs_fault *ret_faults, uint32_t n);

/* Begins a flight that is the caller's: 1; 0 when the chunk is present or has a flight; -ENOMEM. */
int miss_claim(struct miss_queue *queue, struct layer *layer, uint32_t chunk, struct weefs_miss *ret_miss);

#endif
