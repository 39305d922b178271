/* The world's end of the channel: hands out, takes in, insists on the rules. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <string.h>

#include "proto/clock.h"
#include "world.h"

enum { REPEAT_MS = 400 };

struct episode *world_begin(struct world *w, const char *task, int mode, uint64_t seed)
{
    struct episode *e = &w->episodes[w->n_episodes++];

    cr_assert(le(sz, w->n_episodes, WORLD_EPISODES));
    *e = (struct episode){.task = task, .seed = seed, .mode = mode, .attempt = 1};
    lh_id_new_text(e->id);
    return e;
}

void world_forget(struct world *w)
{
    for (size_t i = 0; i < w->n_episodes; i++)
        transcript_finish(&w->episodes[i].got);
    w->n_episodes = 0;
}

static void assign(struct world *w, struct episode *e)
{
    Longhaul__Experience__V1__Assign a = LONGHAUL__EXPERIENCE__V1__ASSIGN__INIT;
    Longhaul__Experience__V1__PolicyVersion v = LONGHAUL__EXPERIENCE__V1__POLICY_VERSION__INIT;
    Longhaul__Experience__V1__Envelope env = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;
    Longhaul__Experience__V1__Budgets budgets = LONGHAUL__EXPERIENCE__V1__BUDGETS__INIT;
    struct channel_frame frames[] = {
        {e->got.tokens, e->got.n * sizeof(int32_t)},
        {e->got.logprobs, e->got.n * sizeof(float)},
        {e->got.mask, e->got.n},
    };

    v.step = w->step;
    a.trajectory = e->id;
    a.group = e->id;
    a.attempt = e->attempt;
    a.task = (char *)e->task;
    a.seed = e->seed;
    a.mode = (Longhaul__Experience__V1__Mode)e->mode;
    a.temperature = 1;
    a.version = &v;
    budgets.turns = e->turns_limit;
    a.budgets = &budgets;
    a.blank_first_observation = e->blank;
    a.resume_tokens = (uint32_t)e->got.n;
    a.resume_turn = e->turns;
    a.resume_snapshot = e->snapshot;
    a.resume_agent_ms = e->agent_ms;
    env.body_case = LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_ASSIGN;
    env.assign = &a;
    channel_intake_send(w->intake, "rollout-0", &env, frames, e->got.n ? 3 : 0, NULL);
    e->sent_ms = lh_now_ms();
}

static void settle(struct world *w, struct episode *e)
{
    Longhaul__Experience__V1__Settled s = LONGHAUL__EXPERIENCE__V1__SETTLED__INIT;
    Longhaul__Experience__V1__Envelope env = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;

    s.trajectory = e->id;
    env.body_case = LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_SETTLED;
    env.settled = &s;
    channel_intake_send(w->intake, "rollout-0", &env, NULL, 0, NULL);
}

static struct episode *find(struct world *w, const char *id)
{
    for (size_t i = 0; i < w->n_episodes; i++)
        if (!strcmp(w->episodes[i].id, id))
            return &w->episodes[i];
    return NULL;
}

static void on_segment(struct world *w, const struct channel_message *m)
{
    const Longhaul__Experience__V1__Segment *s = m->envelope->segment;
    struct episode *e = find(w, s->trajectory);

    if (!e || s->attempt != e->attempt)
        return;
    cr_assert(eq(u32, s->turn, e->turns));
    cr_assert(eq(sz, s->first_token, e->got.n));
    cr_assert(eq(sz, m->n_frames, 3));
    cr_assert(eq(sz, m->frames[0].len, s->tokens * sizeof(int32_t)));
    cr_assert(eq(int, s->last, !*s->snapshot), "a commit point has a snapshot, the end has none");
    cr_assert(ge(u64, s->agent_ms, e->agent_ms), "the agent's clock never goes back");
    if (s->last) {
        e->last = true;
        e->committed = e->got.n;
    } else {
        e->agent_ms = s->agent_ms;
        e->snapshots++;
        strncpy(e->snapshot, s->snapshot, sizeof e->snapshot - 1);
    }
    cr_assert(eq(int,
                 transcript_restore(&e->got, m->frames[0].data, m->frames[1].data,
                                    m->frames[2].data, s->tokens, NULL),
                 0));
    e->turns++;
}

/* The last segment is dead until DONE: no part of what the next attempt gets. */
static void next_attempt(struct episode *e)
{
    e->attempt++;
    e->listed = false;
    if (!e->last)
        return;
    e->last = false;
    e->turns--;
    for (; e->got.n > e->committed; e->got.n--)
        e->got.sampled -= e->got.mask[e->got.n - 1];
}

