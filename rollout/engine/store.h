/* Traffic with kvstored, off the engine's thread.
 *
 * The engine copies what it evicts into a staging buffer and goes on; one thread here puts it into
 * the store.  Loads come the other way: looked up and copied into staging here, picked up by the
 * engine when the sequence is admitted.  Staging is the only memory that grows with the traffic, so
 * it is what max_inflight_bytes caps: a spill without room is dropped (its tokens are recomputed),
 * a load without room waits.  Loads go before spills, but never before an older spill of the same
 * sequence: the store must have it before it is asked.
 *
 * Every failure is a miss or a drop, never an error: the caller recomputes (docs/DESIGN.md 3.7).
 * Called by the engine's thread only. */
#ifndef ROLLOUT_ENGINE_STORE_H
#define ROLLOUT_ENGINE_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvstore/client.h"
#include "proto/cleanup.h"
#include "proto/error.h"

enum store_kind { STORE_SPILL, STORE_LOAD };

/* One transfer.  blocks holds units first..units-1, block_bytes each; state is the one at the end.
 */
struct store_job {
    enum store_kind kind;
    uint64_t owner; /* sequence */
    char name[48];  /* trajectory */
    struct kv_key *chain;
    size_t first, units; /* of a load: wanted at most, then found; 0 = miss */
    char *blocks, *state;
    size_t reserved; /* bytes of the cap */
    int64_t submitted_us;
    bool ok;
    struct store_job *next;
};
void store_job_destroy(struct store_job *j);
LH_DEFINE_AUTO(store_job, store_job_destroy)

struct store;

struct store_options {
    struct kv_client *client; /* borrowed; NULL = no store, everything misses */
    size_t block_bytes, state_bytes, max_inflight_bytes;
    void (*wake)(void *ctx); /* a job has finished; on the thread here; may be NULL */
    void *ctx;
};

struct store *store_create(const struct store_options *o, struct lh_error *err);
void store_destroy(struct store *s);
LH_DEFINE_AUTO(store, store_destroy)

/* A job with staging for units first..units-1; NULL when the cap (or memory) has no room. */
struct store_job *store_job_new(struct store *s, enum store_kind kind, uint64_t owner,
                                const char *name, const struct kv_key *chain, size_t first,
                                size_t units);
void store_submit(struct store *s, struct store_job *j);
/* A finished job, or NULL.  Give it back with store_job_done(). */
struct store_job *store_finished(struct store *s);
void store_job_done(struct store *s, struct store_job *j);

/* Forgets queued jobs, waits for the running one, and makes `root` the only one that matches. */
void store_use_root(struct store *s, const struct kv_key *root, uint64_t policy_step);

struct store_counters {
    uint64_t spilled_bytes, loaded_bytes, dropped_spills;
    size_t inflight_bytes;
};
struct store_counters store_counters(struct store *s);
/* Smoothed wait of the store's load queue, as of the last call, and of ours, the larger; loop A
 * reads it.  Does not wait: kvstored is asked on the thread here. */
double store_load_wait_ms(struct store *s);

#endif
