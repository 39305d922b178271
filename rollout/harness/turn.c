/* The part of a trajectory that blocks: its sandbox, its commit points, its verdict.
 *
 * Whose fault something is decides everything.  What the agent does (nonsense, time or memory used
 * up, its sandbox killed) is judged by the verifier.  What the machinery does is a verdict INVALID
 * with a code, which the intake retries and which never becomes a reward (I8).  And what a daemon's
 * outage does is marked as such, because it must not use up what the task may cost in retries. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "proto/parse.h"
#include "rollout/harness/layout.h"
#include "rollout/harness/report.h"
#include "rollout/harness/trajectory.h"

LH_LOG_COMPONENT("rollout");

typedef Longhaul__Experience__V1__FinishReason Finish;
typedef Longhaul__Task__V1__Timeout Timeout;
typedef Longhaul__Task__V1__OnTimeout OnTimeout;

#define FINISH(name)     LONGHAUL__EXPERIENCE__V1__FINISH_REASON__FINISH_##name
#define ON_TIMEOUT(name) LONGHAUL__TASK__V1__ON_TIMEOUT__ON_TIMEOUT_##name
#define VERDICT(name)    LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_##name

enum {
    OBSERVATION_BYTES = 4096,
    SHOW_TIMEOUT_MS = 30000,
    BOOT_DEFAULT_MS = 10000,
    SETUP_DEFAULT_MS = 60000,
    ACTION_DEFAULT_MS = 30000,
    AGENT_DEFAULT_MS = 3600000,
    VERIFY_DEFAULT_MS = 60000,
    GRACE_MS = 30000, /* for agentenvd to come back */
};

static uint32_t limit_ms(const Timeout *t, uint32_t otherwise)
{
    return t && t->ms ? t->ms : otherwise;
}

static OnTimeout rule(const Timeout *t)
{
    return t && t->on_timeout ? t->on_timeout : ON_TIMEOUT(FAIL);
}

static const Longhaul__Task__V1__Timeouts *timeouts(const struct trajectory *t)
{
    static const Longhaul__Task__V1__Timeouts defaults = LONGHAUL__TASK__V1__TIMEOUTS__INIT;

    return t->task->task->timeouts ? t->task->task->timeouts : &defaults;
}

/* ---- ends ---- */

static void report(struct trajectory *t, Longhaul__Task__V1__Verdict *verdict, Finish finish)
{
    struct lh_error err = {0};
    int r = verdict ? report_done(t, verdict, finish, &err)
                    : lh_fail(&err, LH_RESOURCE_EXHAUSTED, "no memory for a verdict");

    t->done = true;
    t->unreported = r < 0;
    if (r < 0)
        lh_warn("not_reported", "trajectory=%s error=%s", t->assign->trajectory, err.message);
    lh_message_free(verdict ? &verdict->base : NULL);
    sandbox_remove(&t->sandbox);
}

static void give_up(struct trajectory *t, const char *code, const struct lh_error *err, bool outage)
{
    lh_warn("infra", "trajectory=%s attempt=%u code=%s outage=%d error=%s", t->assign->trajectory,
            t->assign->attempt, code, outage, err->message);
    report(t, sandbox_invalid(code, err->message, outage), FINISH(UNSPECIFIED));
}

/* agentenvd was away (sandbox.h), or it failed at what the task asked for. */
static void end_invalid(struct trajectory *t, const char *code, const struct lh_error *err)
{
    give_up(t, code, err, err->code == LH_UNAVAILABLE);
}

/* Neither: the intake or this worker is in trouble. */
static void end_by_us(struct trajectory *t, const char *code, const struct lh_error *err)
{
    give_up(t, code, err, true);
}

/* A segment that no intake takes, or one that did not get away. */
static void end_unsent(struct trajectory *t, const struct lh_error *err)
{
    if (err->code == LH_OUT_OF_RANGE)
        end_invalid(t, "oversized", err);
    else
        end_by_us(t, "channel", err);
}

/* A phase of the agent's ran out of time and the task says it has failed by that. */
static Longhaul__Task__V1__Verdict *timeout_verdict(const char *phase)
{
    Longhaul__Task__V1__Verdict *v = sandbox_invalid(phase, "out of time", false);

    if (v)
        v->kind = VERDICT(TIMEOUT);
    return v;
}

