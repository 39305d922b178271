/* What of a sequence is on the device, how it gets there and how it leaves.
 *
 * A prefix comes from the device cache, from kvstored, or by computing it; the longest wins and the
 * rest is computed.  It leaves by eviction: units up to the newest checkpoint go to kvstored
 * together with that checkpoint's state, what lies behind is dropped.  So a stored prefix has no
 * holes and always ends where it can be taken up again. */
#include <stdlib.h>
#include <string.h>

#include "rollout/engine/internal.h"

/* Hashes of the first `units` units; NULL when memory is out, which callers treat as a miss. */
struct kv_key *residence_chain(struct engine *e, struct engine_sequence *q, size_t units)
{
    unsigned unit = e->o.unit_tokens;

    if (units > q->chain_capacity) {
        size_t capacity = units * 2;
        struct kv_key *bigger = reallocarray(q->chain, capacity, sizeof *bigger);
        if (!bigger)
            return NULL;
        q->chain = bigger;
        q->chain_capacity = capacity;
    }
    if (units > q->chained) {
        const struct kv_key *before = q->chained ? &q->chain[q->chained - 1] : &e->root;
        kv_chain(before, q->spec.transcript->tokens + q->chained * unit,
                 (units - q->chained) * unit, unit, q->chain + q->chained);
        q->chained = units;
    }
    return q->chain;
}

/* The last token is always computed: its logits are what the turn begins with. */
static size_t usable_units(const struct engine *e, const struct engine_sequence *q)
{
    size_t n = q->spec.transcript->n;

    return n ? (n - 1) / e->o.unit_tokens : 0;
}

/* ---- room ---- */

static struct engine_sequence *longest_idle(struct engine *e)
{
    struct engine_sequence *best = NULL;

    for (struct engine_sequence *q = e->sequences; q; q = q->next)
        if (q->phase == SEQUENCE_IDLE && q->n_pages && (!best || q->idle_since < best->idle_since))
            best = q;
    return best;
}

static struct engine_sequence *newest(struct engine *e, enum sequence_phase phase, uint64_t after)
{
    struct engine_sequence *best = NULL;

    for (struct engine_sequence *q = e->sequences; q; q = q->next)
        if (q->phase == phase && q->order > after && (q->n_pages || q->state != POOL_NONE))
            best = q;
    return best;
}

/* Gives up one thing in favour of `q`; only a running sequence may displace running ones. */
static bool reclaim(struct engine *e, const struct engine_sequence *q, bool preempt)
{
    struct engine_sequence *victim;

    if (cache_evict(e->cache))
        return true;
    victim = longest_idle(e);
    if (!victim)
        victim = newest(e, SEQUENCE_WAITING, q->order);
    if (!victim && preempt && (victim = newest(e, SEQUENCE_RUNNING, q->order))) {
        victim->phase = SEQUENCE_WAITING;
        e->counters.preemptions++;
    }
    if (victim)
        residence_evict(e, victim);
    return victim != NULL;
}

static pool_block take(struct engine *e, const struct engine_sequence *q,
                       pool_block (*allocate)(struct pool *), bool preempt)
{
    pool_block b;

    while ((b = allocate(e->pool)) == POOL_NONE && reclaim(e, q, preempt))
        ;
    return b;
}

bool residence_headroom(struct engine *e, struct engine_sequence *q, size_t frames)
{
    while (pool_free(e->pool) < frames)
        if (!reclaim(e, q, false))
            return false;
    return true;
}

static bool push_page(struct engine_sequence *q, pool_block b)
{
    if (q->n_pages == q->page_capacity) {
        size_t capacity = q->page_capacity ? q->page_capacity * 2 : 16;
        pool_block *bigger = reallocarray(q->pages, capacity, sizeof *bigger);
        if (!bigger)
            return false;
        q->pages = bigger;
        q->page_capacity = capacity;
    }
    q->pages[q->n_pages++] = b;
    return true;
}

static bool add_page(struct engine *e, struct engine_sequence *q, bool preempt)
{
    pool_block b = take(e, q, pool_page, preempt);

    if (b == POOL_NONE)
        return false;
    if (push_page(q, b))
        return true;
    pool_release(e->pool, b);
    return false;
}

