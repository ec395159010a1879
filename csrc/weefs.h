/* The C core of weefs: the validated TOC, the merged view, the chunk cache, the miss queue and the FUSE loop.
 *
 * One `struct weefs` is one FUSE superblock: a node has one for all its environments. Layers and plans are added to it and get
 * slots; what a FUSE node id means is a pure function of the slots (node.h), so nothing is allocated on LOOKUP, and LOOKUP and FORGET only
 * count, which tells when a slot may be used again. What must outlive the process is in a memory of its own (session.h): another one that
 * is given this memory, the descriptors of /dev/fuse and the same layers and plans in the same slots serves on.
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
#define WEEFS_LAYER_NAME_SIZE 64

struct weefs;

/* One sentence that says what was expected and what was received; empty when nothing was to be said. */
struct weefs_error {
	char text[512];
};

struct weefs_options {
	uint32_t max_pending;		/* READ requests that may wait for chunks at once; further ones stay in the kernel's queue. Not with `session_fd` */
	int session_fd;			/* of weefs_create_session(), duplicated; -1: a memory of its own, for a mount that ends with this process */
	uint32_t no_resend;		/* 1: as on a kernel that cannot send requests again (before 6.9) */
	uint32_t escape_overlay_xattrs;	/* 1: show `trusted.overlay.X` as `trusted.overlay.overlay.X`, so that it cannot instruct an overlay above */
};

/* A chunk that a reader waits for. */
struct weefs_miss {
	uint32_t layer;		/* layer slot */
	uint32_t chunk;		/* index in the layer's table of chunks */
	uint32_t stored_size;	/* bytes in the blob */
	uint32_t raw_size;	/* bytes in the stream */
	uint64_t blob_offset;
	uint64_t stream_offset;
};

/* A READ that will be answered with EIO; its reader waits until weefs_answer_faults(). */
struct weefs_fault {
	uint64_t number;	/* counts up from 1 in the life of the session */
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
	uint64_t room;			/* bytes on disk of the present and the suspect chunks */
	uint32_t suspect_chunks;	/* present when the machine went down, and not verified since */
	uint32_t read_chunks;		/* that weefs_first_reads() has */
	uint64_t read_raw;		/* their stream bytes */
};

struct weefs_plan_info {
	uint64_t entries;	/* names in the layers of the plan, before merging */
	uint64_t content_size;	/* of all its layers */
	uint32_t merged_dirs;	/* directories that more than one layer has */
	uint32_t plan_specific;	/* files whose link count differs in this plan from that in their layer */
	uint32_t xattrs;	/* 1: a layer has extended attributes */
	char not_stackable[128];	/* why overlayfs, given images of the layers, would show something else; empty: it shows the same */
};

/* Of an EROFS image of metadata. */
struct weefs_image_info {
	uint64_t size;	/* bytes */
	uint64_t inodes;
	uint64_t names;
};

/* How long things took, by powers of two: bucket i counts those of more than 2^(i-1) and at most 2^i microseconds, the first all up to one
 * microsecond, the last all that took more than 2^30 (18 minutes). */
struct weefs_histogram {
	uint64_t buckets[32];
	uint64_t sum_ns;
};

/* Of a FUSE opcode. `answered`: from the arrival of a request until it was dealt with; not READs that had to wait. `errors`: answered
 * with an errno that is no ordinary answer (those are ENOENT, ENODATA, ENOSYS, ENXIO, ERANGE, EINTR, and EAGAIN to an INTERRUPT). */
struct weefs_operation {
	uint64_t requests;
	uint64_t errors;
	struct weefs_histogram answered;
};

/* What a source of chunks was asked for and gave. */
struct weefs_traffic {
	uint64_t misses;	/* chunks that readers waited for */
	uint64_t ahead;		/* chunks that no reader waited for yet */
	uint64_t requests;	/* for chunks */
	uint64_t bytes;		/* of chunks that arrived */
	uint64_t metadata_requests;
	uint64_t metadata_bytes;
	uint64_t retries;
	uint64_t given_up;	/* chunks */
};

struct weefs_source {
	struct weefs_traffic traffic;
	struct weefs_histogram fetches;	/* requests that brought something */
};

