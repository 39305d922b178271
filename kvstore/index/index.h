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
 * Eviction takes superseded states first (inside a chain, with one continuation: a later state of
 * that chain exists), then leaves, in the order of the policy in use (policy.h).  A state where
 * chains branch is not superseded: the other members of a group start there.  Retired roots go
 * before either, and roots of older policy versions before the newest.
 *
 * Objects live in memory, on disk, or both.  Memory alone is given up for a node whose objects are
 * on disk too: it stays visible.  A node is written to disk only after its parent, so what is on
 * disk has no holes either, and what is in memory alone lies at the bottom of its tree.
 *
 * Nodes are 88 bytes and refer to each other by 32-bit places in one table, which is what keeps the
 * index below 100 bytes for a unit; pointers would take half as much again.
 *
 * One thread; nothing here blocks. */
#ifndef KVSTORE_INDEX_INDEX_H
#define KVSTORE_INDEX_INDEX_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kvstore/client.h"
#include "kvstore/index/heap.h"
#include "kvstore/protocol.h"
#include "kvstore/tier/pages.h"

enum { KV_MAX_TENANTS = 64 };
enum { KV_MAX_ROOTS = 1024, KV_ROOT_SLOTS = 2 * KV_MAX_ROOTS, KV_GHOSTS = 1 << 14 };

struct kv_disk;
struct kv_policy;

enum kv_tier { KV_MEMORY, KV_DISK, KV_TIERS };
enum kv_part { KV_BLOCK, KV_STATE, KV_PARTS };

struct kv_geometry {
    uint32_t block_bytes, state_bytes; /* of one object; 0 = the model has none */
    uint32_t unit_tokens;
};

enum kv_phase { KV_PENDING, KV_VISIBLE, KV_DEAD };
/* The last is what may leave memory, the others are what may be dropped; of superseded states,
 * those in memory and those on disk alone. */
enum kv_order {
    KV_SUPERSEDED,
    KV_SUPERSEDED_DISK,
    KV_SMALL,
    KV_MAIN,
    KV_RESIDENT,
    KV_ORDERS,
    KV_KEPT = KV_ORDERS
};

struct kv_root {
    struct kv_key key;
    struct kv_geometry geometry;
    uint64_t policy_step;
    uint64_t used;
    uint64_t objects, bytes;    /* visible blocks and states; bytes of memory granted to them */
    uint32_t refs;              /* nodes of any kind */
    uint16_t slot;              /* its place in kv_index.roots */
    uint16_t tenant;            /* of kv_index.tenants */
    bool retired;               /* nothing of it matches any more */
    uint64_t granted[KV_TIERS]; /* pages, pending objects included */
    uint32_t pages[KV_PARTS][KV_TIERS]; /* of one object */
    struct kv_heap orders[KV_ORDERS];
    struct kv_root *next;
};

/* Whose roots they are (tenants.c); [0] is "", which is everybody's who gives no name. */
struct kv_tenant {
    char name[KV_TENANT_MAX + 1];
    bool has_quota;                              /* of its own, not that of "*" */
    uint64_t quota[KV_TIERS], granted[KV_TIERS]; /* pages; quota 0 = none */
    uint64_t refused, evicted;                   /* puts, and things dropped, because of it */
};

/* An object's first page in each tier, + 1; 0 = not there. */
struct kv_object {
    uint32_t at[KV_TIERS];
    uint32_t crc32c; /* of the object's bytes, not of the padding */
};

struct kv_node {
    struct kv_key hash;
    struct kv_object parts[KV_PARTS];
    uint64_t rank;                            /* by the policy: lower goes first */
    kv_ref parent, child, next, prev, bucket; /* the tree; next also links pending nodes */
    uint32_t place[2];                        /* in an order of dropping, in KV_RESIDENT */
    uint32_t unit : 16;                       /* index in its sequence */
    uint32_t root : 11, phase : 2, order : 3; /* order: as one that may be dropped */
    uint16_t pins;            /* by whoever needs it to be there: it is not dropped */
    uint16_t holds;           /* by whoever needs its bytes: they do not leave memory */
    uint16_t is_resident : 1; /* in KV_RESIDENT */
    uint16_t seen : 1;        /* somebody has read it */
    uint16_t probation : 1;   /* came from disk for its first reader */
    uint16_t queued : 1;      /* waits to be written; survives the node, as its place does */
    uint16_t loading : 2, writing : 2;              /* I/O of its parts under way, a bit each */
    uint16_t main : 1, queued_before : 1, uses : 2; /* of S3-FIFO */
    uint16_t remote : 2, sending : 2; /* parts that a remote tier has, or is being given */
    uint16_t pulled : 1;              /* came from a remote tier and was not read twice */
};
_Static_assert(sizeof(struct kv_node) == 88, "a unit costs less than 100 bytes");

