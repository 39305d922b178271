/* Start-up: registry, memory and machine are made to agree.
 *
 * The registry says what should exist.  Sandboxes whose create or removal was cut off, and those of
 * a call that is gone, are removed.  Those that ran are adopted; what cannot be is DEAD with the
 * cause, its files kept.  Then whatever else carries our label is ended: cgroups by the sweep,
 * directories by their names. */
#include <errno.h>
#include <string.h>

#include "agentenv/daemon/internal.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/log.h"

LH_LOG_COMPONENT("agentenvd");

struct rows {
    struct registry_row *items;
    size_t n;
};

static int collect_row(void *ctx, struct registry_row *row, struct lh_error *err)
{
    struct rows *rows = ctx;
    struct registry_row *more = realloc(rows->items, (rows->n + 1) * sizeof *more);

    if (!more)
        return lh_fail_errno(err, ENOMEM, "recovery");
    rows->items = more;
    rows->items[rows->n++] = *row;
    return 0;
}

static int discard(struct daemon *d, struct sandbox *s, struct lh_error *err)
{
    lh_autofree char *dir = sandbox_dir(d, s->id);
    bool key_too =
        s->state == SB_CREATING; /* it was never acknowledged: the create may be retried */

    if (!dir)
        return lh_fail_errno(err, ENOMEM, "recovery");
    int r = box_destroy_named(d->host, s->id, dir, err);
    if (r == 0)
        r = checkpoint_set(d, s->id, NULL, err);
    if (r == 0)
        r = registry_delete(d, s->id, key_too, err);
    if (r == 0)
        lh_info("unfinished sandbox removed", "sandbox=%s state=%s", s->id,
                sandbox_state_name(s->state));
    return r;
}

/* Its box, taken over, or with `identity` NULL buried. */
static struct box *take_box(struct daemon *d, struct sandbox *s,
                            const struct box_identity *identity, struct lh_error *err)
{
    lh_autofree char *dir = sandbox_dir(d, s->id);
    struct chain chain;

    if (!dir)
        return lh_fail_errno(err, ENOMEM, "recovery"), NULL;
    if (chain_load(d, s, NULL, &chain, err) < 0)
        return NULL;
    struct box_spec spec = sandbox_box_spec(s, dir, &chain);
    struct box *box =
        identity ? box_adopt(d->host, &spec, identity, err) : box_bury(d->host, &spec, err);
    chain_finish(&chain);
    return box;
}

/* Its files stay readable.  Without a box they are not: it was cut off in the middle of a seal. */
static void bury_box(struct daemon *d, struct sandbox *s)
{
    struct lh_error why = {0};

    s->box = take_box(d, s, NULL, &why);
    if (!s->box)
        lh_warn("files of a dead sandbox", "sandbox=%s why=%s", s->id, why.message);
}

static int bury(struct daemon *d, struct sandbox *s, int cause, const char *why,
                struct lh_error *err)
{
    bury_box(d, s);
    s->state = SB_DEAD;
    s->cause = cause;
    lh_info("sandbox is dead", "sandbox=%s why=%s", s->id, why);
    return registry_set_state(d, s->id, SB_DEAD, cause, err);
}

static int adopt(struct daemon *d, struct registry_row *row, struct lh_error *err)
{
    struct sandbox *s = row->sandbox;
    struct lh_error why = {0};

    if (!row->this_boot)
        return bury(d, s, LONGHAUL__SANDBOX__V1__DEATH_CAUSE__DEATH_HOST_RESTART,
                    "the host was restarted", err);
    s->box = take_box(d, s, &row->identity, &why);
    if (!s->box) /* FAILED_PRECONDITION: alive, but cut off in the middle of a seal */
        return bury(d, s,
                    why.code == LH_FAILED_PRECONDITION
                        ? LONGHAUL__SANDBOX__V1__DEATH_CAUSE__DEATH_ERROR
                        : LONGHAUL__SANDBOX__V1__DEATH_CAUSE__DEATH_KILLED,
                    why.message, err);
    if (s->state != SB_FROZEN && box_thaw(s->box, &why) < 0) /* a freeze or seal was cut off */
        lh_warn("thaw failed", "sandbox=%s why=%s", s->id, why.message);
    if (network_open(d, s, &why) < 0)
        lh_warn("network not opened", "sandbox=%s why=%s", s->id, why.message);
    lh_info("sandbox adopted", "sandbox=%s pid=%d", s->id, s->init_pid);
    return monitor_add(d, s, err);
}

