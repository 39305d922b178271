/* Complete groups on their way to training, and their consumption. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/intake/intake_private.h"
#include "trainer/intake/ledger_private.h"

static int read_verdict(struct intake *in, const char *id, struct intake_member *m,
                        struct lh_error *err)
{
    db_autostmt sqlite3_stmt *s =
        db_prepare(ledger_db(in->ledger), err,
                   "SELECT reward, passed, turns, sampled FROM trajectories WHERE id = ?", "t", id);
    int r = s ? db_step(s, err) : LH_INTERNAL;

    if (r <= 0)
        return r < 0 ? r : lh_fail(err, LH_DATA_LOSS, "trajectory %s has no row", id);
    m->reward = sqlite3_column_double(s, 0);
    m->passed = sqlite3_column_int(s, 1);
    m->turns = (uint32_t)sqlite3_column_int64(s, 2);
    m->sampled = (uint32_t)sqlite3_column_int64(s, 3);
    return 0;
}

static int read_group(struct intake *in, const struct group *g, bool with_tokens,
                      struct intake_group *to, struct lh_error *err)
{
    const uint32_t n = g->round->spec.members;
    int r = 0;

    *to = (struct intake_group){.id = g->row.id,
                                .index = g->row.index,
                                .task = g->task->name,
                                .family = g->task->family,
                                .members = calloc(n, sizeof *to->members)};
    if (!to->members)
        return lh_fail_errno(err, ENOMEM, "reading group %lld", (long long)g->row.index);
    to->n_members = n;
    for (uint32_t i = 0; i < n && r == 0; i++) {
        const char *id = g->members[i].row.id;
        memcpy(to->members[i].id, id, LH_ID_SIZE);
        r = read_verdict(in, id, &to->members[i], err);
        if (r == 0 && with_tokens)
            r = ledger_read_history(in->ledger, id, &to->members[i].history, err);
    }
    return r;
}

static size_t count_planned(const struct round *r, int64_t step)
{
    size_t n = 0;

    for (size_t i = 0; i < r->n_groups; i++)
        n += r->groups[i]->row.state == GROUP_READY && r->groups[i]->row.planned == step;
    return n;
}

int intake_take(struct intake *in, const char *name, int64_t step, size_t max, bool with_tokens,
                struct intake_batch *out, struct lh_error *err)
{
    LH_LOCKED(&in->lock);
    const struct round *r = intake_find_round(in, name);
    int e = 0;

    *out = (struct intake_batch){0};
    if (!r)
        return lh_fail(err, LH_NOT_FOUND, "round %s is not open", name);
    size_t planned = count_planned(r, step);
    if (planned)
        max = planned;
    out->groups = calloc(max + 1, sizeof *out->groups);
    if (!out->groups)
        return lh_fail_errno(err, ENOMEM, "a batch of %zu groups", max);
    for (size_t i = 0; i < r->n_groups && out->n < max && e == 0; i++) {
        const struct group *g = r->groups[i];
        if (g->row.state == GROUP_READY && (!planned || g->row.planned == step))
            e = read_group(in, g, with_tokens, &out->groups[out->n++], err);
    }
    if (e < 0)
        intake_batch_finish(out);
    return e;
}

void intake_batch_finish(struct intake_batch *b)
{
    for (size_t i = 0; i < b->n; i++) {
        for (uint32_t m = 0; m < b->groups[i].n_members; m++)
            ledger_history_finish(&b->groups[i].members[m].history);
        free(b->groups[i].members);
    }
    free(b->groups);
    *b = (struct intake_batch){0};
}

/* A rolled back step that is repeated makes the same version again. */
int intake_add_version(struct ledger *l, const struct intake_version *v, struct lh_error *err)
{
    return db_run(ledger_db(l), err,
                  "INSERT OR REPLACE INTO versions (step, id, parent, batch) VALUES (?, ?, ?, ?)",
                  "ibbb", (int64_t)v->step, v->id, (size_t)16, v->parent, (size_t)16, v->batch,
                  (size_t)16);
}

static int mark_consumed(struct intake *in, const struct intake_batch *b, int64_t step,
                         const struct intake_version *v, struct lh_error *err)
{
    int r = ledger_begin(in->ledger, err);

    if (r < 0)
        return r;
    for (size_t i = 0; i < b->n && r == 0; i++)
        r = ledger_set_group(in->ledger, b->groups[i].id, GROUP_CONSUMED, step, err);
    if (r == 0)
        r = intake_add_version(in->ledger, v, err);
    if (r == 0)
        return ledger_commit(in->ledger, err);
    ledger_rollback(in->ledger);
    return r;
}

static struct group *group_of_id(struct round *r, int64_t id)
{
    for (size_t i = 0; i < r->n_groups; i++)
        if (r->groups[i]->row.id == id)
            return r->groups[i];
    return NULL;
}

int intake_consume(struct intake *in, const char *name, const struct intake_batch *b, int64_t step,
                   const struct intake_version *v, struct lh_error *err)
{
    LH_LOCKED(&in->lock);
    struct round *r = intake_find_round(in, name);

    if (!r)
        return lh_fail(err, LH_NOT_FOUND, "round %s is not open", name);
    int e = mark_consumed(in, b, step, v, err);
    if (e < 0)
        return lh_wrap(err, "recording step %lld", (long long)step);
    for (size_t i = 0; i < b->n; i++) {
        struct group *g = group_of_id(r, b->groups[i].id);
        if (!g)
            continue;
        r->ready--;
        intake_forget_group(r, g);
    }
    return 0;
}