/* Long enough for agentenvd's own clocks: it runs a verifier that breaks three times, the third
 * time in a sandbox made from the task. */
static int verify_ms(const struct trajectory *t)
{
    const Longhaul__Task__V1__Timeouts *limits = timeouts(t);

    return (int)(3 * limit_ms(limits->verify, VERIFY_DEFAULT_MS) +
                 limit_ms(limits->boot, BOOT_DEFAULT_MS) +
                 limit_ms(limits->setup, SETUP_DEFAULT_MS) + GRACE_MS);
}

static void end_judged(struct trajectory *t, Longhaul__Task__V1__Verdict *verdict, Finish finish)
{
    struct lh_error err = {0};
    uint64_t seq;

    if (!verdict)
        verdict = sandbox_verify(&t->sandbox, verify_ms(t), &err);
    if (verdict && verdict->kind != VERDICT(INVALID) &&
        report_segment(t, "", true, &seq, &err) < 0) {
        lh_message_free(&verdict->base);
        end_unsent(t, &err);
        return;
    }
    report(t, verdict, finish);
}

static void end_out_of_time(struct trajectory *t, const Timeout *phase, const char *code)
{
    struct lh_error err = {.message = "out of time"};

    if (rule(phase) == ON_TIMEOUT(INFRA_INVALID))
        end_invalid(t, code, &err);
    else
        end_judged(t, rule(phase) == ON_TIMEOUT(FAIL) ? timeout_verdict(code) : NULL,
                   FINISH(AGENT_TIMEOUT));
}

/* ---- budgets ---- */

static size_t left(size_t limit, size_t used)
{
    return limit > used ? limit - used : 0;
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Room for the tokens of a turn behind TOKEN_ASSISTANT. */
size_t trajectory_turn_room(const struct trajectory *t)
{
    const Longhaul__Experience__V1__Budgets *b = &t->budgets;

    if (t->turn >= b->turns)
        return 0;
    return least(least(b->turn_tokens, left(b->total_tokens, t->transcript.sampled)),
                 left(b->context_tokens, t->transcript.n + 1));
}

static Finish exhausted(const struct trajectory *t)
{
    const Longhaul__Experience__V1__Budgets *b = &t->budgets;

    if (t->transcript.n + 1 >= b->context_tokens)
        return FINISH(CONTEXT);
    return t->turn >= b->turns ? FINISH(TURNS) : FINISH(TOKENS);
}

/* Why there is no turn after this one; UNSPECIFIED when there is. The next needs the observation's
 * mark, its own mark and at least one token. */
static Finish no_next_turn(const struct trajectory *t)
{
    const Longhaul__Experience__V1__Budgets *b = &t->budgets;

    if (t->turn + 1 >= b->turns)
        return FINISH(TURNS);
    if (t->transcript.sampled >= b->total_tokens)
        return FINISH(TOKENS);
    return t->transcript.n + 3 > b->context_tokens ? FINISH(CONTEXT) : FINISH(UNSPECIFIED);
}

static bool agent_out_of_time(const struct trajectory *t)
{
    return lh_now_ms() - t->started_ms > limit_ms(timeouts(t)->agent, AGENT_DEFAULT_MS);
}

/* ---- begin ---- */

static int restore(struct trajectory *t, struct lh_error *err)
{
    const Longhaul__Experience__V1__Assign *a = t->assign;
    const struct channel_frame *f = t->message->frames;
    size_t n = a->resume_tokens;

    if (t->message->n_frames != 3 || f[0].len != n * sizeof(int32_t) ||
        f[1].len != n * sizeof(float) || f[2].len != n)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "ASSIGN with %zu tokens has frames that do not fit", n);
    int r = transcript_restore(&t->transcript, f[0].data, f[1].data, f[2].data, n, err);
    for (size_t i = 0; r == 0 && i < a->n_resume_versions; i++) {
        const Longhaul__Experience__V1__VersionSpan *s = a->resume_versions[i];
        struct version_span span = {.first = s->first};
        if (!s->version || s->version->id.len != sizeof span.version.id)
            return lh_fail(err, LH_INVALID_ARGUMENT, "ASSIGN names a version without an id");
        span.version.step = s->version->step;
        memcpy(span.version.id, s->version->id.data, sizeof span.version.id);
        r = transcript_span(&t->transcript, &span, err);
    }
    t->committed = n;
    t->turn = a->resume_turn;
    return r;
}

