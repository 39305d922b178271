/* Nodes in order of their last use, oldest first: a binary heap in which every node knows its
 * place, so that any node can leave or move in O(log n).  A list would do if a node only ever moved
 * to the young end; but a parent re-enters with its own age when its last child has gone. */
#ifndef KVSTORE_INDEX_HEAP_H
#define KVSTORE_INDEX_HEAP_H

#include <stdint.h>

#include "proto/error.h"

struct kv_node;

struct kv_heap {
    struct kv_node **at;
    uint32_t n;
};

int kv_heap_init(struct kv_heap *h, uint32_t room, struct lh_error *err);
void kv_heap_finish(struct kv_heap *h);
void kv_heap_add(struct kv_heap *h, struct kv_node *n);
void kv_heap_remove(struct kv_heap *h, struct kv_node *n);

#endif
