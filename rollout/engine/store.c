#include "rollout/engine/store.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/log.h"

LH_LOG_COMPONENT("rollout");

struct queue {
    struct store_job *head, **tail;
};

struct store {
    struct store_options o;
    pthread_t thread;
    bool started;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* under lock */
    bool stop, busy, look; /* look: the pressure is wanted */
    struct queue todo, finished;
    struct store_counters counters;
    double wait_ms, pressure_ms; /* ours; kvstored's when last asked */
};

void store_job_destroy(struct store_job *j)
{
    if (!j)
        return;
    free(j->chain);
    free(j->blocks);
    free(j);
}

static void push(struct queue *q, struct store_job *j)
{
    j->next = NULL;
    *q->tail = j;
    q->tail = &j->next;
}

static struct store_job *unlink_job(struct queue *q, struct store_job **at)
{
    struct store_job *j = *at;

    *at = j->next;
    if (!j->next)
        q->tail = at;
    j->next = NULL;
    return j;
}

static bool older_spill(const struct queue *q, const struct store_job *load)
{
    for (const struct store_job *j = q->head; j != load; j = j->next)
        if (j->owner == load->owner)
            return true;
    return false;
}

/* The first load that no spill of its own sequence precedes, else the oldest job. */
static struct store_job *next_job(struct queue *q)
{
    for (struct store_job **at = &q->head; *at; at = &(*at)->next)
        if ((*at)->kind == STORE_LOAD && !older_spill(q, *at))
            return unlink_job(q, at);
    return q->head ? unlink_job(q, &q->head) : NULL;
}

static int64_t run_spill(struct store *s, struct store_job *j, struct lh_error *err)
{
    size_t n = j->units - j->first;
    lh_autofree const void **blocks = calloc(n + 1, sizeof *blocks);

    if (!blocks)
        return lh_fail_errno(err, ENOMEM, "spill");
    for (size_t i = 0; i < n; i++)
        blocks[i] = j->blocks + i * s->o.block_bytes;
    int64_t r = kv_put(s->o.client, j->chain, j->first, j->units, blocks, j->state, j->name, err);
    j->ok = r >= 0;
    return r;
}

static int64_t run_load(struct store *s, struct store_job *j, struct lh_error *err)
{
    lh_auto(kv_hit) hit = kv_lookup(s->o.client, j->chain, j->units, j->first, j->name, err);
    size_t wanted = j->units;

    j->units = 0;
    if (!hit)
        return err->code == LH_NOT_FOUND ? 0 : err->code;
    size_t units = kv_hit_units(hit);
    if (units <= j->first || units > wanted)
        return lh_fail(err, LH_DATA_LOSS, "kvstored answered %zu units", units);
    for (size_t u = j->first; u < units; u++) {
        int r = kv_hit_block(hit, u, j->blocks + (u - j->first) * s->o.block_bytes, err);
        if (r < 0)
            return r;
    }
    int r = kv_hit_state(hit, j->state, err);
    if (r < 0)
        return r;
    j->units = units;
    j->ok = true;
    return (int64_t)((units - j->first) * s->o.block_bytes + s->o.state_bytes);
}