static uint32_t smaller_set(uint32_t a, uint32_t b)
{
    return b && b < a ? b : a;
}

static void apply_task_budgets(struct trajectory *t)
{
    const Longhaul__Task__V1__Budgets *b = t->task->task->budgets;

    if (!b)
        return;
    t->budgets.context_tokens = smaller_set(t->budgets.context_tokens, b->context_tokens);
    t->budgets.turn_tokens = smaller_set(t->budgets.turn_tokens, b->turn_tokens);
    t->budgets.total_tokens = smaller_set(t->budgets.total_tokens, b->total_tokens);
    t->budgets.turns = smaller_set(t->budgets.turns, b->turns);
}

static int load_task(struct trajectory *t, struct lh_error *err)
{
    const ProtobufCBinaryData *want = &t->assign->task_digest;

    t->task = sandbox_task(t->agentenv, t->assign->task, SHOW_TIMEOUT_MS, err);
    if (!t->task)
        return err->code;
    if (!t->task->task)
        return lh_fail(err, LH_DATA_LOSS, "task %s is empty", t->assign->task);
    if (want->len &&
        (want->len != t->task->digest.len || memcmp(want->data, t->task->digest.data, want->len)))
        return lh_fail(err, LH_FAILED_PRECONDITION, "task %s has changed since it was assigned",
                       t->assign->task);
    if (t->task->task->n_tools)
        return lh_fail(err, LH_UNIMPLEMENTED,
                       "task %s brings tools; this harness has its shell only", t->assign->task);
    apply_task_budgets(t);
    return 0;
}

/* A demonstration does not: its next action is known. */
static bool thinks(const struct trajectory *t)
{
    return t->assign->mode != LONGHAUL__EXPERIENCE__V1__MODE__MODE_DEMONSTRATE;
}

static int start_sandbox(struct trajectory *t, struct lh_error *err)
{
    const Longhaul__Task__V1__Timeouts *limits = timeouts(t);
    int timeout = (int)limit_ms(limits->boot, BOOT_DEFAULT_MS) +
                  (int)limit_ms(limits->setup, SETUP_DEFAULT_MS) + GRACE_MS;
    int r = sandbox_init(&t->sandbox, t->agentenv, t->owner, t->assign->task, t->assign->attempt,
                         t->assign->resume_snapshot, err);

    t->sandbox.rest = thinks(t) ? t->rest : NULL;
    return r < 0 ? r : sandbox_start(&t->sandbox, timeout, err);
}

void turn_prepare(struct tool_job *job)
{
    struct trajectory *t = (struct trajectory *)job;
    struct lh_error err = {0};

    if (load_task(t, &err) < 0)
        return end_invalid(t, "task", &err);
    int r = t->assign->resume_tokens ? restore(t, &err)
                                     : layout_prompt(&t->transcript, t->task->task, &err);
    if (r < 0)
        return end_invalid(t, "prompt", &err);
    if (start_sandbox(t, &err) < 0)
        return end_invalid(t, "boot", &err);
    sandbox_rest(&t->sandbox);
}

/* ---- one turn ---- */

static int demonstrate(struct trajectory *t, struct lh_error *err)
{
    const Longhaul__Task__V1__Oracle *o = t->task->task->oracle;

    if (!o || t->turn >= o->n_actions)
        return lh_fail(err, LH_FAILED_PRECONDITION, "task %s has no oracle action %u",
                       t->assign->task, t->turn);
    size_t room = trajectory_turn_room(t);
    int r = layout_begin_turn(&t->transcript, err);
    t->turn_first = t->transcript.n;
    if (r == 0)
        r = layout_demonstrate(&t->transcript, o->actions[t->turn], t->turn + 1 == o->n_actions,
                               err);
    size_t n = t->transcript.n - t->turn_first;
    if (r == 0 && n > room)
        r = lh_fail(err, LH_FAILED_PRECONDITION,
                    "oracle action %u of task %s takes %zu tokens, the budgets leave %zu", t->turn,
                    t->assign->task, n, room);
    return r;
}

