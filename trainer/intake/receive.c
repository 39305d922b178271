/* What workers send: a batch of messages is one transaction of the ledger, then all are
 * acknowledged.
 *
 * Three kinds of trouble are told apart.  A message of a superseded attempt changes nothing and is
 * acknowledged, so that it is not sent for ever.  A message that contradicts the ledger (wrong
 * turn, wrong length, no verdict) costs its trajectory the attempt.  A failure of the ledger itself
 * ends the job: nothing of the batch is acknowledged.
 *
 * An attempt that a daemon's outage ended is not held against its trajectory, which goes on from
 * its last turn.  One that met OUTAGES_MAX of them without coming on by a turn stands where nothing
 * works; those after are counted like any failure, so that a job ends. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "trainer/intake/intake_private.h"

LH_LOG_COMPONENT("intake");

enum { OUTAGES_MAX = 20 }; /* each took half a minute and more */

typedef Longhaul__Experience__V1__Envelope envelope;

/* Said after the commit: a SETTLED before it could release a snapshot that recovery needs. */
struct reply {
    enum { SAY_NOTHING, SAY_SETTLED, SAY_CANCEL } kind;
    const char *trajectory; /* in the message */
    uint32_t attempt;
};

/* The trajectory if this worker is to work on this attempt of it; else NULL and what to reply. */
static struct trajectory *current(struct intake *in, const struct worker *w, const char *id,
                                  uint32_t attempt, struct reply *reply)
{
    struct trajectory *t = intake_find_trajectory(in, id);
    struct ledger_trajectory row;
    struct lh_error err = {0};

    if (t && t->worker == w && t->row.attempt == attempt && t->row.state == TRAJECTORY_OPEN)
        return t;
    bool done =
        t ? t->row.state == TRAJECTORY_DONE
          : ledger_find_trajectory(in->ledger, id, &row, &err) == 0 && row.state == TRAJECTORY_DONE;
    *reply = (struct reply){done ? SAY_SETTLED : SAY_CANCEL, id, attempt};
    return NULL;
}

static int give_up_attempt(struct intake *in, struct trajectory *t, struct intake_infra *why,
                           struct lh_error *err)
{
    why->trajectory = t->row.id;
    why->attempt = t->row.attempt;
    why->outage = why->outage && t->outages < OUTAGES_MAX;
    lh_warn("invalid", "trajectory=%s attempt=%u code=%s outage=%d message=%s", why->trajectory,
            why->attempt, why->code, why->outage, why->message);
    *(why->outage ? &in->outages : &in->invalid) += 1;
    t->outages += why->outage;
    if (in->options.on_infra)
        in->options.on_infra(in->options.ctx, why);
    return intake_retry(in, t, !why->outage, err);
}

/* What it sent cannot be. */
static int refuse(struct intake *in, struct trajectory *t, const char *code,
                  const struct lh_error *why, struct lh_error *err)
{
    return give_up_attempt(in, t, &(struct intake_infra){.code = code, .message = why->message},
                           err);
}

/* ---- SEGMENT ---- */

static int read_spans(const Longhaul__Experience__V1__Segment *s, struct ledger_span *to,
                      struct lh_error *err)
{
    for (size_t i = 0; i < s->n_versions; i++) {
        const Longhaul__Experience__V1__VersionSpan *v = s->versions[i];
        if (!v->version || v->version->id.len != 16 || v->first > s->first_token + s->tokens)
            return lh_fail(err, LH_INVALID_ARGUMENT, "version span %zu is not one", i);
        to[i] = (struct ledger_span){.first = v->first, .step = v->version->step};
        memcpy(to[i].id, v->version->id.data, 16);
    }
    return 0;
}

/* What is stored is trained on, again after every resume: a number that is none would end the job
 * each time. */
static int check_values(const struct channel_message *m, uint32_t tokens, struct lh_error *err)
{
    const float *logprob = m->frames[1].data;
    const uint8_t *mask = m->frames[2].data;

    for (uint32_t i = 0; i < tokens; i++)
        if (mask[i] > 1 || (mask[i] && !isfinite(logprob[i])))
            return lh_fail(err, LH_INVALID_ARGUMENT, "token %u has mask %u and log-probability %g",
                           i, mask[i], (double)logprob[i]);
    return 0;
}

