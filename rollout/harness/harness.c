#include "rollout/harness/harness.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/parse.h"
#include "rollout/harness/clean.h"
#include "rollout/harness/layout.h"
#include "rollout/harness/trajectory.h"

LH_LOG_COMPONENT("rollout");

typedef Longhaul__Experience__V1__Assign Assign;
typedef Longhaul__Experience__V1__Envelope Envelope;

#define BODY(name) LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_##name
#define MODE(name) LONGHAUL__EXPERIENCE__V1__MODE__MODE_##name

struct harness {
    struct harness_options o;
    struct engine *engine;
    struct trajectory *list; /* in order of arrival */
};

struct harness *harness_create(const struct harness_options *o, struct lh_error *err)
{
    struct harness *h = calloc(1, sizeof *h);

    if (!h)
        return lh_fail_errno(err, ENOMEM, "harness"), NULL;
    h->o = *o;
    return h;
}

static void free_trajectory(struct harness *h, struct trajectory *t)
{
    if (t->sequence)
        engine_close(h->engine, t->sequence);
    channel_message_free(t->message);
    channel_message_free(t->successor);
    lh_message_free(t->task ? &t->task->base : NULL);
    sandbox_finish(&t->sandbox);
    transcript_finish(&t->transcript);
    free(t->owner);
    free(t->old);
    free(t);
}

void harness_use_engine(struct harness *h, struct engine *engine)
{
    h->engine = engine;
}

void harness_destroy(struct harness *h)
{
    struct trajectory *next;

    if (!h)
        return;
    for (struct tool_job *j; (j = tools_finished(h->o.tools));)
        clean_finished(j);
    for (struct trajectory *t = h->list; t; t = next) {
        next = t->next;
        free_trajectory(h, t);
    }
    free(h);
}

static void clean(struct harness *h, const struct trajectory *t, enum clean_what what,
                  const char *id)
{
    struct clean c = {what, t->owner, id, t->assign->attempt};

    clean_submit(h->o.tools, h->o.agentenv, &c);
}

/* ---- arrival ---- */

static struct trajectory **find(struct harness *h, const char *name)
{
    struct trajectory **at = &h->list;

    while (*at && strcmp((*at)->assign->trajectory, name))
        at = &(*at)->next;
    return at;
}

static uint32_t or_default(uint32_t value, uint32_t otherwise)
{
    return value ? value : otherwise;
}

static void set_budgets(struct trajectory *t, const Longhaul__Experience__V1__Budgets *job)
{
    const Longhaul__Experience__V1__Budgets none = LONGHAUL__EXPERIENCE__V1__BUDGETS__INIT;
    const Longhaul__Experience__V1__Budgets *b = t->assign->budgets ? t->assign->budgets : &none;

    t->budgets = none;
    t->budgets.context_tokens = or_default(b->context_tokens, job->context_tokens);
    t->budgets.turn_tokens = or_default(b->turn_tokens, job->turn_tokens);
    t->budgets.total_tokens = or_default(b->total_tokens, job->total_tokens);
    t->budgets.turns = or_default(b->turns, job->turns);
    if (t->budgets.context_tokens > job->context_tokens)
        t->budgets.context_tokens = job->context_tokens; /* what the KV budget was checked for */
}

static void submit(struct harness *h, struct trajectory *t, void (*run)(struct tool_job *))
{
    t->state = TRAJECTORY_IN_TOOL;
    t->job.run = run;
    tools_submit(h->o.tools, &t->job);
}

/* Takes over m. */
static void begin(struct harness *h, struct channel_message *m)
{
    struct trajectory *t = calloc(1, sizeof *t);
    const Assign *a = m->envelope->assign;

    if (t)
        t->owner = lh_format("%s/%s", h->o.job_id, a->trajectory);
    if (!t || !t->owner) {
        free(t);
        channel_message_free(m); /* the intake repeats it */
        return;
    }
    t->message = m;
    t->assign = a;
    t->agentenv = h->o.agentenv;
    t->channel = h->o.channel;
    t->rest = h->o.rest;
    t->started_ms = lh_now_ms() - (int64_t)a->resume_agent_ms;
    set_budgets(t, &h->o.budgets);
    struct trajectory **at = &h->list;
    while (*at)
        at = &(*at)->next;
    *at = t;
    submit(h, t, turn_prepare);
}

