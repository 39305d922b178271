/* Snapshots and the layers they are made of (docs/DESIGN.md 3.4), engine `fsonly`: the files, no
 * processes.
 *
 * A snapshot is a chain of sealed layers over an image.  Layers are directories STATE/layers/ID in
 * overlayfs' own format; they never change, and live while a row names them.  A snapshot lives
 * while a named owner retains it, and a grace period longer. */
#ifndef AGENTENV_SNAPSHOT_SNAPSHOT_H
#define AGENTENV_SNAPSHOT_SNAPSHOT_H

#include "agentenv/daemon/internal.h"

struct snapshot_options {
    const char *key_kind, *key; /* idempotency; NULL = none */
    const char *owner;          /* retained in the same transaction; NULL or "" = by nobody */
    bool durable;               /* survives the host: files and rows are on disk when it returns */
    int state;                  /* shown meanwhile: SB_SNAPSHOTTING or SB_FORKING */
};

/* The chain of a sandbox becomes that of a snapshot of it which was sealed live; `merged`: which
 * names other layers, so that those it had may be nobody's now. */
int snapshot_adopt_chain(struct daemon *d, const char *sandbox, const char *snapshot, bool merged,
                         struct lh_error *err);
/* Takes one of a sandbox that is held alone, RUNNING or FROZEN. */
int snapshot_take(struct daemon *d, struct sandbox *s, const struct snapshot_options *o,
                  char id[LH_ID_SIZE], struct lh_error *err);
/* Removes it at once, whoever retains it; with `key_too` its idempotency key is free again. */
int snapshot_drop(struct daemon *d, const char *id, bool key_too, struct lh_error *err);

bool snapshot_is_ready(struct daemon *d, const char *id);

/* What a sandbox needs to start from it. */
struct snapshot_origin {
    char id[LH_ID_SIZE];
    char *image, *image_id, *image_path, *task;
    Longhaul__Task__V1__Limits limits;
    Longhaul__Task__V1__Network network;
};
int snapshot_origin(struct daemon *d, const char *id, struct snapshot_origin *out,
                    struct lh_error *err);
void snapshot_origin_finish(struct snapshot_origin *o);

V1(Snapshot) * snapshot_show(struct daemon *d, const char *id, struct lh_error *err);
V1(ListSnapshotsReply) *
    snapshot_list(struct daemon *d, const char *owner_prefix, struct lh_error *err);

/* ---- owners.c ---- */
int snapshot_check_owner(const char *owner, struct lh_error *err);
int snapshot_retain(struct daemon *d, const char *id, const char *owner, struct lh_error *err);
int snapshot_release(struct daemon *d, const char *id, const char *owner, struct lh_error *err);
/* Owners that begin with the prefix keep only what is listed; see ReconcileRequest. */
int snapshot_reconcile(struct daemon *d, const V1(ReconcileRequest) * req,
                       V1(ReconcileReply) * reply, struct lh_error *err);

/* ---- layers.c ---- */

/* Bytes of the files in a layer; with `durable`, they are on disk when it returns. */
int layer_settle(const char *path, bool durable, uint64_t *bytes, struct lh_error *err);
/* Merges layers, top first, into a new directory with the effect of all of them. */
int layers_merge(char *const *paths, size_t n, const char *target, struct lh_error *err);
/* A chain grows by one layer a snapshot; at this length it is merged into one. */
enum { CHAIN_MAX = 32 };

/* Removes every layer that nothing names, and adds to *done (may be NULL). */
struct gc_result {
    uint32_t snapshots, layers;
    uint64_t bytes;
};
int layers_sweep(struct daemon *d, struct gc_result *done);
/* The same for the layers below one sandbox or snapshot, whatever their number in all: the first in
 * the transaction that deletes its rows, before they go, the second after it. */
int layers_condemn_of(struct daemon *d, const char *holder, struct lh_error *err);
int layers_remove_condemned(struct daemon *d, struct gc_result *done);
/* Snapshots and seals that a crash cut short, and directories nobody knows. */
int layers_recover(struct daemon *d, struct lh_error *err);

/* ---- export.c, import.c ---- */

rpc_unary_fn service_export_snapshot, service_import_snapshot;

/* ---- gc.c ---- */
int snapshot_gc(struct daemon *d, int64_t grace_ms, struct gc_result *done, struct lh_error *err);
/* With `content` every addressed layer is read again and compared. */
int daemon_audit(struct daemon *d, bool content, V1(AuditReply) * reply, struct lh_error *err);

#endif
