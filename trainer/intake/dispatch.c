/* Giving work out: waiting trajectories to the least loaded workers, and what else is said to them.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "trainer/intake/intake_private.h"

LH_LOG_COMPONENT("intake");

/* Nothing said to a worker is kept: it is repeated for as long as the reason holds. */
static void say(struct intake *in, const char *peer, Longhaul__Experience__V1__Envelope *e,
                const struct channel_frame *frames, size_t n)
{
    struct lh_error err = {0};

    if (channel_intake_send(in->channel, peer, e, frames, n, &err) < 0)
        lh_debug("send", "worker=%s %s", peer, err.message);
}

void intake_say_cancel(struct intake *in, const char *peer, const char *trajectory,
                       uint32_t attempt)
{
    Longhaul__Experience__V1__Envelope e = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;
    Longhaul__Experience__V1__Cancel c = LONGHAUL__EXPERIENCE__V1__CANCEL__INIT;

    c.trajectory = (char *)trajectory;
    c.attempt = attempt;
    e.body_case = LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_CANCEL;
    e.cancel = &c;
    say(in, peer, &e, NULL, 0);
}

void intake_say_settled(struct intake *in, const char *peer, const char *trajectory)
{
    Longhaul__Experience__V1__Envelope e = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;
    Longhaul__Experience__V1__Settled s = LONGHAUL__EXPERIENCE__V1__SETTLED__INIT;

    s.trajectory = (char *)trajectory;
    e.body_case = LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_SETTLED;
    e.settled = &s;
    say(in, peer, &e, NULL, 0);
}

void intake_stop_workers(struct intake *in)
{
    Longhaul__Experience__V1__Envelope e = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;
    Longhaul__Experience__V1__Stop s = LONGHAUL__EXPERIENCE__V1__STOP__INIT;

    e.body_case = LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_STOP;
    e.stop = &s;
    LH_LOCKED(&in->lock);
    for (size_t i = 0; i < in->n_workers; i++)
        say(in, in->workers[i]->name, &e, NULL, 0);
}

/* Version spans of a history as messages; the arrays are the caller's. */
static void fill_spans(const struct ledger_history *h, Longhaul__Experience__V1__VersionSpan *spans,
                       Longhaul__Experience__V1__PolicyVersion *versions,
                       Longhaul__Experience__V1__VersionSpan **pointers)
{
    for (uint32_t i = 0; i < h->n_spans; i++) {
        longhaul__experience__v1__policy_version__init(&versions[i]);
        versions[i].step = h->spans[i].step;
        versions[i].id = (ProtobufCBinaryData){16, h->spans[i].id};
        longhaul__experience__v1__version_span__init(&spans[i]);
        spans[i].first = h->spans[i].first;
        spans[i].version = &versions[i];
        pointers[i] = &spans[i];
    }
}

/* Sends an assignment whose resumed part is `h`. */
static int send_assign(struct intake *in, struct trajectory *t, Longhaul__Experience__V1__Assign *a,
                       const struct ledger_history *h, struct lh_error *err)
{
    Longhaul__Experience__V1__Envelope e = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;
    lh_autofree Longhaul__Experience__V1__VersionSpan *spans =
        calloc(h->n_spans + 1, sizeof *spans);
    lh_autofree Longhaul__Experience__V1__PolicyVersion *versions =
        calloc(h->n_spans + 1, sizeof *versions);
    lh_autofree Longhaul__Experience__V1__VersionSpan **pointers =
        calloc(h->n_spans + 1, sizeof(Longhaul__Experience__V1__VersionSpan *));
    const struct channel_frame frames[] = {
        {h->token, h->n * sizeof *h->token},
        {h->logprob, h->n * sizeof *h->logprob},
        {h->mask, h->n},
    };

    if (!spans || !versions || !pointers)
        return lh_fail_errno(err, ENOMEM, "assigning %s", t->row.id);
    fill_spans(h, spans, versions, pointers);
    a->n_resume_versions = h->n_spans;
    a->resume_versions = pointers;
    a->resume_tokens = h->n;
    a->resume_turn = h->turns;
    a->resume_snapshot = (char *)h->snapshot;
    a->resume_agent_ms = (uint64_t)h->agent_ms;
    e.body_case = LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_ASSIGN;
    e.assign = a;
    say(in, t->worker->name, &e, frames, h->n ? LH_ARRAY_SIZE(frames) : 0);
    t->sent_ms = lh_now_ms();
    return 0;
}

static int assign(struct intake *in, struct trajectory *t, struct lh_error *err)
{
    const struct group *g = t->group;
    const struct intake_round *spec = &g->round->spec;
    Longhaul__Experience__V1__Assign a = LONGHAUL__EXPERIENCE__V1__ASSIGN__INIT;
    Longhaul__Experience__V1__PolicyVersion v = LONGHAUL__EXPERIENCE__V1__POLICY_VERSION__INIT;
    struct ledger_history h = {0};
    char group_id[LH_ID_SIZE];
    int r = t->row.turns ? ledger_read_history(in->ledger, t->row.id, &h, err) : 0;

    if (r < 0)
        return r;
    plan_trajectory_id(in->job_id, spec->name, g->row.index, UINT32_MAX, group_id);
    v.step = in->version_step;
    v.id = (ProtobufCBinaryData){16, in->version_id};
    a.trajectory = t->row.id;
    a.group = group_id;
    a.member = t->row.member;
    a.attempt = t->row.attempt;
    a.task = g->task->name;
    a.task_digest = (ProtobufCBinaryData){16, (uint8_t *)g->task->digest};
    a.seed = t->row.seed;
    a.mode = spec->mode;
    a.temperature = spec->temperature;
    a.version = &v;
    a.budgets = &in->options.budgets;
    a.blank_first_observation = spec->blank_first_observation;
    r = send_assign(in, t, &a, &h, err);
    ledger_history_finish(&h);
    return r;
}

/* NULL when every worker is full. */
static struct worker *least_loaded(struct intake *in)
{
    struct worker *best = NULL;

    for (size_t i = 0; i < in->n_workers; i++) {
        struct worker *w = in->workers[i];
        if (w->alive && w->held < w->capacity && (!best || w->held < best->held))
            best = w;
    }
    return best;
}

static int dispatch_one(struct intake *in, struct trajectory *t, int64_t now, struct lh_error *err)
{
    if (t->row.state != TRAJECTORY_OPEN || t->cleaning)
        return 0;
    if (t->worker)
        return t->listed || now - t->sent_ms < in->options.repeat_ms ? 0 : assign(in, t, err);
    t->worker = least_loaded(in);
    if (!t->worker) /* nobody has room */
        return 0;
    t->worker->held++;
    return assign(in, t, err);
}

int intake_dispatch(struct intake *in, struct lh_error *err)
{
    int64_t now = lh_now_ms();

    for (size_t r = 0; r < in->n_rounds; r++) {
        struct round *round = in->rounds[r];
        for (size_t g = 0; g < round->n_groups; g++) {
            if (round->groups[g]->row.state != GROUP_DISPATCHED)
                continue;
            for (uint32_t m = 0; m < round->spec.members; m++) {
                int e = dispatch_one(in, &round->groups[g]->members[m], now, err);
                if (e < 0)
                    return lh_wrap(err, "dispatch");
            }
        }
    }
    return 0;
}
