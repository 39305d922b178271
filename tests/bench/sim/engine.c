/* The engine as the throttle sees it: sequences that come and go, one budget of memory, passes that
 * decode a token of everybody and work on prompts besides.  It follows rollout/engine in what
 * decides speed: who is admitted (whoever waits longest, with a head start of the mean wait for
 * what is still on the device), who gives way (idle ones first, then the last in that order), that
 * a sequence is given its memory before its prefix is fetched, and that a checkpoint is at every
 * unit's end. What was carried over stands before what is new. */
#include "tests/bench/sim/engine.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

enum { MAX_RUNNING = 256, TRACE_RECORDS = 1 << 14, QUANTUM = 16 << 20 };

static int open_sequence(struct sequence *q, const struct sim_trajectory *t, struct lh_error *err)
{
    size_t tokens = t->prefix;

    for (unsigned i = 0; i < t->n_turns; i++)
        tokens += t->turns[i].observed + t->turns[i].sampled;
    *q = (struct sequence){.t = t, .phase = IDLE, .known = t->prefix, .ever = t->prefix};
    q->chain = malloc((tokens / 512 + 2) * sizeof *q->chain);
    return q->chain ? 0 : lh_fail_errno(err, ENOMEM, "hashes of %zu tokens", tokens);
}

int engine_init(struct engine *e, const struct sim_options *o, const struct sim_workload *w,
                struct lh_error *err)
{
    *e = (struct engine){.o = o, .model = o->model, .n = w->n, .machine.o = o, .turn_tokens = 256};
    e->last = &e->first;
    kv_lanes_init(&e->lanes, o->model->staging_bytes, QUANTUM, 0);
    kv_compute_init(&e->compute, o->model->pass_tokens);
    window_init(&e->window, MAX_RUNNING);
    e->vault = sim_vault_create(o->model, o->real_bytes, err);
    e->trace = e->vault ? kv_trace_create(o->trace, TRACE_RECORDS, err) : NULL;
    if (!e->trace)
        return LH_RESOURCE_EXHAUSTED;
    e->sequences = calloc(w->n, sizeof *e->sequences);
    e->rows = calloc(MAX_RUNNING, sizeof *e->rows);
    e->waits = calloc(w->turns, sizeof *e->waits);
    if (!e->sequences || !e->rows || !e->waits)
        return lh_fail_errno(err, ENOMEM, "%u sequences", w->n);
    unsigned at = 0;
    for (int carried = 1; carried >= 0; carried--)
        for (unsigned i = 0; i < w->n; i++) {
            if ((w->trajectories[i].prefix > 0) != carried)
                continue;
            int r = open_sequence(&e->sequences[at], &w->trajectories[i], err);
            if (r < 0)
                return r;
            restore_prefill_store(e, &e->sequences[at++]);
        }
    return 0;
}

void engine_finish(struct engine *e)
{
    for (unsigned i = 0; e->sequences && i < e->n; i++) {
        restore_forget(e, &e->sequences[i]);
        free(e->sequences[i].chain);
    }
    free(e->sequences);
    free(e->rows);
    free(e->waits);
    kv_trace_destroy(e->trace);
    sim_vault_destroy(e->vault);
}

unsigned engine_count(const struct engine *e, enum phase phase)
{
    unsigned n = 0;

    for (unsigned i = 0; i < e->n; i++)
        n += e->sequences[i].phase == phase;
    return n;
}

/* ---- memory ---- */

static uint64_t bytes_for(const struct engine *e, size_t tokens)
{
    const struct sim_model *m = e->model;
    return (tokens + m->unit_tokens - 1) / m->unit_tokens * m->block_bytes + 2 * m->state_bytes;
}

static size_t usual_end(const struct engine *e, const struct sequence *q)
{
    return q->known + (size_t)e->turn_tokens;
}

