/* Comparison of a model with a golden reference: the arithmetic behind `longhaul policy verify`. */
#ifndef TRAINER_POLICY_VERIFY_H
#define TRAINER_POLICY_VERIFY_H

#include <stdio.h>

#include "trainer/policy.h"

/* What may be: largest error over largest magnitude.  float32 is to be exact.  bf16 is held against
 * the reference implementation's own bf16 (transformers 5.17 on an H200): three times the error
 * that it makes on the golden model, where a rounding that flips one choice of an expert changes a
 * whole row. */
struct policy_bounds {
    double logits, logprobs, loss, gradients;
    bool greedy; /* the continuation must be the same */
};

/* Gradients: of the worst tensor. */
struct policy_report {
    double logits, logprobs, loss, gradients;
    bool greedy; /* the continuation is the same */
    const struct policy_bounds *bounds;
};

bool policy_report_passes(const struct policy_report *r);

/* Runs on `backend` (policy_model_use) everything the reference file holds (tests/golden/README.md)
 * and prints a line for each tensor. Fails only when the comparison cannot be made; see
 * policy_report_passes() for its outcome. */
int policy_verify(const char *model_dir, const char *reference, const char *backend, FILE *out,
                  struct policy_report *report, struct lh_error *err);

#endif
