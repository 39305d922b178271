/* Prefixes that live on the device: checkpoints of the recurrent state and the pages before them.
 *
 * A policy is hybrid: attention layers keep KV for every token, KDA layers one state for all of
 * them. A prefix can be taken up only where both exist, so the unit of reuse is a checkpoint: a
 * copy of the state at a hash-unit end together with references to every page up to there.  Holding
 * both in one object makes the rules hold by construction: a hit is never inside a unit, losing the
 * state loses the match (the pages stay with whoever else holds them), and everything of a hit is
 * pinned by one reference before anything is allocated.
 *
 * Checkpoints are read-only.  The sequence that made one may go on writing its last page behind the
 * boundary; whoever restores copies that page before writing to it.  The engine looks up between
 * passes only, so what a pass writes cannot be matched in that pass.  A checkpoint nobody holds
 * stays until memory is needed, oldest use first.
 *
 * Hashes begin at the root, so a new policy version makes every older checkpoint unmatchable at
 * once; cache_clear() then returns their memory. */
#ifndef ROLLOUT_ENGINE_CACHE_H
#define ROLLOUT_ENGINE_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvstore/client.h"
#include "rollout/engine/pool.h"

struct checkpoint {
    struct kv_key key; /* hash of the chain at its end */
    size_t units;      /* hash units it covers */
    pool_block state;
    pool_block *pages; /* n_pages, one reference each */
    size_t n_pages;
    bool turn_end; /* made where a prompt or an observation ends: kept when superseded */
    unsigned holders;
    uint64_t used;
    struct checkpoint *next_same_hash;
};

struct cache;

struct cache *cache_create(struct pool *pool, struct lh_error *err);
void cache_destroy(struct cache *c); /* frees every checkpoint, held or not */
LH_DEFINE_AUTO(cache, cache_destroy)

/* A new checkpoint held once by the caller; takes over `state` and retains the pages.  NULL with
 * the state left to the caller when memory is out. */
struct checkpoint *cache_add(struct cache *c, const struct kv_key *key, size_t units,
                             pool_block state, const pool_block *pages, size_t n_pages);
/* Longest checkpoint of chain[0..n) with more than at_least units. */
struct checkpoint *cache_find(struct cache *c, const struct kv_key *chain, size_t n,
                              size_t at_least);
void cache_hold(struct checkpoint *k);
/* `keep` false destroys it when nobody else holds it: it was superseded. */
void cache_drop(struct cache *c, struct checkpoint *k, bool keep);
/* Destroys the unheld checkpoint that was used longest ago; false when there is none. */
bool cache_evict(struct cache *c);
/* Destroys every checkpoint that nobody holds. */
void cache_clear(struct cache *c);

#endif
