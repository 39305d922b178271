#include "rollout/engine/engine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "rollout/engine/internal.h"

enum { FIRST_TURN_GUESS = 32 }; /* tokens, until turns have been seen */
static const double SMOOTH = 0.05;

static size_t step_rows(const struct engine_options *o)
{
    return (size_t)o->step_tokens + o->max_running;
}

size_t engine_scratch_bytes(const struct engine_options *o)
{
    return policy_exec_bytes(o->model, (int)step_rows(o));
}

static int check_options(const struct engine_options *o, struct lh_error *err)
{
    if (!o->unit_tokens || !o->page_tokens || o->page_tokens % o->unit_tokens)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "page_tokens (%u) must be a multiple of unit_tokens (%u)", o->page_tokens,
                       o->unit_tokens);
    if (!o->max_running || !o->step_tokens || !o->max_context_tokens)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "max_running, prefill_chunk and context_tokens must be at least 1");
    if (!policy_kv_floats(o->model) || !policy_state_floats(o->model))
        return lh_fail(err, LH_UNIMPLEMENTED,
                       "rollout needs a hybrid policy: at least one KDA and one attention layer");
    return 0;
}

static struct pool *make_pool(const struct engine_options *o, struct lh_error *err)
{
    return pool_create(o->kv, o->kv_bytes, policy_kv_floats(o->model) * o->page_tokens,
                       policy_state_floats(o->model), err);
}

/* One sequence alone: its pages, one page that is being copied, its state and its checkpoint. */
static int check_budget(const struct engine_options *o, const struct pool *pool,
                        struct lh_error *err)
{
    size_t pages = (o->max_context_tokens + o->page_tokens - 1) / o->page_tokens;
    size_t need = pages + 1 + 2 * pool_state_frames(pool);

    if (pool_frames(pool) >= need)
        return 0;
    return lh_fail(err, LH_INVALID_ARGUMENT,
                   "rollout.kv_budget_bytes is %zu, but one sequence of %u tokens needs %zu: raise "
                   "the budget or lower rollout.context_tokens",
                   o->kv_bytes, o->max_context_tokens, need * pool_frame_bytes(pool));
}

int engine_check(const struct engine_options *o, struct lh_error *err)
{
    int r = check_options(o, err);

    if (r < 0)
        return r;
    lh_auto(pool) pool = make_pool(o, err);
    return pool ? check_budget(o, pool, err) : err ? err->code : LH_RESOURCE_EXHAUSTED;
}

static int allocate(struct engine *e, struct lh_error *err)
{
    const struct engine_options *o = &e->o;
    size_t block = e->block_floats * sizeof(float), state = e->state_floats * sizeof(float);
    struct store_options so = {o->store, block, state, o->max_inflight_bytes, o->wake, o->ctx};

    if (!(e->pool = make_pool(o, err)) || !(e->cache = cache_create(e->pool, err)) ||
        !(e->store = store_create(&so, err)))
        return err ? err->code : LH_UNKNOWN;
    e->plan = calloc(o->max_running, sizeof *e->plan);
    e->chunks = calloc(o->max_running, sizeof *e->chunks);
    e->logits = malloc((size_t)o->max_running * (size_t)e->config->vocab * sizeof(float));
    if (!e->plan || !e->chunks || !e->logits)
        return lh_fail_errno(err, ENOMEM, "engine for %u sequences", o->max_running);
    return 0;
}

struct engine *engine_create(const struct engine_options *o, struct lh_error *err)
{
    struct lh_error local = {0};
    lh_auto(engine) e = calloc(1, sizeof *e);

    err = err ? err : &local;
    if (!e)
        return lh_fail_errno(err, ENOMEM, "engine"), NULL;
    if (engine_check(o, err) < 0)
        return NULL;
    e->o = *o;
    e->config = policy_model_config(o->model);
    for (int i = 0; i < e->config->layers; i++)
        e->attention_layers += e->config->layer_type[i] == POLICY_MLA;
    e->latent = policy_kv_floats(o->model) / e->attention_layers;
    e->block_floats = policy_kv_floats(o->model) * o->unit_tokens;
    e->state_floats = policy_state_floats(o->model);
    e->turn_tokens = FIRST_TURN_GUESS;
    kv_compute_init(&e->compute, o->step_tokens);
    return allocate(e, err) < 0 ? NULL : lh_steal(&e);
}

void engine_destroy(struct engine *e)
{
    if (!e)
        return;
    policy_exec_destroy(e->exec);
    store_destroy(e->store);
    cache_destroy(e->cache);
    pool_destroy(e->pool);
    free(e->plan);
    free(e->chunks);
    free(e->page_pointers);
    free(e->logits);
    free(e);
}

