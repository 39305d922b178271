/* How a prefix leaves for kvstored and comes back: loop C of the throttle (kvstore/throttle.h).
 *
 * When a sequence is admitted, what the device does not have is loaded, computed, or split: the
 * front is computed while the tail is loaded, and both stop where they meet.  What a load brings
 * equals what computing gives to the bit, so a plan decides about time and nothing else.  The state
 * of the recurrent layers comes with the tail, for the end of the prefix; the one that computing
 * the front has made is overwritten.
 *
 * A sequence in a tool whose KV has left is loaded shortly before it is expected back, when nobody
 * waits for the store: it is expected after the time that its tools usually take.  One whose KV has
 * not left is spilled then, if memory is short, so that it may leave at once. */
#include <string.h>

#include "proto/clock.h"
#include "rollout/engine/internal.h"

static const double REUSE = 2; /* times a spill is read again: most trajectories have many turns */
enum { SHORT = 4 };            /* memory is when less than this part of it is free */
static const double EARLY = 2; /* a prefetch begins so many times its own length before */

static void note(struct engine *e, const struct engine_sequence *q, enum kv_decision d,
                 uint64_t bytes, const struct kv_plan *p)
{
    struct kv_record r = {.at_us = lh_now_us(), .bytes = bytes, .decision = (uint16_t)d};

    r.tokens = (uint32_t)q->spec.transcript->n;
    if (p) {
        r.split_tokens = (uint32_t)(p->split * e->o.unit_tokens);
        r.load_ms = (float)(p->load_s * 1e3);
        r.compute_ms = (float)(p->compute_s * 1e3);
    }
    kv_trace_add(e->o.trace, &r, q->spec.name);
}

void restore_note(struct engine *e, const struct engine_sequence *q, enum kv_decision d)
{
    note(e, q, d, 0, NULL);
}

static struct kv_case case_of(const struct engine *e, size_t have, size_t stored)
{
    struct kv_case k = {.unit_tokens = e->o.unit_tokens,
                        .block_bytes = e->block_floats * sizeof(float),
                        .state_bytes = e->state_floats * sizeof(float),
                        .have = have,
                        .stored = stored,
                        .reuse = REUSE};

    for (const struct engine_sequence *q = e->sequences; q; q = q->next) {
        bool waits = q->loading && q->phase == SEQUENCE_RUNNING;
        k.loading += waits;
        k.computing += !waits && q->phase == SEQUENCE_RUNNING;
    }
    return k;
}

/* One unit between its page and the store's block: in a page the layers are page_tokens apart. */
static void copy_unit(const struct engine *e, char *block, float *page, size_t unit, bool out)
{
    size_t tokens = e->o.unit_tokens, per_page = e->o.page_tokens / tokens;
    size_t bytes = tokens * e->latent * sizeof(float);

    for (size_t l = 0; l < e->attention_layers; l++) {
        float *at = page + (l * e->o.page_tokens + unit % per_page * tokens) * e->latent;
        if (out)
            memcpy(block + l * bytes, at, bytes);
        else
            memcpy(at, block + l * bytes, bytes);
    }
}

/* ---- leaving ---- */

static bool worth_spilling(struct engine *e, const struct engine_sequence *q, size_t units)
{
    struct kv_case k = case_of(e, q->stored, units);
    struct kv_plan p = store_plan_spill(e->store, &k, &e->compute);

    note(e, q, p.decision, 0, &p);
    return p.decision == KV_SPILL_WORTH;
}

void restore_spill(struct engine *e, struct engine_sequence *q)
{
    const struct checkpoint *k = q->checkpoint;
    size_t per_page = e->o.page_tokens / e->o.unit_tokens, block = e->block_floats * sizeof(float);

    if (!e->o.store || !k || k->units <= q->stored || k->units <= q->spilling ||
        !worth_spilling(e, q, k->units))
        return;
    const struct kv_key *chain = residence_chain(e, q, k->units);
    struct store_job *j = chain ? store_job_new(e->store, KV_LANE_SPILL, q->id, q->spec.name, chain,
                                                q->stored, k->units)
                                : NULL;
    if (!j)
        return;
    for (size_t u = j->first; u < j->units; u++)
        copy_unit(e, j->blocks + (u - j->first) * block, pool_data(e->pool, k->pages[u / per_page]),
                  u, true);
    memcpy(j->state, pool_data(e->pool, k->state), e->state_floats * sizeof(float));
    size_t units = j->units;
    if (store_submit(e->store, j))
        q->spilling = units;
    else
        note(e, q, KV_SPILL_NO_ROOM, 0, NULL);
}

