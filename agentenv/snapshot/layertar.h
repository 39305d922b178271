/* A layer as entries of a tar archive (pax), and back.
 *
 * Both directions are exact: what was packed and unpacked has the same address (address.h), which
 * the receiver checks.  A whiteout is a character device 0:0, an opaque directory has its
 * attribute, a socket, for which tar has no type, is a FIFO with the attribute LAYER_SOCKET.
 *
 * Unpacking is the guard against archives from outside.  Names are relative, without "..", below
 * directories that the same archive made, never through a symbolic link, and never one that exists;
 * devices other than whiteouts, set owners outside the sandbox, attributes other than user.* and
 * the opaque mark, and hard links out of the layer are refused (INVALID_ARGUMENT, with the name).
 * Fuzzed: tests/fuzz/fuzz_layer.c. */
#ifndef AGENTENV_SNAPSHOT_LAYERTAR_H
#define AGENTENV_SNAPSHOT_LAYERTAR_H

#include <archive.h>
#include <archive_entry.h>
#include <stdint.h>

#include "proto/error.h"

#define LAYER_SOCKET "trusted.longhaul.socket"

/* Appends the layer at `path` to an open archive; every name begins with `prefix` ("" or "x/y").
 * FAILED_PRECONDITION for what another host could not make: access control lists, capabilities. */
int layer_pack(struct archive *to, const char *path, const char *prefix, struct lh_error *err);

struct layer_unpack;

/* Bounds of one layer from outside. */
enum { LAYER_ENTRIES_MAX = 4 << 20 };
#define LAYER_BYTES_MAX ((uint64_t)64 << 30)

/* `dir` must exist and be empty. */
struct layer_unpack *layer_unpack_create(const char *dir, struct lh_error *err);
/* The entry that `from` stands at, if its name begins with `prefix` as layer_pack() had it. */
int layer_unpack_entry(struct layer_unpack *u, struct archive *from, struct archive_entry *e,
                       const char *prefix, struct lh_error *err);
/* After the last: times of directories. */
int layer_unpack_finish(struct layer_unpack *u, struct lh_error *err);
void layer_unpack_destroy(struct layer_unpack *u); /* NULL is fine */

#endif
