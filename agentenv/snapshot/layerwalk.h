/* The canonical walk of a sealed layer: each entry once, parents before what is in them, names of a
 * directory in the order of their bytes.  Two layers with the same effect below the same image give
 * the same entries, wherever and by whatever way they came to lie on a disk.  Address, export and
 * the check of an import are all made of it.
 *
 * What is of this host only is left out or translated: owners are ids inside the sandbox, and of
 * overlay's own attributes only those with an effect are shown (not where a file was copied up
 * from).  Times of access and of status changes are not part of a layer; those of modification are,
 * since tools like make go by them. */
#ifndef AGENTENV_SNAPSHOT_LAYERWALK_H
#define AGENTENV_SNAPSHOT_LAYERWALK_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

#include "proto/error.h"

#define LAYER_OPAQUE "trusted.overlay.opaque"

/* An agent can nest deeper; such a layer serves as one, but has no address and is not exported. */
enum { LAYER_DEPTH_MAX = 256 };

struct layer_xattr {
    char *name;
    void *value;
    size_t len;
};

/* Valid during the call only. */
struct layer_entry {
    const char *path;   /* relative to the layer; "" is the layer itself */
    struct stat st;     /* st_uid, st_gid inside the sandbox; of a whiteout only type and device */
    const char *target; /* of a symbolic link, else "" */
    const char *link;   /* earlier path of the same file, else "" */
    int fd;             /* content of a regular file that is not a link, at offset 0; else -1 */
    const struct layer_xattr *xattrs; /* by name */
    size_t n_xattrs;
};

bool layer_is_whiteout(const struct stat *st);
/* layerxattr.c: attributes have other names on the disk of an ordinary user. */
enum { LAYER_XATTR_NAME = 300 };
const char *layer_xattr_canonical(const char *name, char out[LAYER_XATTR_NAME]);
const char *layer_xattr_on_disk(const char *name, char out[LAYER_XATTR_NAME]);
const char *layer_opaque(void);

/* A negative return of `fn` ends the walk and is returned.  FAILED_PRECONDITION names what cannot
 * be part of a layer. */
typedef int layer_entry_fn(void *ctx, const struct layer_entry *e, struct lh_error *err);
int layer_walk(const char *path, layer_entry_fn *fn, void *ctx, struct lh_error *err);

#endif
