#include "kvstore/tier/room.h"

enum { RECLAIM_NODES = 4096 };

static bool make_some(struct kv_index *ix, enum kv_tier tier)
{
    if (kv_root_reclaimable(ix)) {
        kv_root_reclaim(ix, RECLAIM_NODES);
        return true;
    }
    return tier == KV_MEMORY ? kv_index_evict_memory(ix) : kv_index_evict(ix);
}

bool kv_room_take(struct kv_index *ix, const struct kv_root *root, enum kv_part part,
                  enum kv_tier tier, uint32_t *page)
{
    uint32_t pages = root->pages[part][tier];
    struct kv_extent e;

    if (pages > ix->pages[tier]->n)
        return false;
    while (!kv_pages_take(ix->pages[tier], pages, part == KV_BLOCK ? KV_BOTTOM : KV_TOP, &e))
        if (!make_some(ix, tier))
            return false;
    *page = e.page;
    return true;
}

struct kv_node *kv_room_node(struct kv_index *ix, struct kv_root *root, const struct kv_key *hash,
                             uint32_t unit)
{
    struct kv_node *n = kv_node_new(ix, root, hash, unit);

    while (!n && make_some(ix, KV_DISK))
        n = kv_node_new(ix, root, hash, unit);
    return n;
}
