/* The public functions: making and ending a superblock, adding and removing layers and plans, serving. Fetching is in publish.c. */
#include "weefs.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#include "erofs.h"
#include "fuse.h"
#include "objects.h"
#include "super.h"
#include "util.h"

int weefs_create_session(uint32_t threads, uint32_t connections, uint32_t max_pending, int *ret_fd)
{
	return session_create(threads, connections, max_pending, ret_fd);
}

static int open_session(struct weefs *w, struct weefs_error *error)
{
	int r = 0;

	if (w->options.session_fd >= 0) {
		w->session_fd = fcntl(w->options.session_fd, F_DUPFD_CLOEXEC, 0);
		if (w->session_fd < 0)
			return fail(error, -errno, "session memory: %s", strerror(errno));
	} else {
		r = session_create(SESSION_MAX_THREADS, 1, w->options.max_pending, &w->session_fd);
	}
	return r ? fail(error, r, "session memory: %s", strerror(-r)) : session_open(&w->session, w->session_fd, error);
}

int weefs_new(const struct weefs_options *options, struct weefs **ret_weefs, struct weefs_error *error)
{
	struct weefs *w = calloc(1, sizeof(*w));
	int r;

	if (!w)
		return -ENOMEM;
	w->options = *options;
	w->session_fd = -1;
	w->ended_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	r = w->ended_fd < 0 ? fail(error, -errno, "eventfd: %s", strerror(errno)) : open_session(w, error);
	if (r == 0)
		r = miss_init(&w->misses, &w->session);
	if (r) {
		session_close(&w->session);
		if (w->session_fd >= 0)
			close(w->session_fd);
		if (w->ended_fd >= 0)
			close(w->ended_fd);
		free(w);
		return r;
	}
	pthread_mutex_init(&w->lock, NULL);
	atomic_store(&w->budget.limit, UINT64_MAX);
	digests_init(&w->digests);
	*ret_weefs = w;
	return 0;
}

uint32_t weefs_times_served(struct weefs *w)
{
	return atomic_load(&w->session.header->served);
}

static void layer_free(struct layer *layer)
{
	if (!layer)
		return;
	cache_close(&layer->cache);
	seen_close(&layer->seen);
	if (layer->toc_map)
		munmap(layer->toc_map, layer->toc_size);
	free(layer);
}

static void worker_free(struct worker *worker)
{
	if (!worker)
		return;
	if (worker->started)
		pthread_join(worker->thread, NULL);
	if (worker->fd >= 0)
		close(worker->fd);
	free(worker->reply);
	free(worker);
}

void weefs_free(struct weefs *w)
{
	if (!w)
		return;
	miss_stop(&w->misses);
	for (uint32_t i = 0; i < atomic_load(&w->n_workers); i++)
		worker_free(w->workers[i]);
	for (uint32_t slot = 1; slot <= w->plans.used; slot++)
		plan_free(super_plan(w, slot));
	for (uint32_t slot = 1; slot <= w->layers.used; slot++)
		layer_free(super_layer(w, slot));
	for (uint32_t page = 0; page < SLOT_PAGES; page++) {
		free((void *)atomic_load(&w->plans.pages[page]));
		free((void *)atomic_load(&w->layers.pages[page]));
	}
	miss_destroy(&w->misses);
	digests_destroy(&w->digests);
	session_close(&w->session);
	close(w->session_fd);
	close(w->ended_fd);
	pthread_mutex_destroy(&w->lock);
	free(w);
}

/* ---- slots ---- */

static bool slot_taken(const struct slots *slots, uint32_t slot)
{
	return slots->taken[slot / 64] >> (slot % 64) & 1;
}

/* Takes a slot, with its page in place. Under the lock. */
static int slot_take(struct slots *slots, uint32_t slot)
{
	_Atomic(void *) *page;

	if (slot == 0 || slot > NODE_MAX_SLOT)
		return -EINVAL;
	if (!atomic_load(&slots->pages[slot / SLOT_PAGE])) {
		page = calloc(SLOT_PAGE, sizeof(*page));
		if (!page)
			return -ENOMEM;
		atomic_store(&slots->pages[slot / SLOT_PAGE], page);
	}
	slots->taken[slot / 64] |= UINT64_C(1) << (slot % 64);
	if (slot > atomic_load(&slots->used))
		atomic_store(&slots->used, slot);
	return 0;
}

