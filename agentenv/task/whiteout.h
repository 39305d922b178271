/* What an image's layer does to the layers below it, in a tree that is being made. */
#ifndef AGENTENV_TASK_WHITEOUT_H
#define AGENTENV_TASK_WHITEOUT_H

#include <stdbool.h>

#include "proto/error.h"

/* All paths are relative to `root`, a directory, and never lead through a symbolic link. */

/* Removes what stands at `path` and cannot stay when a directory (or anything else) comes there. */
int whiteout_make_way(int root, const char *path, bool directory, struct lh_error *err);
/* `path` is an entry of a layer.  When its name marks a removal (".wh.NAME", or ".wh..wh..opq" for
 * all in its directory), does it; *was says so. */
int whiteout_apply(int root, const char *path, bool *was, struct lh_error *err);

#endif
