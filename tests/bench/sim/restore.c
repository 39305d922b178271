/* How a prefix leaves and comes back, in the three modes.  The baselines have no throttle: one
 * never uses the store, the other gives every spill and every load to the device at once and waits.
 * The third is kvstore/throttle.h, used as rollout/engine uses it. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "tests/bench/sim/engine.h"

enum { FLOOR_TOKENS = 1024 };
static const double SPILL_START_S = 1, REUSE = 2;
static const int64_t DEADLINE_US = 120000000;

static void note(struct engine *e, const struct sequence *q, enum kv_decision d, uint64_t bytes,
                 const struct kv_plan *p)
{
    struct kv_record r = {.at_us = e->now_us, .bytes = bytes, .decision = (uint16_t)d};
    char name[24];

    r.tokens = (uint32_t)q->known;
    if (p) {
        r.split_tokens = (uint32_t)(p->split * e->model->unit_tokens);
        r.load_ms = (float)(p->load_s * 1e3);
        r.compute_ms = (float)(p->compute_s * 1e3);
    }
    snprintf(name, sizeof name, "t%llu", (unsigned long long)q->t->id);
    kv_trace_add(e->trace, &r, name);
}

/* ---- transfers ---- */

static struct transfer *transfer_new(struct engine *e, struct sequence *q, enum kv_lane_class class,
                                     size_t first, size_t units)
{
    struct transfer *t = calloc(1, sizeof *t);

    if (!t) {
        e->failed = true;
        return NULL;
    }
    *t = (struct transfer){.q = q, .first = first, .units = units};
    t->op.class = class;
    t->op.flow = q->t->id;
    t->op.bytes = (units - first) * e->model->block_bytes + e->model->state_bytes;
    t->op.staging = t->op.bytes;
    t->op.deadline_us = e->now_us + DEADLINE_US;
    return t;
}

static void push_piece(struct engine *e, struct transfer *t, uint64_t bytes)
{
    struct piece *p = calloc(1, sizeof *p);

    if (!p) {
        e->failed = true;
        return;
    }
    *p = (struct piece){.transfer = t, .bytes = bytes, .began_us = e->now_us};
    p->ends_us = sim_device(&e->machine, e->now_us, bytes, t->op.class == KV_LANE_SPILL);
    t->handed += bytes;
    *e->last = p;
    e->last = &p->next;
}

static void count_staging(struct engine *e, int64_t more)
{
    e->staging += (uint64_t)more;
    uint64_t now = e->staging > e->lanes.staging ? e->staging : e->lanes.staging;
    e->staging_peak = now > e->staging_peak ? now : e->staging_peak;
}

/* All of it to the device, now. */
static void rush(struct engine *e, struct transfer *t)
{
    uint64_t bytes = t->op.bytes;

    t->op.bytes = 0;
    t->op.in_flight = bytes;
    count_staging(e, (int64_t)t->op.staging);
    push_piece(e, t, bytes);
}

static void end_transfer(struct engine *e, struct transfer *t)
{
    sim_vault_release(e->vault, t->lease);
    t->lease = 0;
    if (e->o->mode == SIM_THROTTLE)
        kv_lanes_remove(&e->lanes, &t->op);
    else
        count_staging(e, -(int64_t)t->op.staging);
    if (t->q->load == t)
        t->q->load = NULL;
    free(t);
}

void restore_hash(struct engine *e, struct sequence *q)
{
    unsigned unit = e->model->unit_tokens;
    int32_t tokens[512];

    for (; (q->chained + 1) * unit <= q->known; q->chained++) {
        const struct kv_key *before =
            q->chained ? &q->chain[q->chained - 1] : sim_vault_root(e->vault);
        sim_tokens(q->t, q->chained * unit, unit, tokens);
        kv_chain(before, tokens, unit, unit, &q->chain[q->chained]);
    }
}

/* ---- leaving ---- */

static size_t checkpoint(const struct engine *e, const struct sequence *q)
{
    return q->computed / e->model->unit_tokens;
}

static struct kv_case case_of(const struct engine *e, size_t have, size_t stored)
{
    const struct sim_model *m = e->model;
    unsigned loading = 0, running = 0;

    for (unsigned i = 0; i < e->n; i++) {
        running += e->sequences[i].phase == RUNNING;
        loading += e->sequences[i].phase == RUNNING && e->sequences[i].load;
    }
    return (struct kv_case){.unit_tokens = m->unit_tokens,
                            .block_bytes = m->block_bytes,
                            .state_bytes = m->state_bytes,
                            .have = have,
                            .stored = stored,
                            .floor_tokens = FLOOR_TOKENS,
                            .loading = loading,
                            .computing = running - loading,
                            .reuse = REUSE};
}

