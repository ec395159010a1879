/* Extended attributes: GETXATTR and LISTXATTR, and the escaping of those that would instruct an overlay above. */
#include <errno.h>
#include <string.h>

#include "fuse.h"
#include "request.h"

#define OVERLAY_PREFIX "trusted.overlay."
#define OVERLAY_PREFIX_LENGTH (sizeof(OVERLAY_PREFIX) - 1)
#define ESCAPE "overlay."
#define ESCAPE_LENGTH (sizeof(ESCAPE) - 1)

/* Is the stored name one that would instruct an overlay above us? Then it is shown with one more "overlay.", as the
 * kernel itself escapes it. */
static bool must_escape(const struct weefs *w, const char *name, size_t length)
{
	return w->options.escape_overlay_xattrs && length >= OVERLAY_PREFIX_LENGTH && memcmp(name, OVERLAY_PREFIX, OVERLAY_PREFIX_LENGTH) == 0;
}

static const struct toc_xattr *find_xattr(const struct request *request, const struct object *object, const char *name)
{
	const struct toc *toc = &object->layer->toc;
	size_t length = strlen(name), skip_at = 0, skip = 0;

	if (must_escape(request->w, name, length)) {
		if (strncmp(name + OVERLAY_PREFIX_LENGTH, ESCAPE, ESCAPE_LENGTH) != 0)
			return NULL;
		skip_at = OVERLAY_PREFIX_LENGTH;
		skip = ESCAPE_LENGTH;
	}
	for (uint32_t i = object->inode->xattr; i < object->inode->xattr + object->inode->xattrs; i++) {
		const struct toc_xattr *xattr = &toc->xattrs[i];
		const char *stored = toc->strings + xattr->name;

		if (xattr->name_length == length - skip && memcmp(stored, name, skip_at) == 0 &&
		    memcmp(stored + skip_at, name + skip_at + skip, length - skip - skip_at) == 0)
			return xattr;
	}
	return NULL;
}

/* Values and lists are asked for in two ways: size 0 asks how long it is. */
static void answer_sized(const struct request *request, uint32_t size, const void *data, size_t length)
{
	struct fuse_getxattr_out out = {.size = (uint32_t)length};

	if (size == 0)
		request_answer(request, &out, sizeof(out));
	else if (length > size)
		request_error(request, ERANGE);
	else
		request_answer(request, data, length);
}

/* Of two connections, the first is for plans without attributes: told once that there are none at all, its kernel never asks again. */
static bool has_none(const struct request *request)
{
	return request->w->session.header->connections == SESSION_MAX_CONNECTIONS && request->worker->connection == 0;
}

void xattr_get(const struct request *request)
{
	const struct fuse_getxattr_in *in = request->argument;
	const char *name = (const char *)(in + 1);
	const struct toc_xattr *xattr;
	struct object object;
	int r;

	if (request->size <= sizeof(*in) || name[request->size - sizeof(*in) - 1] != 0) {
		request_error(request, EINVAL);
		return;
	}
	if (has_none(request)) {
		request_error(request, ENOSYS);
		return;
	}
	r = super_object(request->w, request->header->nodeid, &object);
	xattr = r == 0 ? find_xattr(request, &object, name) : NULL;
	if (!xattr)
		request_error(request, r && r != -EISDIR ? r : ENODATA);
	else
		answer_sized(request, in->size, object.layer->toc.strings + xattr->value, xattr->value_length);
}

/* An empty list, never ENODATA, when there is none: overlayfs' copy-up takes an error for one. */
void xattr_list(const struct request *request)
{
	const struct fuse_getxattr_in *in = request->argument;
	char *reply = (char *)request->worker->reply;
	struct object object;
	size_t used = 0;
	int r = request->size < sizeof(*in) ? -EINVAL : super_object(request->w, request->header->nodeid, &object);

	if (r && r != -EISDIR) {
		request_error(request, r);
		return;
	}
	for (uint32_t i = 0; r == 0 && i < object.inode->xattrs; i++) {
		const struct toc_xattr *xattr = &object.layer->toc.xattrs[object.inode->xattr + i];
		const char *name = object.layer->toc.strings + xattr->name;
		size_t length = xattr->name_length, at = must_escape(request->w, name, length) ? OVERLAY_PREFIX_LENGTH : 0;

		if (FUSE_REPLY_SIZE - used < length + ESCAPE_LENGTH + 1) {
			request_error(request, E2BIG);
			return;
		}
		memcpy(reply + used, name, at);
		used += at;
		if (at) {
			memcpy(reply + used, ESCAPE, ESCAPE_LENGTH);
			used += ESCAPE_LENGTH;
		}
		memcpy(reply + used, name + at, length - at);
		used += length - at;
		reply[used++] = 0;
	}
	answer_sized(request, in->size, reply, used);
}
