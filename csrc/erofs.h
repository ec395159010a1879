/* EROFS images of metadata: what the kernel needs to show a tree without asking anybody.
 *
 * A regular file has its attributes and its size, no blocks, and two more attributes, `trusted.overlay.metacopy` and
 * `trusted.overlay.redirect` = `/<layer>/<inode>`, by which overlayfs finds its contents in the `objects` directory of the mount, a
 * data-only layer. Read without an overlay it is a hole.
 *
 *   0        1024         1152                                    blocks of 4096
 *   +--------+------------+--------------------------------------+--------------------------+
 *   | zero   | superblock | inodes: 64 bytes, attributes, and    | full blocks of names,    |
 *   |        |            | what is inline (targets, last names) | targets that do not fit  |
 *   +--------+------------+--------------------------------------+--------------------------+
 *
 * The number of an inode is its offset / 32; st_ino shows it. An inode with its attributes and what is inline lies in one block when it
 * fits in one. The same tree gives the same bytes: no clock, no random UUID. For Linux 5.15 and later (files in chunks); fsck.erofs
 * accepts it. The format: Documentation/filesystems/erofs.rst and fs/erofs/erofs_fs.h of Linux.
 */
#ifndef WEEFS_EROFS_H
#define WEEFS_EROFS_H

#include "tree.h"

#define EROFS_WRITER_VERSION 1u	/* part of the volume name: another one makes other bytes */
#define EROFS_MAX_IMAGE (UINT64_C(1) << 30)	/* a TOC may name one value many times: a small one must not fill a disk */

/* Writes the image to `fd` from offset 0. `name`: 32 hexadecimal digits, which become the UUID. Memory: 4 bytes for each inode and 1 MiB.
 * -EOPNOTSUPP: the tree holds something that the format has no place for; -EFBIG: more than EROFS_MAX_IMAGE; both with a sentence. */
int erofs_write(const struct tree *tree, const char *name, int fd, struct weefs_image_info *ret_info, struct weefs_error *ret_error);

#endif
