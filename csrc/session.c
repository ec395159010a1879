/* The memory of requests in flight, which outlives the process that serves (session.h has what is in it). */
#include "session.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "util.h"

#define MAGIC "WEEFSMEM"
#define VERSION 3u
#define MAX_PENDING (1u << 20)
#define HEADER_SIZE 4096u
#define SLOTS (UINT64_C(1) << NODE_SLOT_BITS)
#define SHARED_SIZE ALIGN_UP(sizeof(struct stats_shared), UINT64_C(4096))
#define THREAD_SIZE ALIGN_UP(sizeof(struct stats_thread), UINT64_C(4096))

_Static_assert(sizeof(struct session_header) <= HEADER_SIZE, "the table begins behind it");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "an atomic that takes a lock cannot be shared between processes");

struct layout {
	uint64_t parked, lookups, counters, buffers, size;
};

static struct layout layout_of(uint32_t threads, uint32_t max_pending)
{
	struct layout layout = {.parked = HEADER_SIZE};

	layout.lookups = ALIGN_UP(layout.parked + (uint64_t)max_pending * sizeof(struct parked), UINT64_C(4096));
	layout.counters = layout.lookups + 2 * SLOTS * sizeof(uint64_t);
	layout.buffers = layout.counters + SHARED_SIZE + threads * THREAD_SIZE;
	layout.size = layout.buffers + (uint64_t)threads * SESSION_REQUEST_SIZE;
	return layout;
}

static bool in_bounds(uint32_t threads, uint32_t connections, uint32_t max_pending)
{
	return threads > 0 && threads <= SESSION_MAX_THREADS && connections > 0 && connections <= SESSION_MAX_CONNECTIONS &&
	       threads % connections == 0 && max_pending > 0 && max_pending <= MAX_PENDING;
}

int session_create(uint32_t threads, uint32_t connections, uint32_t max_pending, int *ret_fd)
{
	struct session_header header = {.magic = MAGIC, .version = VERSION, .threads = threads, .connections = connections, .max_pending = max_pending};
	cleanup_close int fd = -1;
	ssize_t written;

	if (!in_bounds(threads, connections, max_pending))
		return -EINVAL;
	fd = memfd_create("weefs-session", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0 || ftruncate(fd, (off_t)layout_of(threads, max_pending).size) < 0)
		return -errno;
	written = pwrite(fd, &header, sizeof(header), 0);
	if (written != (ssize_t)sizeof(header))
		return written < 0 ? -errno : -EIO;
	/* Nobody can cut it off under the mapping. */
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
		return -errno;
	*ret_fd = fd;
	fd = -1;
	return 0;
}

