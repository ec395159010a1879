/* Fuzzing: hostile bytes as the life of a superblock: what the kernel asks, what fetches bring, plans that go, processes that die and
 * what a successor finds in the memory that they leave.
 *
 * The input is a program; each step is a byte and what it takes from the rest. Requests go through the code that the FUSE threads run, in
 * this thread, and the answers to a memfd, where each is looked at: it has a right length, an error in range, and belongs to a request
 * that was not answered before. In the end everything that waits is given up, and nothing may be unanswered: a reader must never wait for
 * nobody. The layers are those of tools/fuzz_corpus.py (build/fuzz/layers.h).
 */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuse.h"
#include "layers.h"
#include "super.h"

#define CLONES 2u
#define MAX_PENDING 8u
#define MAX_BODY 2048u
#define MAX_NODES 256u
#define MAX_WAITING 64u
#define MAX_MISSES 256u
#define N_PLANS 3u
#define FUSE_RESENDS (1ULL << 39)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The rest of the input; zeros when it is used up. */
struct input {
	const uint8_t *data;
	size_t left;
};

struct plan_slot {
	struct weefs_place place;
	bool there;
};

struct life {
	struct weefs *w;
	struct input in;
	int session_fd;
	int channel, device;	/* a memfd, and what the core has in the place of /dev/fuse: it appends, and cannot be read */
	struct weefs_place layers[FUZZ_LAYERS];
	bool layer_there[FUZZ_LAYERS];
	int toc_fds[FUZZ_LAYERS], data_fds[FUZZ_LAYERS], map_fds[FUZZ_LAYERS];
	struct plan_slot plans[N_PLANS];
	uint64_t nodes[MAX_NODES];	/* that were handed out, and some that always are asked for */
	uint32_t n_nodes;
	uint64_t waiting[MAX_WAITING];	/* requests that were not answered yet */
	uint32_t n_waiting;
	struct weefs_miss misses[MAX_MISSES];	/* taken, and neither published nor failed */
	uint32_t n_misses;
	uint64_t unique, last_fault;
	bool foreign;	/* the memory was written to: there may be requests in it that nobody sent */
};

static const uint8_t boot_id[16] = {1};
static const uint8_t plan_layers[N_PLANS][4] = {{0, 1}, {0, 2, 3}, {2, 4, 5, 6}};
static const uint8_t plan_sizes[N_PLANS] = {2, 3, 4};
static const char *const plan_names[N_PLANS] = {"a", "b", "c"};

static void take(struct input *in, void *ret, size_t n)
{
	size_t have = n < in->left ? n : in->left;

	memset(ret, 0, n);
	memcpy(ret, in->data, have);
	in->data += have;
	in->left -= have;
}

static uint8_t take_byte(struct input *in)
{
	uint8_t byte;

	take(in, &byte, 1);
	return byte;
}

static uint32_t take_below(struct input *in, uint32_t bound)
{
	uint16_t number;

	take(in, &number, sizeof(number));
	return bound ? number % bound : 0;
}

/* ---- what is answered ---- */

static void note_node(struct life *life, uint64_t node)
{
	if (node && life->n_nodes < MAX_NODES)
		life->nodes[life->n_nodes++] = node;
}

static bool forget_waiting(struct life *life, uint64_t unique)
{
	for (uint32_t i = 0; i < life->n_waiting; i++)
		if (life->waiting[i] == unique) {
			life->waiting[i] = life->waiting[--life->n_waiting];
			return true;
		}
	return false;
}

static void note_answered(struct life *life, uint64_t unique)
{
	bool waited = forget_waiting(life, unique);

	assert(waited || life->foreign); /* else answered twice, or never asked */
}