static void slot_release(struct slots *slots, uint32_t slot)
{
	slots->taken[slot / 64] &= ~(UINT64_C(1) << (slot % 64));
}

static void slot_set(struct slots *slots, uint32_t slot, void *value)
{
	atomic_store(&atomic_load_explicit(&slots->pages[slot / SLOT_PAGE], memory_order_acquire)[slot % SLOT_PAGE], value);
}

static struct slots *slots_of(struct weefs *w, enum weefs_kind kind)
{
	return kind == WEEFS_LAYER ? &w->layers : &w->plans;
}

/* The lowest that is free: tables and scans stay short. */
int weefs_reserve(struct weefs *w, enum weefs_kind kind, struct weefs_place *ret_place)
{
	_Atomic uint64_t *lookups = kind == WEEFS_LAYER ? w->session.layer_lookups : w->session.plan_lookups;
	struct slots *slots = slots_of(w, kind);
	uint32_t slot = 1;
	int r = -ENOSPC;

	pthread_mutex_lock(&w->lock);
	while (slot <= NODE_MAX_SLOT && (slot_taken(slots, slot) || atomic_load(&lookups[slot])))
		slot++;
	if (slot <= NODE_MAX_SLOT)
		r = slot_take(slots, slot);
	pthread_mutex_unlock(&w->lock);
	if (r == 0)
		*ret_place = (struct weefs_place){.slot = slot, .generation = atomic_fetch_add(&w->session.header->generation, 1) + 1};
	return r;
}

void weefs_release(struct weefs *w, enum weefs_kind kind, uint32_t slot)
{
	struct slots *slots = slots_of(w, kind);

	pthread_mutex_lock(&w->lock);
	if (slot <= NODE_MAX_SLOT && !(kind == WEEFS_LAYER ? (void *)super_layer(w, slot) : (void *)super_plan(w, slot)))
		slot_release(slots, slot);
	pthread_mutex_unlock(&w->lock);
}

/* ---- layers ---- */

static int toc_open(int toc_fd, uint64_t toc_size, struct layer *layer, struct weefs_error *error)
{
	struct stat st;
	void *mapping;

	layer->cache.data_fd = -1;
	if (fstat(toc_fd, &st) < 0)
		return fail(error, -errno, "TOC file: %s", strerror(errno));
	if (toc_size < TOC_HEADER_SIZE || (uint64_t)st.st_size != toc_size)
		return fail(error, -EBADMSG, "TOC file: expected %llu bytes, received %lld", (unsigned long long)toc_size, (long long)st.st_size);
	mapping = mmap(NULL, toc_size, PROT_READ, MAP_PRIVATE, toc_fd, 0);
	if (mapping == MAP_FAILED)
		return fail(error, -errno, "TOC file: %s", strerror(errno));
	layer->toc_map = mapping;
	layer->toc_size = toc_size;
	return toc_validate(mapping, toc_size, &layer->toc, error);
}

static int layer_open(int toc_fd, uint64_t toc_size, int data_fd, int map_fd, const uint8_t *boot_id, struct cache_budget *budget,
		      struct layer *layer, struct weefs_error *error)
{
	int r = toc_open(toc_fd, toc_size, layer, error);

	return r ? r : cache_open(&layer->cache, &layer->toc, data_fd, map_fd, boot_id, budget, error);
}

int weefs_add_layer(struct weefs *w, const struct weefs_place *place, int toc_fd, uint64_t toc_size, int data_fd, int map_fd, const uint8_t *boot_id,
		    const char *name, struct weefs_error *error)
{
	struct layer *layer, *added = NULL;
	int r;

	if (strlen(name) >= WEEFS_LAYER_NAME_SIZE || strchr(name, '/'))
		return fail(error, -EINVAL, "the name of a layer: expected up to %d characters and no '/', received '%.64s'", WEEFS_LAYER_NAME_SIZE - 1, name);
	layer = calloc(1, sizeof(*layer));
	if (layer)
		strcpy(layer->name, name);
	r = layer ? layer_open(toc_fd, toc_size, data_fd, map_fd, boot_id, &w->budget, layer, error) : -ENOMEM;
	if (r == 0)
		r = seen_open(&layer->seen, layer->toc.n_chunks);

	if (r == 0) {
		layer->slot = place->slot;
		layer->generation = place->generation;
		pthread_mutex_lock(&w->lock);
		r = super_layer(w, place->slot) ? -EEXIST : slot_take(&w->layers, place->slot);
		if (r == 0) {
			slot_set(&w->layers, place->slot, layer);
			layer->users++;
			added = layer;
			layer = NULL;
		}
		pthread_mutex_unlock(&w->lock);
		if (added)
			fuse_forget_layer(w, added); /* a directory of an earlier layer of that name, which the kernel may hold */
		super_unuse_layer(w, added);
		if (r)
			fail(error, r, "layer slot %u cannot be used: %s", place->slot, strerror(-r));
	}
	layer_free(layer);
	return r;
}

