/* Which node goes next.  Every root keeps orders of its own, so that what belongs to one policy
 * version or one tenant is found without a search; between roots the least rank decides, after an
 * older version has been made STEP_US older for every step that it lags behind the newest. */
#include "kvstore/index/policy.h"

enum { STEP_US = 600000000, SMALL_SHARE = 10 };

static void leave_order(struct kv_index *ix, struct kv_node *n)
{
    if (n->order != KV_KEPT)
        kv_heap_remove(ix, &kv_root_of(ix, n)->orders[n->order], n);
    n->order = KV_KEPT;
}

static void leave_residence(struct kv_index *ix, struct kv_node *n)
{
    if (n->is_resident)
        kv_heap_remove(ix, &kv_root_of(ix, n)->orders[KV_RESIDENT], n);
    n->is_resident = false;
}

void kv_index_leave_orders(struct kv_index *ix, struct kv_node *n)
{
    leave_order(ix, n);
    leave_residence(ix, n);
}

static enum kv_order order_of(const struct kv_index *ix, const struct kv_node *n)
{
    if (n->pins)
        return KV_KEPT;
    if (!n->child)
        return ix->policy->two_queues && !n->main ? KV_SMALL : KV_MAIN;
    if (!kv_object_exists(&n->parts[KV_STATE]) || kv_at(ix, n->child)->next)
        return KV_KEPT;
    return n->parts[KV_STATE].at[KV_MEMORY] ? KV_SUPERSEDED : KV_SUPERSEDED_DISK;
}

static void enter_order(struct kv_index *ix, struct kv_node *n, enum kv_order order)
{
    if (n->order == order)
        return;
    leave_order(ix, n);
    if (order != KV_KEPT && kv_heap_add(ix, &kv_root_of(ix, n)->orders[order], n))
        n->order = order;
}

/* What is on disk too may leave, and at the bottom of a tree what is not may be dropped.  Only a
 * store with a disk keeps this order. */
void kv_index_settle_resident(struct kv_index *ix, struct kv_node *n)
{
    bool may_leave = ix->disk && n->phase == KV_VISIBLE && !n->holds && kv_node_in_memory(n) &&
                     (kv_node_is_clean(n) || (!n->pins && !n->child));

    if (may_leave == n->is_resident)
        return;
    if (!may_leave)
        leave_residence(ix, n);
    else
        n->is_resident = kv_heap_add(ix, &kv_root_of(ix, n)->orders[KV_RESIDENT], n);
}

void kv_node_read(struct kv_index *ix, struct kv_node *n)
{
    if (n->seen && n->probation) {
        leave_residence(ix, n);
        n->probation = false;
        kv_index_settle_resident(ix, n);
    }
    n->seen = true;
    if (n->order == KV_KEPT && !n->is_resident)
        n->rank = ix->tick;
}

static void count_dropped(struct kv_index *ix, const struct kv_node *n)
{
    for (int part = 0; part < KV_PARTS; part++)
        ix->evicted += kv_object_exists(&n->parts[part]);
}

void kv_index_settle(struct kv_index *ix, struct kv_node *n)
{
    while (n && n->phase == KV_VISIBLE) {
        enum kv_order order = order_of(ix, n);
        bool tail = !n->child && !n->pins && !kv_node_is_boundary(ix, n);
        if (!tail) {
            enter_order(ix, n, order);
            kv_index_settle_resident(ix, n);
            return;
        }
        count_dropped(ix, n);
        n = kv_node_kill(ix, n);
    }
}

/* The checkpoint behind a superseded one, which has one continuation. */
static struct kv_node *next_boundary(const struct kv_index *ix, const struct kv_node *n)
{
    struct kv_node *at = kv_at(ix, n->child);

    while (at && !kv_node_is_boundary(ix, at))
        at = at->child && !kv_at(ix, at->child)->next ? kv_at(ix, at->child) : NULL;
    return at && at->phase == KV_VISIBLE ? at : NULL;
}

static void forget_state(struct kv_index *ix, struct kv_node *n)
{
    kv_index_leave_orders(ix, n);
    kv_index_account(ix, kv_root_of(ix, n), KV_STATE, &n->parts[KV_STATE], -1);
    for (int tier = 0; tier < KV_TIERS; tier++)
        kv_node_leave(ix, n, KV_STATE, tier);
    ix->evicted++;
    ix->superseded++;
    kv_index_settle(ix, n);
}

