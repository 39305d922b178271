#include "trainer/policy/train.h"

#include "trainer/policy/backend.h"

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
    size_t pages = aligned(sizeof *t->pages);
    size_t state = aligned(policy_state_floats(m) * sizeof(wide));
    size_t logits = aligned((size_t)max_tokens * (size_t)m->config.vocab * sizeof(wide));

    if (base) {
        char *at = (char *)base + net;

        t->page = (real *)(void *)at;
        t->pages = (real **)(void *)(at + page);
        t->state = (wide *)(void *)(at + page + pages);
        t->logits = (wide *)(void *)(at + page + pages + state);
        t->net.page_tokens = page_tokens;
    }
    return net + page + pages + state + logits;
}

int R(trainer_forward)(struct R(trainer) * t, const int32_t *tokens, int n, struct lh_error *err)
{
    struct R(net) *net = &t->net;
    struct R(seq) seq;
    struct R(batch) batch = {n, 1, n, tokens, &seq};
    int rc;

    net->batch.rows = 0;
    if (n < 2 || n > net->max_rows)
        return lh_fail(err, LH_INVALID_ARGUMENT, "training sequence of %d tokens, must be 2 to %d",
                       n, net->max_rows);
    for (int i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= net->m->config.vocab)
            return lh_fail(err, LH_INVALID_ARGUMENT, "token %d at %d is not in the vocabulary",
                           (int)tokens[i], i);
    rc = net->m->backend->put(t->pages, &t->page, sizeof t->page, err);
    if (rc)
        return rc;
    net->ops->clear(t->state, policy_state_floats(net->m) * sizeof *t->state);
    seq = (struct R(seq)){0, n, 0, t->pages, t->state};
    rc = R(net_forward)(net, &batch, err);
    if (!rc)
        R(net_logits)(net, NULL, n - 1, t->logits);
    return rc ? rc : net->m->backend->check(err);
}

int R(trainer_backward)(struct R(trainer) * t, const wide *dlogprobs, wide *grads,
                        struct lh_error *err)
{
    struct R(net) *net = &t->net;
    const struct policy_backend *b = net->m->backend;
    size_t count = (size_t)net->batch.rows - 1;
    int rc = b->put(net->dlogprobs, dlogprobs, count * sizeof *dlogprobs, err);

    if (rc)
        return rc;
    R(net_backward)(net, t->page, t->logits, t->temperature, net->dlogprobs, grads);
    return b->check(err);
}