static bool worth_spilling(struct engine *e, struct sequence *q, size_t units)
{
    struct kv_case k = case_of(e, q->stored, units);

    struct kv_plan p = kv_choose_spill(&k, &e->lanes, &e->compute);
    note(e, q, p.decision, 0, &p);
    return p.decision == KV_SPILL_WORTH;
}

void restore_spill(struct engine *e, struct sequence *q)
{
    size_t units = checkpoint(e, q);
    bool throttled = e->o->mode == SIM_THROTTLE;

    if (e->o->mode == SIM_RECOMPUTE || units <= q->stored || q->phase == OVER)
        return;
    if (throttled && !worth_spilling(e, q, units))
        return;
    struct transfer *t = transfer_new(e, q, KV_LANE_SPILL, q->stored, units);
    if (!t)
        return;
    restore_hash(e, q);
    t->op.start_by_us = e->now_us + (int64_t)(SPILL_START_S * 1e6);
    if (!throttled) {
        rush(e, t);
    } else if (!kv_lanes_add(&e->lanes, &t->op, e->now_us)) {
        note(e, q, KV_SPILL_NO_ROOM, t->op.bytes, NULL);
        free(t);
        return;
    }
    q->stored = units;
    count_staging(e, 0);
}

static void spill_ended(struct engine *e, struct transfer *t, bool moved)
{
    struct sequence *q = t->q;
    bool ok = moved && sim_vault_put(e->vault, q->chain, t->first, t->units);

    note(e, q, ok ? KV_SPILLED : moved ? KV_SPILL_FAILED : KV_SPILL_LATE, t->handed, NULL);
    if (!ok && q->stored > t->first)
        q->stored = moved ? 0 : t->first;
    end_transfer(e, t);
}

/* ---- coming back ---- */

/* Seconds of prompts that are to be computed before one that comes now. */
static double compute_ahead(const struct engine *e)
{
    double s = 0;

    for (unsigned i = 0; i < e->n; i++) {
        const struct sequence *q = &e->sequences[i];
        if (q->phase != RUNNING)
            continue;
        size_t joined = q->load ? q->load->units * e->model->unit_tokens : q->front;
        if (q->computed < q->front)
            s += kv_compute_seconds(&e->compute, (double)q->computed, (double)q->front);
        if (q->computed < q->known)
            s += kv_compute_seconds(&e->compute, fmax((double)joined, (double)q->computed),
                                    (double)q->known);
    }
    return s;
}

static void begin_load(struct engine *e, struct sequence *q, const struct kv_plan *p, size_t stored)
{
    struct transfer *t = transfer_new(e, q, KV_LANE_LOAD, p->split, stored);

    if (!t)
        return;
    q->load = t;
    q->front = p->split * e->model->unit_tokens;
    kv_lanes_add(&e->lanes, &t->op, e->now_us);
}

static void plan_throttled(struct engine *e, struct sequence *q)
{
    struct kv_case k = case_of(e, 0, q->stored);

    k.load_wait_s = kv_lanes_wait_s(&e->lanes, false);
    k.compute_wait_s = compute_ahead(e);
    struct kv_plan p = kv_choose_restore(&k, &e->lanes, &e->compute);
    note(e, q, p.decision, 0, &p);
    if (p.split < q->stored)
        begin_load(e, q, &p, q->stored);
    else
        q->front = q->known;
}

static void plan_always_load(struct engine *e, struct sequence *q)
{
    uint64_t lease;
    size_t units =
        sim_vault_lookup(e->vault, q->chain, q->known / e->model->unit_tokens, 0, &lease);
    struct transfer *t = units ? transfer_new(e, q, KV_LANE_LOAD, 0, units) : NULL;

    q->front = q->known;
    if (!t)
        return;
    t->lease = lease;
    t->looked_up = true;
    q->load = t;
    q->front = 0;
    rush(e, t);
}

void restore_plan(struct engine *e, struct sequence *q)
{
    q->front = q->known;
    if (q->computed)
        return;
    if (e->o->mode == SIM_THROTTLE && q->stored)
        plan_throttled(e, q);
    else if (e->o->mode == SIM_LOAD)
        plan_always_load(e, q);
}

/* What is under way arrives for nobody. */
void restore_forget(struct engine *e, struct sequence *q)
{
    struct transfer *t = q->load;

    if (!t)
        return;
    q->load = NULL;
    t->unwanted = true;
    t->op.bytes = 0;
    if (!t->op.in_flight)
        end_transfer(e, t);
}

static void join(struct engine *e, struct sequence *q)
{
    struct transfer *t = q->load;
    size_t to = t->units * e->model->unit_tokens;

    if (to > q->computed) {
        q->found += to - q->computed;
        q->computed = to;
    }
    q->ever = q->computed > q->ever ? q->computed : q->ever;
    q->front = q->known;
    end_transfer(e, t);
}

