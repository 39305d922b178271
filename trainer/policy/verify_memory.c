#include "trainer/policy/verify_memory.h"

#include <stdlib.h>

void memory_release(struct memory *x)
{
    policy_free(x->m, x->at);
}

int memory_take(struct memory *x, size_t bytes, bool dirty, struct lh_error *err)
{
    lh_autofree void *zeros = dirty ? NULL : calloc(1, bytes + 1);

    if (!dirty && !zeros)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "verify: out of memory");
    x->at = policy_alloc(x->m, bytes, err);
    if (!x->at)
        return LH_RESOURCE_EXHAUSTED;
    return dirty ? 0 : policy_put(x->m, x->at, zeros, bytes, err);
}

void verify_sequence_finish(struct verify_sequence *s)
{
    memory_release(&s->memory);
}

int verify_sequence_init(struct verify_sequence *s, const struct policy_model *m, int tokens,
                         struct lh_error *err)
{
    size_t n = ((size_t)tokens + VERIFY_PAGE_TOKENS - 1) / VERIFY_PAGE_TOKENS;
    size_t page = VERIFY_PAGE_TOKENS * policy_kv_floats(m) * policy_number_bytes(m);
    size_t table = n * sizeof(float *), state = policy_state_floats(m) * sizeof(float);
    lh_autofree float **pages = calloc(n, sizeof *pages);
    char *at;
    int rc;

    s->memory = (struct memory){.m = m};
    if (!pages)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "sequence: out of memory");
    rc = memory_take(&s->memory, table + state + n * page, false, err);
    if (rc)
        return rc;
    s->pages = s->memory.at;
    at = (char *)s->memory.at + table;
    s->state = (float *)(void *)at;
    for (size_t i = 0; i < n; i++)
        pages[i] = (float *)(void *)(at + state + i * page);
    return policy_put(m, s->pages, pages, table, err);
}
