/* Fuzzing: hostile bytes as a TOC. What the validator accepts must then be safe to use: every name is looked up,
 * every directory listed, the layer merged over itself and written as an image, with nothing but the guarantees of toc.h. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "erofs.h"
#include "plan.h"
#include "toc.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void use(const struct toc *toc)
{
	volatile uint8_t sink = 0;

	for (uint32_t i = 0; i < toc->n_inodes; i++) {
		const struct toc_inode *inode = &toc->inodes[i];

		for (uint64_t d = inode->data; inode_is_directory(inode) && d < inode->data + inode->count; d++) {
			const struct toc_dirent *dirent = &toc->dirents[d];

			assert(toc_find(toc, inode, toc->strings + dirent->name, dirent->name_length) == (int64_t)d);
		}
		for (uint32_t x = inode->xattr; x < inode->xattr + inode->xattrs; x++)
			for (uint32_t b = 0; b < toc->xattrs[x].value_length; b++)
				sink ^= (uint8_t)toc->strings[toc->xattrs[x].value + b];
	}
	for (uint32_t i = 0; i < toc->n_chunks; i++)
		assert(toc_chunk_at(toc, toc->chunks[i].stream_offset) == i);
	(void)sink;
}

/* An image that is written is whole; what is refused is refused by errno. */
static void write_image(const uint8_t *toc, uint64_t size)
{
	static const char name[] = "0123456789abcdef0123456789abcdef";
	struct weefs_image_info info;
	struct weefs_error error;
	int fd = memfd_create("image", MFD_CLOEXEC);

	assert(fd >= 0);
	if (weefs_write_layer_image(toc, size, name, fd, &info, &error) == 0)
		assert(weefs_check_image(fd, name, &error) == 0 && lseek(fd, 0, SEEK_END) == (off_t)info.size);
	close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	uint8_t *aligned = malloc(size ? size : 1); /* exactly as large, so that a read beyond is seen */
	struct weefs_error error;
	struct toc toc;

	memcpy(aligned, data, size);
	if (toc_validate(aligned, size, &toc, &error) == 0) {
		struct plan_layer layers[2] = {{.toc = &toc, .slot = 1}, {.toc = &toc, .slot = 2}};
		struct plan *plan = NULL;

		use(&toc);
		write_image(aligned, size);
		if (plan_build("fuzz", 1, layers, 1, &plan, &error) == 0)
			plan_free(plan);
		if (plan_build("fuzz", 1, layers, 2, &plan, &error) == 0)
			plan_free(plan);
	}
	free(aligned);
	return 0;
}
