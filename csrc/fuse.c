/* The FUSE server: a loop per cloned /dev/fuse descriptor, one request at a time, answered from tables (stops 1 to 4
 * of a read's path).
 *
 * Why not libfuse: taking over an initialised session, RESEND and passthrough need the device itself, and node ids
 * that are addresses make its inode table pointless. What is here is the part of the protocol that a read-only
 * filesystem needs.
 *
 * A request stays in its thread's buffer, which outlives the process, until it was answered or parked (session.h).
 *
 * Nothing changes, so nothing times out: entries, absences, attributes, directory and page caches are kept for good.
 * Only the mount's own root, which lists the plans, changes, and then the kernel is told. OPEN and OPENDIR are
 * answered ENOSYS, after which the kernel sends none.
 */
#include "fuse.h"

#include <errno.h>
#include <linux/fuse.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "objects.h"
#include "read.h"
#include "request.h"
#include "util.h"

#ifndef FUSE_HAS_RESEND
#define FUSE_HAS_RESEND (1ULL << 39)
#endif

#ifndef FUSE_NOTIFY_RESEND
#define FUSE_NOTIFY_RESEND 7
#endif

#define FOREVER_S (UINT64_C(10) * 365 * 86400)
#define MAX_CHUNKS_PER_READ (FUSE_MAX_READ / TOC_STREAM_ALIGN + 2)

/* ---- answers ---- */

/* Whether the kernel took it. */
static bool answer_parts(int fd, uint64_t unique, int error, const struct iovec *parts, int n)
{
	struct fuse_out_header header = {.len = sizeof(header), .error = -error, .unique = unique};
	struct iovec all[3] = {{&header, sizeof(header)}};
	ssize_t written;

	for (int i = 0; i < n; i++) {
		all[i + 1] = parts[i];
		header.len += (uint32_t)parts[i].iov_len;
	}
	do
		written = writev(fd, all, n + 1);
	while (written < 0 && errno == EINTR);
	/* ENOENT: the request was interrupted, or answered by a predecessor, and is gone. ENODEV: the mount is. Neither has anybody to tell. */
	return written >= 0;
}

bool request_answer(const struct request *request, const void *data, size_t size)
{
	struct iovec part = {(void *)data, size};

	return answer_parts(request->fd, request->header->unique, 0, &part, size ? 1 : 0);
}

/* Answers with an entry, which is a reference for the kernel: counted before it can have it. */
static void answer_entry(const struct request *request, const struct fuse_entry_out *entry)
{
	super_hold(request->w, entry->nodeid);
	if (!request_answer(request, entry, sizeof(*entry)))
		super_forget(request->w, entry->nodeid, 1);
}

/* Says nothing of this server's health: an absence, an end, a size that was asked for, a reader that went away. */
static bool is_ordinary(uint32_t opcode, int error)
{
	switch (error) {
	case ENOENT: case ENODATA: case ENOSYS: case ENXIO: case ERANGE: case EINTR: return true;
	case EAGAIN: return opcode == FUSE_INTERRUPT;
	default: return false;
	}
}

static uint32_t counted_as(uint32_t opcode)
{
	return opcode < STATS_OPERATIONS ? opcode : 0;
}

void request_error(const struct request *request, int error)
{
	uint32_t opcode = request->header->opcode;

	error = error < 0 ? -error : error;
	if (!is_ordinary(opcode, error))
		stats_add(&request->worker->stats->operations[counted_as(opcode)].errors, 1);
	answer_parts(request->fd, request->header->unique, error, NULL, 0);
}

static void note_waited(struct weefs *w, const struct read_request *request)
{
	stats_observe(&w->session.shared->waited, stats_since_ns(request->since_ns, stats_now_ns()));
}

void fuse_fail_read(struct weefs *w, const struct read_request *request, int error)
{
	answer_parts(request->fd, request->unique, error, NULL, 0);
	if (!is_ordinary(FUSE_READ, error))
		stats_add(&w->session.shared->late_errors, 1);
	note_waited(w, request);
	miss_done(&w->misses, request);
}

/* ---- attributes ---- */