/* `opcode`: of the request that was made last, `asked` its number: what its answer must look like. */
static void check_answer(struct life *life, const struct fuse_out_header *header, const uint8_t *body, uint32_t opcode, uint64_t asked)
{
	uint32_t size = header->len - (uint32_t)sizeof(*header);

	if (header->unique == 0) { /* a notification: its code where an error would be, and positive */
		assert(header->error > 0 && header->error <= FUSE_NOTIFY_CODE_MAX + 1);
		return;
	}
	assert(header->error <= 0 && header->error > -4096);
	assert(header->error == 0 || size == 0);
	note_answered(life, header->unique);
	if (header->error || header->unique != asked)
		return;
	if (opcode == FUSE_LOOKUP) {
		const struct fuse_entry_out *entry = (const struct fuse_entry_out *)body;

		assert(size == sizeof(*entry));
		assert(entry->nodeid == 0 || entry->nodeid == entry->attr.ino);
		note_node(life, entry->nodeid);
	} else if (opcode == FUSE_GETATTR) {
		assert(size == sizeof(struct fuse_attr_out));
	} else if (opcode == FUSE_READDIRPLUS) {
		for (uint32_t at = 0; at < size;) {
			const struct fuse_direntplus *entry = (const struct fuse_direntplus *)(body + at);

			assert(size - at >= FUSE_NAME_OFFSET_DIRENTPLUS && size - at >= FUSE_DIRENTPLUS_SIZE(entry));
			assert(entry->dirent.namelen > 0 && entry->dirent.namelen <= 255);
			note_node(life, entry->entry_out.nodeid);
			at += (uint32_t)FUSE_DIRENTPLUS_SIZE(entry);
		}
	} else if (opcode == FUSE_READDIR) {
		for (uint32_t at = 0; at < size;) {
			const struct fuse_dirent *entry = (const struct fuse_dirent *)(body + at);

			assert(size - at >= FUSE_NAME_OFFSET && size - at >= FUSE_DIRENT_SIZE(entry));
			assert(entry->namelen > 0 && entry->namelen <= 255);
			at += (uint32_t)FUSE_DIRENT_SIZE(entry);
		}
	}
}

static void drain(struct life *life, uint32_t opcode, uint64_t asked)
{
	off_t size = lseek(life->channel, 0, SEEK_END);
	uint8_t *answers;

	assert(size >= 0);
	if (size == 0)
		return;
	answers = malloc((size_t)size);
	assert(answers && pread(life->channel, answers, (size_t)size, 0) == size);
	for (off_t at = 0; at < size;) {
		struct fuse_out_header header;
		uint8_t *body;

		assert(size - at >= (off_t)sizeof(header));
		memcpy(&header, answers + at, sizeof(header));
		assert(header.len >= sizeof(header) && header.len <= size - at);
		assert(header.len <= FUSE_REPLY_SIZE);
		body = malloc(header.len); /* aligned, and exactly as large */
		assert(body);
		memcpy(body, answers + at + sizeof(header), header.len - sizeof(header));
		check_answer(life, &header, body, opcode, asked);
		free(body);
		at += header.len;
	}
	free(answers);
	assert(ftruncate(life->channel, 0) == 0);
}

/* ---- what a fetch brings ---- */

static void take_misses(struct life *life)
{
	life->n_misses += weefs_take_misses(life->w, life->misses + life->n_misses, MAX_MISSES - life->n_misses);
}

static uint32_t layer_of(const struct life *life, uint32_t slot)
{
	for (uint32_t i = 0; i < FUZZ_LAYERS; i++)
		if (life->layers[i].slot == slot)
			return i;
	abort();
}

static void settle_miss(struct life *life, uint32_t number, uint8_t how)
{
	struct weefs_miss miss = life->misses[number];
	const struct fuzz_layer *layer = &fuzz_layers[layer_of(life, miss.layer)];
	struct weefs_error error;
	uint8_t *stored;
	int r;

	assert(miss.blob_offset + miss.stored_size <= layer->blob_size);
	if (how % 4 == 3) {
		assert(weefs_fail(life->w, miss.layer, miss.chunk, EIO) == 0);
		life->misses[number] = life->misses[--life->n_misses];
		return;
	}
	stored = malloc(miss.stored_size + 1);
	assert(stored);
	memcpy(stored, layer->blob + miss.blob_offset, miss.stored_size);
	if (how % 4 == 2)
		stored[how % miss.stored_size] ^= (uint8_t)(1 + how);
	r = weefs_publish(life->w, miss.layer, miss.chunk, stored, miss.stored_size, &error);
	free(stored);
	if (how % 4 == 2 && r == -EBADMSG)
		return; /* its readers still wait */
	assert(r == 0 || how % 4 == 2);
	if (r == 0)
		life->misses[number] = life->misses[--life->n_misses];
}

