#include "kvstore/tier/room.h"

enum { RECLAIM_NODES = 4096 };

static bool make_some(struct kv_index *ix, enum kv_tier tier, int tenant)
{
    if (kv_root_reclaimable(ix)) {
        kv_root_reclaim(ix, RECLAIM_NODES);
        return true;
    }
    return tier == KV_MEMORY ? kv_index_evict_memory(ix, tenant) : kv_index_evict(ix, tenant);
}

/* Nobody else's entries go for what is above a quota. */
static bool keep_quota(struct kv_index *ix, const struct kv_root *root, enum kv_tier tier,
                       uint32_t pages)
{
    while (!kv_tenant_has_room(ix, root, tier, pages)) {
        if (!make_some(ix, tier, root->tenant))
            return false;
        ix->tenants[root->tenant].evicted++;
    }
    return true;
}

bool kv_room_take(struct kv_index *ix, struct kv_root *root, enum kv_part part, enum kv_tier tier,
                  uint32_t *page)
{
    uint32_t pages = root->pages[part][tier];
    struct kv_extent e;

    if (pages > ix->pages[tier]->n || !keep_quota(ix, root, tier, pages))
        return false;
    while (!kv_pages_take(ix->pages[tier], pages, part == KV_BLOCK ? KV_BOTTOM : KV_TOP, &e))
        if (!make_some(ix, tier, KV_ANY_TENANT))
            return false;
    kv_tenant_grant(ix, root, tier, pages);
    *page = e.page;
    return true;
}

struct kv_node *kv_room_node(struct kv_index *ix, struct kv_root *root, const struct kv_key *hash,
                             uint32_t unit)
{
    struct kv_node *n = kv_node_new(ix, root, hash, unit);

    while (!n && make_some(ix, KV_DISK, KV_ANY_TENANT))
        n = kv_node_new(ix, root, hash, unit);
    return n;
}