static void fill_attr(const struct object *object, struct fuse_attr *ret)
{
	struct weefs_attr attr;

	super_attr(object, &attr);
	*ret = (struct fuse_attr){
		.ino = attr.node,
		.size = attr.size,
		.blocks = attr.blocks,
		.atime = (uint64_t)attr.mtime_s,
		.mtime = (uint64_t)attr.mtime_s,
		.ctime = (uint64_t)attr.mtime_s,
		.atimensec = attr.mtime_ns,
		.mtimensec = attr.mtime_ns,
		.ctimensec = attr.mtime_ns,
		.mode = attr.mode,
		.nlink = attr.nlink,
		.uid = attr.uid,
		.gid = attr.gid,
		.rdev = attr.rdev,
		.blksize = 4096,
	};
}

/* The mount's own directories: of plans, and of objects. Mode 0555. */
static void fill_own_attr(struct weefs *w, uint64_t node, struct fuse_attr *ret)
{
	*ret = (struct fuse_attr){.ino = node, .size = 4096, .mode = S_IFDIR | 0555, .nlink = 2, .blksize = 4096};
	ret->mtime = ret->ctime = ret->atime = atomic_load(&w->changed_s);
	ret->mtimensec = ret->ctimensec = ret->atimensec = (uint32_t)atomic_load(&w->changed_ns);
}

static void fill_entry(const struct object *object, struct fuse_entry_out *ret)
{
	*ret = (struct fuse_entry_out){.nodeid = object->node, .generation = object->generation, .entry_valid = FOREVER_S, .attr_valid = FOREVER_S};
	fill_attr(object, &ret->attr);
}

static void do_getattr(const struct request *request)
{
	struct fuse_attr_out out = {.attr_valid = FOREVER_S};
	struct object object;
	int r = super_object(request->w, request->header->nodeid, &object);

	if (r == -EISDIR) {
		fill_own_attr(request->w, request->header->nodeid, &out.attr);
	} else if (r) {
		request_error(request, r);
		return;
	} else {
		fill_attr(&object, &out.attr);
	}
	request_answer(request, &out, sizeof(out));
}

/* ---- names ---- */

static void lookup_plan(const struct request *request, const char *name, size_t length)
{
	struct plan *plan = super_find_plan(request->w, name, length);
	struct fuse_entry_out out;
	struct object object;
	int r = plan ? super_object(request->w, node_merged(plan->slot, 0), &object) : -ENOENT;

	if (r) {
		request_error(request, r);
		return;
	}
	fill_entry(&object, &out); /* until fuse_forget_plan() */
	answer_entry(request, &out);
}

/* A name in one of the mount's own directories. What is not there may come: its absence is not remembered. */
static void lookup_own(const struct request *request, const char *name, size_t length)
{
	uint64_t directory = request->header->nodeid, node = node_objects(0);
	struct fuse_entry_out out;
	struct object object;
	int r = 0;

	if (objects_is_directory(directory)) {
		r = objects_lookup(request->w, directory, name, length, &node);
	} else if (length != strlen(OBJECTS_NAME) || memcmp(name, OBJECTS_NAME, length) != 0) {
		lookup_plan(request, name, length);
		return;
	}
	if (r == 0)
		r = super_object(request->w, node, &object);
	if (r == 0) {
		fill_entry(&object, &out);
	} else if (r == -EISDIR) { /* until fuse_forget_layer() */
		out = (struct fuse_entry_out){.nodeid = node, .generation = objects_generation(request->w, node), .entry_valid = FOREVER_S,
					      .attr_valid = FOREVER_S};
		fill_own_attr(request->w, node, &out.attr);
	} else {
		request_error(request, r);
		return;
	}
	answer_entry(request, &out);
}

static void do_lookup(const struct request *request)
{
	const char *name = request->argument;
	struct fuse_entry_out out = {.entry_valid = FOREVER_S}; /* nodeid 0: an absence that may be remembered */
	struct object directory, object;
	uint64_t node;
	size_t length;
	int r;

	if (request->size == 0 || name[request->size - 1] != 0) {
		request_error(request, EINVAL);
		return;
	}
	length = strlen(name);
	r = super_object(request->w, request->header->nodeid, &directory);
	if (r == -EISDIR) {
		lookup_own(request, name, length);
		return;
	}
	if (r == 0)
		r = super_lookup(&directory, name, length, &node);
	if (r == 0)
		r = super_object(request->w, node, &object);
	if (r && r != -ENOENT) {
		request_error(request, r);
		return;
	}
	if (r) {
		request_answer(request, &out, sizeof(out));
		return;
	}
	fill_entry(&object, &out);
	answer_entry(request, &out);
}

