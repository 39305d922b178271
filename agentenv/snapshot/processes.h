/* The processes of a snapshot outside of its store (docs/DESIGN.md 3.4).
 *
 * A restore runs with privilege on what the images say.  So every file of them stands in the
 * manifest with its length and digest, and the manifest carries a code that only a holder of this
 * installation's key can make: STATE/process.key, made with the first export, mode 0600; whoever
 * wants two installations to believe each other copies it.  The code covers the layers, too, by
 * their addresses: images go on with the files that they left. */
#ifndef AGENTENV_SNAPSHOT_PROCESSES_H
#define AGENTENV_SNAPSHOT_PROCESSES_H

#include <archive.h>
#include <archive_entry.h>

#include "agentenv/snapshot/manifest.h"

enum { PROCESS_FILES_MAX = 20000 };

/* Writes down in `m` what lies in the directory, and signs it, last of all. */
int processes_describe(struct daemon *d, int images, SnapshotManifest *m, struct lh_error *err);

/* Before anything of them is taken in: PERMISSION_DENIED without our code, FAILED_PRECONDITION on
 * another kernel or a processor that lacks something; nothing for one without processes. */
int processes_admit(struct daemon *d, const SnapshotManifest *m, struct lh_error *err);

/* What all of them are called in a store. */
int processes_address(const SnapshotManifest *m, char address[LAYER_ADDRESS_SIZE],
                      struct lh_error *err);

/* ---- processtar.c ---- */

/* Every file, below OUTSIDE_PROCESSES.  ABORTED when one is not what the manifest says. */
int processes_pack(struct archive *to, int images, const SnapshotManifest *m, struct lh_error *err);

/* Back: files named in the manifest only, each once, and only if it is what the manifest says. */
struct process_unpack;
/* `path`: a directory to be made. */
struct process_unpack *process_unpack_create(const char *path, const SnapshotManifest *m,
                                             struct lh_error *err);
int process_unpack_entry(struct process_unpack *u, struct archive *from, struct archive_entry *e,
                         struct lh_error *err);
/* DATA_LOSS, with its name, when one is missing. */
int process_unpack_finish(const struct process_unpack *u, struct lh_error *err);
void process_unpack_destroy(struct process_unpack *u); /* NULL is fine */
LH_DEFINE_AUTO(process_unpack, process_unpack_destroy)
/* Whether an entry of this name belongs to the processes. */
bool process_unpack_owns(const char *name);

/* The digest of what can be read from a descriptor, and how much it was. */
int process_digest(int fd, char digest[LAYER_ADDRESS_SIZE], uint64_t *bytes, struct lh_error *err);

#endif