static bool copy_tail_page(struct engine *e, struct engine_sequence *q, size_t at)
{
    pool_block b = take(e, q, pool_page, true), old = q->pages[at];

    if (b == POOL_NONE)
        return false;
    memcpy(pool_data(e->pool, b), pool_data(e->pool, old),
           (size_t)e->o.page_tokens * e->attention_layers * e->latent * sizeof(float));
    pool_release(e->pool, old);
    q->pages[at] = b;
    q->shared = at;
    return true;
}

bool residence_reserve(struct engine *e, struct engine_sequence *q, size_t n)
{
    size_t page = e->o.page_tokens, tail = q->computed / page;

    if (tail < q->shared && !copy_tail_page(e, q, tail))
        return false;
    while (q->n_pages * page < q->computed + n)
        if (!add_page(e, q, true))
            return false;
    return true;
}

/* ---- leaving ---- */

static void release_pages(struct engine *e, struct engine_sequence *q)
{
    for (size_t i = 0; i < q->n_pages; i++)
        pool_release(e->pool, q->pages[i]);
    q->n_pages = q->shared = 0;
    q->computed = 0;
}

static void release_checkpoint(struct engine *e, struct engine_sequence *q, bool keep)
{
    if (q->checkpoint)
        cache_drop(e->cache, q->checkpoint, keep);
    q->checkpoint = NULL;
}

