/* What a serving process must not take with it when it is killed: the requests in its hands, and what it promised the kernel.
 *
 * A memfd of the mount's keeper, mapped shared by each process that serves in turn:
 *
 *   header     what INIT agreed on, and numbers that go on counting
 *   parked     a table of READs that wait for chunks
 *   lookups    for each plan slot and each layer slot, how many references to its nodes the kernel holds
 *   counters   one block of all threads and one per FUSE thread (stats.h)
 *   buffers    one per FUSE thread; the thread reads from /dev/fuse straight into it
 *
 * A request is in its thread's buffer from the moment the kernel has given it away (a SIGKILL takes effect when read(2) returns, so a
 * buffer is never half written) until it was answered, or is in the table. A successor therefore finds each request that was taken and
 * not answered, in one of the two or in both; one that was answered and not yet cleared is answered twice, and the kernel says ENOENT.
 *
 * Counts of lookups rise before the answer that hands a node out, and fall after the FORGET was cleared from its buffer: a process that
 * dies in between leaves a count too high, which costs a slot that is not used again, and never one too low, which would give another
 * image's bytes for an old id.
 *
 * The layout is this version's own: a successor that expects another one refuses the memory. Whoever changes it reads the one before, too,
 * or running nodes cannot be restarted into the new version (the daemon then keeps the old process).
 */
#ifndef WEEFS_SESSION_H
#define WEEFS_SESSION_H

#include <linux/fuse.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "node.h"
#include "stats.h"
#include "weefs.h"

#define SESSION_MAX_THREADS 64u
#define SESSION_MAX_CONNECTIONS 2u
#define SESSION_REQUEST_SIZE (64u << 10)	/* the kernel wants room for its largest request: max_write (4096) and headers; xattr names and paths are smaller */
#define SESSION_NO_RECORD UINT32_MAX

struct session_header {
	char magic[8];
	uint32_t version;
	uint32_t threads;		/* of all connections: a multiple of their number, those of the first one first */
	uint32_t connections;		/* 1 or 2 */
	uint32_t max_pending;
	_Atomic uint32_t served;	/* how many processes have begun to serve */
	uint32_t reserved;
	_Atomic uint32_t initialised[SESSION_MAX_CONNECTIONS];	/* its INIT was answered */
	uint32_t init_minor[SESSION_MAX_CONNECTIONS];	/* of the kernel; this and the flags are set before `initialised` */
	uint64_t init_flags[SESSION_MAX_CONNECTIONS];	/* what was agreed on */
	_Atomic uint64_t generation;	/* the last one given to a plan or a layer */
	_Atomic uint64_t faults;	/* the number of the last fault */
};

struct parked {
	_Atomic uint64_t unique;	/* 0: free. Stored last, cleared first */
	uint32_t clone;			/* index of the descriptor that delivered it */
	uint32_t pid;
	uint32_t layer;			/* slot */
	uint32_t inode;
	uint64_t offset;
	uint32_t size;
	uint32_t reserved;
	uint64_t since_ns;		/* when it arrived: CLOCK_MONOTONIC */
};
_Static_assert(sizeof(struct parked) == 48, "shared between processes");

struct session {
	struct session_header *header;	/* the mapping */
	uint64_t size;
	struct parked *parked;
	_Atomic uint64_t *plan_lookups, *layer_lookups;	/* by slot */
	struct stats_shared *shared;
	uint8_t *threads;	/* a struct stats_thread each, in pages of its own: session_thread() */
	uint8_t *buffers;
};

/* Makes the memory; the caller owns the descriptor. -EINVAL: a size out of its bounds. */
int session_create(uint32_t threads, uint32_t connections, uint32_t max_pending, int *ret_fd);

/* Maps the memory. -EPROTO: another version's, or none. session_close() takes half-opened ones. */
int session_open(struct session *session, int fd, struct weefs_error *ret_error);
void session_close(struct session *session);

/* The buffer of a thread, in memory that stays there: the kernel fails a request whose buffer it has to page in for a process that is
 * being killed. */
int session_buffer(struct session *session, uint32_t thread, uint8_t **ret_buffer);

/* The counters of a thread. */
struct stats_thread *session_thread(const struct session *session, uint32_t thread);

/* The request in a buffer, or NULL. */
const struct fuse_in_header *session_request(const uint8_t *buffer);

/* The request was answered or parked, or needs neither. */
void session_clear(uint8_t *buffer);

/* Where a record of the table is used and freed. Several threads may do so with different records. */
void session_park(struct session *session, uint32_t record, const struct parked *parked);
void session_unpark(struct session *session, uint32_t record);

/* The connection that a thread, or the descriptor of its number, belongs to. */
static inline uint32_t session_connection(const struct session *session, uint32_t thread)
{
	return thread / (session->header->threads / session->header->connections);
}

/* Forgets all requests of a connection: the kernel sends them again. */
void session_clear_requests(struct session *session, uint32_t connection);

/* Drops each buffered READ that is in the table as well. */
void session_settle(struct session *session);

/* The counter of references to nodes like this one: that of its layer for a file and for a directory below /objects, else that of its plan.
 * NULL: the root, and /objects itself. */
_Atomic uint64_t *session_lookups(struct session *session, uint64_t node);

#endif
