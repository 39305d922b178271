/* What lookups bring in from a remote tier.
 *
 * A lookup whose chain goes on behind what the index has asks the tier whether its next unit is
 * there: one round trip, which is what a miss costs.  If it is, how far the chain goes on is found
 * by halves, and from there back to the nearest state; then all of its objects are loaded, into
 * pages that nobody can find yet, and become visible together, as those of a put do.  So a prefix
 * has no holes here either, and what the tier has lost meanwhile, or gives back wrong, is a miss of
 * the whole.  The lookup then goes its usual way.
 *
 * It waits until its deadline at most; a pull that is late goes on without it, for whoever asks
 * next.  One that could not be there in time, by the rate that was measured, is not begun.  Lookups
 * of the same prefix share one.  A pull takes at most a half of the memory, or of its tenant's
 * quota.
 *
 * Promotion on second touch: what was pulled for its first reader does not count as used and is not
 * written to the disk; the second reader makes it an object like any other. */
#ifndef KVSTORE_DAEMON_PULL_H
#define KVSTORE_DAEMON_PULL_H

#include "kvstore/tier/remote.h"

enum { KV_PULLS = 16 };

struct kv_grant;
struct kv_service;
struct kv_pull;

struct kv_pulls {
    struct kv_pull *at[KV_PULLS];
    uint64_t next_id;
    uint64_t hits, late, full; /* made visible; not begun: too slow, no room */
};

struct kv_pull_wanted {
    struct kv_root *root;
    const struct kv_key *chain; /* from unit 0 */
    size_t n;
    uint32_t at_least; /* a boundary must be beyond so many units */
    int64_t deadline_us;
};

/* The number of the pull that brings more of the chain; 0 = none does. */
uint64_t kv_pull_begin(struct kv_service *s, const struct kv_pull_wanted *w, int64_t now_us);
bool kv_pull_is_going(const struct kv_pulls *p, uint64_t id);
/* A find or load has ended. */
void kv_pull_ended(struct kv_service *s, const struct kv_remote_op *op, int64_t now_us);
/* Asks for what may be asked for; ends pulls that are complete or have failed. */
void kv_pull_work(struct kv_service *s, int64_t now_us);
/* Somebody reads a visible node. */
void kv_pull_read(struct kv_service *s, struct kv_node *n);
/* The memory is about to go: nothing that is under way becomes visible. */
void kv_pull_abandon(struct kv_pulls *p);
/* After the tier was closed: nothing of it is under way. */
void kv_pull_finish(struct kv_service *s);

#endif