/* ---- phases and versions ---- */

static void use_version(struct engine *e, const struct policy_version *version)
{
    struct kv_identity id = {.tenant = kv_client_tenant(e->o.store)};

    policy_model_fingerprint(e->o.model, id.model_fingerprint);
    memcpy(id.policy_version, version->id, sizeof id.policy_version);
    e->root = kv_root(&id);
    e->version = *version;
    e->rooted = true;
    for (struct engine_sequence *q = e->sequences; q; q = q->next)
        residence_drop(e, q, true);
    store_use_root(e->store, &e->root, version->step);
}

/* `carry`: the root stays, and with it everything under it. */
static void carry_over(struct engine *e, const struct policy_version *version)
{
    e->version = *version;
    e->mixed = true;
    for (struct engine_sequence *q = e->sequences; q; q = q->next)
        q->old |= q->computed || q->lost;
    policy_exec_destroy(e->exec);
    e->exec = NULL;
}

int engine_resume(struct engine *e, const struct policy_version *version, struct lh_error *err)
{
    bool same = e->rooted && !memcmp(version->id, e->version.id, sizeof version->id) &&
                version->step == e->version.step;

    if (!e->exec)
        e->exec = policy_exec_create(e->o.model, e->o.weights, e->o.scratch, e->o.scratch_bytes,
                                     (int)step_rows(&e->o), (int)e->o.page_tokens, err);
    if (!e->exec)
        return err ? err->code : LH_UNKNOWN;
    if (same)
        return 0;
    if (e->o.carry && e->rooted) {
        carry_over(e, version);
    } else {
        engine_pause(e);
        use_version(e, version);
    }
    return engine_resume(e, version, err);
}

void engine_pause(struct engine *e)
{
    for (struct engine_sequence *q = e->sequences; q; q = q->next) {
        residence_drop(e, q, false);
        q->asked = false;
        if (q->phase == SEQUENCE_RUNNING)
            q->phase = SEQUENCE_WAITING;
    }
    cache_clear(e->cache);
    policy_exec_destroy(e->exec);
    e->exec = NULL;
}

bool engine_paused(const struct engine *e)
{
    return !e->exec;
}

const struct policy_version *engine_version(const struct engine *e)
{
    return &e->version;
}

/* ---- sequences ---- */

static void enlist(struct engine *e, struct engine_sequence *q)
{
    struct engine_sequence **at = &e->sequences;

    while (*at && (*at)->order < q->order)
        at = &(*at)->next;
    q->next = *at;
    *at = q;
}

static void delist(struct engine *e, const struct engine_sequence *q)
{
    struct engine_sequence **at = &e->sequences;

    while (*at != q)
        at = &(*at)->next;
    *at = q->next;
}

/* By the time it was asked for, one place for everyone. */
static uint64_t place(const struct engine_sequence *q, int64_t at_us)
{
    return ((uint64_t)at_us << 12) + q->id % 4096;
}

struct engine_sequence *engine_open(struct engine *e, const struct engine_sequence_spec *spec,
                                    struct lh_error *err)
{
    struct engine_sequence *q = calloc(1, sizeof *q);

    if (!q)
        return lh_fail_errno(err, ENOMEM, "sequence of %s", spec->name), NULL;
    q->spec = *spec;
    q->id = ++e->ids;
    q->order = place(q, lh_now_us());
    q->state = POOL_NONE;
    q->lost = spec->resumed;
    q->idle_since = e->clock;
    enlist(e, q);
    return q;
}

void engine_close(struct engine *e, struct engine_sequence *q)
{
    if (!q)
        return;
    delist(e, q);
    residence_drop(e, q, false);
    restore_forget(e, q);
    free(q->pages);
    free(q->chain);
    free(q);
}

/* Whoever waits longest is served first.  What is still on the device has a head start of the mean
 * wait, because it costs nothing to go on with; and what an earlier attempt began goes before all.
 */
static void take_place(struct engine *e, struct engine_sequence *q)
{
    int64_t head_start = q->computed ? (int64_t)e->wait_us : 0;

    delist(e, q);
    q->order = place(q, q->asked_us - head_start);
    if (q->spec.resumed && !q->idle_us)
        q->order = q->id;
    enlist(e, q);
}

void engine_ask(struct engine *e, struct engine_sequence *q, size_t max_new)
{
    q->asked_us = lh_now_us();
    if (q->idle_us) {
        int64_t tool = q->asked_us - q->idle_us;
        q->tool_us = q->tool_us ? (q->tool_us + tool) / 2 : tool;
    }
    q->phase = SEQUENCE_WAITING;
    q->max_new = max_new;
    q->sampled = 0;
    q->ended = q->settled = false;
    take_place(e, q);
}