double engine_forecast(const struct engine *e)
{
    uint64_t bytes = 0;

    for (unsigned i = 0; i < e->n; i++)
        if (e->sequences[i].phase == RUNNING)
            bytes += bytes_for(e, usual_end(e, &e->sequences[i]));
    return (double)bytes / (double)e->model->kv_bytes;
}

static void evict(struct engine *e, struct sequence *q)
{
    restore_forget(e, q);
    restore_spill(e, q);
    if (q->restored)
        q->waits_since_us = e->now_us;
    e->used -= q->held;
    q->held = 0;
    q->computed = 0;
    q->restored = false;
}

static struct sequence *longest_idle(const struct engine *e)
{
    struct sequence *best = NULL;

    for (unsigned i = 0; i < e->n; i++) {
        struct sequence *q = &e->sequences[i];
        if (q->phase == IDLE && q->held && (!best || q->idle_us < best->idle_us))
            best = q;
    }
    return best;
}

static struct sequence *last_behind(const struct engine *e, const struct sequence *q,
                                    enum phase phase)
{
    struct sequence *last = NULL;

    for (unsigned i = 0; i < e->n; i++) {
        struct sequence *o = &e->sequences[i];
        if (o->phase == phase && o->held && o->place_us > q->place_us &&
            (!last || o->place_us > last->place_us))
            last = o;
    }
    return last;
}

static bool reclaim(struct engine *e, const struct sequence *q, bool preempt)
{
    struct sequence *o = longest_idle(e);

    if (!o)
        o = last_behind(e, q, WAITING);
    if (!o && preempt && (o = last_behind(e, q, RUNNING))) {
        struct kv_record r = {.at_us = e->now_us, .decision = KV_PREEMPTED};
        o->phase = WAITING;
        e->preemptions++;
        kv_trace_add(e->trace, &r, NULL);
    }
    if (o)
        evict(e, o);
    return o != NULL;
}

static bool hold(struct engine *e, struct sequence *q, size_t tokens, bool preempt)
{
    uint64_t bytes = bytes_for(e, tokens);

    if (bytes <= q->held)
        return true;
    while (e->used - q->held + bytes > e->model->kv_bytes)
        if (!reclaim(e, q, preempt))
            return false;
    e->used += bytes - q->held;
    q->held = bytes;
    return true;
}

/* ---- turns ---- */

void engine_ask(struct engine *e, struct sequence *q)
{
    const struct sim_turn *t = &q->t->turns[q->turn];

    q->phase = WAITING;
    q->known += t->observed;
    q->goal = q->known + t->sampled;
    q->waits_since_us = q->place_us = e->now_us;
    if (q->computed)
        q->place_us -= (int64_t)(1e6 * e->mean_wait_s);
    q->turn_waited_s = 0;
    q->restored = false;
    restore_hash(e, q);
    e->known_tokens += q->known;
    e->ever_tokens += q->ever;
    q->found = q->computed;
    q->findable = q->ever;
}

static void end_turn(struct engine *e, struct sequence *q)
{
    const struct sim_turn *t = &q->t->turns[q->turn];

    if (q->turn == 0 && !q->t->prefix)
        q->turn_waited_s = 0; /* it waited for a start, not for its prefix */
    e->found_tokens += q->found < q->findable ? q->found : q->findable;
    q->waited_s += e->waits[e->turns++] = q->turn_waited_s;
    e->mean_wait_s += 0.02 * (q->turn_waited_s - e->mean_wait_s);
    e->new_tokens += t->observed + t->sampled;
    e->turn_tokens += 0.1 * (t->sampled - e->turn_tokens);
    q->idle_us = e->now_us;
    q->tool_us = e->now_us + t->tool_us;
    q->phase = IDLE;
    restore_hash(e, q);
    if (++q->turn < q->t->n_turns)
        return;
    q->phase = OVER;
    e->over++;
    e->used -= q->held;
    q->held = 0;
}

/* ---- admission ---- */