int session_open(struct session *session, int fd, struct weefs_error *error)
{
	struct session_header header;
	struct layout layout;
	struct stat st;
	void *mapping;

	*session = (struct session){0};
	if (fstat(fd, &st) < 0)
		return fail(error, -errno, "session memory: %s", strerror(errno));
	if (pread(fd, &header, sizeof(header), 0) != (ssize_t)sizeof(header) || memcmp(header.magic, MAGIC, sizeof(header.magic)) != 0)
		return fail(error, -EPROTO, "session memory: expected one made by weefs, received something else");
	if (header.version != VERSION)
		return fail(error, -EPROTO, "session memory: expected version %u, received %" PRIu32, VERSION, header.version);
	if (!in_bounds(header.threads, header.connections, header.max_pending))
		return fail(error, -EPROTO, "session memory: its sizes are out of bounds");
	layout = layout_of(header.threads, header.max_pending);
	if ((uint64_t)st.st_size != layout.size)
		return fail(error, -EPROTO, "session memory: expected %" PRIu64 " bytes, received %lld", layout.size, (long long)st.st_size);
	mapping = mmap(NULL, layout.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (mapping == MAP_FAILED)
		return fail(error, -errno, "session memory: %s", strerror(errno));
	session->header = mapping;
	session->size = layout.size;
	session->parked = (struct parked *)((uint8_t *)mapping + layout.parked);
	session->plan_lookups = (_Atomic uint64_t *)((uint8_t *)mapping + layout.lookups);
	session->layer_lookups = session->plan_lookups + SLOTS;
	session->shared = (struct stats_shared *)((uint8_t *)mapping + layout.counters);
	session->threads = (uint8_t *)mapping + layout.counters + SHARED_SIZE;
	session->buffers = (uint8_t *)mapping + layout.buffers;
	return 0;
}

void session_close(struct session *session)
{
	if (session && session->header)
		munmap(session->header, session->size);
	if (session)
		*session = (struct session){0};
}

int session_buffer(struct session *session, uint32_t thread, uint8_t **ret_buffer)
{
	uint8_t *buffer = session->buffers + (uint64_t)thread * SESSION_REQUEST_SIZE;

	if (thread >= session->header->threads)
		return -ENOSPC;
	/* Touched in any case: written to, since the kernel will write, and without a change, since there may be a request in it. Who is
	 * not allowed to lock that much has them at least now. */
	(void)mlock(buffer, SESSION_REQUEST_SIZE);
	for (uint32_t at = 0; at < SESSION_REQUEST_SIZE; at += 4096)
		atomic_fetch_add((_Atomic uint8_t *)(buffer + at), 0);
	*ret_buffer = buffer;
	return 0;
}

struct stats_thread *session_thread(const struct session *session, uint32_t thread)
{
	return (struct stats_thread *)(session->threads + thread * THREAD_SIZE);
}

static _Atomic uint32_t *length_of(uint8_t *buffer)
{
	return (_Atomic uint32_t *)(buffer + offsetof(struct fuse_in_header, len));
}

const struct fuse_in_header *session_request(const uint8_t *buffer)
{
	const struct fuse_in_header *header = (const struct fuse_in_header *)buffer;

	return header->len >= sizeof(*header) && header->len <= SESSION_REQUEST_SIZE ? header : NULL;
}

void session_clear(uint8_t *buffer)
{
	atomic_store(length_of(buffer), 0);
}

void session_park(struct session *session, uint32_t record, const struct parked *parked)
{
	struct parked *at = &session->parked[record];

	at->clone = parked->clone;
	at->pid = parked->pid;
	at->layer = parked->layer;
	at->inode = parked->inode;
	at->offset = parked->offset;
	at->size = parked->size;
	at->since_ns = parked->since_ns;
	atomic_store(&at->unique, parked->unique);
}

void session_unpark(struct session *session, uint32_t record)
{
	atomic_store(&session->parked[record].unique, 0);
}

void session_clear_requests(struct session *session, uint32_t connection)
{
	for (uint32_t i = 0; i < session->header->threads; i++)
		if (session_connection(session, i) == connection)
			session_clear(session->buffers + (uint64_t)i * SESSION_REQUEST_SIZE);
	for (uint32_t i = 0; i < session->header->max_pending; i++)
		if (atomic_load(&session->parked[i].unique) && session_connection(session, session->parked[i].clone) == connection)
			session_unpark(session, i);
}

void session_settle(struct session *session)
{
	for (uint32_t thread = 0; thread < session->header->threads; thread++) {
		uint8_t *buffer = session->buffers + (uint64_t)thread * SESSION_REQUEST_SIZE;
		const struct fuse_in_header *header = session_request(buffer);

		for (uint32_t i = 0; header && i < session->header->max_pending; i++)
			if (atomic_load(&session->parked[i].unique) == header->unique) {
				session_clear(buffer);
				break;
			}
	}
}

_Atomic uint64_t *session_lookups(struct session *session, uint64_t id)
{
	struct node node = node_decode(id);

	if (node.kind == NODE_NONE || (node.kind == NODE_OBJECTS && node.layer == 0))
		return NULL;
	return node.kind == NODE_FILE || node.kind == NODE_OBJECTS ? &session->layer_lookups[node.layer] : &session->plan_lookups[node.plan];
}
