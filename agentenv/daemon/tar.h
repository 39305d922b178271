/* Tar streams into and out of a sandbox, by libarchive's reader and writer but not its disk code:
 * that one works on paths, and paths inside a hostile sandbox are not to be trusted (inroot.h). */
#ifndef AGENTENV_DAEMON_TAR_H
#define AGENTENV_DAEMON_TAR_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "agentenv/daemon/inroot.h"
#include "proto/error.h"

/* The next piece of a stream: its length, 0 at the end, a negative status. */
typedef ssize_t tar_source_fn(void *ctx, const void **data, struct lh_error *err);

/* Unpacks an uncompressed tar below the directory `dir` (O_PATH).  Files, directories, symbolic and
 * hard links; modes and modification times are kept, owners are ids inside the sandbox.  Anything
 * else, and any name that leaves `dir`, is refused (INVALID_ARGUMENT) before it touches a file;
 * what came before it in the stream stays.  Symbolic links in the way are never followed.  Holes
 * stay holes.  *bytes is what was written. */
int tar_unpack(const struct inroot *r, int dir, tar_source_fn *source, void *ctx, uint64_t *bytes,
               struct lh_error *err);

/* Takes the next piece of the stream; a negative return ends the packing and is returned. */
typedef int tar_sink_fn(void *ctx, const void *data, size_t len, struct lh_error *err);

/* Packs a file, a symbolic link, or a directory with all below it; its own name is the first
 * component.  FIFOs, sockets and devices inside a directory are left out; alone they are refused.
 * Holes take no space in the stream. */
int tar_pack(const struct inroot *r, const char *path, tar_sink_fn *sink, void *ctx,
             struct lh_error *err);

#endif
