/* The files of a box whose processes are gone.
 *
 * Its mounts went with its mount namespace, but all they were made of lies on disk.  To look at it,
 * the same layers are stacked once more with its upper directory as the topmost read-only one: what
 * the agent wrote cannot change any more, and looking does not change it either.  A new overlay
 * with the old upper and work directories would; that is why it is not simply mounted again. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>

#include "agentenv/sandbox/box_private.h"
#include "agentenv/sandbox/overlay.h"
#include "proto/file.h"

struct box *box_bury(struct box_host *h, const struct box_spec *spec, struct lh_error *err)
{
    lh_auto(box) b = box_new(h, spec, err);

    return b && box_find_upper(b, err) == 0 ? lh_steal(&b) : NULL;
}

int box_dead_root_fd(struct box *b, struct lh_error *err)
{
    struct mount_attr a = {.attr_set = MOUNT_ATTR_RDONLY};
    lh_autofree struct box_layer *layers = calloc(b->n_layers + 1, sizeof *layers);
    lh_autofree char *top = box_upper_path(b);

    if (b->files >= 0) { /* it died in our time: its overlay is still there */
        lh_autoclose int fd = overlay_clone(b->files, err);
        if (fd >= 0 && mount_setattr(fd, "", AT_EMPTY_PATH, &a, sizeof a) < 0)
            return lh_fail_errno(err, errno, "files of sandbox %s", b->id);
        return lh_steal_fd(&fd);
    }
    if (!layers || !top)
        return lh_fail_errno(err, ENOMEM, "files of sandbox %s", b->id);
    layers[0] = (struct box_layer){top, false};
    memcpy(layers + 1, b->layers, b->n_layers * sizeof *layers);
    const struct overlay o = {
        .layers = layers, .n_layers = b->n_layers + 1, .below = -1, .userns = b->host->userns};
    return overlay_create(&o, err);
}
