/* The index of a store: which prefixes are there, and what may be thrown away next.
 *
 * A node stands for one unit of one sequence and is found by its chained hash.  It owns the unit's
 * block and, where a put ended, the state of the recurrent layers at the unit's end.  Nodes form
 * trees under their roots, and two rules hold at all times:
 *
 *   - a visible node's parent is visible.  So a stored prefix has no holes by construction: nothing
 *     but a leaf is ever removed alone, and a node that is lost takes its subtree along;
 *   - a leaf has a state (unless the model has none).  Attention KV behind the last state serves
 *     nobody, because a recurrent layer cannot enter there; such a tail is dropped at once.
 *
 * The first rule makes lookups short: the longest stored prefix of a chain is found by binary
 * search, the hit is its nearest ancestor-or-self with a state.  A radix tree over tokens would
 * store the tokens as well and walk the whole prefix.
 *
 * A node is pending (allocated, of nobody's knowledge), visible, or dead: unmatchable, but kept in
 * place until its last pin and its last child have gone, because someone is reading its bytes.
 * A pin on a node protects the whole path to the root.
 *
 * Eviction takes, oldest use first: superseded states (inside a chain, with one continuation: a
 * later state of that chain exists), then leaves.  A state where chains branch is not superseded:
 * the other members of a group start there.  Retired roots go before either.
 *
 * One thread; nothing here blocks. */
#ifndef KVSTORE_INDEX_INDEX_H
#define KVSTORE_INDEX_INDEX_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kvstore/client.h"
#include "kvstore/index/heap.h"
#include "kvstore/tier/pages.h"

enum { KV_MAX_ROOTS = 1024 };

struct kv_geometry {
    uint32_t block_bytes, state_bytes; /* of one object; 0 = the model has none */
    uint32_t unit_tokens;
};

struct kv_root {
    struct kv_key key;
    struct kv_geometry geometry;
    uint64_t policy_step;
    uint64_t used;
    uint64_t objects, pages; /* visible blocks and states */
    uint32_t refs;           /* nodes of any kind */
    bool retired;            /* nothing of it matches any more */
    struct kv_node *newest;  /* visible nodes by age; a parent is older than its children */
    struct kv_root *next;
};

enum kv_phase { KV_PENDING, KV_VISIBLE, KV_DEAD };
enum kv_order { KV_SUPERSEDED, KV_LEAF, KV_ORDERS, KV_KEPT = KV_ORDERS };

struct kv_node {
    struct kv_key hash;
    struct kv_root *root;
    struct kv_node *parent, *child, *next, *prev; /* the tree; next also links pending nodes */
    struct kv_node *older, *newer;                /* of the root */
    struct kv_node *bucket;
    struct kv_extent block, state;
    uint64_t used; /* microseconds, unique: the order of eviction */
    uint32_t unit; /* index in its sequence */
    uint32_t pins;
    uint32_t heap_at;
    uint8_t phase, order;
};

struct kv_index {
    struct kv_pages *pages; /* where extents return to */
    struct kv_node *nodes;  /* all of them, max_nodes; touched when first used */
    struct kv_node *free;
    struct kv_node **buckets;
    struct kv_heap orders[KV_ORDERS];
    struct kv_root *live, *retired;
    uint64_t tick;
    uint64_t objects;
    uint64_t evicted, superseded; /* objects dropped to make room; states among them */
    uint32_t max_nodes, touched, in_use, mask, pinned, n_roots;
};

/* `pages` must outlive the index; no more nodes than pages are ever needed. */
int kv_index_init(struct kv_index *ix, struct kv_pages *pages, struct lh_error *err);
void kv_index_finish(struct kv_index *ix);

/* ---- roots (roots.c) ---- */
struct kv_root *kv_root_find(struct kv_index *ix, const struct kv_key *key); /* live ones */
/* FAILED_PRECONDITION when it is open with another geometry. */
struct kv_root *kv_root_open(struct kv_index *ix, const struct kv_key *key,
                             const struct kv_geometry *g, uint64_t policy_step,
                             struct lh_error *err);
/* Every live root but `keep[0..n)`: one flag each, however many objects it has.  Returns how many.
 */
unsigned kv_root_retire_others(struct kv_index *ix, const struct kv_key *keep, size_t n);
/* True when kv_root_reclaim() has something to do now. */
bool kv_root_reclaimable(const struct kv_index *ix);
/* Frees up to `budget` nodes of retired roots; returns kv_root_reclaimable(). */
bool kv_root_reclaim(struct kv_index *ix, unsigned budget);

/* ---- nodes (index.c) ---- */
/* A pending node, or NULL when there are max_nodes. */
struct kv_node *kv_node_new(struct kv_index *ix, struct kv_root *root, const struct kv_key *hash,
                            uint32_t unit);
/* Frees a pending node and gives its extents back. */
void kv_node_discard(struct kv_index *ix, struct kv_node *n);
/* Makes a pending node visible below `parent` (visible, of the same root; NULL for unit 0).  The
 * last node of a chain is settled by kv_node_touch(). */
void kv_node_link(struct kv_index *ix, struct kv_node *n, struct kv_node *parent);
/* Gives a visible node its state. */
void kv_node_set_state(struct kv_index *ix, struct kv_node *n, const struct kv_extent *state);
struct kv_node *kv_node_find(struct kv_index *ix, const struct kv_root *root,
                             const struct kv_key *hash);
/* Last node of the longest stored part of units first..first+n-1, whose hashes are chain[0..n). */
struct kv_node *kv_node_deepest(struct kv_index *ix, const struct kv_root *root,
                                const struct kv_key *chain, size_t n, uint32_t first);
/* The hit: longest boundary of chain[0..n) beyond at_least units; NULL = miss. */
struct kv_node *kv_node_match(struct kv_index *ix, const struct kv_root *root,
                              const struct kv_key *chain, size_t n, uint32_t at_least);
/* Marks it as used now. */
void kv_node_touch(struct kv_index *ix, struct kv_node *n);
void kv_node_pin(struct kv_index *ix, struct kv_node *n);
void kv_node_unpin(struct kv_index *ix, struct kv_node *n);
/* Drops a visible node with everything that depends on it. */
void kv_node_drop(struct kv_index *ix, struct kv_node *n);

/* ---- eviction (order.c) ---- */
/* Drops the one thing that is missed least.  False when everything left is pinned. */
bool kv_index_evict(struct kv_index *ix);
/* Puts a visible node where it belongs after its pins, children or state changed; drops tails. */
void kv_index_settle(struct kv_index *ix, struct kv_node *n);

/* Between index.c, order.c and roots.c: unmatchable now; freed as soon as nothing holds it,
 * ancestors that waited for it included.  Returns the parent that stays, or NULL. */
struct kv_node *kv_node_kill(struct kv_index *ix, struct kv_node *n);
/* One extent of a visible node comes (sign 1) or goes (-1); empty ones count nothing. */
void kv_index_account(struct kv_index *ix, struct kv_root *r, const struct kv_extent *e, int sign);
void kv_index_leave_order(struct kv_index *ix, struct kv_node *n);

static inline bool kv_key_equal(const struct kv_key *a, const struct kv_key *b)
{
    return !memcmp(a->bytes, b->bytes, sizeof a->bytes);
}

static inline bool kv_node_is_boundary(const struct kv_node *n)
{
    return n->state.pages || !n->root->geometry.state_bytes;
}

#endif