static int refuse_oversized(struct intake *in, struct trajectory *t, struct lh_error *err)
{
    struct lh_error why;

    lh_fail(&why, LH_OUT_OF_RANGE, "a message of the trajectory is larger than the intake takes");
    return refuse(in, t, "oversized", &why, err);
}

static int store_segment(struct intake *in, const struct channel_message *m, struct lh_error *err)
{
    const Longhaul__Experience__V1__Segment *s = m->envelope->segment;
    lh_autofree struct ledger_span *spans = calloc(s->n_versions + 1, sizeof *spans);

    if (!spans)
        return lh_fail_errno(err, ENOMEM, "segment of %s", s->trajectory);
    if (m->n_frames != 3 || m->frames[0].len != s->tokens * 4ul ||
        m->frames[1].len != s->tokens * 4ul || m->frames[2].len != s->tokens)
        return lh_fail(err, LH_INVALID_ARGUMENT, "the frames do not hold %u tokens", s->tokens);
    if (!isfinite(s->temperature))
        return lh_fail(err, LH_INVALID_ARGUMENT, "the temperature is not a number");
    if (check_values(m, s->tokens, err) < 0 || read_spans(s, spans, err) < 0)
        return LH_INVALID_ARGUMENT;
    const struct ledger_segment row = {
        .trajectory = s->trajectory,
        .attempt = s->attempt,
        .turn = s->turn,
        .first_token = s->first_token,
        .tokens = s->tokens,
        .token = m->frames[0].data,
        .logprob = m->frames[1].data,
        .mask = m->frames[2].data,
        .spans = spans,
        .n_spans = (uint32_t)s->n_versions,
        .snapshot = s->snapshot,
        .temperature = s->temperature,
        .agent_ms = (int64_t)(s->agent_ms & INT64_MAX),
        .last = s->last,
    };
    return ledger_append(in->ledger, &row, err);
}

static bool peer_is_wrong(int code)
{
    return code == LH_INVALID_ARGUMENT || code == LH_OUT_OF_RANGE || code == LH_ALREADY_EXISTS ||
           code == LH_ABORTED;
}

static int on_segment(struct intake *in, struct worker *w, const struct channel_message *m,
                      struct reply *reply, struct lh_error *err)
{
    const Longhaul__Experience__V1__Segment *s = m->envelope->segment;
    struct trajectory *t = current(in, w, s->trajectory, s->attempt, reply);
    struct lh_error why = {0};

    if (!t)
        return 0;
    if (m->oversized) {
        *reply = (struct reply){SAY_CANCEL, s->trajectory, s->attempt};
        return refuse_oversized(in, t, err);
    }
    int r = store_segment(in, m, &why);
    if (peer_is_wrong(r))
        return refuse(in, t, "segment", &why, err);
    if (r < 0)
        return lh_fail(err, r, "%s", why.message);
    if (r == 0) {
        in->committed++;
        t->row.turns++;
        t->row.tokens += s->tokens;
        t->outages = 0;
    }
    t->listed = true;
    t->listed_ms = lh_now_ms();
    return 0;
}

/* ---- DONE ---- */

static int finish(struct intake *in, struct trajectory *t, const Longhaul__Experience__V1__Done *d,
                  struct lh_error *err)
{
    const bool scored = d->verdict->kind == LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_SCORED;
    const struct ledger_done row = {
        .trajectory = d->trajectory,
        .attempt = d->attempt,
        .kind = (int)d->verdict->kind,
        .reward = scored ? d->verdict->reward : 0, /* the rule said: out of time is a failure */
        .passed = scored && d->verdict->passed,
        .code = d->verdict->code,
        .message = d->verdict->message,
        .finish = (int)d->finish,
        .turns = d->turns,
        .tokens = d->tokens,
        .sampled = d->sampled_tokens,
        .wall_ms = d->wall_ms,
    };
    struct lh_error why = {0};
    int r = ledger_finish_trajectory(in->ledger, &row, &why);

    if (peer_is_wrong(r))
        return refuse(in, t, "done", &why, err);
    if (r < 0)
        return lh_fail(err, r, "%s", why.message);
    in->committed++;
    t->row.state = TRAJECTORY_DONE;
    t->worker->held--;
    t->worker = NULL;
    return intake_group_done(in, t->group, err);
}

static bool is_verdict(const Longhaul__Task__V1__Verdict *v)
{
    return v &&
           (v->kind == LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_TIMEOUT ||
            (v->kind == LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_SCORED && isfinite(v->reward)));
}

