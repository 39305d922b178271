/* Pages of a tier: a bitmap, and runs taken from either end.
 *
 * A store holds objects of two sizes, blocks and states.  Blocks grow from the bottom and states
 * from the top, so that holes are refilled by objects of the very size that left them, and the two
 * sizes do not fragment each other.  A buddy allocator would waste up to half of every state (41.4
 * MiB becomes 64), size classes would fix the ratio of blocks to states in advance. */
#ifndef KVSTORE_TIER_PAGES_H
#define KVSTORE_TIER_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/error.h"

struct kv_extent {
    uint32_t page, pages; /* pages == 0: nothing */
};

struct kv_pages {
    uint64_t *taken; /* a bit each */
    uint32_t n, used;
    uint32_t low, high; /* no page below `low` and none at or above `high` is free */
};

int kv_pages_init(struct kv_pages *p, uint32_t n, struct lh_error *err);
void kv_pages_finish(struct kv_pages *p);

enum kv_end { KV_BOTTOM, KV_TOP };
/* A run of `count` > 0 pages; false when no such run is free. */
bool kv_pages_take(struct kv_pages *p, uint32_t count, enum kv_end end, struct kv_extent *out);
/* The run from `first`, which must be free. */
void kv_pages_take_at(struct kv_pages *p, uint32_t first, uint32_t count);
/* An empty extent is fine; *e is empty afterwards. */
void kv_pages_give(struct kv_pages *p, struct kv_extent *e);

#endif