static void answer_faults(struct life *life)
{
	struct weefs_fault faults[MAX_PENDING * 2];
	uint32_t n;

	while ((n = weefs_take_faults(life->w, faults, MAX_PENDING * 2))) {
		assert(life->foreign || faults[0].number > life->last_fault);
		life->last_fault = faults[n - 1].number;
	}
	weefs_answer_faults(life->w, life->last_fault);
}

/* Everything that waits ends. */
static void give_up(struct life *life)
{
	do {
		take_misses(life);
		while (life->n_misses)
			settle_miss(life, 0, 3);
		answer_faults(life);
		take_misses(life);
	} while (life->n_misses);
}

/* ---- what the kernel asks ---- */

static uint64_t take_node(struct life *life)
{
	struct input *in = &life->in;
	uint64_t raw;

	switch (take_byte(in) % 8) {
	case 0: return NODE_ROOT;
	case 1: return node_objects(take_below(in, FUZZ_LAYERS + 2));
	case 2: return node_file(take_below(in, FUZZ_LAYERS + 2), take_below(in, 64));
	case 3: return node_merged(take_below(in, N_PLANS + 2), take_below(in, 64));
	case 4: return node_directory(take_below(in, N_PLANS + 2), take_below(in, FUZZ_LAYERS + 2), take_below(in, 64));
	case 5: return node_plan_file(take_below(in, N_PLANS + 2), take_below(in, 64));
	case 6: take(in, &raw, sizeof(raw)); return raw;
	default: return life->n_nodes ? life->nodes[take_below(in, life->n_nodes)] : NODE_ROOT;
	}
}

/* The body: raw, or one that gets beyond the first check. */
static size_t take_body(struct life *life, uint32_t opcode, uint8_t *body)
{
	static const char *const names[] = {"a", "b", "c", "d", "e", "s", "x", "objects", "large", "small", "deep", "n7", "lower", "file", ".", "..", ".wh.gone"};
	static const char *const xattrs[] = {"user.a", "user.b", "security.capability", "trusted.overlay.opaque", "trusted.overlay.overlay.x", "x"};
	struct input *in = &life->in;
	uint8_t how = take_byte(in);
	size_t n = 0;

	if (how >= 240) {
		n = take_below(in, how & 1 ? 48 : MAX_BODY); /* often too short */
		take(in, body, n);
		return n;
	}
	switch (opcode) {
	case FUSE_LOOKUP:
		strcpy((char *)body, names[how % (sizeof(names) / sizeof(*names))]);
		return strlen((char *)body) + 1;
	case FUSE_READ: case FUSE_READDIR: case FUSE_READDIRPLUS: {
		struct fuse_read_in read = {.offset = how & 1 ? take_below(in, UINT16_MAX) : 0, .size = how & 2 ? take_below(in, UINT16_MAX) : 1u << 17};

		if (opcode != FUSE_READ && (how & 4) == 0)
			read.offset = how % 4;
		memcpy(body, &read, sizeof(read));
		return sizeof(read);
	}
	case FUSE_GETXATTR: case FUSE_LISTXATTR: {
		struct fuse_getxattr_in get = {.size = how & 1 ? take_below(in, UINT16_MAX) : 0};

		memcpy(body, &get, sizeof(get));
		strcpy((char *)body + sizeof(get), xattrs[how % (sizeof(xattrs) / sizeof(*xattrs))]);
		return sizeof(get) + (opcode == FUSE_GETXATTR ? strlen((char *)body + sizeof(get)) + 1 : 0);
	}
	case FUSE_LSEEK: {
		struct fuse_lseek_in seek = {.offset = take_below(in, UINT16_MAX), .whence = how & 1 ? SEEK_DATA : SEEK_HOLE};

		memcpy(body, &seek, sizeof(seek));
		return sizeof(seek);
	}
	case FUSE_FORGET: {
		struct fuse_forget_in forget = {.nlookup = how & 15};

		memcpy(body, &forget, sizeof(forget));
		return sizeof(forget);
	}
	case FUSE_BATCH_FORGET: {
		struct fuse_batch_forget_in batch = {.count = how & 7};

		memcpy(body, &batch, sizeof(batch));
		n = sizeof(batch);
		for (uint32_t i = 0; i < batch.count; i++, n += sizeof(struct fuse_forget_one)) {
			struct fuse_forget_one one = {.nodeid = take_node(life), .nlookup = take_byte(in) & 3};

			memcpy(body + n, &one, sizeof(one));
		}
		return n;
	}
	case FUSE_INTERRUPT: {
		struct fuse_interrupt_in interrupt = {.unique = life->n_waiting ? life->waiting[how % life->n_waiting] : how};

		memcpy(body, &interrupt, sizeof(interrupt));
		return sizeof(interrupt);
	}
	case FUSE_INIT: {
		struct fuse_init_in init = {.major = how & 1 ? FUSE_KERNEL_VERSION : how, .minor = 39, .flags = UINT32_MAX, .flags2 = UINT32_MAX};

		memcpy(body, &init, sizeof(init));
		return how & 2 ? sizeof(init) : 16;
	}
	default:
		n = how & 63;
		take(in, body, n);
		return n;
	}
}

