/* Making room: what has been retired goes first, then what is missed least (kvstore/index/index.h).
 */
#ifndef KVSTORE_TIER_ROOM_H
#define KVSTORE_TIER_ROOM_H

#include "kvstore/index/index.h"

/* Pages of a tier for an object of this root, evicting as needed: of its tenant alone as long as
 * that is at its quota.  *page is the first of them.  False when what is left is pinned. */
bool kv_room_take(struct kv_index *ix, struct kv_root *root, enum kv_part part, enum kv_tier tier,
                  uint32_t *page);
/* A pending node likewise. */
struct kv_node *kv_room_node(struct kv_index *ix, struct kv_root *root, const struct kv_key *hash,
                             uint32_t unit);

#endif
