/* Roots.  Retiring one sets a flag that every lookup passes: O(1) in what it holds.  Its nodes stay
 * where they are and are freed in slices between requests, newest first, because the newest node of
 * a root is always a leaf. */
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

/* Roots that hold nothing are only remembered for their geometry; the longest unused one goes. */
static bool forget_an_empty_root(struct kv_index *ix)
{
    struct kv_root **oldest = NULL;

    for (struct kv_root **p = &ix->live; *p; p = &(*p)->next)
        if (!(*p)->refs && (!oldest || (*p)->used < (*oldest)->used))
            oldest = p;
    if (!oldest)
        return false;
    struct kv_root *r = *oldest;
    *oldest = r->next;
    free(r);
    ix->n_roots--;
    return true;
}

static struct kv_root *add_root(struct kv_index *ix, const struct kv_key *key,
                                const struct kv_geometry *g, struct lh_error *err)
{
    if (ix->n_roots >= KV_MAX_ROOTS && !forget_an_empty_root(ix))
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%u roots are open; retire some", ix->n_roots),
               NULL;
    struct kv_root *r = calloc(1, sizeof *r);
    if (!r)
        return lh_fail_errno(err, ENOMEM, "opening a root"), NULL;
    r->key = *key;
    r->geometry = *g;
    r->used = ix->tick;
    r->next = ix->live;
    ix->live = r;
    ix->n_roots++;
    return r;
}

struct kv_root *kv_root_open(struct kv_index *ix, const struct kv_key *key,
                             const struct kv_geometry *g, uint64_t policy_step,
                             struct lh_error *err)
{
    struct kv_root *r = kv_root_find(ix, key);

    if (!r)
        r = add_root(ix, key, g, err);
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
    return r;
}

static bool is_kept(const struct kv_root *r, const struct kv_key *keep, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (kv_key_equal(&r->key, &keep[i]))
            return true;
    return false;
}

unsigned kv_root_retire_others(struct kv_index *ix, const struct kv_key *keep, size_t n)
{
    unsigned count = 0;

    for (struct kv_root **p = &ix->live; *p;) {
        struct kv_root *r = *p;
        if (is_kept(r, keep, n)) {
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
    return count;
}

bool kv_root_reclaimable(const struct kv_index *ix)
{
    for (const struct kv_root *r = ix->retired; r; r = r->next)
        if (r->newest || !r->refs)
            return true;
    return false;
}

/* What is pinned, or above something pinned, is killed now and freed by its last unpin. */
bool kv_root_reclaim(struct kv_index *ix, unsigned budget)
{
    for (struct kv_root **p = &ix->retired; *p && budget;) {
        struct kv_root *r = *p;
        for (; r->newest && budget; budget--)
            kv_node_kill(ix, r->newest);
        if (r->refs) {
            p = &r->next;
            continue;
        }
        *p = r->next;
        free(r);
    }
    return kv_root_reclaimable(ix);
}
