#include "trainer/policy/backend.h"

#include <stdlib.h>
#include <string.h>

#include "proto/cleanup.h"
#include "trainer/policy/model.h"

static void *cpu_alloc(size_t bytes, struct lh_error *err)
{
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);

    if (!p)
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "%zu bytes for the policy: out of memory", bytes);
    return p;
}

static int cpu_copy(void *to, const void *from, size_t bytes, struct lh_error *err)
{
    (void)err;
    memcpy(to, from, bytes);
    return 0;
}

static int cpu_check(struct lh_error *err)
{
    (void)err;
    return 0;
}

const struct policy_backend policy_cpu_backend = {
    "cpu", sizeof(float), 1,        policy_cpu_ops_f32, NULL, cpu_alloc,
    free,  cpu_copy,      cpu_copy, cpu_check,          NULL,
};

void *policy_alloc(const struct policy_model *m, size_t bytes, struct lh_error *err)
{
    return m->backend->alloc(bytes, err);
}

void policy_free(const struct policy_model *m, void *p)
{
    if (p)
        m->backend->free(p);
}

int policy_put(const struct policy_model *m, void *to, const void *from, size_t bytes,
               struct lh_error *err)
{
    return m->backend->put(to, from, bytes, err);
}

int policy_get(const struct policy_model *m, void *to, const void *from, size_t bytes,
               struct lh_error *err)
{
    return m->backend->get(to, from, bytes, err);
}
