#include "kvstore/index/index.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kvstore/index/policy.h"
#include "kvstore/tier/disk.h"
#include "proto/clock.h"

int kv_index_init(struct kv_index *ix, struct kv_pages *memory, struct kv_pages *disk,
                  struct lh_error *err)
{
    uint32_t buckets = 1024, max_nodes = memory->n + (disk ? disk->n : 0);

    while (buckets < max_nodes / 2)
        buckets *= 2;
    *ix = (struct kv_index){.pages = {memory, disk},
                            .policy = kv_policy_default(),
                            .max_nodes = max_nodes,
                            .touched = 1,
                            .n_tenants = 1,
                            .mask = buckets - 1};
    ix->nodes = calloc((size_t)max_nodes + 1, sizeof *ix->nodes);
    ix->buckets = calloc(buckets, sizeof *ix->buckets);
    ix->ghosts = calloc(KV_GHOSTS, sizeof *ix->ghosts);
    if (!ix->nodes || !ix->buckets || !ix->ghosts)
        return lh_fail_errno(err, ENOMEM, "index of %u entries", max_nodes);
    return 0;
}

void kv_index_finish(struct kv_index *ix)
{
    for (int i = 0; i < KV_ROOT_SLOTS; i++)
        kv_root_destroy(ix->roots[i]);
    free(ix->ghosts);
    free(ix->buckets);
    free(ix->nodes);
}

/* The hash is uniform, any of its bytes will do. */
static kv_ref *bucket_of(struct kv_index *ix, const struct kv_key *hash)
{
    uint32_t h;

    memcpy(&h, hash->bytes, sizeof h);
    return &ix->buckets[h & ix->mask];
}

struct kv_node *kv_node_find(struct kv_index *ix, const struct kv_root *root,
                             const struct kv_key *hash)
{
    struct kv_node *n = kv_at(ix, *bucket_of(ix, hash));

    while (n && !(n->root == root->slot && kv_key_equal(&n->hash, hash)))
        n = kv_at(ix, n->bucket);
    return n;
}

struct kv_node *kv_node_new(struct kv_index *ix, struct kv_root *root, const struct kv_key *hash,
                            uint32_t unit)
{
    struct kv_node *n = kv_at(ix, ix->free);

    if (n)
        ix->free = n->next;
    else if (ix->touched <= ix->max_nodes)
        n = &ix->nodes[ix->touched++];
    else
        return NULL;
    *n = (struct kv_node){.hash = *hash,
                          .root = root->slot,
                          .unit = (uint16_t)unit,
                          .order = KV_KEPT,
                          .queued = n->queued};
    root->refs++;
    ix->in_use++;
    return n;
}

void kv_object_free(struct kv_index *ix, struct kv_root *root, enum kv_part part,
                    struct kv_object *o, enum kv_tier tier)
{
    if (!o->at[tier])
        return;
    struct kv_extent e = {.page = o->at[tier] - 1, .pages = root->pages[part][tier]};
    if (tier == KV_DISK)
        kv_disk_forget(ix->disk, e.page);
    kv_pages_give(ix->pages[tier], &e);
    kv_tenant_grant(ix, root, tier, -(int64_t)root->pages[part][tier]);
    o->at[tier] = 0;
}

void kv_node_discard(struct kv_index *ix, struct kv_node *n)
{
    struct kv_root *root = kv_root_of(ix, n);

    for (int part = 0; part < KV_PARTS; part++)
        for (int tier = 0; tier < KV_TIERS; tier++)
            kv_object_free(ix, root, part, &n->parts[part], tier);
    root->refs--;
    *n = (struct kv_node){.order = KV_KEPT, .next = ix->free, .queued = n->queued};
    ix->free = kv_ref_of(ix, n);
    ix->in_use--;
}

void kv_index_account(struct kv_index *ix, struct kv_root *r, enum kv_part part,
                      const struct kv_object *o, int sign)
{
    if (!kv_object_exists(o))
        return;
    ix->objects += (uint64_t)sign;
    r->objects += (uint64_t)sign;
    r->bytes += (uint64_t)(sign * (int64_t)(part == KV_BLOCK ? r->geometry.block_bytes
                                                             : r->geometry.state_bytes));
}

static void account_node(struct kv_index *ix, const struct kv_node *n, int sign)
{
    for (int part = 0; part < KV_PARTS; part++)
        kv_index_account(ix, kv_root_of(ix, n), part, &n->parts[part], sign);
}

uint64_t kv_index_tick(struct kv_index *ix)
{
    uint64_t now = (uint64_t)lh_now_us();

    ix->tick = now > ix->tick ? now : ix->tick + 1;
    return ix->tick;
}

static void add_child(struct kv_index *ix, struct kv_node *parent, struct kv_node *n)
{
    n->parent = kv_ref_of(ix, parent);
    n->prev = 0;
    n->next = parent ? parent->child : 0;
    if (!parent)
        return;
    if (parent->child)
        kv_at(ix, parent->child)->prev = kv_ref_of(ix, n);
    parent->child = kv_ref_of(ix, n);
}

static void remove_child(struct kv_index *ix, struct kv_node *n)
{
    if (n->next)
        kv_at(ix, n->next)->prev = n->prev;
    if (n->prev)
        kv_at(ix, n->prev)->next = n->next;
    else if (n->parent)
        kv_parent(ix, n)->child = n->next;
}