static void do_readlink(const struct request *request)
{
	struct object object;
	int r = super_object(request->w, request->header->nodeid, &object);

	if (r == 0 && !S_ISLNK(object.inode->mode))
		r = -EINVAL;
	if (r)
		request_error(request, r);
	else
		request_answer(request, object.layer->toc.strings + object.inode->data, object.inode->size);
}

/* ---- directories ---- */

/* Adds one entry to the reply when it fits. */
static bool add_entry(struct weefs *w, uint8_t *reply, size_t *used, size_t size, bool plus, const struct listed *listed, uint64_t next)
{
	size_t fixed = plus ? offsetof(struct fuse_direntplus, dirent) : 0;
	size_t needed = fixed + FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + listed->name_length);
	struct fuse_dirent *dirent = (struct fuse_dirent *)(reply + *used + fixed);
	struct object object;

	if (size - *used < needed)
		return false;
	memset(reply + *used, 0, needed);
	if (plus && listed->node && super_object(w, listed->node, &object) == 0) {
		fill_entry(&object, (struct fuse_entry_out *)(reply + *used));
		super_hold(w, object.node);
	}
	dirent->ino = listed->node ? listed->node : NODE_ROOT;
	dirent->off = next;
	dirent->namelen = listed->name_length;
	dirent->type = listed->type;
	memcpy(dirent->name, listed->name, listed->name_length);
	*used += needed;
	return true;
}

/* The kernel did not take the answer: it holds none of its entries. */
static void unhold_entries(struct weefs *w, const uint8_t *reply, size_t used)
{
	for (size_t at = 0; at < used;) {
		const struct fuse_direntplus *entry = (const struct fuse_direntplus *)(reply + at);

		if (entry->entry_out.nodeid)
			super_forget(w, entry->entry_out.nodeid, 1);
		at += FUSE_DIRENTPLUS_SIZE(entry);
	}
}

/* The plans, for whoever looks around: position 2 + slot. */
static int list_plan(struct weefs *w, uint64_t index, struct listed *ret_listed)
{
	struct plan *plan;

	if (index > atomic_load(&w->plans.used))
		return -ENOENT;
	plan = super_plan(w, (uint32_t)index);
	if (!plan)
		return 1;
	*ret_listed = (struct listed){.name = plan->name, .name_length = (uint32_t)strlen(plan->name), .type = S_IFDIR >> 12,
				      .node = node_merged(plan->slot, 0)};
	return 0;
}

/* What is in one of the mount's own directories; `buffer` may keep the name. */
static int list_own(const struct request *request, uint64_t index, char *buffer, struct listed *ret_listed)
{
	uint64_t directory = request->header->nodeid;

	if (objects_is_directory(directory))
		return objects_list(request->w, directory, index, buffer, ret_listed);
	if (index > 0)
		return list_plan(request->w, index, ret_listed);
	*ret_listed = (struct listed){.name = OBJECTS_NAME, .name_length = strlen(OBJECTS_NAME), .type = S_IFDIR >> 12, .node = node_objects(0)};
	return 0;
}

/* Offsets are positions: 0 ".", 1 "..", then the names. A name's number in its directory never changes, so a position is valid for ever. */
static void do_readdir(const struct request *request, bool plus)
{
	const struct fuse_read_in *in = request->argument;
	uint8_t *reply = request->worker->reply;
	struct object directory;
	size_t used = 0, size;
	int r = super_object(request->w, request->header->nodeid, &directory);
	char buffer[OBJECTS_LISTED_SIZE];
	bool own = r == -EISDIR;

	if (r == 0 && !inode_is_directory(directory.inode))
		r = -ENOTDIR;
	if (request->size < sizeof(*in))
		r = -EINVAL;
	if (r && (!own || r != -EISDIR)) {
		request_error(request, r);
		return;
	}
	size = in->size < FUSE_MAX_READ ? in->size : FUSE_MAX_READ;
	for (uint64_t position = in->offset;; position++) {
		struct listed listed = {.name = "..", .name_length = position == 0 ? 1 : 2, .type = S_IFDIR >> 12};

		if (position >= 2) {
			r = own ? list_own(request, position - 2, buffer, &listed) : super_list(&directory, position - 2, &listed);
			if (r < 0)
				break;
			if (r > 0)
				continue;
		}
		if (!add_entry(request->w, reply, &used, size, plus, &listed, position + 1))
			break;
	}
	if (!request_answer(request, reply, used) && plus)
		unhold_entries(request->w, reply, used);
}