/* Under the lock. FUSE threads come by a layer through a plan or through a file that the kernel holds: who sees neither here, nor
 * a request that waits, sees that none comes any more. */
static bool layer_idle(struct weefs *w, const struct layer *layer)
{
	return atomic_load(&layer->plans) == 0 && layer->users == 0 && atomic_load(&layer->busy) == 0 &&
	       atomic_load(&w->session.layer_lookups[layer->slot]) == 0;
}

static void wait_for_readers(struct weefs *w);

int weefs_close_layer(struct weefs *w, uint32_t slot)
{
	struct layer *layer;
	int r = 0;

	pthread_mutex_lock(&w->lock);
	layer = super_layer(w, slot);
	if (!layer)
		r = -ENOENT;
	else if (!layer_idle(w, layer))
		r = -EBUSY;
	else
		slot_set(&w->layers, slot, NULL);
	pthread_mutex_unlock(&w->lock);
	if (r)
		return r;
	wait_for_readers(w);
	layer_free(layer);
	return 0;
}

uint32_t weefs_idle_layers(struct weefs *w, uint32_t *ret_slots, uint32_t n)
{
	uint32_t found = 0;

	pthread_mutex_lock(&w->lock);
	for (uint32_t slot = 1; found < n && slot <= atomic_load(&w->layers.used); slot++) {
		const struct layer *layer = super_layer(w, slot);

		if (layer && layer_idle(w, layer))
			ret_slots[found++] = slot;
	}
	pthread_mutex_unlock(&w->lock);
	return found;
}

int weefs_layer_info(struct weefs *w, uint32_t slot, struct weefs_layer_info *ret_info)
{
	struct layer *layer = super_use_layer(w, slot);

	if (!layer)
		return -ENOENT;
	*ret_info = (struct weefs_layer_info){
		.inodes = layer->toc.n_inodes,
		.dirents = layer->toc.n_dirents,
		.chunks = layer->toc.n_chunks,
		.chunk_size = layer->toc.header->chunk_size,
		.stream_size = layer->toc.header->stream_size,
		.content_size = layer->toc.header->content_size,
		.blob_size = layer->toc.header->chunks_end,
		.present_chunks = atomic_load(&layer->cache.present_chunks),
		.present_stored = atomic_load(&layer->cache.present_stored),
		.present_raw = atomic_load(&layer->cache.present_raw),
		.room = atomic_load(&layer->cache.room),
		.suspect_chunks = cache_count_suspects(&layer->cache),
		.read_chunks = atomic_load(&layer->seen.n),
		.read_raw = atomic_load(&layer->seen.raw),
	};
	super_unuse_layer(w, layer);
	return 0;
}

/* ---- room ---- */

void weefs_limit_cache(struct weefs *w, uint64_t limit)
{
	atomic_store(&w->budget.limit, limit);
}

uint64_t weefs_cache_used(struct weefs *w)
{
	return atomic_load(&w->budget.used);
}

int weefs_sweep(struct weefs *w, uint32_t slot, uint64_t goal, uint64_t *ret_freed, struct weefs_error *error)
{
	struct layer *layer = super_use_layer(w, slot);
	int r;

	if (!layer)
		return fail(error, -ENOENT, "no layer %u", slot);
	r = cache_sweep(&layer->cache, goal, ret_freed);
	super_unuse_layer(w, layer);
	return r < 0 ? fail(error, r, "cannot free room of layer %u: %s", slot, strerror(-r)) : r;
}

void weefs_count_evicted(struct weefs *w, uint64_t freed)
{
	stats_add(&w->session.shared->evicted_bytes, freed);
}