static bool has_answer(uint32_t opcode)
{
	return opcode != FUSE_FORGET && opcode != FUSE_BATCH_FORGET;
}

static size_t take_request(struct life *life, uint8_t *ret_request)
{
	static const uint8_t opcodes[] = {FUSE_LOOKUP, FUSE_LOOKUP, FUSE_READ, FUSE_READ, FUSE_READ, FUSE_GETATTR, FUSE_READLINK, FUSE_READDIR,
					  FUSE_READDIRPLUS, FUSE_GETXATTR, FUSE_LISTXATTR, FUSE_LSEEK, FUSE_STATFS, FUSE_INTERRUPT, FUSE_INIT,
					  FUSE_FORGET, FUSE_BATCH_FORGET, FUSE_DESTROY, FUSE_OPEN};
	uint8_t chosen = take_byte(&life->in);
	struct fuse_in_header header = {.unique = life->unique += 2, .pid = 1};

	header.opcode = chosen < 250 ? opcodes[chosen % sizeof(opcodes)] : take_below(&life->in, UINT16_MAX);
	header.nodeid = take_node(life);
	header.len = (uint32_t)(sizeof(header) + take_body(life, header.opcode, ret_request + sizeof(header)));
	memcpy(ret_request, &header, sizeof(header));
	return header.len;
}

static void ask(struct life *life)
{
	struct worker *worker = life->w->workers[take_byte(&life->in) % CLONES];
	uint8_t request[sizeof(struct fuse_in_header) + MAX_BODY], *shared = worker->request;
	size_t size = take_request(life, request);
	struct fuse_in_header header;

	memcpy(&header, request, sizeof(header));
	/* One that may wait needs a record, or this thread would wait for itself. */
	if (life->w->misses.n_free_records == 0 || life->n_waiting == MAX_WAITING) {
		give_up(life);
		drain(life, 0, 0);
	}
	if (has_answer(header.opcode))
		life->waiting[life->n_waiting++] = header.unique;
	worker->request = malloc(size); /* exactly as large, so that a read beyond is seen */
	assert(worker->request);
	memcpy(worker->request, request, size);
	fuse_serve_request(worker);
	assert(session_request(worker->request) == NULL);
	free(worker->request);
	worker->request = shared;
	drain(life, header.opcode, header.unique);
	if (header.opcode == FUSE_INTERRUPT)
		forget_waiting(life, header.unique); /* one that was of use is not answered itself */
}

/* ---- layers, plans, processes ---- */

