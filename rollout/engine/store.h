/* Traffic with kvstored, off the engine's thread.
 *
 * The engine copies what it evicts into a staging buffer and goes on; the thread of the store's
 * client (kvstore/client.h) puts it into the store, one piece of one transfer at a time. Loads come
 * the other way, from the end of a prefix to its front, so that the engine may compute the front
 * meanwhile; the two stop where they meet.  Staging is the only memory that grows with the traffic,
 * so it is what max_inflight_bytes caps: a spill without room is dropped (its tokens are
 * recomputed), a load without room waits.  Which transfer moves next, and which is given up, is
 * loop B of the throttle (kvstore/throttle.h), which also measures here.
 *
 * Every failure is a miss or a drop, never an error: the caller recomputes (docs/DESIGN.md 3.7).
 * Called by the engine's thread only. */
#ifndef ROLLOUT_ENGINE_STORE_H
#define ROLLOUT_ENGINE_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvstore/client.h"
#include "kvstore/throttle.h"
#include "proto/cleanup.h"
#include "proto/error.h"

/* One transfer.  blocks holds units first..units-1, block_bytes each; state is the one at the end.
 * What it is about is fixed when it is made; the rest is this file's until it has finished. */
struct store_job {
    struct kv_op op; /* its flow is the sequence */
    char name[48];   /* trajectory */
    struct kv_key *chain;
    size_t first, units; /* of a load: wanted at most, then found; units 0 = miss */
    char *blocks, *state;
    bool ok, abandoned;
    enum kv_decision outcome; /* when it has finished */
    int64_t submitted_us, finished_us;

    size_t met; /* units that the engine has computed meanwhile */
    size_t low; /* units low..units-1 have come; the state came before them */

    struct store *store; /* from here on for store.c alone */
    struct kv_trajectory *trajectory;
    struct kv_buffer *buffer; /* what blocks and state lie in */
    void **pointers;          /* to the blocks */
    struct kv_hit *hit;
    size_t at; /* units at..units-1 have been copied */
    bool has_state;
    size_t piece_first; /* of the piece under way */
    uint64_t piece_bytes;
    int64_t piece_began_us;
    struct store_job *next;
};
void store_job_destroy(struct store_job *j);
LH_DEFINE_AUTO(store_job, store_job_destroy)

struct store;

struct store_options {
    struct kv_client *client; /* borrowed; NULL = no store, everything misses */
    size_t block_bytes, state_bytes, max_inflight_bytes;
    void (*wake)(void *ctx); /* a job may have finished; on the client's thread; may be NULL */
    void *ctx;
};

struct store *store_create(const struct store_options *o, struct lh_error *err);
void store_destroy(struct store *s);
LH_DEFINE_AUTO(store, store_destroy)

/* A job for units first..units-1; NULL without a store or memory.  A spill has its staging to be
 * filled; a load is given its own when it begins. */
struct store_job *store_job_new(struct store *s, enum kv_lane_class class, uint64_t owner,
                                const char *name, const struct kv_key *chain, size_t first,
                                size_t units);
/* Takes the job over.  False: a spill for which there is no room; the job is gone. */
bool store_submit(struct store *s, struct store_job *j);
/* Of a load that has not been handed back: somebody waits for it now. */
void store_promote(struct store *s, struct store_job *j);
/* Nobody wants it any more: what has not been copied is left out.  It is handed back as a miss. */
void store_abandon(struct store *s, struct store_job *j);
/* Units before `units` need not be loaded any more; returns the lowest that will be. */
size_t store_meet(struct store *s, struct store_job *j, size_t units);
/* A finished job, or NULL.  Give it back with store_job_done(). */
struct store_job *store_finished(struct store *s);
void store_job_done(struct store *s, struct store_job *j);

/* Loop C with what is measured here: fills load_wait_s in. */
struct kv_plan store_plan_restore(struct store *s, struct kv_case *k, const struct kv_compute *c);
struct kv_plan store_plan_spill(struct store *s, const struct kv_case *k,
                                const struct kv_compute *c);
/* Of what is left of a load: k says what has been computed, the rest is filled in. */
struct kv_plan store_plan_rest(struct store *s, const struct store_job *j, struct kv_case *k,
                               const struct kv_compute *c);
/* Nobody waits for a load. */
bool store_idle(struct store *s);

/* Forgets queued jobs, cancels the running one, and makes `root` the only one that matches.  Jobs
 * that the engine knows of are gone, too. */
void store_use_root(struct store *s, const struct kv_key *root, uint64_t policy_step);

struct store_counters {
    uint64_t spilled_bytes, loaded_bytes, dropped_spills;
};
struct store_counters store_counters(struct store *s);
/* Wait of the store's load queue, as of the last call, and of ours, the larger; loop A reads it.
 * Does not wait: kvstored is asked on the client's thread. */
double store_load_wait_ms(struct store *s);

#endif