/* More hangs on the next checkpoint then. */
static void drop_state(struct kv_index *ix, struct kv_node *n)
{
    struct kv_node *next = ix->policy->bonus ? next_boundary(ix, n) : NULL;

    if (!next) {
        forget_state(ix, n);
        return;
    }
    kv_index_leave_orders(ix, next);
    next->rank -= ix->policy->bonus(ix, next);
    forget_state(ix, n);
    next->rank += ix->policy->bonus(ix, next);
    kv_index_settle(ix, next);
}

static uint64_t rank_in(const struct kv_index *ix, const struct kv_root *r, const struct kv_node *n)
{
    uint64_t late = ix->newest_step > r->policy_step ? ix->newest_step - r->policy_step : 0;
    uint64_t penalty = late < UINT32_MAX ? late * STEP_US : UINT64_MAX;

    return n->rank > penalty ? n->rank - penalty : 0;
}

static bool is_of(const struct kv_root *r, int tenant)
{
    return tenant == KV_ANY_TENANT || r->tenant == tenant;
}

static struct kv_node *first_in(const struct kv_index *ix, enum kv_order order, int tenant)
{
    struct kv_node *best = NULL;
    uint64_t least = 0;

    for (const struct kv_root *r = ix->live; r; r = r->next) {
        struct kv_node *n = is_of(r, tenant) ? kv_heap_first(ix, &r->orders[order]) : NULL;
        if (!n)
            continue;
        uint64_t rank = order == KV_RESIDENT && n->probation ? 0 : rank_in(ix, r, n);
        if (!best || rank < least) {
            best = n;
            least = rank;
        }
    }
    return best;
}

/* S3-FIFO takes from the small queue while that has more than a tenth of all. */
static struct kv_node *next_leaf(const struct kv_index *ix, int tenant)
{
    uint64_t small = 0, all = 0;

    for (const struct kv_root *r = ix->live; r; r = r->next) {
        if (!is_of(r, tenant))
            continue;
        small += r->orders[KV_SMALL].n;
        all += r->orders[KV_SMALL].n + r->orders[KV_MAIN].n;
    }
    struct kv_node *n = first_in(ix, small * SMALL_SHARE > all ? KV_SMALL : KV_MAIN, tenant);
    return n ? n : first_in(ix, KV_SMALL, tenant);
}

static bool is_spared(struct kv_index *ix, struct kv_node *n)
{
    if (!ix->policy->spare)
        return false;
    kv_index_leave_orders(ix, n);
    bool spared = ix->policy->spare(ix, n);
    kv_index_settle(ix, n);
    return spared;
}

static void drop_leaf(struct kv_index *ix, struct kv_node *leaf)
{
    count_dropped(ix, leaf);
    kv_index_settle(ix, kv_node_kill(ix, leaf));
}

static bool drop_superseded(struct kv_index *ix, enum kv_order order, int tenant)
{
    struct kv_node *n = first_in(ix, order, tenant);

    if (n)
        drop_state(ix, n);
    return n;
}

bool kv_index_evict(struct kv_index *ix, int tenant)
{
    struct kv_node *leaf;

    if (drop_superseded(ix, KV_SUPERSEDED_DISK, tenant) ||
        drop_superseded(ix, KV_SUPERSEDED, tenant))
        return true;
    while ((leaf = next_leaf(ix, tenant)) && is_spared(ix, leaf))
        ;
    if (leaf)
        drop_leaf(ix, leaf);
    return leaf;
}

static void leave_memory(struct kv_index *ix, struct kv_node *n)
{
    n->probation = false;
    for (int part = 0; part < KV_PARTS; part++) {
        ix->left_memory += n->parts[part].at[KV_MEMORY] != 0;
        kv_node_leave(ix, n, part, KV_MEMORY);
    }
}

/* What is in memory alone lies at the bottom of its tree, but for the state of an inner node that
 * came after its block had been written. */
bool kv_index_evict_memory(struct kv_index *ix, int tenant)
{
    if (!ix->disk)
        return kv_index_evict(ix, tenant);
    if (drop_superseded(ix, KV_SUPERSEDED, tenant))
        return true;
    struct kv_node *n = first_in(ix, KV_RESIDENT, tenant);
    if (!n)
        return false;
    if (kv_node_is_clean(n))
        leave_memory(ix, n);
    else
        drop_leaf(ix, n);
    return true;
}

/* In the order of eviction first, so that of a chain as much stays as is on disk; what is left then
 * is being written. */
void kv_index_lose_memory(struct kv_index *ix)
{
    while (kv_index_evict_memory(ix, KV_ANY_TENANT))
        ;
    for (uint32_t i = 1; i < ix->touched && ix->pages[KV_MEMORY]->used; i++)
        if (ix->nodes[i].phase == KV_VISIBLE && kv_node_in_memory(&ix->nodes[i]))
            kv_node_drop(ix, &ix->nodes[i]);
}
