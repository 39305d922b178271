/* The intake: the trainer's end of the experience channel (docs/DESIGN.md 3.5, 3.6, 3.11).
 *
 * It dispatches groups of numbered rounds to workers, receives what they sample, makes it durable
 * in the ledger, acknowledges, and gives complete groups to whoever trains.  It runs on its own
 * thread and works in every phase of the arbiter: nothing here waits for a training step, and a
 * step waits for nothing here but complete groups.
 *
 * What is said to workers is level-triggered: ASSIGN is repeated until a heartbeat lists the
 * trajectory; a heartbeat that lists what is finished is answered with SETTLED, what is superseded
 * with CANCEL.  So no reply needs to be remembered, and a lost one costs a heartbeat.
 *
 * Any thread may call; the ledger is used under the intake's lock from create to destroy. */
#ifndef TRAINER_INTAKE_INTAKE_H
#define TRAINER_INTAKE_INTAKE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "longhaul/experience/v1/experience.pb-c.h"
#include "proto/cleanup.h"
#include "proto/error.h"
#include "proto/rpc.h"
#include "trainer/intake/ledger.h"
#include "trainer/intake/plan.h"

struct intake;

/* An infrastructure failure, for people: called under the lock, must not call back. */
struct intake_infra {
    const char *trajectory;
    uint32_t attempt;
    const char *code, *message;
    bool outage; /* of a daemon: not counted against the trajectory */
};
typedef void intake_infra_fn(void *ctx, const struct intake_infra *failure);

struct intake_options {
    const char *endpoint; /* ipc:///path */
    struct ledger *ledger;
    const char *job_id;
    uint64_t job_seed;
    uint32_t infra_retries; /* of a trajectory; then its group is dropped and replaced */
    Longhaul__Experience__V1__Budgets budgets;
    struct rpc_channel *agentenv; /* NULL: nobody owns sandboxes (tests) */
    size_t max_message; /* bytes; 0 = CHANNEL_MAX_MESSAGE, which is also what workers go by */
    int silence_ms;     /* a worker not heard of for so long has lost its work; 0 = 20 s */
    int lost_ms;        /* a trajectory it listed and lists no more is lost after this; 0 = 10 s */
    int repeat_ms;      /* ASSIGN is repeated after this; 0 = 1 s */
    intake_infra_fn *on_infra; /* may be NULL */
    void *ctx;
};

/* Cleans up after an earlier run first: every open trajectory goes to its next attempt, sandboxes
 * of the job are removed, snapshots reconciled.  UNAVAILABLE when agentenvd does not answer. */
struct intake *intake_create(const struct intake_options *o, struct lh_error *err);
void intake_destroy(struct intake *in);
LH_DEFINE_AUTO(intake, intake_destroy)

/* ---- what to work on ---- */

struct intake_round {
    char name[LEDGER_ROUND];
    Longhaul__Experience__V1__Mode mode;
    uint32_t members;
    const struct plan_split *tasks; /* outlives the round */
    int64_t even_total;             /* spread this many draws evenly; 0 = draw by hash */
    bool blank_first_observation;
    float temperature;
};

/* The version assignments ask for from now on. */
void intake_set_version(struct intake *in, uint64_t step, const uint8_t id[16]);
/* Takes the round up where the ledger has it.  Opening an open round is fine. */
int intake_open_round(struct intake *in, const struct intake_round *r, struct lh_error *err);
/* Dispatches until `groups` groups of the round exist, dropped ones not counted. */
int intake_raise(struct intake *in, const char *round, int64_t groups, struct lh_error *err);
/* Waits until `ready` groups of the round are complete: how many are.  DEADLINE_EXCEEDED when they
 * are not after timeout_ms; the error of the intake's thread once it has failed. */
int intake_wait(struct intake *in, const char *round, int64_t ready, int timeout_ms,
                struct lh_error *err);
/* Forgets the round; its groups stay in the ledger. */
void intake_close_round(struct intake *in, const char *round);

/* ---- what came back ---- */

struct intake_member {
    char id[LH_ID_SIZE];
    struct ledger_history history; /* empty unless asked for */
    double reward;
    bool passed;
    uint32_t turns, sampled;
};

struct intake_group {
    int64_t id, index;
    const char *task, *family; /* as the plan's */
    struct intake_member *members;
    uint32_t n_members;
};

struct intake_batch {
    struct intake_group *groups; /* in order of index */
    size_t n;
};

/* Up to `max` ready groups: those an earlier, rolled back run gave to `step`, if any, else the
 * first ones.  They stay ready. */
int intake_take(struct intake *in, const char *round, int64_t step, size_t max, bool with_tokens,
                struct intake_batch *out, struct lh_error *err);
void intake_batch_finish(struct intake_batch *b);

struct intake_version {
    uint64_t step;
    const uint8_t *id, *parent, *batch; /* 16 bytes each */
};
/* Records a version that no group made (initial, warm start).  In a transaction. */
int intake_add_version(struct ledger *l, const struct intake_version *v, struct lh_error *err);
/* The groups of the batch are consumed by training step `step`, which made the version.  One
 * commit. */
int intake_consume(struct intake *in, const char *round, const struct intake_batch *b, int64_t step,
                   const struct intake_version *v, struct lh_error *err);

/* Runs `fn` with the ledger, in a transaction, under the lock. */
typedef int intake_ledger_fn(void *ctx, struct ledger *l, struct lh_error *err);
int intake_with_ledger(struct intake *in, intake_ledger_fn *fn, void *ctx, struct lh_error *err);

/* ---- watching ---- */

struct intake_stats {
    uint32_t workers, running, waiting, in_tool, spilled; /* now */
    uint32_t window;                                      /* the sum of theirs */
    uint64_t kv_used_bytes, kv_budget_bytes;
    float load_wait_ms; /* the longest of theirs */
    uint64_t tokens_decoded, spilled_bytes, loaded_bytes, store_lookups, store_hits; /* counters */
    uint64_t hibernated, hibernations_failed; /* sandboxes, while the model thought */
    uint64_t committed;                       /* turns and ends of trajectories, by this process */
    uint64_t invalid, outages, dropped, reassigned; /* invalid: counted ones */
};
void intake_stats(struct intake *in, struct intake_stats *out);
/* Tells every worker to end. */
void intake_stop_workers(struct intake *in);

#endif
