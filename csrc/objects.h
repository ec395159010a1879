/* `/objects/<layer name>/<inode number>`: the contents of layers without their names, for the kernel view.
 *
 * overlayfs takes it as a data-only layer below images of metadata (erofs.h). A file here has the node id that it has in every plan, so
 * both views share one page cache. Its two levels of directories are no plan's: they have ids of their own (node.h) and no inode in a TOC.
 */
#ifndef WEEFS_OBJECTS_H
#define WEEFS_OBJECTS_H

#include <stdbool.h>

#include "super.h"

#define OBJECTS_NAME "objects"

/* A directory of `/objects`, or `/objects` itself. */
bool objects_is_directory(uint64_t node);

/* Whether such a node means something now. */
bool objects_exists(struct weefs *w, uint64_t node);

/* Of the layer that such a directory is of; 0 for `/objects`. */
uint64_t objects_generation(struct weefs *w, uint64_t node);

/* As super_lookup() and super_list(), in such a directory. */
int objects_lookup(struct weefs *w, uint64_t directory, const char *name, size_t length, uint64_t *ret_node);

/* `buffer` keeps the name of the listed entry. */
#define OBJECTS_LISTED_SIZE 16
int objects_list(struct weefs *w, uint64_t directory, uint64_t index, char *buffer, struct listed *ret_listed);

/* Whether a layer has a name in its root that is one of these layers' below `/objects`: overlayfs, which looks for redirected contents in
 * lower layers before it looks in data-only ones, could take that for them. */
bool objects_shadowed(struct weefs *w, const uint32_t *slots, uint32_t n);

#endif