/* ---- plans ---- */

static size_t units_of(const struct engine *e, size_t tokens)
{
    return tokens / e->o.unit_tokens;
}

/* Seconds of prompts that are to be computed before one that comes now. */
static double compute_ahead(const struct engine *e)
{
    double s = 0;

    for (const struct engine_sequence *q = e->sequences; q; q = q->next) {
        size_t n = q->spec.transcript->n;
        if (q->phase != SEQUENCE_RUNNING || n - q->computed <= 1)
            continue;
        size_t joined = q->loading ? q->loading_units * e->o.unit_tokens : q->computed;
        if (q->loading && q->front > q->computed)
            s += kv_compute_seconds(&e->compute, (double)q->computed, (double)q->front);
        s += kv_compute_seconds(&e->compute, (double)(joined > q->computed ? joined : q->computed),
                                (double)n);
    }
    return s;
}

static void begin_load(struct engine *e, struct engine_sequence *q, enum kv_lane_class class,
                       size_t first, size_t units)
{
    const struct kv_key *chain = residence_chain(e, q, units);
    struct store_job *j =
        chain ? store_job_new(e->store, class, q->id, q->spec.name, chain, first, units) : NULL;

    q->asked = true;
    if (!j || !store_submit(e->store, j))
        return;
    q->loading = j;
    q->loading_units = units;
    q->front = first * e->o.unit_tokens;
    e->counters.store_lookups++;
}

/* Units that the store is taken to have.  What an earlier attempt has left there is not known. */
static size_t units_stored(const struct engine *e, const struct engine_sequence *q)
{
    size_t usable = units_of(e, q->spec.transcript->n - 1);
    size_t stored = q->spilling > q->stored ? q->spilling : q->stored;

    if (!stored && q->spec.resumed)
        return usable;
    return stored < usable ? stored : usable;
}

void restore_plan(struct engine *e, struct engine_sequence *q, size_t have)
{
    if (!e->o.store || !q->lost || q->asked || !q->spec.transcript->n)
        return;
    if (q->loading || q->load) {
        if (q->loading)
            store_promote(e->store, q->loading);
        return;
    }
    struct kv_case k = case_of(e, have, units_stored(e, q));
    if (k.stored <= have)
        return;
    k.compute_wait_s = compute_ahead(e);
    struct kv_plan p = store_plan_restore(e->store, &k, &e->compute);
    note(e, q, p.decision, 0, &p);
    if (p.split < k.stored)
        begin_load(e, q, KV_LANE_LOAD, p.split, k.stored);
    else
        q->asked = true;
}

static bool due(struct engine *e, const struct engine_sequence *q, int64_t now_us)
{
    if (q->phase != SEQUENCE_IDLE || q->computed || q->asked || !q->lost || q->loading || q->load ||
        !q->stored || !q->tool_us)
        return false;
    struct kv_case k = case_of(e, 0, q->stored);
    double load_s = store_plan_restore(e->store, &k, &e->compute).load_s;
    return now_us + (int64_t)(EARLY * load_s * 1e6) >= q->idle_us + q->tool_us;
}

/* When memory is short, the prefix of the longest idle is brought to the store before anybody needs
 * its room: giving it up then copies nothing. */
static void put_away(struct engine *e)
{
    struct engine_sequence *best = NULL;

    if (pool_free(e->pool) > pool_frames(e->pool) / SHORT)
        return;
    for (struct engine_sequence *q = e->sequences; q; q = q->next) {
        if (q->spilling)
            return; /* one at a time */
        if (q->phase == SEQUENCE_IDLE && q->checkpoint && q->put_away_us != q->idle_us &&
            (!best || q->idle_since < best->idle_since))
            best = q;
    }
    if (!best)
        return;
    best->put_away_us = best->idle_us;
    restore_spill(e, best);
}