static int memory_of(const void *data, size_t size)
{
	int fd = memfd_create("fuzz", MFD_CLOEXEC);

	assert(fd >= 0 && (size == 0 || write(fd, data, size) == (ssize_t)size));
	return fd;
}

static void add_layer(struct life *life, uint32_t number)
{
	const struct fuzz_layer *layer = &fuzz_layers[number];
	struct weefs_error error;

	if (life->layers[number].slot == 0)
		assert(weefs_reserve(life->w, WEEFS_LAYER, &life->layers[number]) == 0);
	assert(weefs_add_layer(life->w, &life->layers[number], life->toc_fds[number], layer->toc_size, life->data_fds[number], life->map_fds[number],
			       boot_id, layer->name, &error) == 0);
	life->layer_there[number] = true;
}

static void add_plan(struct life *life, uint32_t number)
{
	struct plan_slot *plan = &life->plans[number];
	uint32_t slots[4], n = plan_sizes[number];
	struct weefs_plan_info info;
	struct weefs_error error;

	for (uint32_t i = 0; i < n; i++) {
		if (!life->layer_there[plan_layers[number][i]])
			add_layer(life, plan_layers[number][i]);
		slots[i] = life->layers[plan_layers[number][i]].slot;
	}
	if (plan->place.slot == 0)
		assert(weefs_reserve(life->w, WEEFS_PLAN, &plan->place) == 0);
	assert(weefs_add_plan(life->w, &plan->place, plan_names[number], slots, n, &info, &error) == 0);
	plan->there = true;
}

static void change_plan(struct life *life)
{
	uint32_t number = take_below(&life->in, N_PLANS);
	struct plan_slot *plan = &life->plans[number];

	if (plan->there) {
		assert(weefs_remove_plan(life->w, plan->place.slot) == 0);
		*plan = (struct plan_slot){0};
	} else {
		add_plan(life, number);
	}
}

static void close_idle(struct life *life)
{
	uint32_t slots[FUZZ_LAYERS], n = weefs_idle_layers(life->w, slots, FUZZ_LAYERS);

	for (uint32_t i = 0; i < n; i++) {
		uint32_t number = layer_of(life, slots[i]);

		assert(weefs_close_layer(life->w, slots[i]) == 0);
		for (uint32_t m = 0; m < life->n_misses; m++)
			assert(life->misses[m].layer != slots[i]);
		weefs_release(life->w, WEEFS_LAYER, slots[i]);
		life->layers[number] = (struct weefs_place){0};
		life->layer_there[number] = false;
	}
}

static void begin(struct life *life)
{
	struct weefs_options options = {.session_fd = life->session_fd, .no_resend = take_byte(&life->in) & 1, .escape_overlay_xattrs = 1};
	int fds[CLONES] = {life->device, life->device};
	struct weefs_error error;

	assert(weefs_new(&options, &life->w, &error) == 0);
	for (uint32_t i = 0; i < FUZZ_LAYERS; i++)
		if (life->layer_there[i])
			add_layer(life, i);
	for (uint32_t i = 0; i < N_PLANS; i++)
		if (life->plans[i].there)
			add_plan(life, i);
	/* The threads see to what is in their buffers, cannot read another request, and end. */
	assert(weefs_serve(life->w, fds, CLONES) == 0);
	while (!weefs_ended(life->w)) {
		struct pollfd ended = {.fd = weefs_ended_fd(life->w), .events = POLLIN};

		if (poll(&ended, 1, 1) == 0)
			give_up(life); /* one may wait for a record */
	}
}

