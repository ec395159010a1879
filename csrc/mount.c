/* Mounting: opens /dev/fuse, mounts, and clones the descriptor. Whoever calls this is the connection's keeper. */
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include "util.h"
#include "weefs.h"

#define READ_AHEAD_KB "512"

static int clone_device(int device)
{
	uint32_t source = (uint32_t)device;
	int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);

	if (fd >= 0 && ioctl(fd, FUSE_DEV_IOC_CLONE, &source) < 0) {
		int error = errno;

		close(fd);
		errno = error;
		fd = -1;
	}
	return fd;
}

/* How far the kernel reads ahead of a sequential reader: 128 KiB unless told, too little to keep several requests going; more than this gains
 * nothing (bench/data.py). Best effort: /sys may be read-only. The mount is not asked: nobody serves it yet. */
static void set_readahead(const char *path)
{
	char file[64];
	struct statx st;
	int fd;

	if (statx(AT_FDCWD, path, AT_STATX_DONT_SYNC, 0, &st) < 0)
		return;
	snprintf(file, sizeof(file), "/sys/class/bdi/%u:%u/read_ahead_kb", st.stx_dev_major, st.stx_dev_minor);
	fd = open(file, O_WRONLY | O_CLOEXEC);
	if (fd >= 0) {
		ssize_t ignored = write(fd, READ_AHEAD_KB, strlen(READ_AHEAD_KB));

		(void)ignored;
		close(fd);
	}
}

int weefs_mount(const char *path, const char *source, int *ret_fds, uint32_t n, struct weefs_error *error)
{
	int fds[64];
	uint32_t opened = 0;
	char options[128];
	struct stat st;
	int r;

	if (n == 0 || n > sizeof(fds) / sizeof(fds[0]))
		return fail(error, -EINVAL, "expected 1 to 64 descriptors, received %u", n);
	if (stat(path, &st) < 0)
		return fail(error, -errno, "mount point %s: %s", path, strerror(errno));
	fds[0] = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	if (fds[0] < 0)
		return fail(error, -errno, "cannot open /dev/fuse: %s", strerror(errno));
	opened = 1;
	snprintf(options, sizeof(options), "fd=%d,rootmode=%o,user_id=0,group_id=0,allow_other,default_permissions", fds[0], (unsigned)(st.st_mode & S_IFMT));
	if (mount(source, path, "fuse.weefs", MS_RDONLY | MS_NODEV | MS_NOATIME, options) < 0) {
		r = fail(error, -errno, "cannot mount weefs on %s: %s", path, strerror(errno));
		goto out;
	}
	set_readahead(path);
	for (; opened < n; opened++) {
		fds[opened] = clone_device(fds[0]);
		if (fds[opened] < 0) {
			r = fail(error, -errno, "cannot clone /dev/fuse: %s", strerror(errno));
			umount2(path, MNT_DETACH);
			goto out;
		}
	}
	memcpy(ret_fds, fds, n * sizeof(fds[0]));
	return 0;
out:
	while (opened)
		close(fds[--opened]);
	return r;
}
