/* The C core of weefs: the validated TOC, the merged view, the chunk cache, the miss queue and the FUSE loop.
 *
 * One `struct weefs` is one FUSE superblock: a node has one for all its environments. Layers and plans are added to it and get
 * slots; what a FUSE node id means is a pure function of the slots (node.h), so nothing is allocated on LOOKUP and FORGET does nothing.
 *
 * Conventions: functions that can fail return 0 or -errno; outputs are named `ret_*` and untouched on failure. Where a caller needs more
 * than an errno, it passes a `struct weefs_error` and gets one sentence. The library never logs and never calls back.
 *
 * Threads: every function may be called from any thread, except weefs_free(), which must be the last. The FUSE threads are this
 * library's own. A miss is handed out through weefs_take_misses(), signalled by the eventfd of weefs_miss_fd().
 *
 * The region between the two `cdef` marks is read by weefs/core_build.py: plain declarations only.
 */
#ifndef WEEFS_H
#define WEEFS_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin */
#define WEEFS_ERROR_SIZE 512

struct weefs;

/* One sentence that says what was expected and what was received; empty when nothing was to be said. */
struct weefs_error {
	char text[512];
};

struct weefs_options {
	uint32_t max_pending;		/* READ requests that may wait for chunks at once; further ones stay in the kernel's queue */
	uint32_t escape_overlay_xattrs;	/* 1: show `trusted.overlay.X` as `trusted.overlay.overlay.X`, so that it cannot instruct an overlay above */
};

/* A chunk that a reader waits for. */
struct weefs_miss {
	uint32_t layer;		/* layer slot */
	uint32_t chunk;		/* index in the layer's table of chunks */
	uint32_t stored_size;	/* bytes in the blob */
	uint32_t raw_size;	/* bytes in the stream */
	uint64_t blob_offset;
};

/* A READ that was answered with EIO. */
struct weefs_fault {
	uint32_t layer;
	uint32_t chunk;
	uint32_t pid;	/* of the reader, in the pid namespace of the mount's opener; 0 when the kernel itself read */
	int32_t error;	/* what the fetch failed with, an errno */
};

struct weefs_layer_info {
	uint32_t inodes;
	uint32_t dirents;
	uint32_t chunks;
	uint32_t chunk_size;
	uint64_t stream_size;	/* bytes of the cache file */
	uint64_t content_size;	/* sum of the sizes of the regular files */
	uint64_t blob_size;	/* end of the last chunk */
	uint64_t present_chunks;
	uint64_t present_stored;	/* blob bytes of the present chunks */
	uint64_t present_raw;		/* stream bytes of the present chunks */
};

struct weefs_plan_info {
	uint64_t entries;	/* names in the layers of the plan, before merging */
	uint64_t content_size;	/* of all its layers */
	uint32_t merged_dirs;	/* directories that more than one layer has */
	uint32_t plan_specific;	/* files whose link count differs in this plan from that in their layer */
};

struct weefs_statistics {
	uint64_t requests[64];	/* by FUSE opcode; [0]: any opcode of 64 or more */
	uint64_t read_bytes;	/* sent in answers to READ */
	uint64_t reads_waited;	/* READ requests that had to wait for a chunk */
	uint64_t reads_failed;	/* READ requests answered with EIO */
	uint64_t reads_interrupted;
	uint64_t chunks_published;
	uint64_t chunks_rejected;	/* did not decompress or did not have their digest */
	uint64_t pending;	/* READ requests waiting now */
	uint64_t in_flight;	/* chunks being fetched now */
};

int weefs_new(const struct weefs_options *options, struct weefs **ret_weefs);

/* Waits for the FUSE threads (their mount must be gone) and frees everything. NULL is allowed. */
void weefs_free(struct weefs *w);

/* Adds a layer: `toc_fd` holds the raw TOC of `toc_size` bytes, `data_fd` is the cache file of the logical stream (extended to its size
 * here), `map_fd` the bitmap of present chunks (created, or begun anew when it belongs to another TOC or to an earlier boot than
 * `boot_id`, 16 bytes). All three are duplicated. -EBADMSG: the TOC breaks a rule of docs/format.md, `ret_error` says which.
 * -ENOSPC: no slot is left. */
