/* What policy.h calls a trainer, for one kind of number. */
#include <cblas.h>

#include "trainer/policy/backend.h"
#include "trainer/policy/exec.h"
#include "trainer/policy/train.h"

enum { MAX_TOKENS = 1 << 20 };

struct R(sequence_trainer) {
    struct R(trainer) t;
};

size_t R(train_bytes)(const struct policy_model *m, int max_tokens)
{
    struct R(trainer) t;

    return max_tokens > 1 && max_tokens <= MAX_TOKENS ? R(trainer_lay_out)(&t, m, max_tokens, NULL)
                                                      : 0;
}

struct R(sequence_trainer) * R(train_create)(const struct policy_model *m, const real *weights,
                                             void *arena, size_t bytes, int max_tokens,
                                             struct lh_error *err)
{
    size_t need = R(train_bytes)(m, max_tokens);
    struct R(sequence_trainer) * p;

    if (!need || bytes < need || (uintptr_t)arena % 64 || !arena) {
        lh_fail(err, LH_INVALID_ARGUMENT,
                "policy_trainer: %d tokens (2 to %d) need %zu bytes aligned to 64, not %zu",
                max_tokens, MAX_TOKENS, need, bytes);
        return NULL;
    }
    p = calloc(1, sizeof *p);
    if (!p) {
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "policy_trainer: out of memory");
        return NULL;
    }
    openblas_set_num_threads(1);
    R(trainer_lay_out)(&p->t, m, max_tokens, arena);
    p->t.net.w = weights;
    if (!p->t.net.layers) {
        R(train_destroy)(p);
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "policy_trainer: out of memory");
        return NULL;
    }
    return p;
}

void R(train_destroy)(struct R(sequence_trainer) * p)
{
    if (p)
        R(net_finish)(&p->t.net);
    free(p);
}

int R(train_forward)(struct R(sequence_trainer) * p, const int32_t *tokens, int n,
                     float temperature, float *logprobs, struct lh_error *err)
{
    struct R(net) *net = &p->t.net;
    int rc = R(trainer_forward)(&p->t, tokens, n, err);

    if (rc)
        return rc;
    p->t.temperature = temperature > 0 ? temperature : 1;
    net->ops->logprobs(n - 1, net->m->config.vocab, p->t.logits, p->t.temperature, net->tokens + 1,
                       net->dlogprobs);
    return net->m->backend->get(logprobs, net->dlogprobs, ((size_t)n - 1) * sizeof *logprobs, err);
}

int R(train_backward)(struct R(sequence_trainer) * p, const float *dlogprobs, float *grads,
                      struct lh_error *err)
{
    if (!p->t.net.batch.rows)
        return lh_fail(err, LH_FAILED_PRECONDITION, "backward without a forward before it");
    return R(trainer_backward)(&p->t, dlogprobs, grads, err);
}
