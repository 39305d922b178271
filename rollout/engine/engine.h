/* Continuous batching over one policy, within one budget of KV memory.
 *
 * A sequence is idle (between turns), waiting (a turn was asked for) or running (admitted).  Each
 * engine_step() is one forward pass over the next token of every decoding sequence and pieces of
 * prompts up to step_tokens.  The bits that come out do not depend on the batching: not on who
 * shares a pass, how a prompt was cut, where a prefix was restored from, or what was evicted
 * between.
 *
 * Memory goes to running sequences first.  When it is short the engine gives up, in this order:
 * checkpoints nobody holds, idle sequences (longest idle first), waiting ones (newest first),
 * running ones (newest first: a preemption).  What a sequence loses is spilled to kvstored if that
 * is worth it, ending exactly at its newest checkpoint; what lies behind it is recomputed.  Old and
 * new are the order in which turns were asked for; the oldest never yields, so work always
 * advances: a budget holds at least one sequence of max_context_tokens.
 *
 * Owned by one thread. */
#ifndef ROLLOUT_ENGINE_ENGINE_H
#define ROLLOUT_ENGINE_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvstore/client.h"
#include "kvstore/trace.h"
#include "proto/cleanup.h"
#include "proto/error.h"
#include "rollout/transcript.h"
#include "trainer/policy.h"

struct engine;
struct engine_sequence;

struct engine_options {
    const struct policy_model *model;
    const float *weights; /* readable while a step runs */
    void *kv;             /* the budget: 64-byte aligned, touched only between resume and pause */
    size_t kv_bytes;
    void *scratch; /* engine_scratch_bytes() long, 64-byte aligned */
    size_t scratch_bytes;
    unsigned page_tokens, unit_tokens; /* a page holds whole units */
    unsigned step_tokens;              /* of prompts in one pass */
    unsigned max_running, max_context_tokens;
    bool carry; /* a new version goes on with what older ones have computed (DESIGN.md 3.7) */
    struct kv_client *store;   /* borrowed; NULL = none */
    size_t max_inflight_bytes; /* of transfers with the store */
    struct kv_trace *trace;    /* of the throttle's decisions; borrowed; NULL = none */
    void (*wake)(void *ctx);   /* engine_admit() may have news; any thread; may be NULL */
    void *ctx;
};

/* Memory for the passes of these options (scratch need not be set yet). */
size_t engine_scratch_bytes(const struct engine_options *o);
/* Whether an engine of these options can exist, before any memory does: INVALID_ARGUMENT, with the
 * bytes that are needed, when the budget cannot hold one sequence. */
int engine_check(const struct engine_options *o, struct lh_error *err);
struct engine *engine_create(const struct engine_options *o, struct lh_error *err);
/* All sequences must be closed. */
void engine_destroy(struct engine *e);
LH_DEFINE_AUTO(engine, engine_destroy)

/* The memory is there and holds nothing; the weights are of `version`.  A version other than the
 * last makes everything stored earlier unmatchable; with `carry` everything stays, the transcript
 * has the version of every token and is marked when one was sampled on older KV. */
int engine_resume(struct engine *e, const struct policy_version *version, struct lh_error *err);
/* Forgets all KV (the memory is about to go); tokens stay.  Running turns wait to go on. */
void engine_pause(struct engine *e);
bool engine_paused(const struct engine *e);
const struct policy_version *engine_version(const struct engine *e);

struct engine_sequence_spec {
    const char *name;              /* trajectory */
    struct transcript *transcript; /* outlives the sequence */
    uint64_t seed;
    float temperature; /* 0 = greedy; its log-probabilities are recorded at 1 */
    bool resumed;      /* goes before new ones, and its first turn asks the store */
    void *owner;       /* for the caller */
};
struct engine_sequence *engine_open(struct engine *e, const struct engine_sequence_spec *spec,
                                    struct lh_error *err);
void engine_close(struct engine *e, struct engine_sequence *q);

/* Asks for a turn: sample behind the transcript until TOKEN_RUN, TOKEN_EOS or max_new tokens. */
void engine_ask(struct engine *e, struct engine_sequence *q, size_t max_new);
void *engine_owner(const struct engine_sequence *q);
/* A sequence whose turn has ended since the last call, or NULL. */
struct engine_sequence *engine_turn_ended(struct engine *e);

/* Admits the waiting sequence that is next in order and begins to bring its prefix back; false when
 * there is none, or no room. */
bool engine_admit(struct engine *e);
unsigned engine_running(const struct engine *e);
/* One forward pass over what runs; *tokens = tokens it worked on, 0 when nothing runs. */
int engine_step(struct engine *e, size_t *tokens, struct lh_error *err);

struct engine_stats {
    unsigned running, waiting, idle; /* sequences */
    unsigned spilled;                /* of the idle and waiting: KV not on the device */
    unsigned loading;                /* prefixes on their way from the store */
    size_t used_bytes, budget_bytes;
    size_t horizon_bytes; /* what the running ones will hold at the end of a usual turn */
    size_t mean_bytes;    /* of one sequence that is not idle, at the end of a usual turn */
    uint64_t tokens_decoded, tokens_prefilled, preemptions; /* counters from here */
    uint64_t spilled_bytes, loaded_bytes, store_lookups, store_hits;
    uint64_t prefix_hit_tokens; /* taken from the device cache */
    uint64_t turns;
};
struct engine_stats engine_stats(struct engine *e);
/* A change of the window, into the trace; its size is recorded as tokens. */
void engine_note_window(struct engine *e, enum kv_decision why, unsigned size);
/* Smoothed wait of loads from the store; has kvstored asked, so not for every step. */
double engine_load_wait_ms(struct engine *e);

#endif