/* A layer that is not served, opened for one use. */
static int closed_layer(int toc_fd, uint64_t toc_size, int data_fd, int map_fd, const uint8_t *boot_id, struct layer **ret_layer,
			struct weefs_error *error)
{
	struct layer *layer = calloc(1, sizeof(*layer));
	int r = layer ? layer_open(toc_fd, toc_size, data_fd, map_fd, boot_id, NULL, layer, error) : -ENOMEM;

	if (r) {
		layer_free(layer);
		return r;
	}
	*ret_layer = layer;
	return 0;
}

int weefs_sweep_files(int toc_fd, uint64_t toc_size, int data_fd, int map_fd, const uint8_t *boot_id, uint64_t goal, uint64_t *ret_freed,
		      struct weefs_error *error)
{
	struct layer *layer;
	int r = closed_layer(toc_fd, toc_size, data_fd, map_fd, boot_id, &layer, error);

	if (r)
		return r;
	r = cache_sweep(&layer->cache, goal, ret_freed);
	layer_free(layer);
	return r < 0 ? fail(error, r, "cannot free room: %s", strerror(-r)) : r;
}

int weefs_check_files(int toc_fd, uint64_t toc_size, int data_fd, int map_fd, const uint8_t *boot_id, uint32_t *ret_good, uint32_t *ret_damaged,
		      struct weefs_error *error)
{
	struct layer *layer;
	int r = closed_layer(toc_fd, toc_size, data_fd, map_fd, boot_id, &layer, error);

	if (r)
		return r;
	*ret_good = *ret_damaged = 0;
	for (uint32_t chunk = 0; r >= 0 && chunk < layer->toc.n_chunks; chunk++) {
		r = cache_check(&layer->cache, chunk, error);
		*ret_good += r == 1;
		*ret_damaged += r == -EBADMSG;
		r = r == -EBADMSG ? 0 : r;
	}
	layer_free(layer);
	return r < 0 ? r : 0;
}

/* ---- copies ---- */

int weefs_know_layer(struct weefs *w, uint32_t number, int toc_fd, uint64_t toc_size, struct weefs_error *error)
{
	struct layer *layer = calloc(1, sizeof(*layer));
	int r = layer ? toc_open(toc_fd, toc_size, layer, error) : -ENOMEM;

	if (r == 0)
		r = digests_add(&w->digests, number, &layer->toc);
	layer_free(layer);
	return r;
}

void weefs_forget_layer(struct weefs *w, uint32_t number)
{
	digests_remove(&w->digests, number);
}

uint32_t weefs_find_copies(struct weefs *w, uint32_t slot, uint32_t chunk, uint32_t but, struct weefs_copy *ret_copies, uint32_t n)
{
	struct layer *layer = super_use_layer(w, slot);
	uint32_t found = 0;

	if (layer && chunk < layer->toc.n_chunks)
		found = digests_find(&w->digests, layer->toc.chunks[chunk].sha256, but, ret_copies, n);
	super_unuse_layer(w, layer);
	return found;
}

/* ---- plans ---- */

static void touch_root(struct weefs *w)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	atomic_store(&w->changed_s, (uint64_t)now.tv_sec);
	atomic_store(&w->changed_ns, (uint64_t)now.tv_nsec);
}

/* Under the lock. */
static int add_plan(struct weefs *w, const struct weefs_place *place, const char *name, const uint32_t *slots, uint32_t n, struct plan **ret_plan,
		    struct weefs_error *error)
{
	cleanup_free struct plan_layer *layers = calloc(n, sizeof(*layers));
	int r;

	if (!layers)
		return -ENOMEM;
	for (uint32_t i = 0; i < n; i++) {
		struct layer *layer = super_layer(w, slots[i]);

		if (!layer)
			return fail(error, -ENOENT, "layer %u of the plan: no layer has slot %u", i, slots[i]);
		layers[i] = (struct plan_layer){.toc = &layer->toc, .slot = slots[i]};
	}
	if (super_find_plan(w, name, strlen(name)))
		return fail(error, -EEXIST, "a plan '%s' is there already", name);
	r = super_plan(w, place->slot) ? -EEXIST : slot_take(&w->plans, place->slot);
	if (r)
		return fail(error, r, "plan slot %u cannot be used: %s", place->slot, strerror(-r));
	r = plan_build(name, place->slot, layers, n, ret_plan, error);
	if (r)
		return r; /* the place stays its caller's */
	(*ret_plan)->generation = place->generation;
	if (!(*ret_plan)->not_stackable && objects_shadowed(w, slots, n))
		(*ret_plan)->not_stackable = "a layer has an entry with the name of a layer's objects";
	for (uint32_t i = 0; i < n; i++)
		atomic_fetch_add(&super_layer(w, slots[i])->plans, 1);
	slot_set(&w->plans, place->slot, *ret_plan);
	return 0;
}