/* ---- what the kernel gives back ---- */

/* The buffer is cleared first: a process that dies after it has not counted twice. */
static void do_forget(struct weefs *w, uint8_t *buffer)
{
	const struct fuse_in_header header = *session_request(buffer);
	size_t size = header.len - sizeof(header);
	cleanup_free uint8_t *argument = malloc(size + 1);

	if (argument)
		memcpy(argument, buffer + sizeof(header), size);
	session_clear(buffer);
	if (!argument)
		return; /* counts that stay too high cost a slot */
	if (header.opcode == FUSE_FORGET && size >= sizeof(struct fuse_forget_in)) {
		super_forget(w, header.nodeid, ((const struct fuse_forget_in *)argument)->nlookup);
	} else if (header.opcode == FUSE_BATCH_FORGET && size >= sizeof(struct fuse_batch_forget_in)) {
		const struct fuse_forget_one *one = (const struct fuse_forget_one *)(argument + sizeof(struct fuse_batch_forget_in));
		size_t n = (size - sizeof(struct fuse_batch_forget_in)) / sizeof(*one);

		if (n > ((const struct fuse_batch_forget_in *)argument)->count)
			n = ((const struct fuse_batch_forget_in *)argument)->count;
		for (size_t i = 0; i < n; i++)
			super_forget(w, one[i].nodeid, one[i].nlookup);
	}
}

/* ---- data ---- */

/* Clamps a READ to the file: the bytes to send. */
static uint32_t read_size(const struct toc_inode *inode, uint64_t offset, uint32_t size)
{
	uint64_t left = offset < inode->size ? inode->size - offset : 0;

	return left < size ? (uint32_t)left : size;
}

/* 1: answered. 0: somebody else's now. Else the error to answer. `buffer` has room for the request's size. */
static int serve_read(struct weefs *w, const struct read_request *request, const struct pending *pending, uint8_t *buffer, _Atomic uint64_t *sent)
{
	const struct toc_inode *inode = &request->layer->toc.inodes[request->inode];
	uint32_t chunks[MAX_CHUNKS_PER_READ];
	struct iovec part = {buffer, request->size};
	uint32_t damaged = 0;
	int r;

	for (;;) {
		uint32_t times = cache_times_lost(&request->layer->cache);
		uint32_t missing = read_missing(request->layer, inode, request->offset, request->size, pending, chunks, MAX_CHUNKS_PER_READ);

		r = missing ? miss_wait(&w->misses, request, chunks, missing) : 1;
		if (r <= 0)
			return r;
		if (missing)
			continue; /* they arrived meanwhile */
		r = read_present(request->layer, inode, request->offset, request->size, pending, buffer, &damaged);
		/* The bytes count only if the chunks were present all the while. */
		if (times != cache_times_lost(&request->layer->cache))
			continue;
		if (r == 0)
			break;
		return miss_fault(&w->misses, request, damaged, -r);
	}
	stats_add(sent, request->size);
	answer_parts(request->fd, request->unique, 0, &part, 1);
	read_drop(request->layer, inode, request->offset, request->size);
	miss_done(&w->misses, request);
	return 1;
}

static void serve_late_read(struct weefs *w, const struct read_request *request, const struct pending *pending)
{
	cleanup_free uint8_t *buffer = malloc(request->size);
	int r = buffer ? serve_read(w, request, pending, buffer, &w->session.shared->late_read_bytes) : -ENOMEM;

	if (r > 0)
		note_waited(w, request);
	else if (r < 0)
		fuse_fail_read(w, request, -r);
}

void fuse_answer_pending(struct weefs *w, const struct pending *pending)
{
	serve_late_read(w, &pending->request, pending);
}

