/* What a snapshot is apart from its layers, in the form in which it leaves its store. */
#ifndef AGENTENV_SNAPSHOT_MANIFEST_H
#define AGENTENV_SNAPSHOT_MANIFEST_H

#include "agentenv/daemon/internal.h"
#include "agentenv/snapshot/address.h"

typedef V1(SnapshotManifest) SnapshotManifest;

enum { MANIFEST_FORMAT = 1, MANIFEST_MAX = 8 << 20 };

/* Of a snapshot that is ready; addresses its layers where that was not done yet.  Its processes are
 * not described yet (processes.h). */
SnapshotManifest *manifest_make(struct daemon *d, const char *snapshot, struct lh_error *err);

/* Its JSON and the BLAKE2b-256 of that; the caller frees. */
char *manifest_print(const SnapshotManifest *m, char digest[LAYER_ADDRESS_SIZE],
                     struct lh_error *err);

/* Back, from outside: known format and engine, sensible layers.  `digest` of what was read is
 * filled; when `wanted` is not "", it must be that (DATA_LOSS). */
SnapshotManifest *manifest_parse(const char *text, size_t len, const char *wanted,
                                 char digest[LAYER_ADDRESS_SIZE], struct lh_error *err);

bool manifest_digest_valid(const char *digest);

#endif
