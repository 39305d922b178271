/* policy_trainer: the float trainer behind policy.h. */
#include <cblas.h>

#include "trainer/policy/train.h"

enum { MAX_TOKENS = 1 << 20 };

struct policy_trainer {
    struct R(trainer) t;
};

size_t policy_trainer_bytes(const struct policy_model *m, int max_tokens)
{
    struct R(trainer) t;

    return max_tokens > 1 && max_tokens <= MAX_TOKENS ? R(trainer_lay_out)(&t, m, max_tokens, NULL)
                                                      : 0;
}

struct policy_trainer *policy_trainer_create(const struct policy_model *m, const float *weights,
                                             void *arena, size_t bytes, int max_tokens,
                                             struct lh_error *err)
{
    size_t need = policy_trainer_bytes(m, max_tokens);
    struct policy_trainer *p;

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
    return p;
}

void policy_trainer_destroy(struct policy_trainer *p)
{
    free(p);
}

int policy_train_forward(struct policy_trainer *p, const int32_t *tokens, int n, float temperature,
                         float *logprobs, struct lh_error *err)
{
    int vocab = p->t.net.m->config.vocab;
    int rc = R(trainer_forward)(&p->t, tokens, n, err);

    if (rc)
        return rc;
    p->t.temperature = temperature > 0 ? temperature : 1;
    for (int i = 0; i < n - 1; i++)
        logprobs[i] =
            policy_logprob(p->t.logits + (ptrdiff_t)i * vocab, vocab, temperature, tokens[i + 1]);
    return 0;
}

int policy_train_backward(struct policy_trainer *p, const float *dlogprobs, float *grads,
                          struct lh_error *err)
{
    if (!p->t.net.rows)
        return lh_fail(err, LH_FAILED_PRECONDITION, "backward without a forward before it");
    R(trainer_backward)(&p->t, dlogprobs, grads);
    return 0;
}