/* Counters are of the session: of all processes that served it. */
struct weefs_statistics {
	struct weefs_operation operations[64];	/* by FUSE opcode; [0]: any opcode of 64 or more */
	struct weefs_source sources[8];		/* numbered by the caller */
	struct weefs_histogram waited;	/* READs that had to wait, from their arrival to their answer, whichever it was */
	uint64_t read_bytes;	/* sent in answers to READ */
	uint64_t late_read_bytes;	/* those of them in answers to READs that had to wait */
	uint64_t reads_waited;	/* READ requests that had to wait for a chunk */
	uint64_t reads_failed;	/* READ requests answered with EIO */
	uint64_t reads_interrupted;
	uint64_t chunks_published;
	uint64_t chunks_unwritten;	/* arrived, and the cache could not take them: their readers were answered from memory */
	uint64_t chunks_rejected;	/* did not decompress or did not have their digest */
	uint64_t evicted_bytes;		/* weefs_count_evicted() */
	uint64_t pending;	/* READ requests waiting now */
	uint64_t in_flight;	/* chunks being fetched now */
	uint64_t oldest_waiting_ns;	/* age of the READ that waits longest, one that waits to be reported as failed included; 0: none waits */
	uint64_t oldest_handled_ns;	/* how long a FUSE thread has been busy with a request; 0: none is */
	uint64_t layer_slots;	/* in use: with a layer, or reserved */
	uint64_t plan_slots;
};

/* Where a layer or a plan is: what must be the same after another process took over. */
struct weefs_place {
	uint32_t slot;
	uint64_t generation;
};

enum weefs_kind { WEEFS_PLAN, WEEFS_LAYER };

/* Makes the memory for `threads` FUSE threads, in the keeper of the mounts; the caller owns the descriptor.
 *
 * `connections`: 1, or 2 for two mounts that show the same, but for extended attributes, of which the first has none: its kernel is told so when
 * it asks for one and never asks again. An overlay asks for some of each file that it looks up, which else is a request each, for every
 * environment. Threads (and the descriptors of weefs_serve()) of the first connection come first, and are half of them. */
int weefs_create_session(uint32_t threads, uint32_t connections, uint32_t max_pending, int *ret_fd);

/* -EPROTO: the session is another version's, `ret_error` says so. */
int weefs_new(const struct weefs_options *options, struct weefs **ret_weefs, struct weefs_error *ret_error);

/* How many processes have begun to serve this session: not 0 before weefs_serve() means that there is something to take over. */
uint32_t weefs_times_served(struct weefs *w);

/* Waits for the FUSE threads (their mount must be gone) and frees everything. NULL is allowed. */
void weefs_free(struct weefs *w);

/* Finds a place that nothing has and of which the kernel knows nothing, and keeps it until something is put there, or
 * weefs_release(). -ENOSPC: no slot is left. */
int weefs_reserve(struct weefs *w, enum weefs_kind kind, struct weefs_place *ret_place);
void weefs_release(struct weefs *w, enum weefs_kind kind, uint32_t slot);

/* Adds a layer: `toc_fd` holds the raw TOC of `toc_size` bytes, `data_fd` is the cache file of the logical stream (extended to its size
 * here), `map_fd` the bitmap of present chunks (created, or begun anew when it belongs to another TOC or to an earlier boot than
 * `boot_id`, 16 bytes). All three are duplicated. `name` is its directory below `/objects`, by which images (below) refer to its files;
 * empty: it has none. It must tell the TOC: layers of one name are taken for the same. -EBADMSG: the TOC breaks a rule of docs/format.md,
 * `ret_error` says which. `place`: from weefs_reserve(), or the one it had in an earlier process. -EEXIST: the slot is in use. */
int weefs_add_layer(struct weefs *w, const struct weefs_place *place, int toc_fd, uint64_t toc_size, int data_fd, int map_fd, const uint8_t *boot_id,
		    const char *name, struct weefs_error *ret_error);

/* Closes a layer: -EBUSY while a plan has it, a reader waits for it, or the kernel holds a node of it. Its slot stays reserved until
 * weefs_release(), so that the caller can drop what it knows by that slot. */
int weefs_close_layer(struct weefs *w, uint32_t slot);

/* The layers that could be closed now. weefs_miss_fd() becomes readable when there is a new one. */
uint32_t weefs_idle_layers(struct weefs *w, uint32_t *ret_slots, uint32_t n);

int weefs_layer_info(struct weefs *w, uint32_t slot, struct weefs_layer_info *ret_info);

/* Adds the plan of `n` layers, base first, as directory `name` of the mount. -EEXIST: the name or the slot is taken; -EXDEV, -ENOENT, -ELOOP: the
 * layers do not fit together, `ret_error` says where. */
int weefs_add_plan(struct weefs *w, const struct weefs_place *place, const char *name, const uint32_t *slots, uint32_t n,
		   struct weefs_plan_info *ret_info, struct weefs_error *ret_error);

/* Removes a plan: its directory answers ENOENT, its memory is freed. Returns after no FUSE thread uses it any more. What is still
 * open of it answers ESTALE, but files, which are their layer's, are read on. */
int weefs_remove_plan(struct weefs *w, uint32_t plan);

