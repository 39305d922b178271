/* Rounds and their groups: opened in numbered order, taken up from the ledger, given out complete.
 *
 * Memory holds the groups that are dispatched or ready; what is consumed or dropped is the ledger's
 * alone, so memory does not grow with the length of the job. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "trainer/intake/intake_private.h"

LH_LOG_COMPONENT("intake");

struct round *intake_find_round(struct intake *in, const char *name)
{
    for (size_t i = 0; i < in->n_rounds; i++)
        if (!strcmp(in->rounds[i]->spec.name, name))
            return in->rounds[i];
    return NULL;
}

struct trajectory *intake_find_trajectory(struct intake *in, const char *id)
{
    for (size_t r = 0; r < in->n_rounds; r++) {
        const struct round *round = in->rounds[r];
        for (size_t g = 0; g < round->n_groups; g++)
            for (uint32_t m = 0; m < round->spec.members; m++)
                if (!strcmp(round->groups[g]->members[m].row.id, id))
                    return &round->groups[g]->members[m];
    }
    return NULL;
}

/* Its workers are free for other work. */
static void free_group(struct group *g)
{
    for (uint32_t m = 0; m < g->round->spec.members; m++)
        if (g->members[m].worker)
            g->members[m].worker->held--;
    free(g->members);
    free(g);
}

void intake_free_round(struct round *r)
{
    if (!r)
        return;
    for (size_t i = 0; i < r->n_groups; i++)
        free_group(r->groups[i]);
    free(r->groups);
    free(r);
}

/* A group with room for its members, at the end of its round; not yet in any ledger. */
static struct group *append_group(struct round *r, const struct plan_task *task,
                                  struct lh_error *err)
{
    if (r->n_groups == r->room) {
        size_t room = r->room ? r->room * 2 : 16;
        struct group **bigger = realloc(r->groups, room * sizeof(struct group *));
        if (!bigger)
            return lh_fail_errno(err, ENOMEM, "round %s", r->spec.name), NULL;
        r->groups = bigger;
        r->room = room;
    }
    struct group *g = calloc(1, sizeof *g);
    if (!g || !(g->members = calloc(r->spec.members, sizeof *g->members))) {
        free(g);
        return lh_fail_errno(err, ENOMEM, "round %s", r->spec.name), NULL;
    }
    g->round = r;
    g->task = task;
    for (uint32_t m = 0; m < r->spec.members; m++)
        g->members[m].group = g;
    return r->groups[r->n_groups++] = g;
}

void intake_forget_group(struct round *r, struct group *g)
{
    for (size_t i = 0; i < r->n_groups; i++) {
        if (r->groups[i] != g)
            continue;
        memmove(&r->groups[i], &r->groups[i + 1], (--r->n_groups - i) * sizeof(struct group *));
        free_group(g);
        return;
    }
}

/* ---- new groups ---- */

static int add_members(struct intake *in, struct group *g, struct lh_error *err)
{
    const char *round = g->round->spec.name;
    int r = 0;

    for (uint32_t m = 0; m < g->round->spec.members && r == 0; m++) {
        struct ledger_trajectory *t = &g->members[m].row;
        t->group = g->row.id;
        t->member = m;
        t->attempt = 1;
        t->state = TRAJECTORY_OPEN;
        t->seed = plan_seed(in->options.job_seed, round, g->row.index, m);
        plan_trajectory_id(in->job_id, round, g->row.index, m, t->id);
        r = ledger_add_trajectory(in->ledger, t, err);
    }
    return r;
}

static const struct plan_task *task_of(struct intake *in, const struct round *r)
{
    return r->spec.even_total ? plan_even(r->spec.tasks, r->next, r->spec.even_total)
                              : plan_random(r->spec.tasks, in->options.job_seed, r->next);
}

static bool all_in_quarantine(const struct intake *in, const struct round *r)
{
    for (size_t i = 0; i < r->spec.tasks->n_tasks; i++)
        if (!quarantine_has(&in->quarantine, r->spec.tasks->tasks[i].name))
            return false;
    return true;
}

/* The next index whose task may be drawn.  An index that is passed over is like that of a dropped
 * group: no other task takes its place, so what is drawn later stays what it would have been. */
static const struct plan_task *draw(struct intake *in, struct round *r, struct lh_error *err)
{
    const struct plan_task *task;

    if (all_in_quarantine(in, r)) {
        lh_fail(err, LH_FAILED_PRECONDITION,
                "every task of the round is in quarantine; see agentenv task ls --quarantined, and "
                "agentenv task release");
        return NULL;
    }
    while (task = task_of(in, r), quarantine_has(&in->quarantine, task->name)) {
        lh_warn("quarantine", "round=%s index=%lld task=%s is passed over", r->spec.name,
                (long long)r->next, task->name);
        r->next++;
    }
    return task;
}