static int on_done(struct intake *in, struct worker *w, const struct channel_message *m,
                   struct reply *reply, struct lh_error *err)
{
    const Longhaul__Experience__V1__Done *d = m->envelope->done;
    struct trajectory *t = current(in, w, d->trajectory, d->attempt, reply);

    if (!t)
        return 0;
    if (!is_verdict(d->verdict)) {
        struct intake_infra why = {.code = "verdict", .message = "DONE without a verdict"};
        if (d->verdict)
            why = (struct intake_infra){.code = d->verdict->code,
                                        .message = d->verdict->message,
                                        .outage = d->verdict->outage};
        *reply = (struct reply){SAY_CANCEL, d->trajectory, d->attempt};
        return give_up_attempt(in, t, &why, err);
    }
    *reply = (struct reply){SAY_SETTLED, d->trajectory, d->attempt};
    return finish(in, t, d, err);
}

/* ---- HELLO, HEARTBEAT ---- */

/* The list is what the worker holds; the answer is what it should not hold. */
static void answer_listed(struct intake *in, struct worker *w, const char *id, int64_t now)
{
    struct trajectory *t = intake_find_trajectory(in, id);
    struct ledger_trajectory row = {.state = TRAJECTORY_DROPPED, .attempt = UINT32_MAX};
    struct lh_error err = {0};

    if (t && t->worker == w) {
        t->listed = true;
        t->listed_ms = now;
        return;
    }
    if (t)
        row = t->row;
    else if (ledger_find_trajectory(in->ledger, id, &row, &err) < 0)
        row.attempt = UINT32_MAX;
    if (row.state == TRAJECTORY_DONE)
        intake_say_settled(in, w->name, id);
    else
        intake_say_cancel(in, w->name, id,
                          row.state == TRAJECTORY_OPEN ? row.attempt - 1 : UINT32_MAX);
}

static void on_heartbeat(struct intake *in, struct worker *w,
                         const Longhaul__Experience__V1__Heartbeat *h)
{
    int64_t now = lh_now_ms();

    intake_heartbeat(w, h);
    for (size_t i = 0; i < h->n_trajectories; i++)
        answer_listed(in, w, h->trajectories[i], now);
}

static int receive_one(struct intake *in, const struct channel_message *m, struct reply *reply,
                       struct lh_error *err)
{
    const envelope *e = m->envelope;
    struct worker *w = intake_worker(in, m->peer);

    if (!w)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "too many workers, %s is one more", m->peer);
    int r = intake_worker_instance(in, w, e->instance, err);
    if (r < 0)
        return r;
    switch (e->body_case) {
    case LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_HELLO:
        w->capacity = e->hello->capacity;
        return 0;
    case LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_HEARTBEAT:
        on_heartbeat(in, w, e->heartbeat);
        return 0;
    case LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_SEGMENT:
        return on_segment(in, w, m, reply, err);
    case LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_DONE:
        return on_done(in, w, m, reply, err);
    default:
        lh_warn("message", "worker=%s kind=%d reason=not-for-the-intake", m->peer,
                (int)e->body_case);
        return 0;
    }
}

static void acknowledge(struct intake *in, const struct channel_message *m,
                        const struct reply *reply)
{
    struct lh_error err = {0};

    if (m->envelope->seq && channel_intake_ack(in->channel, m, &err) < 0)
        lh_debug("ack", "worker=%s %s", m->peer, err.message);
    if (reply->kind == SAY_SETTLED)
        intake_say_settled(in, m->peer, reply->trajectory);
    if (reply->kind == SAY_CANCEL)
        intake_say_cancel(in, m->peer, reply->trajectory, reply->attempt);
}

int intake_receive(struct intake *in, struct channel_message **m, size_t n, struct lh_error *err)
{
    struct reply replies[INTAKE_MESSAGES] = {0};
    int r = ledger_begin(in->ledger, err);

    for (size_t i = 0; i < n && r == 0; i++)
        r = receive_one(in, m[i], &replies[i], err);
    if (r == 0)
        r = intake_watch_workers(in, err);
    if (r == 0)
        r = intake_fill_rounds(in, err);
    if (r < 0) {
        ledger_rollback(in->ledger);
        return r;
    }
    r = ledger_commit(in->ledger, err);
    for (size_t i = 0; i < n && r == 0; i++)
        acknowledge(in, m[i], &replies[i]);
    return r;
}