/* The load need not bring what has been computed meanwhile. */
static void meet(struct engine *e, struct transfer *t, size_t front)
{
    uint64_t block = e->model->block_bytes;

    if (front <= t->first)
        return;
    uint64_t passed = (front - t->first) * block;
    t->op.bytes -= passed < t->op.bytes ? passed : t->op.bytes;
    t->first = front < t->units ? front : t->units;
    if (!t->op.bytes && !t->op.in_flight && !t->over) {
        t->over = true;
        note(e, t->q, KV_LOAD_MET, t->handed, NULL);
    }
}

static size_t blocks_left(const struct engine *e, const struct transfer *t)
{
    size_t state = e->model->state_bytes, block = e->model->block_bytes;
    uint64_t bytes = t->op.bytes - (t->handed < state ? state - t->handed : 0);

    return (size_t)((bytes + block - 1) / block);
}

/* The front is computed and the load is not over: compute on, or wait? */
static void move_split(struct engine *e, struct sequence *q)
{
    struct transfer *t = q->load;
    size_t front = q->computed / e->model->unit_tokens;
    size_t left = blocks_left(e, t);
    struct kv_case k = case_of(e, front, front + left);

    k.state_bytes = 0;
    k.floor_tokens = 0;
    k.load_wait_s = kv_lanes_left_s(&e->lanes, &t->op) -
                    (e->lanes.load.per_s > 0 ? (double)t->op.bytes / e->lanes.load.per_s : 0);
    struct kv_plan p = kv_choose_restore(&k, &e->lanes, &e->compute);
    if (!left || p.split == front || p.decision == KV_RESTORE_SHORT)
        return;
    note(e, q, KV_RESTORE_MOVED, 0, &p);
    q->front = p.split * e->model->unit_tokens;
}

bool restore_advance(struct engine *e, struct sequence *q)
{
    if (q->load) {
        meet(e, q->load, q->computed / e->model->unit_tokens);
        if (q->load->over && q->computed >= q->load->first * e->model->unit_tokens)
            join(e, q);
        else if (q->computed >= q->front && e->o->mode == SIM_THROTTLE)
            move_split(e, q);
    }
    return !q->load && (q->computed >= q->ever / e->model->unit_tokens * e->model->unit_tokens);
}

/* ---- the device ---- */

/* The store is asked when the load begins; it may have less than was put. */
static bool look_up(struct engine *e, struct transfer *t)
{
    struct sequence *q = t->q;
    size_t units = sim_vault_lookup(e->vault, q->chain, t->units, t->first, &t->lease);

    t->looked_up = true;
    if (units == t->units)
        return true;
    note(e, q, KV_LOAD_MISSED, 0, NULL);
    q->stored = units;
    q->front = q->known;
    return false;
}

static void drop_overdue(struct engine *e)
{
    struct kv_op *op;

    while ((op = kv_lanes_overdue(&e->lanes, e->now_us))) {
        struct transfer *t = (struct transfer *)op;
        if (op->class == KV_LANE_SPILL) {
            spill_ended(e, t, false);
            continue;
        }
        note(e, t->q, KV_LOAD_LATE, t->handed, NULL);
        t->q->front = t->q->known;
        end_transfer(e, t);
    }
}

void restore_pump(struct engine *e)
{
    struct kv_op *op;
    uint64_t bytes;

    if (e->o->mode != SIM_THROTTLE)
        return;
    drop_overdue(e);
    while ((op = kv_lanes_next(&e->lanes, e->now_us, &bytes))) {
        struct transfer *t = (struct transfer *)op;
        if (op->class != KV_LANE_SPILL && !t->looked_up && !look_up(e, t)) {
            kv_lanes_done(&e->lanes, op, bytes, e->now_us, e->now_us, false);
            end_transfer(e, t);
            continue;
        }
        push_piece(e, t, bytes);
    }
    count_staging(e, 0);
}

void restore_piece_done(struct engine *e)
{
    struct piece *p = e->first;
    struct transfer *t = p->transfer;

    e->first = p->next;
    if (!e->first)
        e->last = &e->first;
    if (e->o->mode == SIM_THROTTLE)
        kv_lanes_done(&e->lanes, &t->op, p->bytes, p->began_us, e->now_us, true);
    else
        t->op.in_flight -= p->bytes;
    free(p);
    if (t->op.bytes || t->op.in_flight)
        return;
    if (t->op.class == KV_LANE_SPILL) {
        spill_ended(e, t, true);
        return;
    }
    if (t->unwanted) {
        end_transfer(e, t);
        return;
    }
    t->over = true;
    note(e, t->q, KV_LOADED, t->handed, NULL);
}

/* What was carried over is in the store from the iteration before. */
void restore_prefill_store(struct engine *e, struct sequence *q)
{
    restore_hash(e, q);
    if (q->chained && e->o->mode != SIM_RECOMPUTE &&
        sim_vault_put(e->vault, q->chain, 0, q->chained))
        q->stored = q->chained;
}
