/* What the files of the engine share: engine.c (sequences), residence.c (what is on the device),
 * restore.c (what comes from the store and goes there), step.c (one forward pass). */
#ifndef ROLLOUT_ENGINE_INTERNAL_H
#define ROLLOUT_ENGINE_INTERNAL_H

#include "rollout/engine/cache.h"
#include "rollout/engine/engine.h"
#include "rollout/engine/pool.h"
#include "rollout/engine/store.h"

enum sequence_phase { SEQUENCE_IDLE, SEQUENCE_WAITING, SEQUENCE_RUNNING };

struct engine_sequence {
    struct engine_sequence_spec spec;
    uint64_t id, order; /* order: who is served first and yields last; of this turn */
    enum sequence_phase phase;
    bool ended;              /* its turn is over and has not been told */
    size_t max_new, sampled; /* of the turn */
    uint64_t idle_since;     /* engine clock */

    /* On the device; all empty when computed is 0. */
    size_t computed; /* tokens in pages and state */
    pool_block state;
    pool_block *pages;
    size_t n_pages, page_capacity;
    size_t shared; /* pages[0..shared) are someone else's too: copied before they are written */
    struct checkpoint *checkpoint; /* newest */

    /* In the store. */
    size_t stored;             /* units known to be there under the current root */
    bool old;                  /* some of its KV may be of an older version */
    bool lost;                 /* had KV of this root, or an earlier attempt had */
    bool asked;                /* the store was asked for this stay */
    size_t spilling;           /* units that are on their way there */
    struct store_job *loading; /* on its way; the store's until it has finished */
    size_t loading_units;
    struct store_job *load; /* finished, waiting to be taken */
    size_t front;           /* tokens to compute before `loading` is needed */

    int64_t asked_us, idle_us, tool_us; /* of this turn, the end of the last; what tools take */
    int64_t put_away_us;                /* idle_us of the rest in which it was put away */
    bool settled;                       /* this turn's prefix is complete */

    struct kv_key *chain; /* of the first `chained` tokens' units */
    size_t chained, chain_capacity;
    struct engine_sequence *next;
};

struct plan_row {
    struct engine_sequence *q;
    int n;
    bool sample;
};

struct engine {
    struct engine_options o;
    const struct policy_config *config;
    struct pool *pool;
    struct cache *cache;
    struct store *store;
    struct policy_exec *exec; /* NULL while paused */
    struct policy_version version;
    struct kv_key root;
    bool rooted;                     /* a version has been set */
    bool mixed;                      /* and another one since, with `carry` */
    size_t attention_layers, latent; /* floats of a token in one attention layer */
    size_t block_floats, state_floats;

    struct engine_sequence *sequences; /* by order */
    uint64_t ids, clock;               /* clock: forward passes and requests */
    double turn_tokens;                /* smoothed length of a turn */
    double wait_us;                    /* smoothed, for a prefix */
    struct kv_compute compute;
    struct engine_stats counters;

    /* Scratch of a step. */
    struct plan_row *plan; /* max_running */
    size_t n_plan;
    struct policy_chunk *chunks;
    float **page_pointers;
    size_t page_pointer_capacity;
    float *logits; /* max_running rows */
};

/* engine.c: q's prefix is complete. */
void engine_settled(struct engine *e, struct engine_sequence *q);

/* restore.c */
void restore_note(struct engine *e, const struct engine_sequence *q, enum kv_decision d);
void restore_spill(struct engine *e, struct engine_sequence *q); /* what is worth it */
/* Decides how q's prefix comes back beyond the `have` units that the device has, and begins. */
void restore_plan(struct engine *e, struct engine_sequence *q, size_t have);
/* When the store has nothing else to do: begins a load for somebody who is expected back soon, or
 * the spill of somebody idle. */
void restore_prefetch(struct engine *e);
/* Takes over what has been loaded.  *to: how far to compute now.  False when memory is short. */
bool restore_advance(struct engine *e, struct engine_sequence *q, size_t *to);
void restore_forget(struct engine *e, struct engine_sequence *q); /* its load */

/* residence.c */
struct kv_key *residence_chain(struct engine *e, struct engine_sequence *q, size_t units);
/* Takes up the longest prefix that the device has, makes room for the state, plans the rest. */
bool residence_restore(struct engine *e, struct engine_sequence *q);
/* Makes `frames` free without displacing what runs. */
bool residence_headroom(struct engine *e, struct engine_sequence *q, size_t frames);
/* Room for n more tokens behind `computed`; false when nothing is left to give up. */
bool residence_reserve(struct engine *e, struct engine_sequence *q, size_t n);
/* After a pass that ended at a unit's end. */
void residence_checkpoint(struct engine *e, struct engine_sequence *q, bool turn_end);
/* Spills what is worth it and lets go of the device. */
void residence_evict(struct engine *e, struct engine_sequence *q);
/* Lets go of the device, and of the store's knowledge too when `forget`. */
void residence_drop(struct engine *e, struct engine_sequence *q, bool forget);
void residence_collect(struct engine *e); /* finished transfers */

#endif