void kv_node_link(struct kv_index *ix, struct kv_node *n, struct kv_node *parent)
{
    kv_ref *bucket = bucket_of(ix, &n->hash);

    n->phase = KV_VISIBLE;
    n->rank = kv_index_tick(ix);
    n->bucket = *bucket;
    *bucket = kv_ref_of(ix, n);
    add_child(ix, parent, n);
    account_node(ix, n, 1);
    kv_index_settle_resident(ix, n);
    if (parent)
        kv_index_settle(ix, parent);
}

void kv_node_set_state(struct kv_index *ix, struct kv_node *n, const struct kv_object *state)
{
    n->parts[KV_STATE] = *state;
    kv_index_account(ix, kv_root_of(ix, n), KV_STATE, state, 1);
    kv_index_settle_resident(ix, n);
}

void kv_node_place(struct kv_index *ix, struct kv_node *n, enum kv_part part, enum kv_tier tier,
                   uint32_t page)
{
    n->parts[part].at[tier] = page + 1;
    kv_index_settle(ix, n);
}

void kv_node_leave(struct kv_index *ix, struct kv_node *n, enum kv_part part, enum kv_tier tier)
{
    kv_object_free(ix, kv_root_of(ix, n), part, &n->parts[part], tier);
    kv_index_settle(ix, n);
}

void kv_node_touch(struct kv_index *ix, struct kv_node *n)
{
    kv_index_leave_orders(ix, n);
    kv_root_of(ix, n)->used = kv_index_tick(ix);
    ix->policy->touch(ix, n);
    kv_index_settle(ix, n);
}

/* A node is there only if all its ancestors are, so "is unit i there" is monotone in i. */
struct kv_node *kv_node_deepest(struct kv_index *ix, const struct kv_root *root,
                                const struct kv_key *chain, size_t n, uint32_t first)
{
    struct kv_node *best = NULL;
    size_t lo = 0, hi = n;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        struct kv_node *at = kv_node_find(ix, root, &chain[mid]);
        if (at && at->unit == first + mid) {
            best = at;
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return best;
}

struct kv_node *kv_node_match(struct kv_index *ix, const struct kv_root *root,
                              const struct kv_key *chain, size_t n, uint32_t at_least)
{
    struct kv_node *at = kv_node_deepest(ix, root, chain, n, 0);

    while (at && at->unit >= at_least && !kv_node_is_boundary(ix, at))
        at = kv_parent(ix, at);
    return at && at->unit >= at_least ? at : NULL;
}

static void hide(struct kv_index *ix, struct kv_node *n)
{
    kv_ref *p = bucket_of(ix, &n->hash);

    while (kv_at(ix, *p) != n)
        p = &kv_at(ix, *p)->bucket;
    *p = n->bucket;
    account_node(ix, n, -1);
    kv_index_leave_orders(ix, n);
    n->phase = KV_DEAD;
}

/* Frees dead nodes upwards from n as far as nothing holds them; returns the first that stays. */
static struct kv_node *reap(struct kv_index *ix, struct kv_node *n)
{
    while (n && n->phase == KV_DEAD && !n->pins && !n->child) {
        struct kv_node *parent = kv_parent(ix, n);
        remove_child(ix, n);
        kv_node_discard(ix, n);
        n = parent;
    }
    return n;
}

struct kv_node *kv_node_kill(struct kv_index *ix, struct kv_node *n)
{
    struct kv_node *parent = kv_parent(ix, n);

    hide(ix, n);
    struct kv_node *stays = reap(ix, n);
    return stays == n ? parent : stays;
}

static struct kv_node *lowest(struct kv_index *ix, struct kv_node *n)
{
    while (n->child)
        n = kv_at(ix, n->child);
    return n;
}

/* Post-order, so that a node's children are dead before it is: whatever nobody reads goes at once.
 * Dead children met on the way were left by an earlier drop and wait for their readers. */
void kv_node_drop(struct kv_index *ix, struct kv_node *top)
{
    struct kv_node *parent = kv_parent(ix, top);

    for (struct kv_node *n = lowest(ix, top), *next; n; n = next) {
        next = n == top ? NULL : n->next ? lowest(ix, kv_at(ix, n->next)) : kv_parent(ix, n);
        if (n->phase == KV_VISIBLE)
            kv_node_kill(ix, n);
    }
    if (parent)
        kv_index_settle(ix, parent);
}

void kv_node_pin(struct kv_index *ix, struct kv_node *n)
{
    if (n->pins++ == 0) {
        ix->pinned++;
        kv_index_leave_orders(ix, n);
        kv_index_settle_resident(ix, n);
    }
}

void kv_node_unpin(struct kv_index *ix, struct kv_node *n)
{
    if (--n->pins)
        return;
    ix->pinned--;
    n = reap(ix, n);
    if (n)
        kv_index_settle(ix, n);
}

void kv_node_hold(struct kv_index *ix, struct kv_node *n)
{
    n->holds++;
    kv_index_settle_resident(ix, n);
}

void kv_node_unhold(struct kv_index *ix, struct kv_node *n)
{
    n->holds--;
    kv_index_settle_resident(ix, n);
}

void kv_path_take(struct kv_index *ix, struct kv_node *hit, uint32_t from)
{
    kv_node_pin(ix, hit);
    for (struct kv_node *n = hit; n && n->unit >= from; n = kv_parent(ix, n))
        kv_node_hold(ix, n);
}

void kv_path_give(struct kv_index *ix, struct kv_node *hit, uint32_t from)
{
    for (struct kv_node *n = hit; n && n->unit >= from; n = kv_parent(ix, n))
        kv_node_unhold(ix, n);
    kv_node_unpin(ix, hit);
}
