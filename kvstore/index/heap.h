/* Nodes in the order in which they may go, least rank first: a binary heap in which every node
 * knows its place, so that any node can leave or move in O(log n).  A list would do if a node only
 * ever moved to the young end; but a parent re-enters with its own age when its last child has
 * gone. */
#ifndef KVSTORE_INDEX_HEAP_H
#define KVSTORE_INDEX_HEAP_H

#include <stdbool.h>
#include <stdint.h>

struct kv_index;
struct kv_node;

/* A node's place in the index's table; 0 = none. */
typedef uint32_t kv_ref;

struct kv_heap {
    kv_ref *at;
    uint32_t n, room;
    uint8_t place; /* which of a node's two places is this heap's */
};

void kv_heap_finish(struct kv_heap *h);
/* False when memory is out: then the node is in no order and stays. */
bool kv_heap_add(struct kv_index *ix, struct kv_heap *h, struct kv_node *n);
void kv_heap_remove(struct kv_index *ix, struct kv_heap *h, struct kv_node *n);
/* The next to go; NULL = empty. */
struct kv_node *kv_heap_first(const struct kv_index *ix, const struct kv_heap *h);

#endif
