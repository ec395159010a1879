/* One request of the kernel while a FUSE thread deals with it: what fuse.c and those parts of the protocol that have files of their own share. */
#ifndef WEEFS_REQUEST_H
#define WEEFS_REQUEST_H

#include <linux/fuse.h>

#include "super.h"

struct request {
	struct weefs *w;
	struct worker *worker;
	int fd;
	const struct fuse_in_header *header;
	const void *argument;	/* behind the header */
	size_t size;		/* of the argument */
};

/* Answers it with data, or with an error (of either sign). Once. Whether the kernel took it: it may have gone. */
bool request_answer(const struct request *request, const void *data, size_t size);
void request_error(const struct request *request, int error);

/* GETXATTR and LISTXATTR (xattr.c). */
void xattr_get(const struct request *request);
void xattr_list(const struct request *request);

#endif
