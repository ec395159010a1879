/* The FUSE loop: requests from /dev/fuse in, answers out. */
#ifndef WEEFS_FUSE_H
#define WEEFS_FUSE_H

#include "super.h"

#define FUSE_MAX_READ (1u << 20)
#define FUSE_REPLY_SIZE (FUSE_MAX_READ + 4096u)

/* A worker's thread: finishes what is in its buffer, then serves until the mount is gone. */
void *fuse_thread(void *worker);

/* Deals with the request in the worker's buffer: then it is answered, or parked, or cleared. The worker's thread, or none is running. */
void fuse_serve_request(struct worker *worker);

/* Sees to the requests that a predecessor took and did not answer: the kernel sends them again, or they are parked here or
 * left in their buffers. After all workers have been made and before their threads run. */
int fuse_take_over(struct weefs *w);

/* Answers a READ whose chunks have all arrived (or parks it again, if one has gone meanwhile). Any thread. */
void fuse_answer_pending(struct weefs *w, const struct pending *pending);

/* Answers a READ that was parked with an error, positive; its record is free then. Any thread. */
void fuse_fail_read(struct weefs *w, const struct read_request *request, int error);

/* The list of plans changed: the kernel drops what it holds of the root's attributes and listing. A plan has gone: it
 * drops its directory tree. Any thread but a FUSE thread, under no lock: the kernel may wait for a lookup that a FUSE
 * thread is to answer. */
void fuse_root_changed(struct weefs *w);
void fuse_forget_plan(struct weefs *w, const char *name);

/* A layer goes: the kernel drops its directory below /objects. As above, and `layer` must still be there. */
void fuse_forget_layer(struct weefs *w, const struct layer *layer);

#endif