struct kv_index {
    struct kv_pages *pages[KV_TIERS]; /* where extents return to; no disk: NULL */
    struct kv_disk *disk;             /* told of every extent that becomes free; NULL = none */
    const struct kv_policy *policy;
    struct kv_node *nodes; /* max_nodes + 1 of them, [0] unused; touched when first used */
    kv_ref free;
    kv_ref *buckets;
    struct kv_root *roots[KV_ROOT_SLOTS], *live, *retired;
    struct kv_tenant tenants[KV_MAX_TENANTS];
    unsigned n_tenants;
    uint64_t tick;
    uint64_t newest_step; /* of all roots opened so far */
    double mean_value;    /* of the value policy */
    uint64_t objects;
    uint64_t evicted, superseded; /* objects dropped to make room; states among them */
    uint64_t left_memory;         /* objects that went on on disk alone */
    uint32_t *ghosts;             /* of S3-FIFO: KV_GHOSTS hashes of what left KV_SMALL */
    uint32_t max_nodes, touched, in_use, mask, pinned, n_roots;
    uint32_t sweep; /* retired nodes are looked for below this place */
};

/* `memory` and `disk` (or NULL) must outlive the index; no more nodes than pages are ever needed.
 */
int kv_index_init(struct kv_index *ix, struct kv_pages *memory, struct kv_pages *disk,
                  struct lh_error *err);
void kv_index_finish(struct kv_index *ix);

/* ---- roots (roots.c) ---- */
struct kv_root *kv_root_find(struct kv_index *ix, const struct kv_key *key); /* live ones */
/* FAILED_PRECONDITION when it is open with another geometry.  `page_bytes` of the tiers. */
struct kv_root *kv_root_open(struct kv_index *ix, const struct kv_key *key,
                             const struct kv_geometry *g, uint64_t policy_step,
                             const uint32_t page_bytes[KV_TIERS], struct lh_error *err);
/* Every live root but `keep[0..n)`: one flag each, however many objects it has.  Returns how many.
 */
unsigned kv_root_retire_others(struct kv_index *ix, const struct kv_key *keep, size_t n);
/* That one; false when it is not live. */
bool kv_root_retire(struct kv_index *ix, const struct kv_key *key);
void kv_root_destroy(struct kv_root *r);
/* True when kv_root_reclaim() has something to do now. */
bool kv_root_reclaimable(const struct kv_index *ix);
/* Looks at up to `budget` nodes and frees those of retired roots; returns kv_root_reclaimable(). */
bool kv_root_reclaim(struct kv_index *ix, unsigned budget);

/* ---- tenants (tenants.c) ---- */
/* Found or made; RESOURCE_EXHAUSTED when KV_MAX_TENANTS have roots or quotas. */
struct kv_tenant *kv_tenant_named(struct kv_index *ix, const char *name, struct lh_error *err);
/* tenants[i] has roots or a quota, or is "". */
bool kv_tenant_is_used(const struct kv_index *ix, unsigned i);
/* The root is `t`'s from here, with all that it holds. */
void kv_tenant_adopt(struct kv_index *ix, struct kv_root *r, const struct kv_tenant *t);
/* Pages of the root's tenant have been granted, or have returned (negative). */
void kv_tenant_grant(struct kv_index *ix, struct kv_root *r, enum kv_tier tier, int64_t pages);
bool kv_tenant_has_room(const struct kv_index *ix, const struct kv_root *r, enum kv_tier tier,
                        uint64_t pages);

/* ---- nodes (index.c) ---- */
/* A pending node, or NULL when there are max_nodes. */
struct kv_node *kv_node_new(struct kv_index *ix, struct kv_root *root, const struct kv_key *hash,
                            uint32_t unit);
/* Frees a pending node and gives its extents back. */
void kv_node_discard(struct kv_index *ix, struct kv_node *n);
/* Makes a pending node visible below `parent` (visible, of the same root; NULL for unit 0).  The
 * last node of a chain is settled by kv_node_touch(). */
void kv_node_link(struct kv_index *ix, struct kv_node *n, struct kv_node *parent);
/* Gives a visible node its state, in memory or on disk. */
void kv_node_set_state(struct kv_index *ix, struct kv_node *n, const struct kv_object *state);
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
/* Somebody reads it on the way to a hit that was touched: it is as recent as the hit unless it is
 * in an order already.  For the second time, it has earned its place in memory. */