static void do_read(const struct request *request)
{
	const struct fuse_read_in *in = request->argument;
	struct read_request read = {.unique = request->header->unique, .fd = request->fd, .clone = request->worker->index,
				    .record = SESSION_NO_RECORD, .pid = request->header->pid,
				    .since_ns = stats_get(&request->worker->since_ns)};
	struct object object;
	int r = request->size < sizeof(*in) ? -EINVAL : super_object(request->w, request->header->nodeid, &object);

	if (r == 0 && !S_ISREG(object.inode->mode))
		r = S_ISDIR(object.inode->mode) ? -EISDIR : -EINVAL;
	if (r == 0) {
		read.layer = object.layer;
		read.inode = object.number;
		read.offset = in->offset;
		read.size = read_size(object.inode, in->offset, in->size < FUSE_MAX_READ ? in->size : FUSE_MAX_READ);
		if (read.size == 0) {
			request_answer(request, NULL, 0);
			return;
		}
		r = serve_read(request->w, &read, NULL, request->worker->reply, &request->worker->stats->read_bytes);
		request->worker->parked = r == 0;
	}
	if (r < 0)
		request_error(request, r);
}

static void do_interrupt(const struct request *request)
{
	const struct fuse_interrupt_in *in = request->argument;
	struct read_request read;

	if (request->size < sizeof(*in))
		request_error(request, EINVAL);
	else if (miss_interrupt(&request->w->misses, in->unique, &read))
		fuse_fail_read(request->w, &read, EINTR);
	else
		request_error(request, EAGAIN); /* not waiting yet, or answered: the kernel asks again if it still matters */
}

static void do_lseek(const struct request *request)
{
	const struct fuse_lseek_in *in = request->argument;
	struct fuse_lseek_out out = {0};
	struct object object;
	int r = request->size < sizeof(*in) ? -EINVAL : super_object(request->w, request->header->nodeid, &object);

	if (r == 0 && (!S_ISREG(object.inode->mode) || (in->whence != SEEK_DATA && in->whence != SEEK_HOLE)))
		r = -EINVAL;
	if (r == 0)
		r = read_seek(&object.layer->toc, object.inode, in->offset, in->whence == SEEK_HOLE, &out.offset);
	if (r)
		request_error(request, r);
	else
		request_answer(request, &out, sizeof(out));
}

/* ---- the mount ---- */

/* overlayfs refuses a lower layer without STATFS. */
static void do_statfs(const struct request *request)
{
	struct fuse_statfs_out out = {.st = {.bsize = 4096, .frsize = 4096, .namelen = 255}};

	for (uint32_t slot = 1; slot <= atomic_load(&request->w->layers.used); slot++) {
		const struct layer *layer = super_layer(request->w, slot);

		out.st.blocks += layer ? (layer->toc.header->stream_size + 4095) / 4096 : 0;
		out.st.files += layer ? layer->toc.n_inodes : 0;
	}
	request_answer(request, &out, sizeof(out));
}

static void do_init(const struct request *request)
{
	const struct fuse_init_in *in = request->argument;
	const uint64_t wanted = FUSE_ASYNC_READ | FUSE_PARALLEL_DIROPS | FUSE_MAX_PAGES | FUSE_NO_OPEN_SUPPORT | FUSE_NO_OPENDIR_SUPPORT |
				FUSE_DO_READDIRPLUS | FUSE_READDIRPLUS_AUTO | FUSE_CACHE_SYMLINKS | FUSE_EXPLICIT_INVAL_DATA | FUSE_INIT_EXT |
				(request->w->options.no_resend ? 0 : FUSE_HAS_RESEND);
	struct session_header *session = request->w->session.header;
	uint32_t connection = request->worker->connection;
	struct fuse_init_out out = {.major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION};
	uint64_t offered, flags;

	if (request->size < 16) { /* major, minor, max_readahead, flags */
		request_error(request, EPROTO);
		return;
	}
	offered = in->flags;
	if (request->size >= 20 && (in->flags & FUSE_INIT_EXT))
		offered |= (uint64_t)in->flags2 << 32;
	/* Without NO_OPEN support (Linux before 3.16) and MAX_PAGES (before 4.20) this server would be wrong or slow: say so by refusing. */
	if (in->major != FUSE_KERNEL_VERSION || (offered & FUSE_NO_OPENDIR_SUPPORT) == 0) {
		request_error(request, EPROTO);
		return;
	}
	/* A predecessor that died with this very request may have answered it: then what it said holds. */
	if (session->init_flags[connection] == 0)
		session->init_flags[connection] = wanted & offered;
	session->init_minor[connection] = in->minor;
	flags = session->init_flags[connection];
	out.max_readahead = FUSE_MAX_READ; /* a bound; mount.c sets what is done */
	out.flags = (uint32_t)flags;
	out.flags2 = (uint32_t)(flags >> 32);
	/* Reads that wait for chunks are among these: were there few, the kernel would hold back reads that need not wait. */
	out.max_background = UINT16_MAX;
	out.congestion_threshold = UINT16_MAX / 4 * 3;
	out.max_write = 4096;
	out.time_gran = 1;
	out.max_pages = FUSE_MAX_READ / 4096;
	request_answer(request, &out, sizeof(out));
	atomic_store(&session->initialised[connection], 1);
}

