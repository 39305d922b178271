/* Mounts by file descriptor (fsopen, fsconfig, fsmount, open_tree, move_mount): no option-string
 * limits, no path races, ID-mapped lower layers, and a detached overlay that is handed to a sandbox
 * in another mount namespace.  The host owns the overlay, so that whiteouts and opaque directories
 * are right (trusted.overlay.*) and layers of one sandbox serve another. */
#ifndef AGENTENV_SANDBOX_OVERLAY_H
#define AGENTENV_SANDBOX_OVERLAY_H

#include "agentenv/sandbox/box.h"

/* A user namespace that maps 0.. to BOX_UID_BASE..; only its descriptor keeps it.  Forks. */
int overlay_userns(struct lh_error *err);

/* What an overlay is made of: `layers`, top first, then `below` (-1 = nothing), a detached overlay;
 * above them the directories `upper` and `work` under dir_fd, which belong to BOX_UID_BASE;
 * upper NULL: nothing above them, read-only. */
struct overlay {
    const struct box_layer *layers;
    size_t n_layers;
    int below, userns, dir_fd;
    const char *upper, *work;
};

/* Returns a detached mount. */
int overlay_create(const struct overlay *o, struct lh_error *err);

/* Another detached mount of the same overlay. */
int overlay_clone(int mount_fd, struct lh_error *err);

/* Turns a whole file system read-only.  1 = done, 0 = a file is open for writing: an atomic test
 * for writers that costs nothing. */
int overlay_set_readonly(int mount_fd, struct lh_error *err);

/* A new file system of one kind as a detached mount; options are pairs, ended by NULL. */
int overlay_new_fs(const char *type, const char *const options[], unsigned attributes);

#endif
