/* One import, for import.c (what is recorded and checked) and import_archive.c (where bytes come
 * from). */
#ifndef AGENTENV_SNAPSHOT_IMPORT_H
#define AGENTENV_SNAPSHOT_IMPORT_H

#include "agentenv/snapshot/blobs.h"
#include "agentenv/snapshot/layertar.h"
#include "agentenv/snapshot/manifest.h"
#include "agentenv/snapshot/processes.h"

struct incoming {
    const char *address;
    char id[LH_ID_SIZE]; /* of ours, or of a new one */
    bool fresh, done;
};

struct importing {
    struct daemon *d;
    struct rpc_call *call;
    const V1(ImportSnapshotRequest) * req;
    const SnapshotManifest *m;
    int64_t deadline_ms;
    char id[LH_ID_SIZE];
    struct incoming *layers; /* one for each address, in the order of the manifest */
    size_t n;
    struct process_unpack *processes; /* NULL: it has none, or they are not wanted */
};

/* ---- import.c ---- */

struct incoming *import_find(const struct importing *x, const char *address, size_t len);
/* Whether the caller still waits. */
int import_check_time(const struct importing *x, struct lh_error *err);
/* The directory of a fresh layer; and, when all of it is there, the proof that it is what its
 * address says.  end takes `u`. */
struct layer_unpack *import_begin_layer(struct importing *x, struct incoming *l,
                                        struct lh_error *err);
int import_end_layer(struct importing *x, struct incoming *l, struct layer_unpack *u,
                     struct lh_error *err);

/* ---- import_archive.c ---- */

void import_free_archive(struct archive **a);
#define auto_import_archive __attribute__((cleanup(import_free_archive))) struct archive *

struct archive *import_open_archive(int fd, struct lh_error *err);
/* The next entry, which must have this name, as text. */
char *import_read_text(const struct importing *x, struct archive *a, const char *name, size_t *len,
                       struct lh_error *err);
/* All layers of a file, from where it stands on. */
int import_file_layers(struct importing *x, struct archive *a, struct lh_error *err);
/* A store's manifest as it was asked for, and one layer. */
char *import_fetch_manifest(struct importing *x, struct blobs *b, size_t *len,
                            struct lh_error *err);
int import_fetch_layer(struct importing *x, struct blobs *b, struct incoming *l,
                       struct lh_error *err);
int import_fetch_processes(struct importing *x, struct blobs *b, struct lh_error *err);

#endif