void engine_settled(struct engine *e, struct engine_sequence *q)
{
    if (!q->settled)
        e->wait_us += SMOOTH * ((double)(lh_now_us() - q->asked_us) - e->wait_us);
    q->settled = true;
}

void *engine_owner(const struct engine_sequence *q)
{
    return q->spec.owner;
}

struct engine_sequence *engine_turn_ended(struct engine *e)
{
    for (struct engine_sequence *q = e->sequences; q; q = q->next) {
        if (!q->ended)
            continue;
        q->ended = false;
        return q;
    }
    return NULL;
}

/* ---- admission ---- */

static bool anything(const struct engine *e, bool (*is)(const struct engine_sequence *))
{
    for (const struct engine_sequence *q = e->sequences; q; q = q->next)
        if (is(q))
            return true;
    return false;
}

static bool is_running(const struct engine_sequence *q)
{
    return q->phase == SEQUENCE_RUNNING;
}

static size_t pages_for(const struct engine *e, size_t tokens)
{
    return (tokens + e->o.page_tokens - 1) / e->o.page_tokens;
}

/* Frames the sequence will want until its turn ends, beyond what it holds. */
static size_t growth(const struct engine *e, const struct engine_sequence *q)
{
    size_t left = q->max_new - q->sampled, turn = (size_t)e->turn_tokens;
    size_t pages = pages_for(e, q->spec.transcript->n + (turn < left ? turn : left));

    return (pages > q->n_pages ? pages - q->n_pages : 0) +
           (q->checkpoint ? 0 : pool_state_frames(e->pool));
}

unsigned engine_running(const struct engine *e)
{
    unsigned n = 0;

    for (const struct engine_sequence *q = e->sequences; q; q = q->next)
        n += is_running(q);
    return n;
}

static struct engine_sequence *first_waiting(const struct engine *e)
{
    struct engine_sequence *q = e->sequences;

    while (q && q->phase != SEQUENCE_WAITING)
        q = q->next;
    return q;
}

bool engine_admit(struct engine *e)
{
    residence_collect(e);
    struct engine_sequence *q = e->exec ? first_waiting(e) : NULL;
    if (!q) {
        if (e->exec)
            restore_prefetch(e);
        return false;
    }
    bool alone = !anything(e, is_running);
    if (!residence_restore(e, q))
        return false;
    if (!residence_headroom(e, q, growth(e, q)) && !alone)
        return false;
    q->phase = SEQUENCE_RUNNING;
    /* Its prefix's pages now: the next in order must not count on them. */
    residence_reserve(e, q, q->spec.transcript->n - q->computed);
    restore_note(e, q, KV_ADMITTED);
    return true;
}

/* ---- numbers ---- */

static void count(struct engine *e, const struct engine_sequence *q, struct engine_stats *s)
{
    size_t n = q->spec.transcript->n;

    s->running += q->phase == SEQUENCE_RUNNING;
    s->waiting += q->phase == SEQUENCE_WAITING;
    s->idle += q->phase == SEQUENCE_IDLE;
    s->spilled += q->phase != SEQUENCE_RUNNING && !q->computed && q->stored;
    s->loading += q->loading != NULL;
    size_t end = (pages_for(e, n + (size_t)e->turn_tokens) + 2 * pool_state_frames(e->pool)) *
                 pool_frame_bytes(e->pool);
    if (q->phase == SEQUENCE_RUNNING)
        s->horizon_bytes += end;
    if (q->phase != SEQUENCE_IDLE)
        s->mean_bytes += end;
}

struct engine_stats engine_stats(struct engine *e)
{
    struct engine_stats s = e->counters;
    struct store_counters c = store_counters(e->store);

    for (const struct engine_sequence *q = e->sequences; q; q = q->next)
        count(e, q, &s);
    if (s.running + s.waiting)
        s.mean_bytes /= s.running + s.waiting;
    s.budget_bytes = pool_frames(e->pool) * pool_frame_bytes(e->pool);
    s.used_bytes = s.budget_bytes - pool_free(e->pool) * pool_frame_bytes(e->pool);
    s.spilled_bytes = c.spilled_bytes;
    s.loaded_bytes = c.loaded_bytes;
    return s;
}

void engine_note_window(struct engine *e, enum kv_decision why, unsigned size)
{
    struct kv_record r = {.at_us = lh_now_us(), .tokens = size, .decision = (uint16_t)why};

    kv_trace_add(e->o.trace, &r, NULL);
}

double engine_load_wait_ms(struct engine *e)
{
    return store_load_wait_ms(e->store);
}