static bool has_xattrs(const struct plan *plan)
{
	for (uint32_t i = 0; i < plan->n_layers; i++)
		if (plan->layers[i].toc->n_xattrs)
			return true;
	return false;
}

int weefs_add_plan(struct weefs *w, const struct weefs_place *place, const char *name, const uint32_t *slots, uint32_t n,
		   struct weefs_plan_info *ret_info, struct weefs_error *error)
{
	struct plan *plan = NULL;
	int r;

	if (n == 0 || n > MAX_LAYERS_PER_PLAN)
		return fail(error, -EINVAL, "a plan has 1 to %u layers, received %u", MAX_LAYERS_PER_PLAN, n);
	if (name[0] == 0 || strlen(name) > 255 || strchr(name, '/') || strcmp(name, ".") == 0 || strcmp(name, "..") == 0 ||
	    strcmp(name, OBJECTS_NAME) == 0)
		return fail(error, -EINVAL, "'%s' cannot be the name of a plan's directory", name);
	pthread_mutex_lock(&w->lock);
	r = add_plan(w, place, name, slots, n, &plan, error);
	if (r == 0)
		*ret_info = (struct weefs_plan_info){.xattrs = has_xattrs(plan), .entries = plan->n_entries, .content_size = plan->content_size, .merged_dirs = plan->n_directories,
						     .plan_specific = plan->n_files};
	if (r == 0)
		snprintf(ret_info->not_stackable, sizeof(ret_info->not_stackable), "%s", plan->not_stackable ? plan->not_stackable : "");
	pthread_mutex_unlock(&w->lock);
	if (r)
		return r;
	touch_root(w);
	fuse_root_changed(w);
	return 0;
}

/* Waits until every FUSE thread has been outside a request once: none can hold a pointer that was unpublished before. Pointer and section
 * are written and read in the one order of sequential consistency: who is not seen in a section here sees the pointer gone.
 * Requests never wait for a plan inside a section but for room in the miss queue, which publishing makes, from other
 * threads than the caller's. */
static void wait_for_readers(struct weefs *w)
{
	for (uint32_t i = 0; i < atomic_load(&w->n_workers); i++) {
		struct worker *worker = w->workers[i];
		uint64_t section = atomic_load(&worker->section);

		while ((section & 1) && atomic_load(&worker->section) == section)
			sched_yield();
	}
}

/* Takes the plan's layers back from it, and tells the kernel to drop the objects of those that no plan has any more. */
static void release_layers(struct weefs *w, const struct plan *plan)
{
	for (uint32_t i = 0; i < plan->n_layers; i++) {
		struct layer *layer;

		pthread_mutex_lock(&w->lock);
		layer = super_layer(w, plan->layers[i].slot);
		if (atomic_fetch_sub(&layer->plans, 1) == 1)
			layer->users++; /* so that it stays while the kernel is told */
		else
			layer = NULL;
		pthread_mutex_unlock(&w->lock);
		if (layer)
			fuse_forget_layer(w, layer);
		super_unuse_layer(w, layer);
	}
}

int weefs_remove_plan(struct weefs *w, uint32_t slot)
{
	struct plan *plan;

	pthread_mutex_lock(&w->lock);
	plan = super_plan(w, slot);
	if (plan && atomic_load(&w->root_plan) != slot)
		slot_set(&w->plans, slot, NULL);
	pthread_mutex_unlock(&w->lock);
	if (!plan)
		return -ENOENT;
	if (atomic_load(&w->root_plan) == slot)
		return -EBUSY;
	touch_root(w);
	wait_for_readers(w); /* so that none hands out a node of it after the kernel was told to drop them */
	fuse_forget_plan(w, plan->name);
	release_layers(w, plan);
	pthread_mutex_lock(&w->lock);
	slot_release(&w->plans, slot);
	pthread_mutex_unlock(&w->lock);
	plan_free(plan);
	miss_ring(&w->misses); /* its layers may be idle now */
	return 0;
}

