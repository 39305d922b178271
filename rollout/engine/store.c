#include "rollout/engine/store.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "proto/wait.h"

LH_LOG_COMPONENT("rollout");

enum { OVERDUE_EVERY_MS = 100, IDLE_MS = 60000 };
static const int64_t LOAD_DEADLINE_US = 120000000, SPILL_DEADLINE_US = 60000000;
static const int64_t SPILL_START_US = 1000000;

struct store {
    struct store_options o;
    pthread_t thread;
    bool started;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* under lock */
    bool stop, busy, look; /* look: the pressure is wanted */
    struct kv_lanes lanes;
    struct store_job *finished, **last;
    struct store_counters counters;
    double pressure_ms; /* kvstored's when last asked */
};

void store_job_destroy(struct store_job *j)
{
    if (!j)
        return;
    kv_hit_destroy(j->hit);
    free(j->chain);
    free(j->blocks);
    free(j);
}

static struct store_job *job_of(struct kv_op *op)
{
    return (struct store_job *)op; /* its first member */
}

/* ---- under lock ---- */

static void finish(struct store *s, struct store_job *j, bool ok, enum kv_decision outcome)
{
    j->ok = ok;
    j->outcome = outcome;
    j->finished_us = lh_now_us();
    j->op.bytes = 0;
    j->next = NULL;
    *s->last = j;
    s->last = &j->next;
    if (j->op.class == KV_LANE_SPILL) {
        kv_lanes_remove(&s->lanes, &j->op);
        s->counters.dropped_spills += !ok;
    }
}

static void drop_overdue(struct store *s)
{
    for (struct kv_op *op; (op = kv_lanes_overdue(&s->lanes, lh_now_us()));) {
        bool spill = op->class == KV_LANE_SPILL;
        if (!spill)
            op->deadline_us = 0;
        finish(s, job_of(op), false, spill ? KV_SPILL_LATE : KV_LOAD_LATE);
    }
}

/* What the engine has computed is left out. */
static void leave_out_met(struct store *s, struct store_job *j)
{
    size_t front = j->met > j->first ? j->met : j->first;
    size_t left = j->low > front ? j->low - front : 0;
    uint64_t bytes = left * s->o.block_bytes + (j->has_state ? 0 : s->o.state_bytes);

    if (bytes < j->op.bytes)
        j->op.bytes = bytes;
}

/* ---- the thread: pieces ---- */

static int begin_load(struct store *s, struct store_job *j, struct lh_error *err)
{
    size_t bytes = (j->units - j->first) * s->o.block_bytes + s->o.state_bytes;

    j->hit = kv_lookup(s->o.client, j->chain, j->units, j->first, j->name, err);
    if (!j->hit)
        return err->code ? err->code : LH_NOT_FOUND;
    size_t units = kv_hit_units(j->hit);
    if (units <= j->first || units > j->units)
        return lh_fail(err, LH_DATA_LOSS, "kvstored answered %zu units", units);
    j->blocks = malloc(bytes);
    if (!j->blocks)
        return lh_fail_errno(err, ENOMEM, "staging of %zu bytes", bytes);
    j->units = j->at = units;
    j->state = j->blocks + (units - j->first) * s->o.block_bytes;
    return 0;
}

/* The state, then units from the end, `bytes` of both. */
static int load_piece(struct store *s, struct store_job *j, uint64_t bytes, struct lh_error *err)
{
    size_t state = s->o.state_bytes, block = s->o.block_bytes;
    int r = j->hit ? 0 : begin_load(s, j, err);

    if (r == 0 && !j->has_state) {
        r = kv_hit_state(j->hit, j->state, err);
        j->has_state = r == 0;
        bytes -= bytes < state ? bytes : state;
    }
    for (; r == 0 && j->at > j->first && bytes; bytes -= bytes < block ? bytes : block) {
        size_t u = j->at - 1;
        r = kv_hit_block(j->hit, u, j->blocks + (u - j->first) * block, err);
        j->at = r == 0 ? u : j->at;
    }
    return r;
}

static int spill_piece(struct store *s, struct store_job *j, uint64_t *bytes, struct lh_error *err)
{
    size_t n = j->units - j->first;
    lh_autofree const void **blocks = calloc(n + 1, sizeof *blocks);

    if (!blocks)
        return lh_fail_errno(err, ENOMEM, "spill");
    for (size_t i = 0; i < n; i++)
        blocks[i] = j->blocks + i * s->o.block_bytes;
    int64_t r = kv_put(s->o.client, j->chain, j->first, j->units, blocks, j->state, j->name, err);
    *bytes = r > 0 ? (uint64_t)r : 0;
    return r < 0 ? (int)r : 0;
}

