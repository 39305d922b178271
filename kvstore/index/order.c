#include "kvstore/index/index.h"

void kv_index_leave_order(struct kv_index *ix, struct kv_node *n)
{
    if (n->order != KV_KEPT)
        kv_heap_remove(&ix->orders[n->order], n);
    n->order = KV_KEPT;
}

static enum kv_order order_of(const struct kv_node *n)
{
    if (n->pins)
        return KV_KEPT;
    if (!n->child)
        return KV_LEAF;
    return n->state.pages && !n->child->next ? KV_SUPERSEDED : KV_KEPT;
}

static void enter_order(struct kv_index *ix, struct kv_node *n, enum kv_order order)
{
    if (n->order == order)
        return;
    kv_index_leave_order(ix, n);
    n->order = order;
    if (order != KV_KEPT)
        kv_heap_add(&ix->orders[order], n);
}

void kv_index_settle(struct kv_index *ix, struct kv_node *n)
{
    while (n && n->phase == KV_VISIBLE) {
        enum kv_order order = order_of(n);
        if (order != KV_LEAF || kv_node_is_boundary(n)) {
            enter_order(ix, n, order);
            return;
        }
        ix->evicted += n->block.pages > 0;
        n = kv_node_kill(ix, n);
    }
}

static void drop_state(struct kv_index *ix, struct kv_node *n)
{
    kv_index_leave_order(ix, n);
    kv_index_account(ix, n->root, &n->state, -1);
    kv_pages_give(ix->pages, &n->state);
    ix->evicted++;
    ix->superseded++;
}

bool kv_index_evict(struct kv_index *ix)
{
    if (ix->orders[KV_SUPERSEDED].n) {
        drop_state(ix, ix->orders[KV_SUPERSEDED].at[0]);
        return true;
    }
    if (ix->orders[KV_LEAF].n) {
        struct kv_node *leaf = ix->orders[KV_LEAF].at[0];
        ix->evicted += (uint64_t)(leaf->block.pages > 0) + (leaf->state.pages > 0);
        kv_index_settle(ix, kv_node_kill(ix, leaf));
        return true;
    }
    return false;
}
