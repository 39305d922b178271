/* The incremental forward: rollout's end of the network. */
#include <cblas.h>
#include <limits.h>

#include "trainer/policy/net.h"

enum { MAX_TOKENS = 1 << 20 }; /* keeps row * heads in an int */

struct policy_exec {
    struct R(net) net;
    int32_t *wanted; /* rows whose logits the caller asked for */
};

static size_t lay_out(struct policy_exec *x, const struct policy_model *m, int max_tokens,
                      void *base)
{
    size_t net = R(net_lay_out)(&x->net, m, max_tokens, 0, base);

    x->wanted = base ? (int32_t *)(void *)((char *)base + net) : NULL;
    return net + ((size_t)max_tokens * sizeof *x->wanted + 63) / 64 * 64;
}

size_t policy_exec_bytes(const struct policy_model *m, int max_tokens)
{
    struct policy_exec x;

    return max_tokens > 0 && max_tokens <= MAX_TOKENS ? lay_out(&x, m, max_tokens, NULL) : 0;
}

struct policy_exec *policy_exec_create(const struct policy_model *m, const float *weights,
                                       void *arena, size_t bytes, int max_tokens, int page_tokens,
                                       struct lh_error *err)
{
    size_t need = policy_exec_bytes(m, max_tokens);
    struct policy_exec *x;

    if (!need || bytes < need || (uintptr_t)arena % 64 || !arena) {
        lh_fail(err, LH_INVALID_ARGUMENT,
                "policy_exec: %d tokens (1 to %d) need %zu bytes aligned to 64, not %zu",
                max_tokens, MAX_TOKENS, need, bytes);
        return NULL;
    }
    if (page_tokens < MLA_BLOCK || page_tokens % MLA_BLOCK) {
        lh_fail(err, LH_INVALID_ARGUMENT,
                "policy_exec: page of %d tokens, must be a multiple of %d", page_tokens, MLA_BLOCK);
        return NULL;
    }
    x = calloc(1, sizeof *x);
    if (!x) {
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "policy_exec: out of memory");
        return NULL;
    }
    openblas_set_num_threads(1);
    lay_out(x, m, max_tokens, arena);
    x->net.w = weights;
    x->net.page_tokens = page_tokens;
    return x;
}

void policy_exec_destroy(struct policy_exec *x)
{
    free(x);
}

static int check_chunk(const struct R(net) * n, const struct policy_chunk *c, int index,
                       struct lh_error *err)
{
    if (c->n < 1 || c->n > n->max_rows - n->rows || c->start < 0)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "chunk %d: %d tokens at %lld behind %d others; at most %d in a call", index,
                       c->n, (long long)c->start, n->rows, n->max_rows);
    if (c->logits_from < 0 || c->logits_from > c->n)
        return lh_fail(err, LH_INVALID_ARGUMENT, "chunk %d: logits_from %d of %d tokens", index,
                       c->logits_from, c->n);
    for (int i = 0; i < c->n; i++)
        if (c->tokens[i] < 0 || c->tokens[i] >= n->m->config.vocab)
            return lh_fail(err, LH_INVALID_ARGUMENT, "chunk %d: token %d is not in the vocabulary",
                           index, (int)c->tokens[i]);
    return 0;
}

int policy_forward(struct policy_exec *x, const struct policy_chunk *chunks, int n_chunks,
                   float *logits, struct lh_error *err)
{
    struct R(net) *n = &x->net;
    int wanted = 0;

    n->rows = 0;
    n->n_seqs = 0;
    for (int i = 0; i < n_chunks; i++) {
        const struct policy_chunk *c = &chunks[i];
        int rc = check_chunk(n, c, i, err);

        if (rc)
            return rc;
        memcpy(n->tokens + n->rows, c->tokens, (size_t)c->n * sizeof *n->tokens);
        n->seqs[n->n_seqs++] = (struct R(seq)){n->rows, c->n, c->start, c->pages, c->state};
        for (int t = c->logits_from; t < c->n; t++)
            x->wanted[wanted++] = n->rows + t;
        n->rows += c->n;
    }
    if (!n->rows)
        return 0;
    R(net_forward)(n);
    R(net_logits)(n, x->wanted, wanted, logits);
    return 0;
}
