#include "kvstore/tier/room.h"

enum { RECLAIM_NODES = 64 };

static bool make_some(struct kv_index *ix)
{
    if (kv_root_reclaimable(ix)) {
        kv_root_reclaim(ix, RECLAIM_NODES);
        return true;
    }
    return kv_index_evict(ix);
}

bool kv_room_take(struct kv_index *ix, uint32_t pages, enum kv_end end, struct kv_extent *out)
{
    if (pages > ix->pages->n)
        return false;
    while (!kv_pages_take(ix->pages, pages, end, out))
        if (!make_some(ix))
            return false;
    return true;
}

struct kv_node *kv_room_node(struct kv_index *ix, struct kv_root *root, const struct kv_key *hash,
                             uint32_t unit)
{
    struct kv_node *n = kv_node_new(ix, root, hash, unit);

    while (!n && make_some(ix))
        n = kv_node_new(ix, root, hash, unit);
    return n;
}