void kv_node_read(struct kv_index *ix, struct kv_node *n);
void kv_node_pin(struct kv_index *ix, struct kv_node *n);
void kv_node_unpin(struct kv_index *ix, struct kv_node *n);
void kv_node_hold(struct kv_index *ix, struct kv_node *n);
void kv_node_unhold(struct kv_index *ix, struct kv_node *n);
/* For a reader of units from..hit: pins the hit, and with it the way to the root, and holds them.
 */
void kv_path_take(struct kv_index *ix, struct kv_node *hit, uint32_t from);
void kv_path_give(struct kv_index *ix, struct kv_node *hit, uint32_t from);
/* Drops a visible node with everything that depends on it. */
void kv_node_drop(struct kv_index *ix, struct kv_node *n);
/* An object of a visible node has come to a tier, or leaves it while it stays in the other. */
void kv_node_place(struct kv_index *ix, struct kv_node *n, enum kv_part part, enum kv_tier tier,
                   uint32_t page);
void kv_node_leave(struct kv_index *ix, struct kv_node *n, enum kv_part part, enum kv_tier tier);
/* Gives an extent of an object back; nothing happens when it has none in that tier. */
void kv_object_free(struct kv_index *ix, struct kv_root *root, enum kv_part part,
                    struct kv_object *o, enum kv_tier tier);

/* ---- eviction (order.c) ---- */
enum { KV_ANY_TENANT = -1 };
/* Drops the one thing that is missed least, of all or of one tenant.  False when everything left is
 * pinned. */
bool kv_index_evict(struct kv_index *ix, int tenant);
/* The same for the sake of memory: what is on disk too only leaves memory. */
bool kv_index_evict_memory(struct kv_index *ix, int tenant);
/* The memory's content is lost: what is on disk too goes on there, the rest is dropped, pinned or
 * not. */
void kv_index_lose_memory(struct kv_index *ix);
/* Puts a visible node where it belongs after its pins, children or state changed; drops tails. */
void kv_index_settle(struct kv_index *ix, struct kv_node *n);
/* The same for memory alone. */
void kv_index_settle_resident(struct kv_index *ix, struct kv_node *n);

/* Between index.c, order.c and roots.c: unmatchable now; freed as soon as nothing holds it,
 * ancestors that waited for it included.  Returns the parent that stays, or NULL. */
struct kv_node *kv_node_kill(struct kv_index *ix, struct kv_node *n);
/* One object comes (sign 1) or goes (-1); an empty one counts nothing. */
void kv_index_account(struct kv_index *ix, struct kv_root *r, enum kv_part part,
                      const struct kv_object *o, int sign);
void kv_index_leave_orders(struct kv_index *ix, struct kv_node *n);
uint64_t kv_index_tick(struct kv_index *ix);

static inline bool kv_key_equal(const struct kv_key *a, const struct kv_key *b)
{
    return !memcmp(a->bytes, b->bytes, sizeof a->bytes);
}

static inline struct kv_node *kv_at(const struct kv_index *ix, kv_ref r)
{
    return r ? &ix->nodes[r] : NULL;
}

static inline kv_ref kv_ref_of(const struct kv_index *ix, const struct kv_node *n)
{
    return n ? (kv_ref)(n - ix->nodes) : 0;
}

static inline struct kv_node *kv_parent(const struct kv_index *ix, const struct kv_node *n)
{
    return kv_at(ix, n->parent);
}

static inline struct kv_root *kv_root_of(const struct kv_index *ix, const struct kv_node *n)
{
    return ix->roots[n->root];
}

/* Of one object, without padding. */
static inline uint32_t kv_root_bytes(const struct kv_root *r, enum kv_part part)
{
    return part == KV_BLOCK ? r->geometry.block_bytes : r->geometry.state_bytes;
}

static inline bool kv_object_exists(const struct kv_object *o)
{
    return o->at[KV_MEMORY] || o->at[KV_DISK];
}

static inline bool kv_node_is_boundary(const struct kv_index *ix, const struct kv_node *n)
{
    return kv_object_exists(&n->parts[KV_STATE]) || !kv_root_of(ix, n)->geometry.state_bytes;
}

/* A later state of its one continuation has replaced its own. */
static inline bool kv_node_is_superseded(const struct kv_index *ix, const struct kv_node *n)
{
    return n->child && !kv_at(ix, n->child)->next;
}

/* Something of it is in memory; nothing of it is in memory alone. */
static inline bool kv_node_in_memory(const struct kv_node *n)
{
    return n->parts[KV_BLOCK].at[KV_MEMORY] || n->parts[KV_STATE].at[KV_MEMORY];
}

static inline bool kv_node_is_clean(const struct kv_node *n)
{
    for (int part = 0; part < KV_PARTS; part++)
        if (n->parts[part].at[KV_MEMORY] && !n->parts[part].at[KV_DISK])
            return false;
    return true;
}

#endif
