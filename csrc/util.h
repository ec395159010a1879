/* Small things that every part of the core uses: cleanup attributes, alignment, error sentences, little-endian loads. */
#ifndef WEEFS_UTIL_H
#define WEEFS_UTIL_H

#include <endian.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "weefs.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the TOC is used in place and is little-endian; a big-endian host needs a converting reader"
#endif

static inline void cleanup_freep(void *p)
{
	free(*(void **)p);
}

static inline void cleanup_closep(int *fd)
{
	if (*fd >= 0)
		close(*fd);
}

#define cleanup_free __attribute__((cleanup(cleanup_freep)))
#define cleanup_close __attribute__((cleanup(cleanup_closep)))

#define ALIGN_UP(value, to) (((value) + ((to) - 1)) & ~((__typeof__(value))(to) - 1))

/* pread(2) of all of it. -EBADMSG: the file ends before. */
static inline int pread_whole(int fd, uint8_t *buffer, size_t size, uint64_t offset)
{
	while (size) {
		ssize_t n = pread(fd, buffer, size, (off_t)offset);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EBADMSG;
		buffer += n;
		size -= (size_t)n;
		offset += (uint64_t)n;
	}
	return 0;
}

/* Writes the sentence and returns `code`, so that a check reads `return fail(error, -EBADMSG, "…")`. `error` may be NULL. */
__attribute__((format(printf, 3, 4))) static inline int fail(struct weefs_error *error, int code, const char *format, ...)
{
	if (error) {
		va_list arguments;

		va_start(arguments, format);
		vsnprintf(error->text, sizeof(error->text), format, arguments);
		va_end(arguments);
	}
	return code;
}

#endif