void restore_prefetch(struct engine *e)
{
    int64_t now = lh_now_us();

    if (!e->o.store || !store_idle(e->store))
        return;
    for (struct engine_sequence *q = e->sequences; q; q = q->next) {
        if (!due(e, q, now))
            continue;
        begin_load(e, q, KV_LANE_PREFETCH, 0, q->stored);
        q->asked = false; /* a miss may be asked for again */
        note(e, q, KV_PREFETCHED, 0, NULL);
        return;
    }
    put_away(e);
}

/* ---- coming back ---- */

static struct engine_sequence *by_id(struct engine *e, uint64_t id)
{
    for (struct engine_sequence *q = e->sequences; q; q = q->next)
        if (q->id == id)
            return q;
    return NULL;
}

static void collect_load(struct engine *e, struct engine_sequence *q, struct store_job *j)
{
    q->loading = NULL;
    e->counters.store_hits += j->ok;
    if (!j->ok) {
        q->stored = q->spilling = 0;
        store_job_done(e->store, j);
        return;
    }
    q->load = j;
    q->stored = j->units;
}

static void collect_spill(struct engine_sequence *q, const struct store_job *j)
{
    q->spilling = 0;
    if (j->ok)
        q->stored = j->units;
    else if (j->outcome == KV_SPILL_FAILED)
        q->stored = 0;
}

void residence_collect(struct engine *e)
{
    for (struct store_job *j; (j = store_finished(e->store));) {
        struct engine_sequence *q = by_id(e, j->op.flow);
        bool load = j->op.class != KV_LANE_SPILL;
        if (q)
            note(e, q, j->outcome, 0,
                 &(struct kv_plan){.split = load ? j->low : 0,
                                   .load_s = (double)(j->finished_us - j->submitted_us) * 1e-6});
        if (q && load) {
            collect_load(e, q, j);
            continue;
        }
        if (q)
            collect_spill(q, j);
        store_job_done(e->store, j);
    }
}

void restore_forget(struct engine *e, struct engine_sequence *q)
{
    if (q->loading)
        store_abandon(e->store, q->loading);
    if (q->load)
        store_job_done(e->store, q->load);
    q->load = q->loading = NULL;
}

/* The load is over and the front computed: its tail behind the front, its state in place of ours.
 */
static bool join(struct engine *e, struct engine_sequence *q)
{
    const struct store_job *j = q->load;
    size_t unit = e->o.unit_tokens, end = j->units * unit, block = e->block_floats * sizeof(float);
    size_t per_page = e->o.page_tokens / unit;

    if (end > q->computed) {
        size_t from = q->computed / unit;
        if (!residence_reserve(e, q, end - q->computed))
            return false;
        for (size_t u = from; u < j->units; u++)
            copy_unit(e, j->blocks + (u - j->first) * block,
                      pool_data(e->pool, q->pages[u / per_page]), u, false);
        memcpy(pool_data(e->pool, q->state), j->state, e->state_floats * sizeof(float));
        q->computed = end;
        q->old |= e->mixed;
    }
    restore_forget(e, q);
    return true;
}

/* The front is computed and the load is not over: compute on, or wait for it? */
static void move_split(struct engine *e, struct engine_sequence *q)
{
    struct kv_case k = case_of(e, units_of(e, q->computed), 0);
    struct kv_plan p = store_plan_rest(e->store, q->loading, &k, &e->compute);

    if (p.split <= k.have || p.decision == KV_RESTORE_SHORT || p.decision == KV_RESTORE_PROBE)
        return;
    q->front = p.split * e->o.unit_tokens;
    note(e, q, KV_RESTORE_MOVED, 0, &p);
}

bool restore_advance(struct engine *e, struct engine_sequence *q, size_t *to)
{
    *to = q->spec.transcript->n;
    if (q->load && q->computed >= q->load->low * e->o.unit_tokens)
        return join(e, q);
    if (q->load) {
        *to = q->load->low * e->o.unit_tokens;
    } else if (q->loading && q->computed < q->loading_units * e->o.unit_tokens) {
        store_meet(e->store, q->loading, units_of(e, q->computed));
        if (q->computed >= q->front)
            move_split(e, q);
        *to = q->front;
    }
    return true;
}