static void on_done(struct world *w, const struct channel_message *m)
{
    const Longhaul__Experience__V1__Done *d = m->envelope->done;
    struct episode *e = find(w, d->trajectory);

    if (!e || d->attempt != e->attempt)
        return;
    if (d->verdict->kind == LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_INVALID) {
        fprintf(stderr, "invalid: %s: %s\n", d->verdict->code, d->verdict->message);
        e->infra++;
        e->outages += d->verdict->outage;
        next_attempt(e);
        return;
    }
    cr_assert(eq(u32, d->turns, e->turns));
    cr_assert(eq(sz, d->tokens, e->got.n));
    cr_assert(eq(sz, d->sampled_tokens, e->got.sampled));
    e->done = true;
    e->verdict = d->verdict->kind;
    e->reward = d->verdict->reward;
    e->finish = d->finish;
}

static void on_heartbeat(struct world *w, const Longhaul__Experience__V1__Heartbeat *h)
{
    bool listed[WORLD_EPISODES] = {0};

    w->tokens_decoded = h->tokens_decoded;
    w->spilled_bytes = h->spilled_bytes;
    w->hibernated = h->hibernated;
    for (size_t i = 0; i < h->n_trajectories; i++) {
        struct episode *e = find(w, h->trajectories[i]);
        if (!e)
            continue;
        listed[e - w->episodes] = e->listed = true;
        if (e->done)
            settle(w, e);
    }
    for (size_t i = 0; i < w->n_episodes; i++)
        if (w->episodes[i].done && !listed[i])
            w->episodes[i].settled = true;
}

/* What a worker's last instance held is handed out again, from its last commit point. */
static void on_instance(struct world *w, const char *instance)
{
    if (!strcmp(w->instance, instance))
        return;
    if (*w->instance)
        for (size_t i = 0; i < w->n_episodes; i++) {
            struct episode *e = &w->episodes[i];
            if (!e->done)
                next_attempt(e); /* also one that began and was not listed yet */
            e->listed = false;
        }
    strcpy(w->instance, instance);
}

static void take(struct world *w, const struct channel_message *m)
{
    on_instance(w, m->envelope->instance);
    switch (m->envelope->body_case) {
    case LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_SEGMENT:
        on_segment(w, m);
        break;
    case LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_DONE:
        on_done(w, m);
        break;
    case LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_HEARTBEAT:
        on_heartbeat(w, m->envelope->heartbeat);
        break;
    default:
        break;
    }
    if (m->envelope->seq)
        channel_intake_ack(w->intake, m, NULL);
}

void world_turn(struct world *w, int timeout_ms)
{
    struct channel_message *m = channel_intake_recv(w->intake, timeout_ms, NULL);

    if (m)
        take(w, m);
    channel_message_free(m);
    for (size_t i = 0; i < w->n_episodes && *w->instance; i++) {
        struct episode *e = &w->episodes[i];
        if (!e->done && !e->listed && lh_now_ms() - e->sent_ms > REPEAT_MS)
            assign(w, e);
    }
}

void world_finish(struct world *w, int seconds)
{
    int64_t deadline = lh_now_ms() + seconds * 1000;

    for (;;) {
        size_t settled = 0;
        world_turn(w, 50);
        for (size_t i = 0; i < w->n_episodes; i++)
            settled += w->episodes[i].settled;
        if (settled == w->n_episodes)
            return;
        cr_assert(lt(i64, lh_now_ms(), deadline), "%zu of %zu episodes settled", settled,
                  w->n_episodes);
    }
}
