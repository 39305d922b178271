#include <errno.h>
#include <string.h>

#include "agentenv/daemon/internal.h"
#include "proto/file.h"

char *sandbox_dir(const struct daemon *d, const char *id)
{
    return lh_format("%s/boxes/%s", d->state_dir, id);
}

char *layer_dir(const struct daemon *d, const char *id)
{
    return lh_format("%s/layers/%s", d->state_dir, id);
}

char *images_dir(const struct daemon *d, const char *id)
{
    return lh_format("%s/checkpoints/%s", d->state_dir, id);
}

void chain_finish(struct chain *c)
{
    for (size_t i = 0; i < c->n; i++)
        free((char *)c->layers[i].path);
    free(c->layers);
    *c = (struct chain){0};
}

/* Takes `path`. */
static int append(struct chain *c, char *path, bool host_owned, struct lh_error *err)
{
    struct box_layer *more = path ? realloc(c->layers, (c->n + 1) * sizeof *more) : NULL;

    if (!more) {
        free(path);
        return lh_fail_errno(err, ENOMEM, "layers of a sandbox");
    }
    c->layers = more;
    c->layers[c->n++] = (struct box_layer){.path = path, .host_owned = host_owned};
    return 0;
}

struct loading {
    struct daemon *d;
    struct chain *chain;
};

static int append_row(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct loading *l = ctx;

    return append(l->chain, layer_dir(l->d, db_text(row, 0)), false, err);
}

static int append_layers(struct loading *l, const char *sandbox, const char *instead,
                         struct lh_error *err)
{
    if (instead)
        return append(l->chain, layer_dir(l->d, instead), false, err);
    return db_each(l->d->db, err, append_row, l,
                   "SELECT layer FROM sandbox_layers WHERE sandbox=? ORDER BY pos", "s", sandbox);
}

int chain_load(struct daemon *d, const struct sandbox *s, const char *instead, struct chain *out,
               struct lh_error *err)
{
    struct loading l = {d, out};
    int r = 0;

    *out = (struct chain){0};
    if (s->top_layer[0])
        r = append(out, strdup(s->top_layer), true, err);
    if (r == 0 && !s->over)
        r = append_layers(&l, s->id, instead, err);
    if (r == 0 && !s->over)
        r = append(out, strdup(s->image_path), true, err);
    if (r < 0)
        chain_finish(out);
    return r;
}

/* A transient sandbox writes little, as verifiers do, and for a moment.  On a disk the inodes that
 * overlay makes come to a third of its cost (SANDBOXES.md). */
enum { IN_MEMORY_MAX = 256 << 20 };

struct box_spec sandbox_box_spec(const struct sandbox *s, const char *dir, const struct chain *c)
{
    return (struct box_spec){
        .id = s->id,
        .dir = dir,
        .layers = c->layers,
        .n_layers = c->n,
        .limits = {.cpu_millis = s->limits.cpu_millis,
                   .memory_bytes = s->limits.memory_bytes,
                   .pids = s->limits.pids,
                   .open_files = s->limits.open_files,
                   .disk_bytes = s->limits.disk_bytes,
                   .output_bytes = s->limits.output_bytes},
        .network = s->network == LONGHAUL__TASK__V1__NETWORK__NETWORK_LOOPBACK ? BOX_NET_LOOPBACK
                                                                               : BOX_NET_NONE,
        .below = s->over ? s->over->box : NULL,
        .in_memory = s->transient && s->limits.disk_bytes <= IN_MEMORY_MAX,
    };
}