static void run_job(struct store *s, struct store_job *j)
{
    struct lh_error err = {0};
    int64_t bytes = j->kind == STORE_SPILL ? run_spill(s, j, &err) : run_load(s, j, &err);

    if (bytes < 0)
        lh_debug(j->kind == STORE_SPILL ? "spill_dropped" : "load_missed", "trajectory=%s error=%s",
                 j->name, err.message);
    LH_LOCKED(&s->lock);
    if (bytes > 0 && j->kind == STORE_SPILL)
        s->counters.spilled_bytes += (uint64_t)bytes;
    if (bytes > 0 && j->kind == STORE_LOAD)
        s->counters.loaded_bytes += (uint64_t)bytes;
    s->counters.dropped_spills += bytes < 0 && j->kind == STORE_SPILL;
    if (j->kind == STORE_LOAD)
        s->wait_ms += 0.2 * ((double)(lh_now_us() - j->submitted_us) / 1000.0 - s->wait_ms);
    push(&s->finished, j);
    s->busy = false;
    pthread_cond_broadcast(&s->changed);
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

/* 1 = *j is to be run, 0 = the pressure is wanted, -1 = the end. */
static int await_work(struct store *s, struct store_job **j)
{
    LH_LOCKED(&s->lock);
    while (!(*j = next_job(&s->todo)) && !s->look && !s->stop)
        pthread_cond_wait(&s->changed, &s->lock);
    s->busy = *j || !s->stop;
    return *j ? 1 : s->stop ? -1 : 0;
}

static void *store_thread(void *arg)
{
    struct store *s = arg;
    struct store_job *j;

    for (int work; (work = await_work(s, &j)) >= 0;) {
        if (!work) {
            look(s);
            continue;
        }
        run_job(s, j);
        if (s->o.wake)
            s->o.wake(s->o.ctx);
    }
    return NULL;
}

struct store *store_create(const struct store_options *o, struct lh_error *err)
{
    struct store *s = calloc(1, sizeof *s);

    if (!s)
        return lh_fail_errno(err, ENOMEM, "store"), NULL;
    s->o = *o;
    s->todo.tail = &s->todo.head;
    s->finished.tail = &s->finished.head;
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

static void drop_all(struct queue *q)
{
    while (q->head)
        store_job_destroy(unlink_job(q, &q->head));
}

void store_destroy(struct store *s)
{
    if (!s)
        return;
    pthread_mutex_lock(&s->lock);
    drop_all(&s->todo);
    s->stop = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    if (s->started)
        pthread_join(s->thread, NULL);
    drop_all(&s->finished);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static bool take_room(struct store *s, size_t bytes)
{
    LH_LOCKED(&s->lock);
    size_t used = s->counters.inflight_bytes;

    if (used && used + bytes > s->o.max_inflight_bytes)
        return false;
    s->counters.inflight_bytes += bytes;
    return true;
}

static void give_room(struct store *s, size_t bytes)
{
    LH_LOCKED(&s->lock);
    s->counters.inflight_bytes -= bytes;
}

struct store_job *store_job_new(struct store *s, enum store_kind kind, uint64_t owner,
                                const char *name, const struct kv_key *chain, size_t first,
                                size_t units)
{
    size_t blocks = (units - first) * s->o.block_bytes, bytes = blocks + s->o.state_bytes;

    if (!s->started || !take_room(s, bytes))
        return NULL;
    lh_auto(store_job) j = calloc(1, sizeof *j);
    if (j) {
        j->blocks = malloc(bytes);
        j->chain = malloc(units * sizeof *chain);
    }
    if (!j || !j->blocks || !j->chain) {
        give_room(s, bytes);
        return NULL;
    }
    memcpy(j->chain, chain, units * sizeof *chain);
    j->kind = kind;
    j->owner = owner;
    j->first = first;
    j->units = units;
    j->state = j->blocks + blocks;
    j->reserved = bytes;
    snprintf(j->name, sizeof j->name, "%s", name);
    return lh_steal(&j);
}

void store_submit(struct store *s, struct store_job *j)
{
    j->submitted_us = lh_now_us();
    LH_LOCKED(&s->lock);
    push(&s->todo, j);
    pthread_cond_broadcast(&s->changed);
}

struct store_job *store_finished(struct store *s)
{
    LH_LOCKED(&s->lock);
    return s->finished.head ? unlink_job(&s->finished, &s->finished.head) : NULL;
}

void store_job_done(struct store *s, struct store_job *j)
{
    give_room(s, j->reserved);
    store_job_destroy(j);
}

void store_use_root(struct store *s, const struct kv_key *root, uint64_t policy_step)
{
    struct lh_error err = {0};

    if (!s->started)
        return;
    pthread_mutex_lock(&s->lock);
    while (s->todo.head) {
        s->counters.inflight_bytes -= s->todo.head->reserved;
        store_job_destroy(unlink_job(&s->todo, &s->todo.head));
    }
    while (s->busy) /* ends by the deadline of one operation of the client */
        pthread_cond_wait(&s->changed, &s->lock);
    while (s->finished.head) {
        s->counters.inflight_bytes -= s->finished.head->reserved;
        store_job_destroy(unlink_job(&s->finished, &s->finished.head));
    }
    pthread_mutex_unlock(&s->lock);
    if (kv_use_root(s->o.client, root, policy_step, 1, &err) < 0)
        lh_warn("store_root", "step=%llu error=%s", (unsigned long long)policy_step, err.message);
}

struct store_counters store_counters(struct store *s)
{
    LH_LOCKED(&s->lock);
    return s->counters;
}

double store_load_wait_ms(struct store *s)
{
    LH_LOCKED(&s->lock);
    if (s->started && !s->look) {
        s->look = true;
        pthread_cond_broadcast(&s->changed);
    }
    return s->pressure_ms > s->wait_ms ? s->pressure_ms : s->wait_ms;
}