static void write_session(struct life *life)
{
	struct session *session = &life->w->session;
	struct input *in = &life->in;
	uint64_t raw[6];

	life->foreign = true;
	take(in, raw, sizeof(raw));
	switch (take_byte(in) % 6) {
	case 0: case 1: { /* a request that was not answered */
		uint8_t request[sizeof(struct fuse_in_header) + MAX_BODY];

		memcpy(session->buffers + (raw[0] & 1) * SESSION_REQUEST_SIZE, request, take_request(life, request));
		break;
	}
	case 2: { /* a READ that waits */
		struct parked parked = {.unique = life->unique += 2, .clone = raw[0] & 3, .layer = raw[1] % (FUZZ_LAYERS + 2), .inode = raw[2] & 63,
					.offset = raw[3] & 0xffff, .size = raw[4] & 0x1fffff, .since_ns = raw[5]};

		session_park(session, raw[1] % MAX_PENDING, &parked);
		break;
	}
	case 3: memcpy((uint8_t *)session->parked + raw[5] % (MAX_PENDING * sizeof(struct parked) - 40), raw, 40); break;
	case 4: memcpy((uint8_t *)session->header + offsetof(struct session_header, served) + raw[5] % 32, raw, 8); break;
	default: atomic_store(&session->layer_lookups[raw[0] % (FUZZ_LAYERS + 2)], raw[1]); break;
	}
}

/* The process dies with everything that it knows, and the next one begins. */
static void die(struct life *life)
{
	uint8_t writes = take_byte(&life->in) % 4;
	const struct session_header *header;

	while (writes--)
		write_session(life);
	life->n_misses = 0;
	weefs_free(life->w);
	begin(life);
	drain(life, 0, 0);
	header = life->w->session.header;
	if (atomic_load(&header->initialised[0]) && (header->init_flags[0] & FUSE_RESENDS) && !life->w->options.no_resend)
		life->n_waiting = 0; /* the kernel would send them again; what was asked here is not */
}

static void look(struct life *life)
{
	struct weefs_statistics statistics;

	weefs_get_statistics(life->w, &statistics);
	assert(statistics.pending <= MAX_PENDING);
}

static void claim(struct life *life)
{
	uint32_t number = take_below(&life->in, FUZZ_LAYERS);

	if (life->n_misses < MAX_MISSES && life->layers[number].slot &&
	    weefs_claim(life->w, life->layers[number].slot, take_byte(&life->in), &life->misses[life->n_misses]) == 1)
		life->n_misses++;
}

static void step(struct life *life)
{
	uint8_t what = take_byte(&life->in);

	switch (what % 16) {
	case 10: case 11:
		take_misses(life);
		if (life->n_misses)
			settle_miss(life, take_below(&life->in, life->n_misses), take_byte(&life->in));
		break;
	case 12: what & 16 ? answer_faults(life) : claim(life); break;
	case 13: what & 16 ? change_plan(life) : close_idle(life); break;
	case 14:
		if ((what & 48) == 48)
			die(life);
		else
			look(life);
		break;
	default: ask(life); return;
	}
	drain(life, 0, 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct life life = {.in = {data, size}};
	char path[32];

	assert(weefs_create_session(CLONES, 1, MAX_PENDING, &life.session_fd) == 0);
	life.channel = memfd_create("channel", MFD_CLOEXEC);
	assert(life.channel >= 0);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", life.channel);
	life.device = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
	assert(life.device >= 0);
	for (uint32_t i = 0; i < FUZZ_LAYERS; i++) {
		life.toc_fds[i] = memory_of(fuzz_layers[i].toc, fuzz_layers[i].toc_size);
		life.data_fds[i] = memory_of(NULL, 0);
		life.map_fds[i] = memory_of(NULL, 0);
	}
	begin(&life);
	for (uint32_t i = 0; i < N_PLANS; i++)
		add_plan(&life, i);
	drain(&life, 0, 0);
	while (life.in.left)
		step(&life);
	give_up(&life);
	drain(&life, 0, 0);
	assert(life.foreign || life.n_waiting == 0);
	assert(life.w->misses.n_pending == 0 && life.w->misses.n_flights == 0);
	assert(life.foreign || life.w->misses.n_free_records == MAX_PENDING);
	weefs_free(life.w);
	for (uint32_t i = 0; i < FUZZ_LAYERS; i++) {
		close(life.toc_fds[i]);
		close(life.data_fds[i]);
		close(life.map_fds[i]);
	}
	close(life.device);
	close(life.channel);
	close(life.session_fd);
	return 0;
}
