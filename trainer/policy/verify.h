/* Comparison of a model with a golden reference: the arithmetic behind `longhaul policy verify`. */
#ifndef TRAINER_POLICY_VERIFY_H
#define TRAINER_POLICY_VERIFY_H

#include <stdio.h>

#include "trainer/policy.h"

/* Largest error over largest magnitude.  Gradients: of the worst tensor. */
struct policy_report {
    double logits, logprobs, loss, gradients;
    bool greedy; /* the continuation is the same */
};

#define POLICY_BOUND_LOGITS    1e-4 /* and log-probabilities and loss */
#define POLICY_BOUND_GRADIENTS 1e-3

bool policy_report_passes(const struct policy_report *r);

/* Runs everything the reference file holds (tests/golden/README.md) and prints a line for each
 * tensor. Fails only when the comparison cannot be made; see policy_report_passes() for its
 * outcome. */
int policy_verify(const char *model_dir, const char *reference, FILE *out,
                  struct policy_report *report, struct lh_error *err);

#endif
