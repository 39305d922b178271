/* What goes out to a remote tier.
 *
 * A node is offered when it becomes visible and waits in one queue, oldest first.  Nothing is
 * written while less than a half of the tier above (the disk, where there is one, else memory) is
 * in use: what dies with the next policy version before room is needed never costs a write, and
 * eviction later finds objects that the remote tier has.  What is evicted before its turn is lost
 * to it (`skipped`): a spill never waits for the network.  An object that is on disk alone is read
 * into memory first, one at a time.
 *
 * The queue is bounded; an offer that finds it full is skipped. */
#ifndef KVSTORE_DAEMON_PUSH_H
#define KVSTORE_DAEMON_PUSH_H

#include "kvstore/tier/remote.h"

enum { KV_PUSH_QUEUE = 1 << 16 };

struct kv_service;

struct kv_push {
    kv_ref *queue; /* a ring of KV_PUSH_QUEUE */
    uint32_t head, n;
    kv_ref staged; /* pinned and held while its bytes come from disk; 0 = none */
    uint64_t skipped;
};

int kv_push_init(struct kv_push *q, struct lh_error *err);
void kv_push_finish(struct kv_push *q);
void kv_push_offer(struct kv_service *s, struct kv_node *n);
/* A store has ended. */
void kv_push_ended(struct kv_service *s, const struct kv_remote_op *op);
/* Lets go of what was being brought into memory; it comes again with its turn. */
void kv_push_unstage(struct kv_service *s);
void kv_push_work(struct kv_service *s, int64_t now_us);

#endif
