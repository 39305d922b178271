/* Objects between memory and disk.
 *
 * Out: a node is offered when it becomes visible and waits in one queue, so parents begin to be
 * written before their children, and as writes end in the order in which they began, a child counts
 * as written only when its parent does.  (Waiting for the parent before the child begins was tried:
 * a chain then has one write under way at a time, a third of what the device can do.)  Nothing is
 * written while less than WRITE_BACK_SHARE of the memory is in use: what dies with the next policy
 * version before room is needed never costs a write.  Beyond it the oldest go out, so that eviction
 * finds objects that only have to leave memory.  When memory fills up faster than the device
 * writes, eviction drops what is not on disk yet: a spill never waits for the disk.
 *
 * In: a lookup that hits nodes which are on disk alone waits for their reads, with its deadline.
 * The first reader of an object takes it through memory; what a second one asks for stays there
 * (promotion on second touch): until then it is the first to leave. */
#ifndef KVSTORE_TIER_EXCHANGE_H
#define KVSTORE_TIER_EXCHANGE_H

#include "kvstore/tier/disk.h"

struct kv_exchange {
    struct kv_index *index;
    struct kv_disk *disk;
    uint8_t *memory; /* the mapped segment */
    uint32_t memory_page_bytes;
    kv_ref *queue; /* a ring of index->max_nodes + 1 */
    uint32_t head, n;
    uint32_t era;     /* of the memory: one ends whenever it is emptied */
    bool all;         /* everything is written, however little of the memory is in use */
    uint64_t storing; /* pages of memory that are being written */
    uint64_t stored, stored_bytes, loaded, loaded_bytes; /* objects that the device has done */
    uint64_t skipped; /* offered, but dead, dropped or superseded before their turn */
};

int kv_exchange_init(struct kv_exchange *x, struct kv_index *ix, struct kv_disk *d, uint8_t *memory,
                     uint32_t memory_page_bytes, struct lh_error *err);
void kv_exchange_finish(struct kv_exchange *x);

/* A visible node may have something that is not on disk. */
void kv_exchange_offer(struct kv_exchange *x, struct kv_node *n);

enum kv_fetch { KV_FETCHED, KV_FETCHING, KV_UNFETCHABLE };
/* Brings units from..hit and the state of `hit` into memory.  The caller has pinned them all. */
enum kv_fetch kv_exchange_load(struct kv_exchange *x, struct kv_node *hit, uint32_t from,
                               int64_t now_us);
/* True when everything of units from..hit is in memory. */
bool kv_exchange_is_loaded(const struct kv_index *ix, const struct kv_node *hit, uint32_t from);

/* The memory has been emptied: what is being read into it is lost when it has come. */
void kv_exchange_end_era(struct kv_exchange *x);
/* Takes what has ended; begins what may begin. */
void kv_exchange_work(struct kv_exchange *x, int64_t now_us);

#endif