static void load_moved(struct store *s, struct store_job *j, int r)
{
    if (r < 0) {
        j->units = 0;
        finish(s, j, false, KV_LOAD_MISSED);
        return;
    }
    j->low = j->at;
    leave_out_met(s, j);
    if (j->op.bytes)
        return;
    s->counters.loaded_bytes += (j->units - j->low) * s->o.block_bytes + s->o.state_bytes;
    finish(s, j, true, j->low > j->first ? KV_LOAD_MET : KV_LOADED);
}

/* Returns the hit when it is not needed any more: giving it back talks to kvstored. */
static struct kv_hit *end_piece(struct store *s, struct store_job *j, uint64_t bytes,
                                int64_t began_us, uint64_t put, int r)
{
    bool spill = j->op.class == KV_LANE_SPILL;
    struct kv_hit *hit = NULL;
    LH_LOCKED(&s->lock);

    kv_lanes_done(&s->lanes, &j->op, bytes, began_us, lh_now_us(), r == 0 && (!spill || put));
    if (r < 0 || (j->has_state && j->at <= (j->met > j->first ? j->met : j->first)))
        hit = lh_steal(&j->hit);
    s->counters.spilled_bytes += put;
    if (spill)
        finish(s, j, r == 0, r == 0 ? KV_SPILLED : KV_SPILL_FAILED);
    else
        load_moved(s, j, r);
    s->busy = false;
    pthread_cond_broadcast(&s->changed);
    return hit;
}

static void run_piece(struct store *s, struct store_job *j, uint64_t bytes)
{
    struct lh_error err = {0};
    bool spill = j->op.class == KV_LANE_SPILL;
    int64_t began = lh_now_us();
    uint64_t put = 0;
    int r = spill ? spill_piece(s, j, &put, &err) : load_piece(s, j, bytes, &err);

    if (r < 0)
        lh_debug(spill ? "spill_dropped" : "load_missed", "trajectory=%s error=%s", j->name,
                 err.message);
    kv_hit_destroy(end_piece(s, j, bytes, began, put, r));
}

static void look(struct store *s)
{
    struct kv_pressure p = {0};

    if (kv_pressure(s->o.client, &p, NULL) < 0)
        p.load_wait_ms = 0;
    LH_LOCKED(&s->lock);
    s->pressure_ms = p.load_wait_ms;
    s->look = s->busy = false;
    pthread_cond_broadcast(&s->changed);
}

/* Until something could be overdue. */
static int patience_ms(const struct store *s)
{
    for (int class = 0; class < KV_LANE_CLASSES; class ++)
        if (s->lanes.ops[class])
            return OVERDUE_EVERY_MS;
    return IDLE_MS;
}

/* 1 = bytes of *j are to be moved, 0 = the pressure is wanted, -1 = the end. */
static int await_work(struct store *s, struct store_job **j, uint64_t *bytes)
{
    struct kv_op *op = NULL;
    LH_LOCKED(&s->lock);

    while (!s->stop) {
        drop_overdue(s);
        if ((op = kv_lanes_next(&s->lanes, lh_now_us(), bytes)) || s->look)
            break;
        lh_wait_until(&s->changed, &s->lock, lh_now_ms() + patience_ms(s));
    }
    s->busy = !s->stop;
    *j = op ? job_of(op) : NULL;
    return s->stop ? -1 : op != NULL;
}

static void *store_thread(void *arg)
{
    struct store *s = arg;
    struct store_job *j;
    uint64_t bytes;

    for (int work; (work = await_work(s, &j, &bytes)) >= 0;) {
        if (!work) {
            look(s);
            continue;
        }
        run_piece(s, j, bytes);
        if (s->o.wake)
            s->o.wake(s->o.ctx);
    }
    return NULL;
}

/* ---- life ---- */

struct store *store_create(const struct store_options *o, struct lh_error *err)
{
    struct store *s = calloc(1, sizeof *s);

    if (!s)
        return lh_fail_errno(err, ENOMEM, "store"), NULL;
    s->o = *o;
    s->last = &s->finished;
    kv_lanes_init(&s->lanes, o->max_inflight_bytes, KV_QUANTUM_BYTES, lh_now_us());
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    int r = o->client ? pthread_create(&s->thread, NULL, store_thread, s) : 0;
    s->started = o->client && r == 0;
    if (r) {
        store_destroy(s);
        return lh_fail_errno(err, r, "store thread"), NULL;
    }
    return s;
}

/* Under lock, with no piece in flight. */
static void drop_all(struct store *s)
{
    for (int class = 0; class < KV_LANE_CLASSES; class ++)
        for (struct kv_op *op; (op = s->lanes.ops[class]);) {
            kv_lanes_remove(&s->lanes, op);
            if (job_of(op)->finished_us == 0)
                store_job_destroy(job_of(op));
        }
    for (struct store_job *j; (j = s->finished);) {
        s->finished = j->next;
        store_job_destroy(j);
    }
    s->last = &s->finished;
}