void residence_drop(struct engine *e, struct engine_sequence *q, bool forget)
{
    q->lost |= q->computed > 0;
    release_pages(e, q);
    pool_release(e->pool, q->state);
    q->state = POOL_NONE;
    release_checkpoint(e, q, !forget);
    if (!forget)
        return;
    if (q->load)
        store_job_done(e->store, q->load);
    q->load = NULL;
    q->loading = q->lost = q->asked = false;
    q->stored = q->chained = 0;
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

static void spill(struct engine *e, struct engine_sequence *q)
{
    const struct checkpoint *k = q->checkpoint;
    size_t per_page = e->o.page_tokens / e->o.unit_tokens, block = e->block_floats * sizeof(float);

    if (!k || k->units <= q->stored)
        return;
    const struct kv_key *chain = residence_chain(e, q, k->units);
    struct store_job *j = chain ? store_job_new(e->store, STORE_SPILL, q->id, q->spec.name, chain,
                                                q->stored, k->units)
                                : NULL;
    if (!j)
        return;
    for (size_t u = j->first; u < j->units; u++)
        copy_unit(e, j->blocks + (u - j->first) * block, pool_data(e->pool, k->pages[u / per_page]),
                  u, true);
    memcpy(j->state, pool_data(e->pool, k->state), e->state_floats * sizeof(float));
    store_submit(e->store, j);
}

void residence_evict(struct engine *e, struct engine_sequence *q)
{
    spill(e, q);
    release_checkpoint(e, q, false);
    residence_drop(e, q, false);
    q->asked = false;
}

/* ---- coming back ---- */

bool residence_prefetch(struct engine *e, struct engine_sequence *q)
{
    size_t units = usable_units(e, q), known = q->stored ? q->stored : units;

    if (!e->o.store || !q->lost || q->asked || q->computed || !units)
        return true;
    const struct kv_key *chain = residence_chain(e, q, units);
    if (!chain || cache_find(e->cache, chain, units, known - 1))
        return true;
    struct store_job *j = store_job_new(e->store, STORE_LOAD, q->id, q->spec.name, chain, 0, units);
    if (!j)
        return false;
    q->asked = q->loading = true;
    e->counters.store_lookups++;
    store_submit(e->store, j);
    return true;
}

static struct engine_sequence *by_id(struct engine *e, uint64_t id)
{
    for (struct engine_sequence *q = e->sequences; q; q = q->next)
        if (q->id == id)
            return q;
    return NULL;
}

static void collect_load(struct engine *e, struct engine_sequence *q, struct store_job *j)
{
    q->loading = false;
    e->counters.store_hits += j->ok;
    if (!j->ok || q->computed) {
        store_job_done(e->store, j);
        return;
    }
    q->load = j;
    q->stored = j->units;
}

void residence_collect(struct engine *e)
{
    for (struct store_job *j; (j = store_finished(e->store));) {
        struct engine_sequence *q = by_id(e, j->owner);
        if (q && j->kind == STORE_LOAD) {
            collect_load(e, q, j);
            continue;
        }
        if (q)
            q->stored = j->ok ? j->units : 0;
        store_job_done(e->store, j);
    }
}

static bool restore_checkpoint(struct engine *e, struct engine_sequence *q, struct checkpoint *k)
{
    for (size_t i = 0; i < k->n_pages; i++) {
        if (!push_page(q, k->pages[i]))
            return false;
        pool_retain(e->pool, k->pages[i]);
    }
    q->shared = q->n_pages;
    memcpy(pool_data(e->pool, q->state), pool_data(e->pool, k->state),
           e->state_floats * sizeof(float));
    q->computed = k->units * e->o.unit_tokens;
    e->counters.prefix_hit_tokens += q->computed;
    release_checkpoint(e, q, true);
    cache_hold(q->checkpoint = k);
    return true;
}

static bool restore_loaded(struct engine *e, struct engine_sequence *q)
{
    const struct store_job *j = q->load;
    size_t per_page = e->o.page_tokens / e->o.unit_tokens, block = e->block_floats * sizeof(float);

    while (q->n_pages * per_page < j->units)
        if (!add_page(e, q, false))
            return false;
    for (size_t u = 0; u < j->units; u++)
        copy_unit(e, j->blocks + u * block, pool_data(e->pool, q->pages[u / per_page]), u, false);
    memcpy(pool_data(e->pool, q->state), j->state, e->state_floats * sizeof(float));
    q->computed = j->units * e->o.unit_tokens;
    return true;
}

static bool fill(struct engine *e, struct engine_sequence *q, struct checkpoint *k)
{
    size_t device = k ? k->units : 0, stored = q->load ? q->load->units : 0;
    bool ok = true;

    if (stored > device)
        ok = restore_loaded(e, q);
    else if (device)
        ok = restore_checkpoint(e, q, k);
    else
        memset(pool_data(e->pool, q->state), 0, e->state_floats * sizeof(float));
    if (ok && q->load) {
        store_job_done(e->store, q->load);
        q->load = NULL;
    }
    return ok;
}

bool residence_restore(struct engine *e, struct engine_sequence *q)
{
    size_t units = usable_units(e, q);

    if (q->computed)
        return true;
    const struct kv_key *chain = residence_chain(e, q, units);
    struct checkpoint *k = chain ? cache_find(e->cache, chain, units, 0) : NULL;
    if (k)
        cache_hold(k); /* pinned before anything is allocated */
    if (q->state == POOL_NONE)
        q->state = take(e, q, pool_state, false);
    bool ok = q->state != POOL_NONE && fill(e, q, k);
    if (k)
        cache_drop(e->cache, k, true);
    if (!ok)
        residence_drop(e, q, false);
    return ok;
}

/* ---- checkpoints ---- */

static struct checkpoint *new_checkpoint(struct engine *e, struct engine_sequence *q,
                                         const struct kv_key *key, size_t units)
{
    size_t pages = (q->computed + e->o.page_tokens - 1) / e->o.page_tokens;
    pool_block state = take(e, q, pool_state, false);

    if (state == POOL_NONE)
        return NULL;
    memcpy(pool_data(e->pool, state), pool_data(e->pool, q->state),
           e->state_floats * sizeof(float));
    struct checkpoint *k = cache_add(e->cache, key, units, state, q->pages, pages);
    if (!k)
        pool_release(e->pool, state);
    return k;
}

void residence_checkpoint(struct engine *e, struct engine_sequence *q, bool turn_end)
{
    size_t units = q->computed / e->o.unit_tokens;
    const struct kv_key *chain = residence_chain(e, q, units);

    if (!chain)
        return;
    struct checkpoint *k = cache_find(e->cache, chain, units, units - 1);
    if (k)
        cache_hold(k);
    release_checkpoint(e, q, q->checkpoint && q->checkpoint->turn_end);
    if (!k && !(k = new_checkpoint(e, q, &chain[units - 1], units)))
        return;
    k->turn_end |= turn_end;
    q->checkpoint = k;
}
