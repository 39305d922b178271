/* agentenvd from the inside: what its parts (daemon/, snapshot/, task/) may ask of each other.
 *
 * The registry (SQLite, db.h) is the truth about what exists; memory holds only what a running
 * process needs (boxes, waiters).  Every object is recorded before it is created.  The requests of
 * longhaul.sandbox.v1 serve as arguments here too: an internal create is a create.
 *
 * Functions block, may be called from any thread, and take absolute deadlines (lh_now_ms()).  No
 * lock is held while they wait for a sandbox. */
#ifndef AGENTENV_DAEMON_DAEMON_H
#define AGENTENV_DAEMON_DAEMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "agentenv/daemon/db.h"
#include "longhaul/sandbox/v1/sandbox.pb-c.h"
#include "proto/cleanup.h"
#include "proto/error.h"
#include "proto/id.h"
#include "proto/rpc.h"

struct daemon;

struct db *daemon_db(struct daemon *d);
const char *daemon_state_dir(const struct daemon *d); /* absolute, no trailing slash */

/* ---- sandboxes ----------------------------------------------------------------------------- */

struct daemon_create_options {
    /* Read-only directory mounted above the sandbox's layers and below its fresh upper layer: the
     * verifier's files.  NULL = none.  Must outlive the sandbox. */
    const char *top_layer;
    /* The sandbox belongs to a call in progress: recovery removes it. */
    bool transient;
    /* The idempotency key is that of a fork's child, not of a create (daemon/fork.c). */
    bool fork_child;
    /* Instead of a source in the request: this sandbox's files, as they are, lie below.  It is held
     * alone, and is given back when the new one is removed; after an error the caller has it. */
    struct sandbox *over;
};

/* As the rpc Create, setup of a task included; `o` may be NULL.  id receives the sandbox. */
int daemon_create(struct daemon *d, const Longhaul__Sandbox__V1__CreateRequest *req,
                  const struct daemon_create_options *o, int64_t deadline_ms, char id[LH_ID_SIZE],
                  struct lh_error *err);

/* A new, transient sandbox over the files that `id` has now; none of its processes.  Requests to
 * the parent may wait until the child is removed; it may be dead, so that what brought it down is
 * judged by what it left.  `req` gives limits, network and owner of the child; its source and key
 * are ignored. */
int daemon_fork_files(struct daemon *d, const char *id, uint32_t attempt,
                      const Longhaul__Sandbox__V1__CreateRequest *req,
                      const struct daemon_create_options *o, int64_t deadline_ms,
                      char child[LH_ID_SIZE], struct lh_error *err);

/* Output as it comes: stream is 1 or 2.  A negative return kills the exec and is returned. */
typedef int daemon_output_fn(void *ctx, int stream, const void *data, size_t len,
                             struct lh_error *err);

/* Runs to its end or its timeout; either way *exit is filled and 0 returned.  `output` may be NULL
 * (discarded).  `call` may be NULL; when it is cancelled the exec is killed (CANCELLED). */
int daemon_exec(struct daemon *d, const Longhaul__Sandbox__V1__ExecRequest *req,
                struct rpc_call *call, daemon_output_fn *output, void *ctx,
                Longhaul__Sandbox__V1__ExecExit *exit, struct lh_error *err);

/* Gone when it returns: processes, cgroup, mounts, files, record.  NOT_FOUND when it never was. */
int daemon_remove(struct daemon *d, const char *id, uint32_t attempt, struct lh_error *err);

/* The record as List shows it; free with lh_message_free(). */
Longhaul__Sandbox__V1__Sandbox *daemon_show(struct daemon *d, const char *id, struct lh_error *err);

/* Files of a sandbox by path inside it, confined to its root.  put creates missing directories;
 * both as root of the sandbox.  get refuses anything but regular files and more than `max` bytes;
 * the buffer has a NUL behind it. */
int daemon_put_file(struct daemon *d, const char *id, const char *path, const void *data,
                    size_t len, mode_t mode, struct lh_error *err);
/* A directory and what is missing above it, as root of the sandbox; fine when it is there. */
int daemon_make_dir(struct daemon *d, const char *id, const char *path, struct lh_error *err);
char *daemon_get_file(struct daemon *d, const char *id, const char *path, size_t max, size_t *len,
                      struct lh_error *err);

/* Makes the zygote of an image that names a warm-up, where an engine for processes is offered;
 * fails as the command does. */
int daemon_warm_up(struct daemon *d, const char *image, struct lh_error *err);
/* Drops zygotes of images that are no more. */
void zygotes_sweep(struct daemon *d);

/* ---- what agentenv/task plugs in ------------------------------------------------------------ */

/* An image's root file system never changes while a row of sandboxes or snapshots names image_id;
 * a new import under the same name gets a new id. */
struct daemon_image {
    char id[LH_ID_SIZE];
    char name[129];
    char path[4096]; /* directory */
};

/* Everything of a task that shapes its sandbox; strings live as long as `owned`. */
struct daemon_task {
    const char *image;
    Longhaul__Task__V1__Limits limits;
    Longhaul__Task__V1__Network network;
    ProtobufCMessage *owned; /* freed with lh_message_free() */
};

/* What a command in a task's sandbox gets where its request says nothing.  env: NAME=value, each
 * owned, like the array; the other strings live as long as `owned`. */
struct daemon_exec_defaults {
    const char *cwd, *user;
    char **env;
    size_t n_env;
    ProtobufCMessage *owned; /* freed with lh_message_free() */
};

struct daemon_hooks {
    /* Called once after the registry is open and before recovery: tables, clean-up of imports cut
     * short. */
    int (*start)(struct daemon *d, struct lh_error *err);
    int (*image_find)(struct daemon *d, const char *name, struct daemon_image *out,
                      struct lh_error *err);
    /* The image with this digest, whatever its name; NOT_FOUND says how to get it. */
    int (*image_by_digest)(struct daemon *d, const char *digest, struct daemon_image *out,
                           struct lh_error *err);
    /* How an image's processes run; free with lh_message_free(). */
    Longhaul__Sandbox__V1__ImageInfo *(*image_info)(struct daemon *d, const char *id,
                                                    struct lh_error *err);
    /* Digest of the image that a snapshot stands on; the caller frees. */
    char *(*image_digest)(struct daemon *d, const char *snapshot, struct lh_error *err);
    int (*task_find)(struct daemon *d, const char *name, struct daemon_task *out,
                     struct lh_error *err);
    int (*task_exec_defaults)(struct daemon *d, const char *task, struct daemon_exec_defaults *out,
                              struct lh_error *err);
    /* The sandbox runs; puts the task's files in, runs setup and healthcheck.  A failure undoes
     * the create. */
    int (*task_setup)(struct daemon *d, const char *task, const char *sandbox, int64_t deadline_ms,
                      struct lh_error *err);
    /* Appends to the audit: one call of `problem` for each thing without a record or the reverse.
     */
    int (*audit)(struct daemon *d, void (*problem)(void *ctx, const char *text), void *ctx,
                 struct lh_error *err);
    /* Verify, ImportImage, BuildImage, ListImages, RemoveImage of longhaul.sandbox.v1.Sandboxes. */
    rpc_unary_fn *verify, *import_image, *build_image, *list_images, *remove_image;
    /* Methods of longhaul.task.v1.Tasks, ended by a NULL name. */
    const struct rpc_method *tasks;
};

/* Defined by agentenv/task.  Every handler's ctx is the struct daemon. */
extern const struct daemon_hooks task_hooks;

#endif
