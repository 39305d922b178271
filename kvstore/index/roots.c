/* Roots.  Retiring one sets a flag that every lookup passes: O(1) in what it holds.  Its nodes stay
 * where they are and are freed in slices between requests, by a walk over the table of nodes: it
 * needs no list of what belongs to a root, which would cost every node eight bytes. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kvstore/index/index.h"

struct kv_root *kv_root_find(struct kv_index *ix, const struct kv_key *key)
{
    struct kv_root *r = ix->live;

    while (r && !kv_key_equal(&r->key, key))
        r = r->next;
    return r;
}

void kv_root_destroy(struct kv_root *r)
{
    if (!r)
        return;
    for (int i = 0; i < KV_ORDERS; i++)
        kv_heap_finish(&r->orders[i]);
    free(r);
}

static void forget(struct kv_index *ix, struct kv_root **link)
{
    struct kv_root *r = *link;

    *link = r->next;
    ix->roots[r->slot] = NULL;
    kv_root_destroy(r);
}

/* Roots that hold nothing are only remembered for their geometry; the longest unused one goes. */
static bool forget_an_empty_root(struct kv_index *ix)
{
    struct kv_root **oldest = NULL;

    for (struct kv_root **p = &ix->live; *p; p = &(*p)->next)
        if (!(*p)->refs && (!oldest || (*p)->used < (*oldest)->used))
            oldest = p;
    if (!oldest)
        return false;
    forget(ix, oldest);
    ix->n_roots--;
    return true;
}

static int free_slot(const struct kv_index *ix)
{
    for (int i = 0; i < KV_ROOT_SLOTS; i++)
        if (!ix->roots[i])
            return i;
    return -1;
}

static void count_pages(struct kv_root *r, const uint32_t page_bytes[KV_TIERS])
{
    const uint32_t bytes[KV_PARTS] = {r->geometry.block_bytes, r->geometry.state_bytes};

    for (int part = 0; part < KV_PARTS; part++)
        for (int tier = 0; tier < KV_TIERS; tier++)
            if (page_bytes[tier])
                r->pages[part][tier] =
                    (uint32_t)(((uint64_t)bytes[part] + page_bytes[tier] - 1) / page_bytes[tier]);
    for (int i = 0; i < KV_ORDERS; i++)
        r->orders[i].place = i == KV_RESIDENT;
}

static struct kv_root *add_root(struct kv_index *ix, const struct kv_key *key,
                                const struct kv_geometry *g, const uint32_t page_bytes[KV_TIERS],
                                struct lh_error *err)
{
    bool room = ix->n_roots < KV_MAX_ROOTS || forget_an_empty_root(ix);
    int slot = room ? free_slot(ix) : -1;

    if (slot < 0)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%u roots are open; retire some", ix->n_roots),
               NULL;
    struct kv_root *r = calloc(1, sizeof *r);
    if (!r)
        return lh_fail_errno(err, ENOMEM, "opening a root"), NULL;
    r->key = *key;
    r->geometry = *g;
    r->used = ix->tick;
    r->slot = (uint16_t)slot;
    count_pages(r, page_bytes);
    r->next = ix->live;
    ix->live = ix->roots[slot] = r;
    ix->n_roots++;
    return r;
}

struct kv_root *kv_root_open(struct kv_index *ix, const struct kv_key *key,
                             const struct kv_geometry *g, uint64_t policy_step,
                             const uint32_t page_bytes[KV_TIERS], struct lh_error *err)
{
    struct kv_root *r = kv_root_find(ix, key);

    if (!r)
        r = add_root(ix, key, g, page_bytes, err);
    if (!r)
        return NULL;
    if (memcmp(&r->geometry, g, sizeof *g)) {
        lh_fail(err, LH_FAILED_PRECONDITION,
                "this root is open with blocks of %u bytes, states of %u, units of %u tokens; the "
                "model fingerprint must cover the layout",
                r->geometry.block_bytes, r->geometry.state_bytes, r->geometry.unit_tokens);
        return NULL;
    }
    r->policy_step = policy_step;
    if (policy_step > ix->newest_step)
        ix->newest_step = policy_step;
    return r;
}

static bool is_named(const struct kv_root *r, const struct kv_key *keys, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (kv_key_equal(&r->key, &keys[i]))
            return true;
    return false;
}

/* The live roots that are named, or those that are not. */
static unsigned retire(struct kv_index *ix, const struct kv_key *keys, size_t n, bool named)
{
    unsigned count = 0;

    for (struct kv_root **p = &ix->live; *p;) {
        struct kv_root *r = *p;
        if (is_named(r, keys, n) != named) {
            p = &r->next;
            continue;
        }
        *p = r->next;
        r->retired = true;
        r->next = ix->retired;
        ix->retired = r;
        ix->n_roots--;
        count++;
    }
    if (count)
        ix->sweep = ix->touched;
    return count;
}

unsigned kv_root_retire_others(struct kv_index *ix, const struct kv_key *keep, size_t n)
{
    return retire(ix, keep, n, false);
}

bool kv_root_retire(struct kv_index *ix, const struct kv_key *key)
{
    return retire(ix, key, 1, true);
}

bool kv_root_reclaimable(const struct kv_index *ix)
{
    if (ix->sweep > 1)
        return true;
    for (const struct kv_root *r = ix->retired; r; r = r->next)
        if (!r->refs)
            return true;
    return false;
}

static void forget_reclaimed(struct kv_index *ix)
{
    for (struct kv_root **p = &ix->retired; *p;)
        if ((*p)->refs)
            p = &(*p)->next;
        else
            forget(ix, p);
}

/* What is pinned, or above something pinned, is killed now and freed by its last unpin.  A node may
 * be freed while it is passed: its parent's place or its child's may be looked at before or after,
 * in any order. */
bool kv_root_reclaim(struct kv_index *ix, unsigned budget)
{
    for (; ix->sweep > 1 && budget; budget--) {
        struct kv_node *n = &ix->nodes[--ix->sweep];
        if (n->phase == KV_VISIBLE && kv_root_of(ix, n)->retired)
            kv_node_kill(ix, n);
    }
    if (ix->sweep <= 1)
        ix->sweep = 0;
    forget_reclaimed(ix);
    return kv_root_reclaimable(ix);
}
