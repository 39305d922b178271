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

enum { LOOK_AGAIN_MS = 1000 };
static const int64_t LOAD_DEADLINE_US = 120000000, SPILL_DEADLINE_US = 60000000;
static const int64_t SPILL_START_US = 1000000;

struct store {
    struct store_options o;
    struct kv_trajectory *looks; /* whose the LOOKs are */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* under lock */
    bool closing, looking;
    struct store_job *moving; /* of which a piece is under way; NULL = none */
    bool moved;               /* it has ended: the job may be gone, the pump is not yet on */
    struct kv_lanes lanes;
    struct store_job *finished, **last;
    struct store_counters counters;
    double pressure_ms; /* kvstored's when last asked */
};

void store_job_destroy(struct store_job *j)
{
    if (!j)
        return;
    kv_buffer_unregister(j->buffer); /* nobody copies from here on */
    kv_hit_destroy(j->hit);
    kv_trajectory_close(j->trajectory);
    free(j->chain);
    free(j->pointers);
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
    j->op.deadline_us = 0; /* a load stays in the lanes until it is given back, for its staging */
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
        finish(s, job_of(op), false, spill ? KV_SPILL_LATE : KV_LOAD_LATE);
    }
}

/* It has no piece under way, and will have none. */
static void give_up(struct store *s, struct store_job *j)
{
    bool spill = j->op.class == KV_LANE_SPILL;

    j->units = spill ? j->units : 0;
    finish(s, j, false, spill ? KV_SPILL_FAILED : KV_LOAD_MISSED);
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

/* ---- pieces: one at a time, on the client's thread ---- */

static void pump(struct store *s);

/* The staging of units first..units-1 and the state behind them. */
static int make_staging(struct store *s, struct store_job *j, struct lh_error *err)
{
    size_t n = j->units - j->first, block = s->o.block_bytes, bytes = n * block + s->o.state_bytes;

    j->blocks = malloc(bytes);
    j->pointers = calloc(n + 1, sizeof *j->pointers);
    if (!j->blocks || !j->pointers)
        return lh_fail_errno(err, ENOMEM, "staging of %zu bytes", bytes);
    j->buffer = kv_buffer_register(s->o.client, j->blocks, bytes, err);
    if (!j->buffer)
        return err->code;
    for (size_t i = 0; i < n; i++)
        j->pointers[i] = j->blocks + i * block;
    j->state = j->blocks + n * block;
    return 0;
}

static void load_moved(struct store *s, struct store_job *j, int64_t r)
{
    if (r < 0) {
        j->units = 0;
        finish(s, j, false, KV_LOAD_MISSED);
        return;
    }
    j->at = j->piece_first;
    j->has_state = true;
    j->low = j->at;
    leave_out_met(s, j);
    if (j->op.bytes)
        return;
    s->counters.loaded_bytes += (j->units - j->low) * s->o.block_bytes + s->o.state_bytes;
    finish(s, j, true, j->low > j->first ? KV_LOAD_MET : KV_LOADED);
}

/* Returns the hit when it is not needed any more: giving it back talks to kvstored. */
static struct kv_hit *account_piece(struct store *s, struct store_job *j, int64_t r)
{
    bool spill = j->op.class == KV_LANE_SPILL;
    struct kv_hit *hit = NULL;
    LH_LOCKED(&s->lock);

    s->moved = true;
    kv_lanes_done(&s->lanes, &j->op, j->piece_bytes, j->piece_began_us, lh_now_us(),
                  r > 0 || (!spill && r == 0));
    s->counters.spilled_bytes += spill && r > 0 ? (uint64_t)r : 0;
    if (spill)
        finish(s, j, r >= 0, r >= 0 ? KV_SPILLED : KV_SPILL_FAILED);
    else
        load_moved(s, j, j->abandoned ? LH_CANCELLED : r);
    if (!spill && !j->op.bytes)
        hit = lh_steal(&j->hit);
    return hit;
}

/* The engine hears of it before the next piece begins: once that has, `s` may go at any time. */
static void end_piece(struct store *s, struct store_job *j, int64_t r, const struct lh_error *err)
{
    if (r < 0)
        lh_debug(j->op.class == KV_LANE_SPILL ? "spill_dropped" : "load_missed",
                 "trajectory=%s error=%s", j->name, err->message);
    struct kv_hit *hit = account_piece(s, j, r);
    if (s->o.wake)
        s->o.wake(s->o.ctx);
    kv_hit_destroy(hit);
    LH_LOCKED(&s->lock);
    s->moving = NULL;
    pump(s);
    pthread_cond_broadcast(&s->changed);
}

static void on_moved(void *job, struct kv_async *io)
{
    struct store_job *j = job;
    struct store *s = j->store;
    struct lh_error err = {0};
    int64_t r = kv_async_result(io, &err);

    kv_async_destroy(io);
    end_piece(s, j, r, &err);
}

static int begin(struct store_job *j, enum kv_async_kind kind, struct kv_batch *b,
                 struct lh_error *err)
{
    b->ctx = j;
    return kv_async_begin(j->trajectory, kind, b, err) ? 0 : err->code;
}

/* The state, then units from the end, `piece_bytes` of both. */
static int begin_get(struct store *s, struct store_job *j, struct lh_error *err)
{
    uint64_t left = j->piece_bytes, block = s->o.block_bytes;

    if (!j->has_state)
        left -= left < s->o.state_bytes ? left : s->o.state_bytes;
    size_t n = block ? (left + block - 1) / block : 0;
    j->piece_first = n < j->at - j->first ? j->at - n : j->first;
    struct kv_batch b = {.hit = j->hit,
                         .first = j->piece_first,
                         .n = j->at,
                         .blocks = j->pointers + (j->piece_first - j->first),
                         .state = j->has_state || !s->o.state_bytes ? NULL : j->state,
                         .buffer = j->buffer,
                         .done = on_moved};
    return begin(j, KV_GET, &b, err);
}

static int take_hit(struct store *s, struct store_job *j, struct kv_async *io, struct lh_error *err)
{
    int64_t r = kv_async_result(io, err);

    if (r < 0)
        return (int)r;
    j->hit = kv_async_take_hit(io);
    size_t units = kv_hit_units(j->hit);
    if (units <= j->first || units > j->units)
        return lh_fail(err, LH_DATA_LOSS, "kvstored answered %zu units", units);
    j->units = j->at = units;
    return make_staging(s, j, err);
}

static void on_found(void *job, struct kv_async *io)
{
    struct store_job *j = job;
    struct store *s = j->store;
    struct lh_error err = {0};

    int r = take_hit(s, j, io, &err);
    kv_async_destroy(io);
    pthread_mutex_lock(&s->lock);
    if (r == 0)
        r = s->closing || j->abandoned ? lh_fail(&err, LH_CANCELLED, "cancelled")
                                       : begin_get(s, j, &err);
    pthread_mutex_unlock(&s->lock);
    if (r < 0)
        end_piece(s, j, r, &err);
}

static int begin_piece(struct store *s, struct store_job *j, struct lh_error *err)
{
    struct kv_batch find = {.chain = j->chain, .first = j->first, .n = j->units, .done = on_found};
    struct kv_batch put = find;

    if (j->abandoned)
        return lh_fail(err, LH_CANCELLED, "nobody wants it any more");
    if (j->op.class != KV_LANE_SPILL)
        return j->hit ? begin_get(s, j, err) : begin(j, KV_PREFETCH, &find, err);
    put.blocks = j->pointers;
    put.state = j->state;
    put.buffer = j->buffer;
    put.done = on_moved;
    return begin(j, KV_PUT, &put, err);
}

/* Under lock.  What cannot even be begun is given up as if it had failed. */
static void pump(struct store *s)
{
    struct lh_error err = {0};
    struct kv_op *op;
    uint64_t bytes;

    drop_overdue(s);
    while (!s->closing && !s->moving && (op = kv_lanes_next(&s->lanes, lh_now_us(), &bytes))) {
        struct store_job *j = job_of(op);
        j->piece_bytes = bytes;
        j->piece_began_us = lh_now_us();
        s->moving = j;
        s->moved = false;
        if (begin_piece(s, j, &err) == 0)
            return;
        s->moving = NULL;
        kv_lanes_done(&s->lanes, op, bytes, j->piece_began_us, lh_now_us(), false);
        give_up(s, j);
    }
}

static void on_look(void *store, struct kv_async *io)
{
    struct store *s = store;
    bool known = kv_async_result(io, NULL) == 0;
    double wait_ms = known ? kv_async_pressure(io).load_wait_ms : 0;

    kv_async_destroy(io);
    LH_LOCKED(&s->lock);
    s->pressure_ms = wait_ms;
    s->looking = false;
    pthread_cond_broadcast(&s->changed);
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
    s->looks = o->client ? kv_trajectory_open(o->client, "", err) : NULL;
    if (s->looks || !o->client)
        return s;
    store_destroy(s);
    return NULL;
}

/* Under lock, with no piece in flight. */
static struct store_job *take_all(struct store *s)
{
    struct store_job *all = s->finished;

    for (int class = 0; class < KV_LANE_CLASSES; class ++)
        for (struct kv_op *op; (op = s->lanes.ops[class]);) {
            kv_lanes_remove(&s->lanes, op);
            if (job_of(op)->finished_us)
                continue; /* in the list, or the engine's */
            job_of(op)->next = all;
            all = job_of(op);
        }
    s->finished = NULL;
    s->last = &s->finished;
    return all;
}

/* Giving a hit back talks to kvstored: never under lock. */
static void destroy_all(struct store_job *all)
{
    for (struct store_job *next; all; all = next) {
        next = all->next;
        store_job_destroy(all);
    }
}

/* Under lock: ends what is under way, and lets nothing begin meanwhile.  A piece ends before its
 * next block is copied, or by the deadline of one operation of the client. */
static void quiesce(struct store *s)
{
    s->closing = true;
    if (s->moving && !s->moved)
        kv_trajectory_cancel(s->moving->trajectory);
    if (s->looking)
        kv_trajectory_cancel(s->looks);
    while (s->moving || s->looking)
        lh_wait_until(&s->changed, &s->lock, lh_now_ms() + LOOK_AGAIN_MS);
    s->closing = false;
}

void store_destroy(struct store *s)
{
    if (!s)
        return;
    pthread_mutex_lock(&s->lock);
    quiesce(s);
    struct store_job *all = take_all(s);
    pthread_mutex_unlock(&s->lock);
    destroy_all(all);
    kv_trajectory_close(s->looks);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

void store_use_root(struct store *s, const struct kv_key *root, uint64_t policy_step)
{
    struct lh_error err = {0};

    if (!s->o.client)
        return;
    pthread_mutex_lock(&s->lock);
    quiesce(s);
    struct store_job *all = take_all(s);
    pthread_mutex_unlock(&s->lock);
    destroy_all(all);
    if (kv_use_root(s->o.client, root, policy_step, 1, &err) < 0)
        lh_warn("store_root", "step=%llu error=%s", (unsigned long long)policy_step, err.message);
}

/* ---- jobs ---- */

struct store_job *store_job_new(struct store *s, enum kv_lane_class class, uint64_t owner,
                                const char *name, const struct kv_key *chain, size_t first,
                                size_t units)
{
    bool spill = class == KV_LANE_SPILL;
    size_t bytes = (units - first) * s->o.block_bytes + s->o.state_bytes;
    struct lh_error err;

    if (!s->o.client)
        return NULL;
    lh_auto(store_job) j = calloc(1, sizeof *j);
    if (!j || !(j->chain = malloc(units * sizeof *chain)))
        return NULL;
    memcpy(j->chain, chain, units * sizeof *chain);
    j->store = s;
    j->op = (struct kv_op){
        .class = class, .flow = owner, .bytes = bytes, .staging = bytes, .whole = spill};
    j->first = first;
    j->units = j->low = units;
    snprintf(j->name, sizeof j->name, "%s", name);
    j->trajectory = kv_trajectory_open(s->o.client, j->name, &err);
    if (!j->trajectory || (spill && make_staging(s, j, &err) < 0))
        return NULL;
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
    pump(s);
    pthread_mutex_unlock(&s->lock);
    if (!added)
        store_job_destroy(j);
    return added;
}

void store_abandon(struct store *s, struct store_job *j)
{
    LH_LOCKED(&s->lock);

    if (j->finished_us)
        return;
    j->abandoned = true;
    kv_trajectory_cancel(j->trajectory);
    if (j != s->moving) /* else before its next piece */
        give_up(s, j);
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
    pump(s); /* time has passed: something may be overdue */
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
    pump(s); /* its staging is free */
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
    struct kv_batch look = {.done = on_look, .ctx = s};
    LH_LOCKED(&s->lock);
    double own = kv_lanes_wait_s(&s->lanes, false) * 1e3;

    if (s->looks && !s->looking && !s->closing)
        s->looking = kv_async_begin(s->looks, KV_LOOK, &look, NULL) != NULL;
    return s->pressure_ms > own ? s->pressure_ms : own;
}