static int observe(struct trajectory *t, const struct sandbox_result *res, bool malformed,
                   struct lh_error *err)
{
    char text[OBSERVATION_BYTES + 1];
    struct observation o = {
        .output = res->output ? res->output : "",
        .len = res->len,
        .produced = res->produced,
        .status = res->status,
        .note = malformed        ? "!malformed"
                : res->timed_out ? "!timeout"
                                 : NULL,
    };
    size_t room = left(t->budgets.context_tokens, t->transcript.n + 3);
    size_t n = layout_observe(&o, text, least(room, OBSERVATION_BYTES));

    if (t->assign->blank_first_observation && t->turn == 0)
        n = 0;
    return layout_observation(&t->transcript, text, n, err);
}

static int remember_old(struct trajectory *t, const char *snapshot, uint64_t seq,
                        struct lh_error *err)
{
    struct old_snapshot *bigger;

    if (!*snapshot)
        return 0;
    bigger = reallocarray(t->old, t->n_old + 1, sizeof *bigger);
    if (!bigger)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a list of snapshots");
    t->old = bigger;
    snprintf(bigger[t->n_old].id, sizeof bigger->id, "%s", snapshot);
    bigger[t->n_old++].seq = seq;
    return 0;
}

/* The snapshot first, then the segment that names it. */
static void commit(struct trajectory *t)
{
    struct lh_error err = {0};
    uint64_t seq = 0;
    char before[sizeof t->sandbox.snapshot];

    memcpy(before, t->sandbox.snapshot, sizeof before);
    int r = sandbox_commit(&t->sandbox, t->turn, GRACE_MS, &err);
    if (r == LH_FAILED_PRECONDITION)
        return end_judged(t, NULL, FINISH(AGENT_DEATH));
    if (r < 0)
        return end_invalid(t, "snapshot", &err);
    if (report_segment(t, t->sandbox.snapshot, false, &seq, &err) < 0 ||
        remember_old(t, before, seq, &err) < 0)
        return end_unsent(t, &err);
    sandbox_rest(&t->sandbox);
}

static void go_on(struct trajectory *t, const struct sandbox_result *res, bool malformed)
{
    const Timeout *limit = timeouts(t)->action;
    struct lh_error err = {0};

    if (res->dead)
        return end_judged(t, NULL, FINISH(AGENT_DEATH));
    if (res->timed_out && limit && limit->on_timeout > ON_TIMEOUT(FAIL))
        return end_out_of_time(t, limit, "action");
    if (agent_out_of_time(t))
        return end_out_of_time(t, timeouts(t)->agent, "agent");
    Finish finish = no_next_turn(t);
    if (finish)
        return end_judged(t, NULL, finish);
    if (observe(t, res, malformed, &err) < 0)
        return end_by_us(t, "observation", &err);
    commit(t);
}

static void run_action(struct trajectory *t, const struct action *a)
{
    struct sandbox_result res = {0};
    struct lh_error err = {0};
    int r = 0;

    if (!a->malformed)
        r = sandbox_run(&t->sandbox, a->text, limit_ms(timeouts(t)->action, ACTION_DEFAULT_MS),
                        OBSERVATION_BYTES, &res, &err);
    if (r < 0)
        end_invalid(t, "action", &err);
    else if (a->end == ACTION_SUBMIT)
        end_judged(t, NULL, res.dead ? FINISH(AGENT_DEATH) : FINISH(SUBMITTED));
    else
        go_on(t, &res, a->malformed);
    free(res.output);
}

void turn_act(struct tool_job *job)
{
    struct trajectory *t = (struct trajectory *)job;
    struct lh_error err = {0};
    struct action a;

    if (t->assign->mode == LONGHAUL__EXPERIENCE__V1__MODE__MODE_DEMONSTRATE &&
        demonstrate(t, &err) < 0)
        return end_invalid(t, "demonstration", &err);
    if (layout_action(t->transcript.tokens + t->turn_first, t->transcript.n - t->turn_first, &a,
                      &err) < 0)
        return end_by_us(t, "memory", &err);
    if (a.end == ACTION_CUT)
        end_judged(t, NULL,
                   t->transcript.n >= t->budgets.context_tokens ? FINISH(CONTEXT) : FINISH(TOKENS));
    else
        run_action(t, &a);
    free(a.text);
}

void turn_refuse(struct tool_job *job)
{
    struct trajectory *t = (struct trajectory *)job;

    end_judged(t, NULL, exhausted(t));
}