/* The kernel drops what it holds below the directory `name`, of a plan that a predecessor removed. */
void weefs_forget_name(struct weefs *w, const char *name);
/* Writes the metadata of a layer to `fd`, from offset 0, as an EROFS image that overlayfs can stack: contents are redirected to
 * `/<name>/<inode>` of a data-only layer, which `/objects` of a mount is. `toc`: its raw TOC, 8-byte aligned. `name`: of weefs_add_layer(),
 * 32 hexadecimal digits. The same arguments give the same bytes. Needs no mount. -EBADMSG: the TOC breaks a rule; -EOPNOTSUPP, -EFBIG: the
 * layer has what such an image cannot hold. After a failure the file holds nothing of use. */
int weefs_write_layer_image(const uint8_t *toc, uint64_t size, const char *name, int fd, struct weefs_image_info *ret_info,
			    struct weefs_error *ret_error);

/* The same of a plan as its directory shows it, as one image. `name`: 32 hexadecimal digits for this plan; its layers need names, too. No
 * layer or plan is added or removed meanwhile: that waits. */
int weefs_write_plan_image(struct weefs *w, uint32_t plan, const char *name, int fd, struct weefs_image_info *ret_info,
			   struct weefs_error *ret_error);

/* Whether `fd` holds a whole image of that name, made by this version: by its first block, checksum included, and its size. -EBADMSG. */
int weefs_check_image(int fd, const char *name, struct weefs_error *ret_error);

/* Makes the plan the root directory of the mount itself (before anything is served). */
int weefs_set_root(struct weefs *w, uint32_t plan);

/* Opens /dev/fuse, mounts it read-only on `path`, and clones the descriptor: `ret_fds` gets `n` of them. The caller owns the descriptors
 * and may give them to another process: the connection lives as long as one of them is open. */
int weefs_mount(const char *path, const char *source, int *ret_fds, uint32_t n, struct weefs_error *ret_error);

/* Starts a FUSE thread on each descriptor; they are duplicated. The threads end when the mount is gone. Once: all descriptors of the
 * session, in the same order in each process, since a request is answered where it came from. Takes over what a predecessor left
 * unanswered, so all layers and plans must be there. */
int weefs_serve(struct weefs *w, const int *fds, uint32_t n);

/* 1 when every FUSE thread has ended; the eventfd becomes readable then. Owned by `w`. */
int weefs_ended(struct weefs *w);
int weefs_ended_fd(struct weefs *w);

/* The eventfd that is readable while misses or faults are to be taken, or layers are idle. Owned by `w`. */
int weefs_miss_fd(struct weefs *w);
uint32_t weefs_take_misses(struct weefs *w, struct weefs_miss *ret_misses, uint32_t n);
uint32_t weefs_take_faults(struct weefs *w, struct weefs_fault *ret_faults, uint32_t n);

/* The faults up to this number, of those that were taken, were reported: answers their readers. */
void weefs_answer_faults(struct weefs *w, uint64_t through);

/* Claims a chunk that no reader waits for, to fetch it ahead: 1 when it is now the caller's to publish or fail, 0
 * when it is present or somebody fetches it. */
int weefs_claim(struct weefs *w, uint32_t layer, uint32_t chunk, struct weefs_miss *ret_miss);

/* Claims, of the chunks from `from` on, the first that can be, and those behind it up to the first that cannot, or until their blob bytes are
 * `size`: a range of the blob. How many, at most `n`; one at least, if there is one, whatever its size. */
int weefs_claim_run(struct weefs *w, uint32_t layer, uint32_t from, uint64_t size, struct weefs_miss *ret_misses, uint32_t n);

/* Gives a claimed chunk back: absent again if no reader waits for it by now; else it comes by weefs_take_misses(), for whoever fetches what
 * readers wait for. */
int weefs_unclaim(struct weefs *w, uint32_t layer, uint32_t chunk);

/* A chunk, whether it is present, claimed or neither. */
int weefs_describe_chunk(struct weefs *w, uint32_t layer, uint32_t chunk, struct weefs_miss *ret_chunk);

/* The chunks of a layer in the order of their first READ since it was added, from the `since`th on: up to `n`; how many. What the kernel
 * has in its page cache is read without a READ; of a layer that is added for the first time in this session, it has nothing. */
int weefs_first_reads(struct weefs *w, uint32_t layer, uint32_t since, uint32_t *ret_chunks, uint32_t n);

/* The only way into the cache: decompress, compare the digest, write, mark as present, answer the readers that wait for it. 1: the
 * cache has no room for it; its readers are answered all the same, and the next one asks again. -ENOSPC: they cannot be, since too much waits so.
 * -EBADMSG: the bytes are not the chunk's; nothing was written and its readers still wait. */
