/* The trainer in either precision; policy.h shows the float one, tests use double for finite
 * differences. */
#ifndef TRAINER_POLICY_TRAIN_H
#define TRAINER_POLICY_TRAIN_H

#include "trainer/policy/net.h"

struct R(trainer) {
    struct R(net) net;
    real *page, **pages; /* one page holds the sequence */
    wide *state, *logits;
    wide temperature;
};

/* Free with net_finish(). */
size_t R(trainer_lay_out)(struct R(trainer) * t, const struct policy_model *m, int max_tokens,
                          void *base);
/* Forward over one sequence; logits of all positions but the last are in t->logits. */
int R(trainer_forward)(struct R(trainer) * t, const int32_t *tokens, int n, struct lh_error *err);
int R(trainer_backward)(struct R(trainer) * t, const wide *dlogprobs, wide *grads,
                        struct lh_error *err);

#endif
