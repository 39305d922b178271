/* A simulator of rollout against a store of limited bandwidth (docs/THROTTLE.md).
 *
 * Real: the store's index, eviction, grants and accounting (kvstore/daemon/service.h, driven by its
 * own messages), the throttle (kvstore/throttle.h) and the window (rollout/scheduler/window.h).
 * Simulated: computing, the store's device, tools, and time, which is a counter of microseconds.
 * The throttle is told the model's sizes and what it could measure; the rates, and how they drift,
 * are known to machine.c alone.
 *
 *   workload.c  what trajectories do      engine.c   sequences, memory, passes
 *   machine.c   hidden rates              restore.c  how a prefix comes back, in the three modes
 *   vault.c     the real store            run.c      events in order, and the numbers
 *   main.c      sweeps and tables
 */
#ifndef TESTS_BENCH_SIM_SIM_H
#define TESTS_BENCH_SIM_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvstore/client.h"
#include "kvstore/throttle.h"
#include "rollout/scheduler/window.h"

enum sim_mode { SIM_RECOMPUTE, SIM_LOAD, SIM_THROTTLE, SIM_MODES };

/* Sizes of a model and what one engine of it does when nothing disturbs it. */
struct sim_model {
    const char *name;
    unsigned unit_tokens, pass_tokens;
    size_t block_bytes, state_bytes;
    double prompt_s, context_s;          /* seconds a token, and a token looking at a token */
    double pass_s, row_s, row_context_s; /* of decoding: a pass, a row, a row's token of context */
    uint64_t kv_bytes, staging_bytes, store_bytes;
};
extern const struct sim_model sim_models[];
enum { SIM_MODEL_COUNT = 2 };

struct sim_options {
    const struct sim_model *model;
    enum sim_mode mode;
    double bytes_per_s; /* of the store, reads and writes together */
    unsigned trajectories;
    uint64_t seed;
    bool drift, real_bytes;
    const char *trace; /* file, or NULL */
};

/* ---- workload.c ---- */

struct sim_turn {
    uint32_t observed, sampled; /* tokens before the policy's, and its own */
    int64_t tool_us;            /* from the turn's end to the next one's start */
};

struct sim_trajectory {
    uint64_t id, group;
    size_t prefix; /* tokens carried over from the iteration before */
    size_t shared; /* of the beginning: tokens that the group has in common */
    unsigned n_turns;
    struct sim_turn *turns;
};

struct sim_workload {
    struct sim_trajectory *trajectories;
    unsigned n;
    uint64_t turns, tokens;
};
int sim_workload_init(struct sim_workload *w, unsigned n, uint64_t seed, struct lh_error *err);
void sim_workload_finish(struct sim_workload *w);
double sim_uniform(uint64_t seed, uint64_t i); /* (0, 1] */
/* The token ids of one unit. */
void sim_tokens(const struct sim_trajectory *t, size_t first, unsigned n, int32_t *tokens);

/* ---- machine.c ---- */

struct sim_machine {
    const struct sim_options *o;
    int64_t free_us; /* when the store's device has done what it was given */
    uint64_t read, written;
};
/* Seconds of one pass. */
double sim_pass_seconds(const struct sim_machine *m, int64_t now_us, unsigned rows, double contexts,
                        double prompt_tokens, double prompt_contexts);
/* The device does one thing after the other; returns when these bytes are through. */
int64_t sim_device(struct sim_machine *m, int64_t now_us, uint64_t bytes, bool write);

/* ---- vault.c ---- */

struct sim_vault;
struct sim_vault *sim_vault_create(const struct sim_model *m, bool real_bytes,
                                   struct lh_error *err);
void sim_vault_destroy(struct sim_vault *v);
LH_DEFINE_AUTO(sim_vault, sim_vault_destroy)
const struct kv_key *sim_vault_root(const struct sim_vault *v);
/* Units first..n-1 and the state at the end; false when the store refuses. */
bool sim_vault_put(struct sim_vault *v, const struct kv_key *chain, size_t first, size_t n);
/* Longest boundary beyond at_least, 0 = miss; pinned until sim_vault_release().  With real bytes,
 * every byte of the hit is compared with what was put. */
size_t sim_vault_lookup(struct sim_vault *v, const struct kv_key *chain, size_t n, size_t at_least,
                        uint64_t *lease);
void sim_vault_release(struct sim_vault *v, uint64_t lease);
uint64_t sim_vault_used(const struct sim_vault *v);
uint64_t sim_vault_wrong(const struct sim_vault *v); /* bytes that came back different */

/* ---- run.c ---- */

struct sim_result {
    double finish_s;
    double hit, ideal; /* shares of the known prefix tokens: found; ever computed */
    double wait_p50_s, wait_p99_s, mean_wait_s; /* for the prefix, of a turn */
    double worst_wait;                          /* of a trajectory, a turn, over the mean of all */
    double worst_of_both; /* the same, but by whichever is less: a turn, or in all */
    double jain;          /* of the trajectories' waits */
    uint64_t preemptions, turns;
    double written_per_token;
    uint64_t staging_peak, wrong_bytes;
    unsigned window_min, window_max;
    uint64_t decisions[KV_DECISION_COUNT];
};
int sim_run(const struct sim_options *o, struct sim_result *r, struct lh_error *err);

#endif