int weefs_add_layer(struct weefs *w, int toc_fd, uint64_t toc_size, int data_fd, int map_fd, const uint8_t *boot_id,
		    uint32_t *ret_slot, struct weefs_error *ret_error);

int weefs_layer_info(struct weefs *w, uint32_t slot, struct weefs_layer_info *ret_info);

/* Adds the plan of `n` layers, base first, as directory `name` of the mount. -EEXIST: the name is taken; -EXDEV, -ENOENT, -ELOOP: the
 * layers do not fit together, `ret_error` says where. */
int weefs_add_plan(struct weefs *w, const char *name, const uint32_t *slots, uint32_t n, uint32_t *ret_plan,
		   struct weefs_plan_info *ret_info, struct weefs_error *ret_error);

/* Removes a plan: its directory answers ENOENT, its memory is freed. Returns after no FUSE thread uses it any more. */
int weefs_remove_plan(struct weefs *w, uint32_t plan);

/* Makes the plan the root directory of the mount itself (before anything is served). */
int weefs_set_root(struct weefs *w, uint32_t plan);

/* Opens /dev/fuse, mounts it read-only on `path`, and clones the descriptor: `ret_fds` gets `n` of them. The caller owns the descriptors
 * and may give them to another process: the connection lives as long as one of them is open. */
int weefs_mount(const char *path, const char *source, int *ret_fds, uint32_t n, struct weefs_error *ret_error);

/* Starts a FUSE thread on each descriptor; they are duplicated. The threads end when the mount is gone. */
int weefs_serve(struct weefs *w, const int *fds, uint32_t n);

/* 1 when every FUSE thread has ended. */
int weefs_ended(struct weefs *w);

/* The eventfd that is readable while misses or faults are to be taken. Owned by `w`. */
int weefs_miss_fd(struct weefs *w);
uint32_t weefs_take_misses(struct weefs *w, struct weefs_miss *ret_misses, uint32_t n);
uint32_t weefs_take_faults(struct weefs *w, struct weefs_fault *ret_faults, uint32_t n);

/* Claims a chunk that no reader waits for, to fetch it ahead: 1 when it is now the caller's to publish or fail, 0
 * when it is present or somebody fetches it. */
int weefs_claim(struct weefs *w, uint32_t layer, uint32_t chunk, struct weefs_miss *ret_miss);

/* The only way into the cache: decompress, compare the digest, write, mark as present, answer the readers that wait for it.
 * -EBADMSG: the bytes are not the chunk's; nothing was written and its readers still wait. */
int weefs_publish(struct weefs *w, uint32_t layer, uint32_t chunk, const uint8_t *stored, size_t size, struct weefs_error *ret_error);

/* Gives a chunk up: its readers get EIO (and are reported as faults), and the next reader asks again. */
int weefs_fail(struct weefs *w, uint32_t layer, uint32_t chunk, int error);

void weefs_get_statistics(struct weefs *w, struct weefs_statistics *ret_statistics);

/* Without a mount, for tests and tools: the node of a path below a plan's root (not following a symlink at its end), and what it is.
 * `ret_attr` as FUSE has it. -ENOENT, -ENOTDIR. */
struct weefs_attr {
	uint64_t node;
	uint64_t size;
	uint64_t blocks;
	int64_t mtime_s;
	uint32_t mtime_ns;
	uint32_t mode;
	uint32_t nlink;
	uint32_t uid;
	uint32_t gid;
	uint32_t rdev;
};
int weefs_lookup(struct weefs *w, uint32_t plan, const char *path, struct weefs_attr *ret_attr);

/* Checks a raw TOC as weefs_add_layer() does, and nothing else. */
int weefs_check_toc(const uint8_t *toc, uint64_t size, struct weefs_error *ret_error);
/* cdef end */

#endif
