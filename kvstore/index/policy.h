/* Policies of eviction: what rank a node gets when it is used, and whether a victim is spared.
 *
 *   value    (default) recency plus compute saved per byte, as Marconi's S(n) = recency + alpha *
 *            efficiency (Pan et al., MLSys 2025), with the saving measured from the nearest
 * retained checkpoint instead of from the root, because that is where recomputing would start:
 *
 *                rank = now + HORIZON * e / (e + mean e)
 *                e    = n (1 + (L + n/2) / KNEE) / bytes
 *
 *            for a state at token L + n whose nearest ancestor with a state is at L.  n costs n in
 *            the linear layers and grows with what attention looks back on; KNEE is the context at
 *            which attention costs as much as the rest.  e / (e + mean e) lies between 0 and 1, so
 *            that a valuable entry is kept at most HORIZON longer than a worthless one: no entry
 *            lives for ever, and there is nothing to tune on a trace.
 *   lru      rank = now.
 *   s3-fifo  Yang et al., SOSP 2023: a small queue for what is new, a main queue for what was used
 *            again; both in order of entry, and one used meanwhile is spared.
 *
 * All of them drop roots of older policy versions first (order.c). */
#ifndef KVSTORE_INDEX_POLICY_H
#define KVSTORE_INDEX_POLICY_H

#include <stdbool.h>

#include "kvstore/index/index.h"

struct kv_policy {
    const char *name;
    /* The node was used, or became visible: sets its rank; it is in no order now. */
    void (*touch)(struct kv_index *ix, struct kv_node *n);
    /* True: the victim stays this time, its rank or queue changed; it is in no order now.  NULL =
     * never. */
    bool (*spare)(struct kv_index *ix, struct kv_node *n);
    /* The part of a rank that changes with the checkpoint before it; NULL = none does. */
    uint64_t (*bonus)(struct kv_index *ix, const struct kv_node *n);
    bool two_queues; /* KV_SMALL is used besides KV_MAIN */
};

const struct kv_policy *kv_policy_default(void);
/* NULL = there is none of this name. */
const struct kv_policy *kv_policy_find(const char *name);

#endif
