/* The trainer of a job, rank 0: what it holds, and the phases of a job in the order they run.
 *
 *     demonstrations ▸ warm start ▸ eval "warm" ▸ steps (with checkpoints, evals)
 *     ▸ eval "final", "blank"
 *
 * Every phase first looks at how far the checkpoint and the ledger have it, so resuming is running
 * the same sequence again.  One thread runs it; the intake, the status writer and the threads of a
 * gradient run beside it. */
#ifndef TRAINER_LEARN_TRAINER_H
#define TRAINER_LEARN_TRAINER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "longhaul/job/v1/job.pb-c.h"
#include "proto/arbiter.h"
#include "trainer/intake/intake.h"
#include "trainer/learn/checkpoint.h"
#include "trainer/learn/gradient.h"
#include "trainer/learn/metrics.h"

enum { FAMILY_NAME = 64 };

/* What status.json shows beside the intake's gauges; under `lock`. */
struct progress {
    pthread_mutex_t lock;
    const char *phase;
    uint64_t step, steps;
    double reward_mean, success, step_s; /* of the last step; success of the last evaluation */
};

struct trainer {
    const char *job_dir;
    Longhaul__Job__V1__Job *job;
    const atomic_bool *stop; /* SIGTERM has come */

    struct policy_model *model;
    struct rpc_channel *agentenv;
    struct arbiter *arbiter;
    struct arbiter_weights_header *header;
    struct checkpoint_arrays arrays; /* weights and moments, in regions of the arbiter */
    struct gradient_memory memory;   /* mapped in TRAIN only */
    unsigned threads;

    struct ledger *ledger;
    struct intake *intake;
    struct plan_split train_tasks, eval_tasks;

    struct checkpoint_state state;
    struct version saved; /* of the checkpoint that is the latest; id all zero = none */
    struct metrics *metrics;
    struct progress progress;
    double switch_ms;        /* since the last step line */
    uint64_t residual_bytes; /* largest since then */

    pthread_t status_thread;
    bool status_runs;
    atomic_bool status_stop;
};

/* ---- setup.c ---- */
int trainer_init(struct trainer *t, const char *job_dir, const atomic_bool *stop,
                 struct lh_error *err);
void trainer_finish(struct trainer *t);
/* Switches unless it is the phase already. */
int trainer_enter(struct trainer *t, enum arbiter_phase phase, struct lh_error *err);
/* CANCELLED after SIGTERM, UNAVAILABLE once arbiterd is gone. */
int trainer_check(const struct trainer *t, struct lh_error *err);

/* ---- tasks.c ---- */
/* What the job draws from: listed from agentenvd at its first start, from the ledger since. */
int trainer_load_tasks(struct trainer *t, struct lh_error *err);

/* ---- rounds.c ---- */
/* Raises the round to `groups` and waits until `ready` are complete; fails when nothing has moved
 * for long. */
int trainer_collect(struct trainer *t, const struct intake_round *round, int64_t groups,
                    int64_t ready, struct lh_error *err);

/* ---- update.c: one optimizer step on a batch of sequences, in TRAIN ---- */
struct update {
    const struct objective *objective;
    const struct gradient_sequence *sequences;
    size_t n;
    float learning_rate;
    struct version_digest *digest; /* of what the step learns from; freed here */
};
struct update_result {
    struct gradient_result gradient;
    struct version parent;
    uint8_t batch[16];
};
/* Publishes the new weights and moves state.version and state.adam_steps. */
int trainer_update(struct trainer *t, const struct update *u, struct update_result *out,
                   struct lh_error *err);
/* Nothing when the latest checkpoint is of this version. */
int trainer_checkpoint(struct trainer *t, struct lh_error *err);

/* ---- warm.c, steps.c, eval.c ---- */
int trainer_warm_start(struct trainer *t, struct lh_error *err);
int trainer_steps(struct trainer *t, struct lh_error *err);

struct eval {
    const char *name;   /* "warm", "step", "final", "blank" */
    const char *unique; /* "" = the result of this version stands; else evaluate anew under it */
    int64_t episodes;
    bool blank;
    const char *turns_of; /* name of the evaluation that says which episodes need a second turn;
                             NULL = itself */
};
/* success may be NULL. */
int trainer_eval(struct trainer *t, const struct eval *e, double *success, struct lh_error *err);

/* ---- status.c ---- */
int status_start(struct trainer *t, struct lh_error *err);
void status_stop(struct trainer *t);
void status_phase(struct trainer *t, const char *phase, uint64_t step, uint64_t steps);

/* ---- job.c ---- */
/* The whole job, or what is left of it; result.json at the end. */
int trainer_run(struct trainer *t, struct lh_error *err);

#endif