void weefs_forget_name(struct weefs *w, const char *name)
{
	touch_root(w);
	fuse_forget_plan(w, name);
}

int weefs_write_plan_image(struct weefs *w, uint32_t slot, const char *name, int fd, struct weefs_image_info *ret_info, struct weefs_error *error)
{
	struct tree tree = {0};
	struct plan *plan;
	int r;

	pthread_mutex_lock(&w->lock); /* no plan or layer of the tree may go meanwhile */
	plan = super_plan(w, slot);
	r = plan ? tree_of_plan(w, plan, &tree, error) : fail(error, -ENOENT, "no plan has slot %u", slot);
	if (r == 0)
		r = erofs_write(&tree, name, fd, ret_info, error);
	pthread_mutex_unlock(&w->lock);
	tree_free(&tree);
	return r;
}

int weefs_set_root(struct weefs *w, uint32_t plan)
{
	if (!super_plan(w, plan))
		return -ENOENT;
	atomic_store(&w->root_plan, plan);
	return 0;
}

/* ---- serving ---- */

/* The process's signals are for its other threads. */
static int start_thread(struct worker *worker)
{
	sigset_t all, before;
	int r;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	r = pthread_create(&worker->thread, NULL, fuse_thread, worker);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	worker->started = r == 0;
	return -r;
}

static int add_worker(struct weefs *w, int fd)
{
	uint32_t n = atomic_load(&w->n_workers);
	struct worker *worker;
	int r = -ENOMEM;

	if (n >= MAX_WORKERS)
		return -ENOSPC;
	worker = calloc(1, sizeof(*worker));
	if (!worker)
		return -ENOMEM;
	worker->weefs = w;
	worker->index = n;
	worker->connection = session_connection(&w->session, n);
	worker->reply = aligned_alloc(4096, FUSE_REPLY_SIZE);
	worker->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (worker->fd < 0)
		r = -errno;
	else if (worker->reply)
		r = session_buffer(&w->session, n, &worker->request);
	if (r == 0)
		worker->stats = session_thread(&w->session, n);
	if (r) {
		worker_free(worker);
		return r;
	}
	w->workers[n] = worker;
	atomic_store(&w->n_workers, n + 1);
	return 0;
}

int weefs_serve(struct weefs *w, const int *fds, uint32_t n)
{
	bool first;
	int r = 0;

	pthread_mutex_lock(&w->lock);
	if (atomic_load(&w->n_workers))
		r = -EALREADY;
	else if (w->session.header->connections > 1 && n != w->session.header->threads)
		r = -EINVAL;
	for (uint32_t i = 0; r == 0 && i < n; i++)
		r = add_worker(w, fds[i]);
	pthread_mutex_unlock(&w->lock);
	if (r)
		return r;
	r = fuse_take_over(w);
	first = atomic_fetch_add(&w->session.header->served, 1) == 0;
	for (uint32_t i = 0; r == 0 && i < n; i++) {
		atomic_fetch_add(&w->running, 1);
		r = start_thread(w->workers[i]);
	}
	/* A plan may have come when its process died. */
	touch_root(w);
	if (r == 0 && !first)
		fuse_root_changed(w);
	return r;
}

int weefs_ended_fd(struct weefs *w)
{
	return w->ended_fd;
}

int weefs_ended(struct weefs *w)
{
	for (uint32_t i = 0; i < atomic_load(&w->n_workers); i++)
		if (!atomic_load(&w->workers[i]->ended))
			return 0;
	return 1;
}

/* ---- for tests and tools ---- */

int weefs_lookup(struct weefs *w, uint32_t slot, const char *path, struct weefs_attr *ret_attr)
{
	struct plan *plan = super_plan(w, slot);
	struct object object;
	int r = plan ? super_object(w, node_merged(slot, 0), &object) : -ENOENT;

	while (r == 0 && *(path += strspn(path, "/"))) {
		size_t length = strcspn(path, "/");
		uint64_t node = 0;

		r = super_lookup(&object, path, length, &node);
		if (r == 0)
			r = super_object(w, node, &object);
		path += length;
	}
	if (r == 0)
		super_attr(&object, ret_attr);
	return r;
}