static void handle(const struct request *request)
{
	switch (request->header->opcode) {
	case FUSE_LOOKUP: do_lookup(request); break;
	case FUSE_GETATTR: do_getattr(request); break;
	case FUSE_READLINK: do_readlink(request); break;
	case FUSE_READ: do_read(request); break;
	case FUSE_READDIR: do_readdir(request, false); break;
	case FUSE_READDIRPLUS: do_readdir(request, true); break;
	case FUSE_GETXATTR: xattr_get(request); break;
	case FUSE_LISTXATTR: xattr_list(request); break;
	case FUSE_LSEEK: do_lseek(request); break;
	case FUSE_STATFS: do_statfs(request); break;
	case FUSE_INTERRUPT: do_interrupt(request); break;
	case FUSE_INIT: do_init(request); break;
	case FUSE_FORGET: case FUSE_BATCH_FORGET: do_forget(request->w, request->worker->request); break; /* no answer */
	case FUSE_DESTROY: request_answer(request, NULL, 0); break;
	default: request_error(request, ENOSYS); break; /* OPEN, OPENDIR, STATX, ACCESS, FLUSH: the kernel takes its default from here on */
	}
}

/* ENOENT (the kernel holds nothing of it) and ENODEV (unmounted) are as good as success. */
static bool notify(int fd, int code, const struct iovec *parts, int n)
{
	return answer_parts(fd, 0, -code, parts, n);
}

/* The first thread of a connection; NULL before anything is served. */
static const struct worker *first_worker(struct weefs *w, uint32_t connection)
{
	uint32_t first = connection * (w->session.header->threads / w->session.header->connections);

	return first < atomic_load(&w->n_workers) ? w->workers[first] : NULL;
}

static void notify_all(struct weefs *w, int code, const struct iovec *parts, int n)
{
	for (uint32_t connection = 0; connection < w->session.header->connections; connection++) {
		const struct worker *worker = first_worker(w, connection);

		if (worker)
			notify(worker->fd, code, parts, n);
	}
}

void fuse_root_changed(struct weefs *w)
{
	struct fuse_notify_inval_inode_out out = {.ino = NODE_ROOT, .off = 0, .len = 0};
	struct iovec part = {&out, sizeof(out)};

	notify_all(w, FUSE_NOTIFY_INVAL_INODE, &part, 1);
}

void fuse_forget_plan(struct weefs *w, const char *name)
{
	struct fuse_notify_inval_entry_out out = {.parent = NODE_ROOT, .namelen = (uint32_t)strlen(name)};
	struct iovec parts[2] = {{&out, sizeof(out)}, {(void *)name, strlen(name) + 1}};

	notify_all(w, FUSE_NOTIFY_INVAL_ENTRY, parts, 2);
	fuse_root_changed(w);
}

void fuse_forget_layer(struct weefs *w, const struct layer *layer)
{
	struct fuse_notify_inval_entry_out out = {.parent = node_objects(0), .namelen = (uint32_t)strlen(layer->name)};
	struct iovec parts[2] = {{&out, sizeof(out)}, {(void *)layer->name, strlen(layer->name) + 1}};

	if (layer->name[0])
		notify_all(w, FUSE_NOTIFY_INVAL_ENTRY, parts, 2);
}

/* ---- the threads ---- */

