/* What export.c and import.c agree on. */
#ifndef AGENTENV_SNAPSHOT_OUTSIDE_H
#define AGENTENV_SNAPSHOT_OUTSIDE_H

#include "agentenv/daemon/internal.h"

/* Names within a file. */
#define OUTSIDE_MANIFEST  "manifest.json"
#define OUTSIDE_DIGEST    "manifest.blake2b"
#define OUTSIDE_LAYERS    "layers"
#define OUTSIDE_PROCESSES "processes"

/* Names within a store; NULL: no memory. */
char *outside_layer_name(const char *address);
char *outside_manifest_name(const char *digest);
char *outside_processes_name(const char *digest);

/* A file without a name in the state directory: a crash leaves nothing of it. */
int outside_temporary(struct daemon *d, struct lh_error *err);

/* The caller's deadline, or an hour: gigabytes travel. */
int64_t outside_deadline_ms(const struct rpc_call *call);

#endif
