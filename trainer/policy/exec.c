/* The incremental forward: rollout's end of the network. */
#include <cblas.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/policy/backend.h"
#include "trainer/policy/exec.h"
#include "trainer/policy/net.h"

enum { MAX_TOKENS = 1 << 20 }; /* keeps row * heads in an int */

struct R(exec) {
    struct R(net) net;
    /* The batch as it is put together, before it goes to the backend. */
    int32_t *tokens, *wanted;
    struct R(seq) * seqs;
    struct R(batch) batch;
};

size_t R(exec_bytes)(const struct policy_model *m, int max_tokens)
{
    struct R(net) n;

    return max_tokens > 0 && max_tokens <= MAX_TOKENS ? R(net_lay_out)(&n, m, max_tokens, 0, NULL)
                                                      : 0;
}

static int allocate(struct R(exec) * x, const struct policy_model *m, int max_tokens, void *arena,
                    struct lh_error *err)
{
    size_t rows = (size_t)max_tokens;

    R(net_lay_out)(&x->net, m, max_tokens, 0, arena);
    x->tokens = malloc(rows * sizeof *x->tokens);
    x->wanted = malloc(rows * sizeof *x->wanted);
    x->seqs = malloc(rows * sizeof *x->seqs);
    return x->net.layers && x->tokens && x->wanted && x->seqs
               ? 0
               : lh_fail(err, LH_RESOURCE_EXHAUSTED, "policy_exec: out of memory");
}

struct R(exec) * R(exec_create)(const struct policy_model *m, const real *weights, void *arena,
                                size_t bytes, int max_tokens, int page_tokens, struct lh_error *err)
{
    size_t need = R(exec_bytes)(m, max_tokens);
    struct R(exec) * x;

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
    x->net.w = weights;
    x->net.page_tokens = page_tokens;
    if (allocate(x, m, max_tokens, arena, err)) {
        R(exec_destroy)(x);
        return NULL;
    }
    return x;
}

void R(exec_destroy)(struct R(exec) * x)
{
    if (!x)
        return;
    R(net_finish)(&x->net);
    free(x->tokens);
    free(x->wanted);
    free(x->seqs);
    free(x);
}

static int check_chunk(const struct R(net) * n, const struct policy_chunk *c, int index, int rows,
                       struct lh_error *err)
{
    if (c->n < 1 || c->n > n->max_rows - rows || c->start < 0)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "chunk %d: %d tokens at %lld behind %d others; at most %d in a call", index,
                       c->n, (long long)c->start, rows, n->max_rows);
    if (c->logits_from < 0 || c->logits_from > c->n)
        return lh_fail(err, LH_INVALID_ARGUMENT, "chunk %d: logits_from %d of %d tokens", index,
                       c->logits_from, c->n);
    for (int i = 0; i < c->n; i++)
        if (c->tokens[i] < 0 || c->tokens[i] >= n->m->config.vocab)
            return lh_fail(err, LH_INVALID_ARGUMENT, "chunk %d: token %d is not in the vocabulary",
                           index, (int)c->tokens[i]);
    return 0;
}

/* Appends a chunk to the batch. */
static int add_chunk(struct R(exec) * x, const struct policy_chunk *c)
{
    struct R(batch) *b = &x->batch;

    memcpy(x->tokens + b->rows, c->tokens, (size_t)c->n * sizeof *x->tokens);
    x->seqs[b->n_seqs++] =
        (struct R(seq)){b->rows, c->n, c->start, (real *const *)(const void *)c->pages, c->state};
    b->longest = c->n > b->longest ? c->n : b->longest;
    b->rows += c->n;
    return c->n - c->logits_from;
}

int R(exec_forward)(struct R(exec) * x, const struct policy_chunk *chunks, int n_chunks,
                    float *logits, struct lh_error *err)
{
    struct R(net) *n = &x->net;
    const struct policy_backend *to = n->m->backend;
    int wanted = 0, rc = 0;

    x->batch = (struct R(batch)){.tokens = x->tokens, .seqs = x->seqs};
    for (int i = 0; i < n_chunks; i++) {
        rc = check_chunk(n, &chunks[i], i, x->batch.rows, err);
        if (rc)
            return rc;
        for (int left = add_chunk(x, &chunks[i]); left > 0; left--)
            x->wanted[wanted++] = x->batch.rows - left;
    }
    if (!x->batch.rows)
        return 0;
    rc = R(net_forward)(n, &x->batch, err);
    if (!rc && wanted)
        rc = to->put(n->wanted, x->wanted, (size_t)wanted * sizeof *x->wanted, err);
    if (!rc && wanted)
        R(net_logits)(n, n->wanted, wanted, logits);
    return rc ? rc : to->check(err);
}