void fuse_serve_request(struct worker *worker)
{
	const struct fuse_in_header *header = session_request(worker->request);
	struct request request = {.w = worker->weefs, .worker = worker, .fd = worker->fd, .header = header, .argument = header + 1,
				  .size = header->len - sizeof(*header)};
	struct stats_operation *operation = &worker->stats->operations[counted_as(header->opcode)];
	uint64_t begin_ns = stats_now_ns();

	stats_add(&operation->requests, 1);
	atomic_store_explicit(&worker->since_ns, begin_ns, memory_order_relaxed);
	worker->parked = false;
	atomic_fetch_add(&worker->section, 1);
	handle(&request);
	session_clear(worker->request);
	atomic_fetch_add(&worker->section, 1);
	atomic_store_explicit(&worker->since_ns, 0, memory_order_relaxed);
	if (!worker->parked)
		stats_observe(&operation->answered, stats_since_ns(begin_ns, stats_now_ns()));
}

/* What the table says of a READ is checked like a request: the memory is older than this process. */
static void adopt_parked(struct weefs *w, uint32_t record)
{
	const struct parked *parked = &w->session.parked[record];
	struct read_request read = {.unique = atomic_load(&parked->unique), .record = record, .clone = parked->clone, .pid = parked->pid,
				    .layer = super_layer(w, parked->layer), .inode = parked->inode, .offset = parked->offset,
				    .since_ns = parked->since_ns};

	if (read.clone >= atomic_load(&w->n_workers)) {
		session_unpark(&w->session, record); /* nobody could answer it */
		return;
	}
	read.fd = w->workers[read.clone]->fd;
	if (read.layer && read.inode < read.layer->toc.n_inodes && S_ISREG(read.layer->toc.inodes[read.inode].mode))
		read.size = read_size(&read.layer->toc.inodes[read.inode], read.offset, parked->size);
	if (read.size && read.size <= FUSE_MAX_READ) {
		serve_late_read(w, &read, NULL);
		return;
	}
	fuse_fail_read(w, &read, ESTALE);
}

/* Everything of this connection comes again, but what has no answer. */
static void await_resent(struct weefs *w, uint32_t connection)
{
	for (uint32_t i = 0; i < atomic_load(&w->n_workers); i++) {
		const struct fuse_in_header *request = session_request(w->workers[i]->request);

		if (w->workers[i]->connection == connection && request &&
		    (request->opcode == FUSE_FORGET || request->opcode == FUSE_BATCH_FORGET))
			do_forget(w, w->workers[i]->request);
	}
	session_clear_requests(&w->session, connection);
}

/* Whether the kernel has agreed to send again what this connection's last server did not answer. */
static bool ask_to_resend(struct weefs *w, uint32_t connection)
{
	const struct session_header *header = w->session.header;
	const struct worker *worker = first_worker(w, connection);

	return worker && atomic_load(&header->initialised[connection]) && (header->init_flags[connection] & FUSE_HAS_RESEND) &&
	       !w->options.no_resend && notify(worker->fd, FUSE_NOTIFY_RESEND, NULL, 0);
}

int fuse_take_over(struct weefs *w)
{
	int r;

	/* Cleared after the kernel has agreed: whoever dies in between leaves them to the next. */
	for (uint32_t connection = 0; connection < w->session.header->connections; connection++)
		if (ask_to_resend(w, connection))
			await_resent(w, connection);
	session_settle(&w->session); /* of a connection that resends, nothing is left */
	r = miss_begin(&w->misses);
	for (uint32_t i = 0; r == 0 && i < w->session.header->max_pending; i++)
		if (atomic_load(&w->session.parked[i].unique))
			adopt_parked(w, i);
	return r;
}

void *fuse_thread(void *argument)
{
	struct worker *worker = argument;
	struct weefs *w = worker->weefs;
	uint64_t one = 1;
	ssize_t n;

	if (session_request(worker->request))
		fuse_serve_request(worker); /* a predecessor's */
	for (;;) {
		n = read(worker->fd, worker->request, SESSION_REQUEST_SIZE);
		/* ENOENT: the request was interrupted while we took it. */
		if (n < 0 && (errno == EINTR || errno == EAGAIN || errno == ENOENT))
			continue;
		if (n < 0 || !session_request(worker->request) || session_request(worker->request)->len != (size_t)n)
			break; /* ENODEV: unmounted */
		fuse_serve_request(worker);
	}
	atomic_store(&worker->ended, true);
	if (atomic_fetch_sub(&w->running, 1) == 1)
		n = write(w->ended_fd, &one, sizeof(one));
	return NULL;
}
