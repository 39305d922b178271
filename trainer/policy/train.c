#include "trainer/policy/train.h"

static size_t aligned(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

size_t R(trainer_lay_out)(struct R(trainer) * t, const struct policy_model *m, int max_tokens,
                          void *base)
{
    int page_tokens = (max_tokens + MLA_BLOCK - 1) / MLA_BLOCK * MLA_BLOCK;
    size_t net = R(net_lay_out)(&t->net, m, max_tokens, 1, base);
    size_t page = aligned((size_t)page_tokens * policy_kv_floats(m) * sizeof(real));
    size_t state = aligned(policy_state_floats(m) * sizeof(real));
    size_t logits = aligned((size_t)max_tokens * (size_t)m->config.vocab * sizeof(real));

    if (base) {
        t->page = (real *)(void *)((char *)base + net);
        t->state = (real *)(void *)((char *)base + net + page);
        t->logits = (real *)(void *)((char *)base + net + page + state);
        t->pages[0] = t->page;
        t->net.page_tokens = page_tokens;
    }
    return net + page + state + logits;
}

int R(trainer_forward)(struct R(trainer) * t, const int32_t *tokens, int n, struct lh_error *err)
{
    struct R(net) *net = &t->net;

    net->rows = 0;
    if (n < 2 || n > net->max_rows)
        return lh_fail(err, LH_INVALID_ARGUMENT, "training sequence of %d tokens, must be 2 to %d",
                       n, net->max_rows);
    for (int i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= net->m->config.vocab)
            return lh_fail(err, LH_INVALID_ARGUMENT, "token %d at %d is not in the vocabulary",
                           (int)tokens[i], i);
    memcpy(net->tokens, tokens, (size_t)n * sizeof *tokens);
    memset(t->state, 0, policy_state_floats(net->m) * sizeof *t->state);
    net->seqs[0] = (struct R(seq)){0, n, 0, t->pages, t->state};
    net->n_seqs = 1;
    net->rows = n;
    R(net_forward)(net);
    R(net_logits)(net, NULL, n - 1, t->logits);
    return 0;
}

void R(trainer_backward)(struct R(trainer) * t, const real *dlogprobs, real *grads)
{
    R(net_backward)(&t->net, t->logits, t->temperature, dlogprobs, grads);
}
