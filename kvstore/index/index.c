#include "kvstore/index/index.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"

int kv_index_init(struct kv_index *ix, struct kv_pages *pages, struct lh_error *err)
{
    uint32_t buckets = 1024;

    while (buckets < pages->n)
        buckets *= 2;
    *ix = (struct kv_index){.pages = pages, .max_nodes = pages->n, .mask = buckets - 1};
    ix->nodes = calloc(ix->max_nodes, sizeof *ix->nodes);
    ix->buckets = calloc(buckets, sizeof(struct kv_node *));
    if (!ix->nodes || !ix->buckets)
        return lh_fail_errno(err, ENOMEM, "index of %u entries", ix->max_nodes);
    for (int i = 0; i < KV_ORDERS; i++) {
        int r = kv_heap_init(&ix->orders[i], ix->max_nodes, err);
        if (r < 0)
            return r;
    }
    return 0;
}

static void free_roots(struct kv_root *r)
{
    while (r) {
        struct kv_root *next = r->next;
        free(r);
        r = next;
    }
}

void kv_index_finish(struct kv_index *ix)
{
    free_roots(ix->live);
    free_roots(ix->retired);
    for (int i = 0; i < KV_ORDERS; i++)
        kv_heap_finish(&ix->orders[i]);
    free(ix->buckets);
    free(ix->nodes);
}

/* The hash is uniform, any of its bytes will do. */
static struct kv_node **bucket_of(struct kv_index *ix, const struct kv_key *hash)
{
    uint32_t h;

    memcpy(&h, hash->bytes, sizeof h);
    return &ix->buckets[h & ix->mask];
}

struct kv_node *kv_node_find(struct kv_index *ix, const struct kv_root *root,
                             const struct kv_key *hash)
{
    struct kv_node *n = *bucket_of(ix, hash);

    while (n && !(n->root == root && kv_key_equal(&n->hash, hash)))
        n = n->bucket;
    return n;
}

struct kv_node *kv_node_new(struct kv_index *ix, struct kv_root *root, const struct kv_key *hash,
                            uint32_t unit)
{
    struct kv_node *n = ix->free;

    if (n)
        ix->free = n->next;
    else if (ix->touched < ix->max_nodes)
        n = &ix->nodes[ix->touched++];
    else
        return NULL;
    *n = (struct kv_node){.hash = *hash, .root = root, .unit = unit, .order = KV_KEPT};
    root->refs++;
    ix->in_use++;
    return n;
}

void kv_node_discard(struct kv_index *ix, struct kv_node *n)
{
    kv_pages_give(ix->pages, &n->block);
    kv_pages_give(ix->pages, &n->state);
    n->root->refs--;
    n->root = NULL;
    n->phase = KV_PENDING;
    n->next = ix->free;
    ix->free = n;
    ix->in_use--;
}

void kv_index_account(struct kv_index *ix, struct kv_root *r, const struct kv_extent *e, int sign)
{
    if (!e->pages)
        return;
    ix->objects += (uint64_t)sign;
    r->objects += (uint64_t)sign;
    r->pages += (uint64_t)(sign * (int64_t)e->pages);
}

static void account_node(struct kv_index *ix, const struct kv_node *n, int sign)
{
    kv_index_account(ix, n->root, &n->block, sign);
    kv_index_account(ix, n->root, &n->state, sign);
}

static uint64_t next_tick(struct kv_index *ix)
{
    uint64_t now = (uint64_t)lh_now_us();

    ix->tick = now > ix->tick ? now : ix->tick + 1;
    return ix->tick;
}

static void add_child(struct kv_node *parent, struct kv_node *n)
{
    n->parent = parent;
    n->prev = NULL;
    n->next = parent ? parent->child : NULL;
    if (!parent)
        return;
    if (parent->child)
        parent->child->prev = n;
    parent->child = n;
}

static void remove_child(struct kv_node *n)
{
    if (n->next)
        n->next->prev = n->prev;
    if (n->prev)
        n->prev->next = n->next;
    else if (n->parent)
        n->parent->child = n->next;
}

void kv_node_link(struct kv_index *ix, struct kv_node *n, struct kv_node *parent)
{
    struct kv_node **bucket = bucket_of(ix, &n->hash);

    n->phase = KV_VISIBLE;
    n->used = next_tick(ix);
    n->bucket = *bucket;
    *bucket = n;
    add_child(parent, n);
    n->older = n->root->newest;
    n->newer = NULL;
    if (n->older)
        n->older->newer = n;
    n->root->newest = n;
    account_node(ix, n, 1);
    if (parent)
        kv_index_settle(ix, parent);
}

void kv_node_set_state(struct kv_index *ix, struct kv_node *n, const struct kv_extent *state)
{
    n->state = *state;
    kv_index_account(ix, n->root, &n->state, 1);
}

void kv_node_touch(struct kv_index *ix, struct kv_node *n)
{
    kv_index_leave_order(ix, n);
    n->used = n->root->used = next_tick(ix);
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

    while (at && at->unit >= at_least && !kv_node_is_boundary(at))
        at = at->parent;
    return at && at->unit >= at_least ? at : NULL;
}

static void hide(struct kv_index *ix, struct kv_node *n)
{
    struct kv_node **p = bucket_of(ix, &n->hash);

    while (*p != n)
        p = &(*p)->bucket;
    *p = n->bucket;
    if (n->newer)
        n->newer->older = n->older;
    else
        n->root->newest = n->older;
    if (n->older)
        n->older->newer = n->newer;
    account_node(ix, n, -1);
    kv_index_leave_order(ix, n);
    n->phase = KV_DEAD;
}

/* Frees dead nodes upwards from n as far as nothing holds them; returns the first that stays. */
static struct kv_node *reap(struct kv_index *ix, struct kv_node *n)
{
    while (n && n->phase == KV_DEAD && !n->pins && !n->child) {
        struct kv_node *parent = n->parent;
        remove_child(n);
        kv_node_discard(ix, n);
        n = parent;
    }
    return n;
}

struct kv_node *kv_node_kill(struct kv_index *ix, struct kv_node *n)
{
    struct kv_node *parent = n->parent;

    hide(ix, n);
    struct kv_node *stays = reap(ix, n);
    return stays == n ? parent : stays;
}

static struct kv_node *lowest(struct kv_node *n)
{
    while (n->child)
        n = n->child;
    return n;
}

/* Post-order, so that a node's children are dead before it is: whatever nobody reads goes at once.
 * Dead children met on the way were left by an earlier drop and wait for their readers. */
void kv_node_drop(struct kv_index *ix, struct kv_node *top)
{
    struct kv_node *parent = top->parent;

    for (struct kv_node *n = lowest(top), *next; n; n = next) {
        next = n == top ? NULL : n->next ? lowest(n->next) : n->parent;
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
        kv_index_leave_order(ix, n);
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