int weefs_publish(struct weefs *w, uint32_t layer, uint32_t chunk, const uint8_t *stored, size_t size, struct weefs_error *ret_error);

/* The same of a chunk that a file holds, uncompressed, at `offset`: that of another layer. -EBADMSG: it does not. */
int weefs_publish_copy(struct weefs *w, uint32_t layer, uint32_t chunk, int fd, uint64_t offset, struct weefs_error *ret_error);

/* The same of a chunk's bytes in the stream, uncompressed, from a peer. -EBADMSG: they are not. */
int weefs_publish_raw(struct weefs *w, uint32_t layer, uint32_t chunk, const uint8_t *raw, size_t size, struct weefs_error *ret_error);

/* For sending bytes of the stream straight from the data file. weefs_chunks_at(): the chunks that cover a range, which may not be empty; -ERANGE:
 * it is not inside of the stream. weefs_hold(): keeps chunks from being evicted until weefs_unhold() gets what it returned; -ENODATA: one of
 * them is absent; -EBUSY: too many ranges of the layer are held. weefs_unhold(): 0, or -ESTALE when one was lost all the same, since it was
 * found damaged or the file was cut off. The caller keeps the layer from being closed. */
int weefs_chunks_at(struct weefs *w, uint32_t layer, uint64_t offset, uint64_t size, uint32_t *ret_first, uint32_t *ret_end);
int weefs_hold(struct weefs *w, uint32_t layer, uint32_t first, uint32_t end);
int weefs_unhold(struct weefs *w, uint32_t layer, uint32_t hold);

/* What the cache may have copies of, by the digests of its chunks. weefs_know_layer() adds those of a layer, served or not, with a raw TOC in
 * `toc_fd`, under the caller's number for it, not 0. weefs_find_copies(): up to `n` places of a chunk in layers of other numbers than `but`.
 * A place is a hint: weefs_publish_copy() from the data file of that layer says whether it is there. */
struct weefs_copy {
	uint32_t layer;
	uint64_t offset;	/* in the stream */
};
int weefs_know_layer(struct weefs *w, uint32_t number, int toc_fd, uint64_t toc_size, struct weefs_error *ret_error);
void weefs_forget_layer(struct weefs *w, uint32_t number);
uint32_t weefs_find_copies(struct weefs *w, uint32_t layer, uint32_t chunk, uint32_t but, struct weefs_copy *ret_copies, uint32_t n);

/* Reads a chunk in the cache and compares its digest. 1: right; one that was suspect is present now, and its readers are answered. 0: it is not
 * there. -EBADMSG: it was damaged, and is dropped. */
int weefs_check_chunk(struct weefs *w, uint32_t layer, uint32_t chunk, struct weefs_error *ret_error);

/* Room, in bytes, that the chunks of all layers may have; what arrives beyond is not written (weefs_publish()). No bound at first. A lower one
 * than is used frees nothing by itself. */
void weefs_limit_cache(struct weefs *w, uint64_t limit);
uint64_t weefs_cache_used(struct weefs *w);

/* Turns the clock of a layer: frees at least `goal` bytes and returns 0, or comes to the end of the layer and returns 1; `ret_freed`: bytes.
 * Chunks that were read since it last came by stay until it comes again. Both of a layer that is served and, with its files and `boot_id` as
 * for weefs_add_layer(), of one that is not. */
int weefs_sweep(struct weefs *w, uint32_t layer, uint64_t goal, uint64_t *ret_freed, struct weefs_error *ret_error);
int weefs_sweep_files(int toc_fd, uint64_t toc_size, int data_fd, int map_fd, const uint8_t *boot_id, uint64_t goal, uint64_t *ret_freed,
		      struct weefs_error *ret_error);

/* Adds what sweeps freed, bytes, to the statistics. */
void weefs_count_evicted(struct weefs *w, uint64_t freed);

/* weefs_check_chunk() of all chunks of a layer that is not served: how many were right, and how many damaged. */
int weefs_check_files(int toc_fd, uint64_t toc_size, int data_fd, int map_fd, const uint8_t *boot_id, uint32_t *ret_good, uint32_t *ret_damaged,
		      struct weefs_error *ret_error);

/* Gives a chunk up: its readers become faults, and the next reader asks again. */
int weefs_fail(struct weefs *w, uint32_t layer, uint32_t chunk, int error);

void weefs_get_statistics(struct weefs *w, struct weefs_statistics *ret_statistics);

/* Adds to the counters of a source. `fetch_ns`: how long a request took that brought something; 0: there was none. -EINVAL: no such source. */
int weefs_count_traffic(struct weefs *w, uint32_t source, const struct weefs_traffic *traffic, uint64_t fetch_ns);

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
