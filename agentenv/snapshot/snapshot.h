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
    bool processes;             /* engine criu; the sandbox runs or is frozen */
};

/* The chain of a sandbox becomes that of a snapshot of it which was sealed live; `merged`: which
 * names other layers, so that those it had may be nobody's now. */
int snapshot_adopt_chain(struct daemon *d, const char *sandbox, const char *snapshot, bool merged,
                         struct lh_error *err);
/* The same inside a transaction. */
int snapshot_take_chain(struct daemon *d, const char *sandbox, const char *snapshot, bool merged,
                        struct lh_error *err);
/* Takes one of a sandbox that is held alone, RUNNING or FROZEN. */
int snapshot_take(struct daemon *d, struct sandbox *s, const struct snapshot_options *o,
                  char id[LH_ID_SIZE], struct lh_error *err);
/* Removes it at once, whoever retains it; with `key_too` its idempotency key is free again. */
int snapshot_drop(struct daemon *d, const char *id, bool key_too, struct lh_error *err);

/* ---- hibernate.c ---- */

/* Of a sandbox that is held alone, RUNNING or FROZEN: takes a snapshot with its processes, makes it
 * the sandbox's checkpoint and the sandbox HIBERNATED, in one transaction, and ends the processes.
 * After an error it goes on as before, or is DEAD. */
int snapshot_hibernate(struct daemon *d, struct sandbox *s, struct lh_error *err);
/* The second half, again after a crash: what is left of its processes is the caller's, its upper
 * directory becomes the checkpoint's layer. */
int snapshot_settle_hibernated(struct daemon *d, struct sandbox *s, struct lh_error *err);
/* Flushes checkpoints that were not, so that hibernated sandboxes survive the host. */
int checkpoints_flush(struct daemon *d, struct lh_error *err);

/* ---- images.c: the process images of a snapshot ---- */

/* Engine criu: where they lie; *path = NULL: it has none.  NOT_FOUND: no such snapshot. */
int snapshot_images(struct daemon *d, const char *id, char **path, struct lh_error *err);
/* Makes the directory and fills it; the box is asleep and frozen then. */
int images_dump(struct daemon *d, struct sandbox *s, const char *id, struct lh_error *err);
int images_settle(struct daemon *d, const char *id, bool durable, uint64_t *bytes,
                  struct lh_error *err);
int images_remove(struct daemon *d, const char *id, struct lh_error *err); /* absent is fine */
/* box_restore(), during which what it reads stays, whatever is exchanged (sharing.c). */
int images_restore(struct daemon *d, struct box *box, const char *images, struct lh_error *err);
/* The directory, for reading so; images_close(d, -1) is fine. */
int images_open(struct daemon *d, const char *id, struct lh_error *err);
void images_close(struct daemon *d, int fd);

/* The checkpoint of a sandbox: a snapshot that is retained by it.  "" = it has none. */
int checkpoint_of(struct daemon *d, const char *sandbox, char id[LH_ID_SIZE], struct lh_error *err);
/* Inside a transaction: another one, or (NULL) none. */
int checkpoint_name(struct daemon *d, const char *sandbox, const char *snapshot,
                    struct lh_error *err);
/* The same in one of its own; the one before is dropped unless somebody else retains it. */
int checkpoint_set(struct daemon *d, const char *sandbox, const char *snapshot,
                   struct lh_error *err);
/* Drops a snapshot that nobody retains. */
int checkpoint_drop(struct daemon *d, const char *snapshot, struct lh_error *err);

/* ---- parts of snapshot.c ---- */

/* The rows of a snapshot that is not ready: a new layer on the sandbox's chain, or on `merged`
 * (NULL = none), which stands for all of it. */
int snapshot_record(struct daemon *d, const struct sandbox *s, const struct snapshot_options *o,
                    const char *id, const char *layer, const char *merged, struct lh_error *err);
/* Makes the merged layer, which is recorded. */
int snapshot_merge_chain(struct daemon *d, struct sandbox *s, const char *merged, bool durable,
                         struct lh_error *err);
bool snapshot_chain_is_long(struct daemon *d, const char *sandbox);
/* Tells the box what lies below it: `merged`, or (NULL) what is recorded. */
int snapshot_set_box_chain(struct daemon *d, struct sandbox *s, const char *merged,
                           struct lh_error *err);

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

/* ---- sharing.c: pages that snapshots have in common are on disk once ---- */

struct sharing_scope {
    int64_t after_ms; /* snapshots older than this */
    bool checkpoints; /* of sandboxes that sleep, too */
    bool at_once;     /* what somebody still reads is left to the next round */
};
/* Compares the memory of every snapshot with processes in scope that was not compared yet; *bytes
 * grows by what became free. */
int sharing_round(struct daemon *d, const struct sharing_scope *scope, uint64_t *bytes,
                  struct lh_error *err);
/* What a crash left of one. */
int sharing_recover(struct daemon *d, struct lh_error *err);

/* ---- quota.c: a limit to what snapshots hold on disk ---- */

int quota_used(struct daemon *d, uint64_t *bytes, struct lh_error *err);
/* Before something new is kept: gc when the store is full, then RESOURCE_EXHAUSTED. */
int quota_check(struct daemon *d, struct lh_error *err);

/* ---- export.c, import.c ---- */

rpc_unary_fn service_export_snapshot, service_import_snapshot;

/* ---- gc.c ---- */
int snapshot_gc(struct daemon *d, int64_t grace_ms, struct gc_result *done, struct lh_error *err);
/* With `content` every addressed layer is read again and compared. */
int daemon_audit(struct daemon *d, bool content, V1(AuditReply) * reply, struct lh_error *err);

#endif