static int recover_row(struct daemon *d, struct registry_row *row, struct lh_error *err)
{
    struct sandbox *s = row->sandbox;
    int64_t layers = 0;

    if (s->state == SB_CREATING || s->state == SB_DELETED || s->transient) {
        int r = discard(d, s, err);
        sandbox_unref(d, s);
        return r;
    }
    int r = db_int(d->db, err, &layers, "SELECT count(*) FROM sandbox_layers WHERE sandbox=?", "s",
                   s->id);
    s->had_layers = layers > 0;
    if (r == 0 && (s->state == SB_HIBERNATED || s->state == SB_RESUMING))
        r = recover_hibernated(d, s, row->this_boot, err);
    else if (r == 0 && s->state != SB_DEAD)
        r = adopt(d, row, err);
    else if (r == 0)
        bury_box(d, s);
    sandbox_add(d, s);
    return r;
}

static int sweep(struct daemon *d, struct lh_error *err)
{
    struct sandbox **list;
    size_t n = sandbox_list(d, "", false, &list, err);
    lh_autofree const char **keep = calloc(n + 1, sizeof *keep);
    int swept = LH_RESOURCE_EXHAUSTED;

    for (size_t i = 0; keep && i < n; i++)
        keep[i] = list[i]->id;
    if (keep)
        swept = box_host_sweep(d->host, keep, n, err);
    for (size_t i = 0; i < n; i++)
        sandbox_unref(d, list[i]);
    free(list);
    if (swept > 0)
        lh_warn("orphaned cgroups removed", "count=%d", swept);
    return swept < 0 ? swept : 0;
}

/* Snapshots of forks and exports that were cut off.  A fork that is asked for again goes on with
 * its own, so gc gets them only after its grace; but they need not have survived the host. */
static int release_forks(struct daemon *d, struct lh_error *err)
{
    int r = db_run(d->db, err,
                   "UPDATE snapshots SET unowned_ms=? WHERE id IN"
                   " (SELECT snapshot FROM snapshot_owners WHERE owner='fork'"
                   " OR owner LIKE 'export/%')",
                   "l", lh_unix_ms());

    if (r == 0)
        r = db_run(d->db, err,
                   "DELETE FROM snapshot_owners WHERE owner='fork' OR owner LIKE 'export/%'", "");
    if (r == 0)
        r = db_run(d->db, err,
                   "UPDATE snapshots SET ready=0 WHERE durable=0 AND (SELECT boot FROM meta)<>?",
                   "s", d->boot);
    return r == 0 ? db_run(d->db, err, "UPDATE meta SET boot=?", "s", d->boot) : r;
}

int recover(struct daemon *d, struct lh_error *err)
{
    struct rows rows = {0};
    int r = release_forks(d, err);

    if (r == 0)
        r = layers_recover(d, err); /* drops what is not ready */
    if (r == 0)
        r = registry_each(d, collect_row, &rows, err);
    for (size_t i = 0; i < rows.n; i++) {
        if (r == 0)
            r = recover_row(d, &rows.items[i], err);
        else
            sandbox_unref(d, rows.items[i].sandbox);
    }
    free(rows.items);
    if (r == 0)
        r = sweep(d, err);
    if (r == 0)
        layers_sweep(d, NULL);
    return r < 0 ? lh_wrap(err, "recovery of %s", d->state_dir) : 0;
}