void store_destroy(struct store *s)
{
    if (!s)
        return;
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    if (s->started)
        pthread_join(s->thread, NULL);
    drop_all(s);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

void store_use_root(struct store *s, const struct kv_key *root, uint64_t policy_step)
{
    struct lh_error err = {0};

    if (!s->started)
        return;
    pthread_mutex_lock(&s->lock);
    while (s->busy) /* ends by the deadline of one operation of the client */
        pthread_cond_wait(&s->changed, &s->lock);
    drop_all(s);
    pthread_mutex_unlock(&s->lock);
    if (kv_use_root(s->o.client, root, policy_step, 1, &err) < 0)
        lh_warn("store_root", "step=%llu error=%s", (unsigned long long)policy_step, err.message);
}

/* ---- jobs ---- */

struct store_job *store_job_new(struct store *s, enum kv_lane_class class, uint64_t owner,
                                const char *name, const struct kv_key *chain, size_t first,
                                size_t units)
{
    bool spill = class == KV_LANE_SPILL;
    size_t blocks = (units - first) * s->o.block_bytes, bytes = blocks + s->o.state_bytes;

    if (!s->started)
        return NULL;
    lh_auto(store_job) j = calloc(1, sizeof *j);
    if (!j || !(j->chain = malloc(units * sizeof *chain)) ||
        (spill && !(j->blocks = malloc(bytes))))
        return NULL;
    memcpy(j->chain, chain, units * sizeof *chain);
    j->op = (struct kv_op){
        .class = class, .flow = owner, .bytes = bytes, .staging = bytes, .whole = spill};
    j->first = first;
    j->units = j->low = units;
    j->state = spill ? j->blocks + blocks : NULL;
    snprintf(j->name, sizeof j->name, "%s", name);
    return lh_steal(&j);
}

bool store_submit(struct store *s, struct store_job *j)
{
    int64_t now = lh_now_us();
    bool spill = j->op.class == KV_LANE_SPILL;

    j->submitted_us = now;
    j->op.deadline_us = now + (spill ? SPILL_DEADLINE_US : LOAD_DEADLINE_US);
    j->op.start_by_us = spill ? now + SPILL_START_US : 0;
    pthread_mutex_lock(&s->lock);
    bool added = kv_lanes_add(&s->lanes, &j->op, now);
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    if (!added)
        store_job_destroy(j);
    return added;
}

void store_promote(struct store *s, struct store_job *j)
{
    LH_LOCKED(&s->lock);
    kv_lanes_promote(&s->lanes, &j->op);
}

size_t store_meet(struct store *s, struct store_job *j, size_t units)
{
    LH_LOCKED(&s->lock);

    j->met = units > j->met ? units : j->met;
    return j->low;
}

struct store_job *store_finished(struct store *s)
{
    LH_LOCKED(&s->lock);
    struct store_job *j = s->finished;

    if (j && !(s->finished = j->next))
        s->last = &s->finished;
    return j;
}

void store_job_done(struct store *s, struct store_job *j)
{
    pthread_mutex_lock(&s->lock);
    if (j->op.class != KV_LANE_SPILL)
        kv_lanes_remove(&s->lanes, &j->op);
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    store_job_destroy(j);
}

/* ---- loop C ---- */

struct kv_plan store_plan_restore(struct store *s, struct kv_case *k, const struct kv_compute *c)
{
    LH_LOCKED(&s->lock);

    k->load_wait_s = kv_lanes_wait_s(&s->lanes, false);
    return kv_choose_restore(k, &s->lanes, c);
}

struct kv_plan store_plan_spill(struct store *s, const struct kv_case *k,
                                const struct kv_compute *c)
{
    LH_LOCKED(&s->lock);
    return kv_choose_spill(k, &s->lanes, c);
}

struct kv_plan store_plan_rest(struct store *s, const struct store_job *j, struct kv_case *k,
                               const struct kv_compute *c)
{
    LH_LOCKED(&s->lock);
    double rate = s->lanes.load.per_s;

    k->stored = j->low > k->have ? j->low : k->have;
    k->state_bytes = 0;
    k->load_wait_s = rate > 0 ? kv_lanes_left_s(&s->lanes, &j->op) - (double)j->op.bytes / rate : 0;
    return kv_choose_restore(k, &s->lanes, c);
}

bool store_idle(struct store *s)
{
    LH_LOCKED(&s->lock);
    return !s->lanes.ops[KV_LANE_LOAD];
}

struct store_counters store_counters(struct store *s)
{
    LH_LOCKED(&s->lock);
    return s->counters;
}

double store_load_wait_ms(struct store *s)
{
    LH_LOCKED(&s->lock);
    double own = kv_lanes_wait_s(&s->lanes, false) * 1e3;

    if (s->started && !s->look) {
        s->look = true;
        pthread_cond_broadcast(&s->changed);
    }
    return s->pressure_ms > own ? s->pressure_ms : own;
}