static int open_group(struct intake *in, struct round *r, struct lh_error *err)
{
    const struct plan_task *task = draw(in, r, err);
    struct group *g = task ? append_group(r, task, err) : NULL;

    if (!g)
        return task ? LH_RESOURCE_EXHAUSTED : LH_FAILED_PRECONDITION;
    g->row = (struct ledger_group){
        .index = r->next, .task = task->name, .family = task->family, .state = GROUP_DISPATCHED};
    memcpy(g->row.round, r->spec.name, sizeof g->row.round);
    r->next++;
    r->kept++;
    int e = ledger_add_group(in->ledger, &g->row, err);
    return e < 0 ? e : add_members(in, g, err);
}

int intake_fill_rounds(struct intake *in, struct lh_error *err)
{
    for (size_t i = 0; i < in->n_rounds; i++) {
        struct round *r = in->rounds[i];
        while (r->kept < r->limit) {
            int e = open_group(in, r, err);
            if (e < 0)
                return lh_wrap(err, "opening group %lld of round %s", (long long)r->next - 1,
                               r->spec.name);
        }
    }
    return 0;
}

/* ---- groups of the ledger ---- */

struct loading {
    struct intake *in;
    struct round *round;
    struct group *group;
};

static int load_member(void *ctx, const struct ledger_trajectory *t, struct lh_error *err)
{
    struct loading *l = ctx;

    if (t->member >= l->round->spec.members)
        return lh_fail(err, LH_FAILED_PRECONDITION, "trajectory %s is member %u of a group of %u",
                       t->id, t->member, l->round->spec.members);
    l->group->members[t->member].row = *t;
    l->group->n_done += t->state == TRAJECTORY_DONE;
    return 0;
}

static int load_group(void *ctx, const struct ledger_group *row, struct lh_error *err)
{
    struct loading *l = ctx;
    const struct plan_task *task = plan_find(l->round->spec.tasks, row->task);

    if (!task)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "group %lld is of task %s, which is not planned", (long long)row->index,
                       row->task);
    struct group *g = l->group = append_group(l->round, task, err);
    if (!g)
        return LH_RESOURCE_EXHAUSTED;
    g->row = *row;
    g->row.task = task->name;
    g->row.family = task->family;
    l->round->ready += row->state == GROUP_READY;
    return ledger_each_trajectory(l->in->ledger, row->id, load_member, l, err);
}

static int load_round(struct intake *in, struct round *r, struct lh_error *err)
{
    struct loading l = {.in = in, .round = r};
    int e = ledger_round_extent(in->ledger, r->spec.name, &r->next, &r->kept, err);

    if (e == 0)
        e = ledger_each_group(in->ledger, r->spec.name, 1u << GROUP_DISPATCHED | 1u << GROUP_READY,
                              load_group, &l, err);
    return e;
}

int intake_open_round(struct intake *in, const struct intake_round *spec, struct lh_error *err)
{
    LH_LOCKED(&in->lock);
    if (intake_find_round(in, spec->name))
        return 0;
    if (!spec->tasks->n_tasks)
        return lh_fail(err, LH_FAILED_PRECONDITION, "round %s has no tasks to draw from",
                       spec->name);
    struct round *r = calloc(1, sizeof *r);
    if (!r || in->n_rounds == LH_ARRAY_SIZE(in->rounds)) {
        free(r);
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "too many rounds are open for %s", spec->name);
    }
    r->spec = *spec;
    int e = load_round(in, r, err);
    if (e < 0) {
        intake_free_round(r);
        return lh_wrap(err, "taking up round %s", spec->name);
    }
    in->rounds[in->n_rounds++] = r;
    return 0;
}

void intake_close_round(struct intake *in, const char *name)
{
    LH_LOCKED(&in->lock);
    for (size_t i = 0; i < in->n_rounds; i++) {
        if (strcmp(in->rounds[i]->spec.name, name))
            continue;
        intake_free_round(in->rounds[i]);
        in->rounds[i] = in->rounds[--in->n_rounds];
        return;
    }
}

/* ---- what becomes of them ---- */

int intake_group_done(struct intake *in, struct group *g, struct lh_error *err)
{
    if (++g->n_done < g->round->spec.members)
        return 0;
    g->row.state = GROUP_READY;
    g->round->ready++;
    pthread_cond_broadcast(&in->changed);
    return ledger_set_group(in->ledger, g->row.id, GROUP_READY, -1, err);
}

/* Its members are told by the answer to their next heartbeat. */
int intake_drop_group(struct intake *in, struct group *g, struct lh_error *err)
{
    int r = ledger_set_group(in->ledger, g->row.id, GROUP_DROPPED, -1, err);

    g->round->kept--;
    in->dropped++;
    intake_forget_group(g->round, g);
    return r;
}
