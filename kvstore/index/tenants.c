/* Tenants and their quotas.
 *
 * A root belongs to one tenant, and pages are counted for it when they are granted and when they
 * return, so what a tenant has is known without a walk.  A quota bounds one tenant in one tier: at
 * it, the tenant's own entries make room (kv_room_take()), in the order in which they would go
 * anyway.  Quotas may sum up to more than the store; below its quota a tenant competes with all
 * others, as if there were none. */
#include <string.h>

#include "kvstore/index/index.h"

bool kv_tenant_is_used(const struct kv_index *ix, unsigned i)
{
    const struct kv_root *lists[] = {ix->live, ix->retired};

    if (i == 0 || ix->tenants[i].has_quota)
        return true;
    for (int k = 0; k < 2; k++)
        for (const struct kv_root *r = lists[k]; r; r = r->next)
            if (r->tenant == i)
                return true;
    return false;
}

static struct kv_tenant *find(struct kv_index *ix, const char *name)
{
    for (unsigned i = 0; i < ix->n_tenants; i++)
        if (!strcmp(ix->tenants[i].name, name))
            return &ix->tenants[i];
    return NULL;
}

/* The quota of whoever is not named in the list of quotas. */
static const struct kv_tenant *anybody(struct kv_index *ix)
{
    return find(ix, "*");
}

struct kv_tenant *kv_tenant_named(struct kv_index *ix, const char *name, struct lh_error *err)
{
    struct kv_tenant *t = find(ix, name);
    const struct kv_tenant *model = anybody(ix);
    unsigned i = 0;

    if (t)
        return t;
    while (i < ix->n_tenants && kv_tenant_is_used(ix, i))
        i++;
    if (i == KV_MAX_TENANTS)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%d tenants are there; retire roots of some",
                       KV_MAX_TENANTS),
               NULL;
    t = &ix->tenants[i];
    *t = (struct kv_tenant){0};
    strncpy(t->name, name, sizeof t->name - 1);
    if (model)
        memcpy(t->quota, model->quota, sizeof t->quota);
    ix->n_tenants += i == ix->n_tenants;
    return t;
}

void kv_tenant_adopt(struct kv_index *ix, struct kv_root *r, const struct kv_tenant *t)
{
    uint16_t to = (uint16_t)(t - ix->tenants);

    for (int tier = 0; tier < KV_TIERS; tier++) {
        ix->tenants[r->tenant].granted[tier] -= r->granted[tier];
        ix->tenants[to].granted[tier] += r->granted[tier];
    }
    r->tenant = to;
}

void kv_tenant_grant(struct kv_index *ix, struct kv_root *r, enum kv_tier tier, int64_t pages)
{
    r->granted[tier] += (uint64_t)pages;
    ix->tenants[r->tenant].granted[tier] += (uint64_t)pages;
}

bool kv_tenant_has_room(const struct kv_index *ix, const struct kv_root *r, enum kv_tier tier,
                        uint64_t pages)
{
    const struct kv_tenant *t = &ix->tenants[r->tenant];

    return !t->quota[tier] || t->granted[tier] + pages <= t->quota[tier];
}