/* ---- end ---- */

static void remove_from_list(struct harness *h, struct trajectory *t)
{
    struct trajectory **at = find(h, t->assign->trajectory);
    struct channel_message *next = lh_steal(&t->successor);

    *at = t->next;
    free_trajectory(h, t);
    if (next)
        begin(h, next);
}

/* Dropped: another attempt goes on from the snapshots, so only the sandbox goes. */
static void drop(struct harness *h, struct trajectory *t)
{
    if (*t->sandbox.id)
        clean(h, t, CLEAN_SANDBOX, t->sandbox.id);
    remove_from_list(h, t);
}

static void settle(struct harness *h, struct trajectory *t)
{
    clean(h, t, CLEAN_ALL, "");
    remove_from_list(h, t);
}

static unsigned working(const struct harness *h)
{
    unsigned n = 0;

    for (const struct trajectory *t = h->list; t; t = t->next)
        n += t->state != TRAJECTORY_REPORTED;
    return n;
}

static bool acceptable(const Assign *a)
{
    bool sampled = a->mode == MODE(SAMPLE);

    return lh_id_text_valid(a->trajectory) && a->attempt && *a->task &&
           (a->mode == MODE(DEMONSTRATE) || a->mode == MODE(GREEDY) || sampled) &&
           (!sampled || a->temperature > 0);
}

static bool in_tool(const struct trajectory *t)
{
    return t->state == TRAJECTORY_IN_TOOL;
}

static void receive_assign(struct harness *h, struct channel_message *m)
{
    const Assign *a = m->envelope->assign;
    struct trajectory *t = *find(h, a->trajectory);

    if (!acceptable(a)) {
        lh_warn("assign_refused", "trajectory=%s attempt=%u mode=%d", a->trajectory, a->attempt,
                (int)a->mode);
    } else if (t && a->attempt > t->assign->attempt) {
        channel_message_free(t->successor);
        t->successor = lh_steal(&m);
        t->cancelled = true;
        if (!in_tool(t))
            drop(h, t);
    } else if (!t && working(h) < h->o.capacity) {
        begin(h, lh_steal(&m));
    }
    channel_message_free(m);
}

static void receive_cancel(struct harness *h, const Longhaul__Experience__V1__Cancel *c)
{
    struct trajectory *t = *find(h, c->trajectory);

    if (!t || t->assign->attempt > c->attempt)
        return;
    t->cancelled = true;
    if (!in_tool(t))
        drop(h, t);
}

static void receive_settled(struct harness *h, const char *name)
{
    struct trajectory *t = *find(h, name);

    if (!t)
        return;
    t->settled = true;
    if (!in_tool(t))
        settle(h, t);
}

void harness_receive(struct harness *h, struct channel_message *m)
{
    const Envelope *e = m->envelope;

    switch (e->body_case) {
    case BODY(ASSIGN):
        receive_assign(h, m);
        return;
    case BODY(CANCEL):
        receive_cancel(h, e->cancel);
        break;
    case BODY(SETTLED):
        receive_settled(h, e->settled->trajectory);
        break;
    default:
        break;
    }
    channel_message_free(m);
}

/* ---- progress ---- */

static bool engine_serves(const struct harness *h, const struct trajectory *t)
{
    const Longhaul__Experience__V1__PolicyVersion *v = t->assign->version;

    return h->engine && !engine_paused(h->engine) &&
           engine_version(h->engine)->step >= (v ? v->step : 0);
}

static int open_sequence(struct harness *h, struct trajectory *t, struct lh_error *err)
{
    struct engine_sequence_spec spec = {
        .name = t->assign->trajectory,
        .transcript = &t->transcript,
        .seed = t->assign->seed,
        .temperature = t->assign->mode == MODE(GREEDY) ? 0 : t->assign->temperature,
        .resumed = t->assign->resume_tokens > 0,
        .owner = t,
    };

    if (!t->sequence)
        t->sequence = engine_open(h->engine, &spec, err);
    return t->sequence ? 0 : err->code;
}

