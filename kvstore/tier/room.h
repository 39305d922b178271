/* Making room: what has been retired goes first, then what is missed least (kvstore/index/index.h).
 */
#ifndef KVSTORE_TIER_ROOM_H
#define KVSTORE_TIER_ROOM_H

#include "kvstore/index/index.h"

/* A run of pages for an object of one size, evicting as needed.  False when what is left is pinned.
 */
bool kv_room_take(struct kv_index *ix, uint32_t pages, enum kv_end end, struct kv_extent *out);
/* A pending node likewise. */
struct kv_node *kv_room_node(struct kv_index *ix, struct kv_root *root, const struct kv_key *hash,
                             uint32_t unit);

#endif
