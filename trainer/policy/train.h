/* The trainer in either precision; policy.h shows the float one, tests use double for finite
 * differences. */
#ifndef TRAINER_POLICY_TRAIN_H
#define TRAINER_POLICY_TRAIN_H

#include "trainer/policy/net.h"

struct R(trainer) {
    struct R(net) net;
    real *page, *state, *logits;
    real *pages[1]; /* one page holds the sequence */
    real temperature;
};

size_t R(trainer_lay_out)(struct R(trainer) * t, const struct policy_model *m, int max_tokens,
                          void *base);
/* Forward over one sequence; logits of all positions but the last are in t->logits. */
int R(trainer_forward)(struct R(trainer) * t, const int32_t *tokens, int n, struct lh_error *err);
void R(trainer_backward)(struct R(trainer) * t, const real *dlogprobs, real *grads);

#endif
