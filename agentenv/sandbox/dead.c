/* The files of a box whose processes are gone.
 *
 * Its mounts went with its mount namespace, but all they were made of lies on disk.  To look at it,
 * the same layers are stacked once more with its upper directory as the topmost read-only one: what
 * the agent wrote cannot change any more, and looking does not change it either.  A new overlay
 * with the old upper and work directories would; that is why it is not simply mounted again. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

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
    char upper[32], work[32];
    lh_autofree struct box_layer *layers = calloc(b->n_layers + 1, sizeof *layers);

    box_upper_names(b->upper, upper, work);
    lh_autofree char *top = lh_format("%s/%s", b->dir, upper);
    if (!layers || !top)
        return lh_fail_errno(err, ENOMEM, "files of sandbox %s", b->id);
    layers[0] = (struct box_layer){top, false};
    memcpy(layers + 1, b->layers, b->n_layers * sizeof *layers);
    return overlay_create(layers, b->n_layers + 1, b->host->userns, -1, NULL, NULL, err);
}
