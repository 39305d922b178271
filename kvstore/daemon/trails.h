/* What kvstored remembers of trajectories, for `kvstore show`: the last place where each put
 * something and the last where it found something, and sums.
 *
 * A trajectory is a name in requests, anybody's and any number of them, so the table is of fixed
 * size: sets of TRAIL_WAYS by hash of the name, of which the longest unused gives way. */
#ifndef KVSTORE_DAEMON_TRAILS_H
#define KVSTORE_DAEMON_TRAILS_H

#include <stdint.h>

#include "kvstore/client.h"
#include "kvstore/protocol.h"

struct kv_trail {
    char name[KV_TRAJECTORY_MAX + 1];
    struct kv_key root, put, hit; /* hashes of last units; of `root` */
    uint64_t puts, put_bytes, refused, lookups, hits, hit_units, loaded_bytes;
    int64_t used_us;
};

struct kv_trails {
    struct kv_trail *slots;
};

int kv_trails_init(struct kv_trails *t, struct lh_error *err);
void kv_trails_finish(struct kv_trails *t);
/* The trail under this root, begun anew when its last one was under another; NULL for "". */
struct kv_trail *kv_trail_of(struct kv_trails *t, const char *name, const struct kv_key *root,
                             int64_t now_us);
/* NULL = not remembered. */
const struct kv_trail *kv_trail_find(const struct kv_trails *t, const char *name);

#endif
