/* Copying a root file system, from a directory or an archive, into an image's tree. */
#ifndef AGENTENV_TASK_TREE_H
#define AGENTENV_TASK_TREE_H

#include <stdint.h>

#include "agentenv/task/oci.h"
#include "proto/error.h"

enum { TREE_DIGEST = 32 };

struct tree_source {
    const char *path;
    struct oci *oci; /* what is there as an image of layers; NULL = a plain root file system */
    uid_t uid_base;  /* taken off owners that are at least this */
};

/* `to` must exist and be empty.  Devices, sockets and FIFOs are left out: a sandbox makes its own
 * /dev.  INVALID_ARGUMENT for a name or hard link that leaves the tree, RESOURCE_EXHAUSTED beyond
 * the bounds in tree.c.  The digest is over paths, types, modes, owners, link targets and contents
 * in the order of paths, so a directory and its tar have the same one (unless the tar has hard
 * links, which become files of their own when a directory is read). */
int tree_import(const struct tree_source *from, const char *to, uint8_t digest[TREE_DIGEST],
                uint64_t *bytes, struct lh_error *err);

/* Adds what every sandbox needs and would otherwise make in its own layer each time it starts:
 * mount points, device names, the usual links of /dev, /tmp, /work.  What is there already stays.
 */
int tree_add_skeleton(const char *tree, struct lh_error *err);

#endif
