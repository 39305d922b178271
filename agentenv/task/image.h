/* Images: root file systems that sandboxes start from, imported once and never changed.
 *
 * STATE/images/ID/ is one image's tree, ID its row's id.  A row is written before the tree is
 * (state IMPORTING) and the tree is removed before the row is; a new import under a name retires
 * the row that had it.  Retired trees go when no sandbox, snapshot or row of a task needs them any
 * more. */
#ifndef AGENTENV_TASK_IMAGE_H
#define AGENTENV_TASK_IMAGE_H

#include "agentenv/daemon/daemon.h"
#include "agentenv/task/oci.h"

/* How the processes of an image run, where nobody says otherwise; strings are borrowed. */
struct image_config {
    char **env; /* NAME=value */
    size_t n_env;
    const char *workdir, *user, *warm_up;
};

struct image_source {
    const char *name;
    const char *path; /* of the root file system, or of what `oci` was opened from */
    struct oci *oci;  /* or NULL */
    uid_t uid_base;   /* host id of its root; files of others stay as they are */
    const struct image_config *config; /* or NULL */
    const char *digest;                /* of another image with this tree; NULL = of what is read */
};

/* Imports it under its name; the same tree under the same name is kept as it is. */
int image_add(struct daemon *d, const struct image_source *s, struct lh_error *err);
/* Free with lh_message_free(). */
Longhaul__Sandbox__V1__ImageInfo *image_show(struct daemon *d, const char *name,
                                             struct lh_error *err);

/* Tables; removes what an import cut short, and retired images nobody uses, left behind. */
int image_start(struct daemon *d, struct lh_error *err);
/* Hooks of daemon.h. */
int image_find(struct daemon *d, const char *name, struct daemon_image *out, struct lh_error *err);
int image_by_digest(struct daemon *d, const char *digest, struct daemon_image *out,
                    struct lh_error *err);
Longhaul__Sandbox__V1__ImageInfo *image_info(struct daemon *d, const char *id,
                                             struct lh_error *err);
char *image_digest_of(struct daemon *d, const char *snapshot, struct lh_error *err);
int image_audit(struct daemon *d, void (*problem)(void *ctx, const char *text), void *ctx,
                struct lh_error *err);
rpc_unary_fn image_import_rpc, image_list_rpc, image_remove_rpc;

#endif