static struct sequence *next_waiting(const struct engine *e)
{
    struct sequence *best = NULL;

    for (unsigned i = 0; i < e->n; i++) {
        struct sequence *q = &e->sequences[i];
        if (q->phase == WAITING && (!best || q->place_us < best->place_us))
            best = q;
    }
    return best;
}

void engine_admit(struct engine *e)
{
    struct sequence *q;

    for (unsigned n = engine_count(e, RUNNING); n < window_size(&e->window); n++) {
        if (!(q = next_waiting(e)) || !hold(e, q, usual_end(e, q), false))
            return;
        q->phase = RUNNING;
        struct kv_record r = {.at_us = e->now_us, .tokens = (uint32_t)q->known};
        r.decision = KV_ADMITTED;
        kv_trace_add(e->trace, &r, NULL);
        restore_plan(e, q);
    }
}

/* ---- passes ---- */

static void begin_turn(const struct engine *e, struct sequence *q)
{
    q->restored = true;
    q->turn_waited_s += (double)(e->now_us - q->waits_since_us) * 1e-6;
}

static void add_row(struct engine *e, struct sequence *q, size_t n)
{
    e->rows[e->n_rows++] = (struct row){q, n};
    if (!n) {
        e->decoding++;
        return;
    }
    e->prompt_tokens += (double)n;
    e->prompt_contexts += (double)n * ((double)q->computed + (double)n / 2);
}

/* Tokens of q's prompt in this pass; what is restored by computing ends at the split. */
static size_t prompt_part(struct engine *e, struct sequence *q, size_t budget)
{
    size_t to = q->known;

    if (!q->restored) {
        if (restore_advance(e, q))
            begin_turn(e, q);
        else
            to = q->front;
    }
    size_t n = to > q->computed ? to - q->computed : 0;
    return n < budget ? n : budget;
}

static void plan_row(struct engine *e, struct sequence *q, size_t *budget)
{
    size_t n = prompt_part(e, q, *budget);

    if (!n && !(q->restored && q->computed == q->known))
        return;
    if (!hold(e, q, q->computed + (n ? n : 1), true)) {
        q->phase = WAITING;
        e->preemptions++;
        evict(e, q);
        return;
    }
    *budget -= n;
    add_row(e, q, n);
}

double engine_plan(struct engine *e)
{
    size_t budget = e->model->pass_tokens;
    double contexts = 0;

    e->n_rows = e->decoding = 0;
    e->prompt_tokens = e->prompt_contexts = 0;
    for (unsigned i = 0; i < e->n && e->n_rows < MAX_RUNNING; i++)
        if (e->sequences[i].phase == RUNNING)
            plan_row(e, &e->sequences[i], &budget);
    for (unsigned i = 0; i < e->n_rows; i++)
        contexts += e->rows[i].n ? 0 : (double)e->rows[i].q->computed;
    return e->n_rows ? sim_pass_seconds(&e->machine, e->now_us, e->decoding, contexts,
                                        e->prompt_tokens, e->prompt_contexts)
                     : 0;
}

void engine_pass_done(struct engine *e, double seconds)
{
    kv_compute_pass(&e->compute, e->decoding, e->prompt_tokens, e->prompt_contexts, seconds);
    for (unsigned i = 0; i < e->n_rows; i++) {
        struct sequence *q = e->rows[i].q;
        q->computed += e->rows[i].n;
        if (!e->rows[i].n) {
            q->known++;
            q->computed++;
        }
        q->ever = q->computed > q->ever ? q->computed : q->ever;
        if (q->known == q->goal)
            end_turn(e, q);
    }
}

void engine_park(struct engine *e)
{
    for (unsigned i = 0; i < e->n; i++) {
        struct sequence *q = &e->sequences[i];
        if (!q->held)
            continue;
        evict(e, q);
        if (q->phase == RUNNING)
            q->phase = WAITING;
    }
}
