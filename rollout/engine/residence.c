/* What of a sequence is on the device, how it gets there and how it leaves.
 *
 * A prefix comes from the device cache, and what is missing from kvstored or by computing it
 * (restore.c).  It leaves by eviction: units up to the newest checkpoint go to kvstored together
 * with that checkpoint's state, what lies behind is dropped.  So a stored prefix has no holes and
 * always ends where it can be taken up again. */
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
        restore_note(e, victim, KV_PREEMPTED);
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

static bool add_page(struct engine *e, struct engine_sequence *q)
{
    pool_block b = take(e, q, pool_page, true);

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
        if (!add_page(e, q))
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
    restore_forget(e, q);
    q->loading = NULL;
    q->lost = q->asked = false;
    q->stored = q->spilling = q->chained = 0;
}

void residence_evict(struct engine *e, struct engine_sequence *q)
{
    restore_spill(e, q);
    release_checkpoint(e, q, false);
    residence_drop(e, q, false);
    q->asked = false;
}

/* ---- coming back ---- */

static bool restore_checkpoint(struct engine *e, struct engine_sequence *q, struct checkpoint *k)
{
    release_pages(e, q); /* those it was admitted with */
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
    q->old |= e->mixed;
    release_checkpoint(e, q, true);
    cache_hold(q->checkpoint = k);
    return true;
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
    bool ok = q->state != POOL_NONE;
    if (ok && k)
        ok = restore_checkpoint(e, q, k);
    else if (ok)
        memset(pool_data(e->pool, q->state), 0, e->state_floats * sizeof(float));
    if (ok)
        restore_plan(e, q, k ? k->units : 0);
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
