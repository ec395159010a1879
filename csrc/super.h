/* The superblock: the layers and plans of one FUSE mount, by slot.
 *
 * Slots are written under `lock` and read without one: pointers are published with release order and never change
 * while set. A plan, and a layer that nothing uses any more, is unpublished first and freed after every FUSE thread has been
 * seen outside a request (`struct worker.section`).
 *
 * A slot is used again when the kernel holds no node of its former owner (session.h counts them). As a second line, each owner
 * has a generation of its own, which goes into the kernel's entries: it never takes a node of one for a node of another.
 */
#ifndef WEEFS_SUPER_H
#define WEEFS_SUPER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "cache.h"
#include "digests.h"
#include "miss.h"
#include "node.h"
#include "plan.h"
#include "seen.h"
#include "session.h"
#include "toc.h"

#define SLOT_PAGE 512u
#define SLOT_PAGES ((1u << NODE_SLOT_BITS) / SLOT_PAGE)
#define MAX_LAYERS_PER_PLAN 1024u

struct layer {
	struct toc toc;
	void *toc_map;
	uint64_t toc_size;
	struct cache cache;
	struct seen seen;
	uint32_t slot;
	uint64_t generation;
	_Atomic uint32_t plans;	/* that it is in; changed under the superblock's lock */
	_Atomic uint32_t busy;	/* its flights, and its failed requests that were not answered yet; changed under the miss queue's lock */
	uint32_t users;		/* callers of the public functions; under the superblock's lock */
	char name[WEEFS_LAYER_NAME_SIZE]; /* below /objects; empty: not there */
};

/* A fixed directory of pages, so that a reader needs no lock while the table grows. */
struct slots {
	_Atomic(_Atomic(void *) *) pages[SLOT_PAGES];
	_Atomic uint32_t used; /* the highest that was ever taken; changed under the superblock's lock */
	uint64_t taken[(NODE_MAX_SLOT + 64) / 64]; /* reserved or set: bit slot % 64 of word slot / 64; under the superblock's lock */
};

struct worker {
	struct weefs *weefs;
	pthread_t thread;
	uint32_t connection;
	int fd;
	uint32_t index;			/* of the descriptor, which is that of its buffer in the session */
	uint8_t *request, *reply;	/* `request` is the session's */
	_Atomic uint64_t section;	/* odd while the thread handles a request: see weefs_remove_plan() */
	struct stats_thread *stats;	/* the session's */
	_Atomic uint64_t since_ns;	/* when the request that it handles arrived; 0: it waits for one */
	bool parked;			/* that request was parked; its own thread's */
	_Atomic bool ended;
	bool started;
};

#define MAX_WORKERS SESSION_MAX_THREADS

/* A chunk that is being written back, to be dropped from the page cache; layer 0: none. */
struct settling {
	uint32_t layer, chunk;
	uint64_t generation;
};

struct weefs {
	struct weefs_options options;
	pthread_mutex_t lock;		/* writers of slots, of `workers` and of `root_plan` */
	struct slots layers, plans;
	struct worker *workers[MAX_WORKERS];
	_Atomic uint32_t n_workers;
	_Atomic uint32_t root_plan;	/* slot of the plan that is the root directory itself, or 0 */
	_Atomic uint64_t changed_s, changed_ns; /* mtime of the root directory */
	_Atomic uint32_t running;	/* FUSE threads */
	int ended_fd;			/* an eventfd: the last of them has ended */
	int session_fd;
	struct session session;
	struct settling settling[CACHE_SETTLING];	/* a ring, under `lock` */
	uint64_t settled;				/* chunks put into it so far */
	struct cache_budget budget;
	struct digests digests;
	struct miss_queue misses;
};

/* NULL when nothing has that slot (any more). */
struct layer *super_layer(struct weefs *w, uint32_t slot);
struct plan *super_plan(struct weefs *w, uint32_t slot);

/* The kernel is about to get a reference to the node; it gave back `n` (or did not take it). */
void super_hold(struct weefs *w, uint64_t node);
void super_forget(struct weefs *w, uint64_t node, uint64_t n);

/* The layer, which stays until it is given back; NULL when nothing has that slot, which may be given back too. For callers of the public
 * functions: FUSE threads need it not (`section`). */
struct layer *super_use_layer(struct weefs *w, uint32_t slot);
void super_unuse_layer(struct weefs *w, struct layer *layer);

/* The plan of that name, or NULL. */
struct plan *super_find_plan(struct weefs *w, const char *name, size_t length);

/* An object that a node id means. */
struct object {
	const struct plan *plan;			/* directories and NODE_PLAN_FILE; else NULL */
	const struct plan_directory *merged;	/* NODE_MERGED */
	struct layer *layer;
	const struct toc_inode *inode;		/* whose attributes it has */
	uint32_t number;			/* of `inode` */
	uint32_t nlink;
	uint64_t node;
	uint64_t generation;	/* of whatever owns the id: the layer of a file, else the plan */
};

/* -ESTALE when the id means nothing (any more). The mount's own directories (its root without a root plan, and those of objects.h) are
 * not objects: -EISDIR. */
int super_object(struct weefs *w, uint64_t node, struct object *ret_object);

/* The node of `name` in a directory: 0, -ENOENT, -ENOTDIR. */
int super_lookup(const struct object *directory, const char *name, size_t length, uint64_t *ret_node);

/* The `index`th name of a directory: 0; 1 for a hole in the numbering; -ENOENT behind the last. */
struct listed {
	const char *name;
	uint32_t name_length;
	uint8_t type;
	uint64_t node;
};
int super_list(const struct object *directory, uint64_t index, struct listed *ret_listed);

void super_attr(const struct object *object, struct weefs_attr *ret_attr);

#endif