/* Turns that run or wait there. */
static unsigned in_engine(const struct harness *h)
{
    unsigned n = 0;

    for (const struct trajectory *t = h->list; t; t = t->next)
        n += t->state == TRAJECTORY_THINKING;
    return n;
}

static bool begin_turn(struct harness *h, struct trajectory *t)
{
    struct lh_error err = {0};
    size_t room = trajectory_turn_room(t);

    if (!room) {
        submit(h, t, turn_refuse);
        return true;
    }
    if (t->assign->mode == MODE(DEMONSTRATE)) {
        submit(h, t, turn_act);
        return true;
    }
    if (!engine_serves(h, t))
        return false;
    if (open_sequence(h, t, &err) < 0 || layout_begin_turn(&t->transcript, &err) < 0) {
        lh_warn("turn_delayed", "trajectory=%s error=%s", t->assign->trajectory, err.message);
        return false;
    }
    t->turn_first = t->transcript.n;
    t->state = TRAJECTORY_THINKING;
    t->asked_ms = lh_now_ms();
    t->asked_in_engine = in_engine(h);
    engine_ask(h->engine, t->sequence, room);
    return true;
}

static void job_returned(struct harness *h, struct trajectory *t)
{
    t->state = !t->done ? TRAJECTORY_READY : t->unreported ? TRAJECTORY_LOST : TRAJECTORY_REPORTED;
    if (t->done && t->sequence) {
        engine_close(h->engine, t->sequence);
        t->sequence = NULL;
    }
    if (t->settled)
        settle(h, t);
    else if (t->cancelled || t->state == TRAJECTORY_LOST)
        drop(h, t);
}

static bool collect_jobs(struct harness *h)
{
    bool any = false;

    for (struct tool_job *j; (j = tools_finished(h->o.tools)); any = true) {
        if (!clean_finished(j))
            job_returned(h, (struct trajectory *)j);
    }
    return any;
}

static bool collect_turns(struct harness *h)
{
    bool any = false;

    for (struct engine_sequence *q; h->engine && (q = engine_turn_ended(h->engine)); any = true) {
        struct trajectory *t = engine_owner(q);
        if (h->o.rest)
            rest_note_turn(h->o.rest, lh_now_ms() - t->asked_ms, t->asked_in_engine);
        submit(h, t, turn_act);
    }
    if (any && h->o.rest)
        rest_note_queue(h->o.rest, in_engine(h));
    return any;
}

/* The list of old snapshots belongs to the job while there is one. */
static void release_old(struct harness *h, struct trajectory *t, uint64_t acked)
{
    size_t kept = 0;

    for (size_t i = 0; i < t->n_old; i++) {
        if (t->old[i].seq <= acked)
            clean(h, t, CLEAN_SNAPSHOT, t->old[i].id);
        else
            t->old[kept++] = t->old[i];
    }
    t->n_old = kept;
}

bool harness_poll(struct harness *h)
{
    uint64_t acked = channel_worker_acked(h->o.channel);
    bool any = collect_jobs(h);

    any |= collect_turns(h);
    for (struct trajectory *t = h->list; t; t = t->next) {
        if (in_tool(t))
            continue;
        release_old(h, t, acked);
        if (t->state == TRAJECTORY_READY)
            any |= begin_turn(h, t);
    }
    return any;
}

struct harness_counts harness_counts(const struct harness *h)
{
    struct harness_counts c = {0};

    for (const struct trajectory *t = h->list; t; t = t->next) {
        c.held++;
        c.in_tool += t->state == TRAJECTORY_IN_TOOL;
        c.wants_engine |= t->state == TRAJECTORY_READY || t->state == TRAJECTORY_THINKING;
    }
    return c;
}

size_t harness_names(const struct harness *h, char **names, size_t max)
{
    size_t n = 0;

    for (struct trajectory *t = h->list; t && n < max; t = t->next)
        names[n++] = t->assign->trajectory;
    return n;
}
