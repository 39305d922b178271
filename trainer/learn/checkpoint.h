/* Checkpoints: everything a job needs to go on from a step, and nothing of when or where it was
 * made, so that equal runs leave equal bytes.
 *
 * checkpoints/step-NNNNNN/ is written under another name, synced and renamed; then `latest` is
 * replaced. `latest` is the commit of consumption: what the ledger says was consumed by later steps
 * is returned. */
#ifndef TRAINER_LEARN_CHECKPOINT_H
#define TRAINER_LEARN_CHECKPOINT_H

#include <stdint.h>

#include "proto/error.h"
#include "trainer/learn/version.h"
#include "trainer/policy.h"

enum { CHECKPOINT_NAME = 32 };

struct checkpoint_state {
    struct version version;
    uint8_t fingerprint[16];    /* of the model */
    uint64_t seed;              /* of the job; all randomness is counted from it */
    uint64_t warm_steps, steps; /* done: behaviour cloning, reinforcement */
    uint64_t adam_steps;
    int64_t cursor; /* index behind the last group trained on */
    int64_t groups; /* trained on */
};

struct checkpoint_arrays {
    float *weights, *m, *v;
};

/* Writes it and makes it the latest; the `keep` newest remain. */
int checkpoint_write(const char *job_dir, unsigned keep, const struct policy_model *model,
                     const struct checkpoint_state *s, const struct checkpoint_arrays *a,
                     struct lh_error *err);
/* NOT_FOUND when there is none yet. */
int checkpoint_latest(const char *job_dir, char name[CHECKPOINT_NAME], struct lh_error *err);
int checkpoint_read_state(const char *job_dir, const char *name, struct checkpoint_state *s,
                          struct lh_error *err);
/* FAILED_PRECONDITION when it is of another model or seed than *s says. */
int checkpoint_load(const char *job_dir, const char *name, const struct policy_model *model,
                    struct checkpoint_state *s, const struct checkpoint_arrays *a,
                    struct lh_error *err);

#endif
