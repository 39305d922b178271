/* The remote tier: objects in a Redis Cluster or an S3-compatible bucket, shared by every store
 * that is given the same place.
 *
 * An object's name is its identity: root (model, policy version, tenant), chained hash, part.  So
 * any store finds what any other has written, there is no remote index that could be wrong, and
 * nothing is ever overwritten with other bytes.  Everything that identifies it stands in a header
 * before the bytes too, with checksums of both: what does not say that it is the very object that
 * was asked for, of the very size, is a miss, whoever sent it.
 *
 * The work is done by threads of its own that block, KV_REMOTE_THREADS of them, each with its own
 * connections, so there is nothing to lock but the queue.  The other way, hiredis' asynchronous
 * half and curl's multi interface in kvstored's poll loop, was rejected: two event adapters, a
 * state machine for every redirection of a cluster, and megabytes hashed and checked on the one
 * thread that answers requests; this way a slow peer costs a thread that has nothing else to do.
 * Bytes move between the peer and the shared segment, whose pages whoever asked keeps pinned.
 *
 * Bounds: KV_REMOTE_OPS operations, each with a deadline.  A peer that fails closes the gate of its
 * direction for a while that doubles from KV_REMOTE_PAUSE_US to KV_REMOTE_PAUSE_MAX_US; what waits
 * behind a closed gate fails at once, and one operation at a time tries until one succeeds. */
#ifndef KVSTORE_TIER_REMOTE_H
#define KVSTORE_TIER_REMOTE_H

#include <stdbool.h>
#include <stdint.h>

#include "kvstore/index/index.h"
#include "kvstore/throttle.h"
#include "kvstore/tier/remote_object.h"
#include "proto/error.h"

enum {
    KV_REMOTE_THREADS = 4,
    KV_REMOTE_OPS = 64,
    KV_REMOTE_STORES = KV_REMOTE_OPS / 2, /* so that loads always find a place */
    KV_REMOTE_OP_MS = 2000,               /* of an operation, from when a thread takes it, */
    KV_REMOTE_BYTES_A_MS = 8192,          /* and so much more for its bytes */
    KV_REMOTE_PAUSE_US = 100000,
    KV_REMOTE_PAUSE_MAX_US = 5000000,
    KV_REMOTE_TRIAL_US = 5000000, /* a rate that old is not believed any more */
    KV_REMOTE_SCAN = 64,          /* units looked at for a state, from the last block back */
};

enum kv_remote_kind { KV_REMOTE_FIND, KV_REMOTE_LOAD, KV_REMOTE_STORE };
enum kv_remote_gate { KV_GATE_IN, KV_GATE_OUT, KV_GATES };

/* How far a chain continues remotely. */
struct kv_remote_search {
    const struct kv_key *chain; /* of units first..first+n-1 */
    uint32_t first, n;
    bool stateful;  /* the model has states */
    uint32_t found; /* how many of them are there, the last with its state; 0 = none */
};

struct kv_remote_op {
    enum kv_remote_kind kind;
    struct kv_remote_object object; /* a find: of unit `search.first`; a load fills the checksum */
    struct kv_remote_search search;
    void *bytes; /* read or written by a thread until the operation has ended */
    void *owner; /* the submitter's */
    kv_ref node; /* the submitter's */
    int status;  /* 0, LH_NOT_FOUND, LH_DATA_LOSS (not the object), or why the peer failed */

    int64_t began_us, ended_us; /* the rest is the tier's; of a thread's work on it */
    int64_t deadline_ms;
    bool busy;
    struct kv_remote_op *next;
};

struct kv_remote_counters {
    uint64_t stored, stored_bytes, loaded, loaded_bytes;
    uint64_t finds, missing;  /* searches; objects that a search had found and a load did not */
    uint64_t corrupt, errors; /* loads of something else; operations that the peer failed */
};

struct kv_remote_options {
    const char *location;    /* redis://HOST:PORT[,HOST:PORT...] or s3://BUCKET[/PREFIX] */
    const char *credentials; /* file (remote_secrets.h); NULL or "" = none */
    uint32_t ttl_s;          /* of objects in Redis; 0 = they stay */
};

struct kv_remote {
    struct kv_remote_pool *pool; /* threads and queue (remote.c) */
    int event_fd;                /* readable when something has ended */
    uint64_t object_max;         /* bytes that the peer takes in one object */
    unsigned in_flight[KV_GATES];
    uint64_t bytes_in_flight[KV_GATES];
    struct kv_rate rate[KV_GATES]; /* of the busy time */
    int64_t measured_us[KV_GATES]; /* the last end */
    struct kv_remote_counters count;
    const char *location;
    char trouble[256]; /* the peer's last failure, for people */
};

/* Speaks to nobody yet: a peer that is away is no reason not to start.  INVALID_ARGUMENT for a
 * location that is none, FAILED_PRECONDITION for credentials that cannot be used. */
int kv_remote_open(struct kv_remote *r, const struct kv_remote_options *o, struct lh_error *err);
/* Waits for the threads, which give up what they are doing (a name that is being resolved takes as
 * long as the system's resolver does). */
void kv_remote_close(struct kv_remote *r);

/* True when kv_remote_begin() may be called for this direction. */
bool kv_remote_ready(const struct kv_remote *r, enum kv_remote_gate gate, int64_t now_us);
/* Whether the gate is closed, or only tried. */
bool kv_remote_is_paused(const struct kv_remote *r, enum kv_remote_gate gate);
/* Hands a copy of `op` to the threads.  Only after kv_remote_ready(). */
void kv_remote_begin(struct kv_remote *r, const struct kv_remote_op *op);
/* Takes one that has ended; false = none. */
bool kv_remote_ended(struct kv_remote *r, struct kv_remote_op *out);

/* Seconds that loading so many bytes takes, by what was measured; 0 = not known. */
double kv_remote_load_s(const struct kv_remote *r, uint64_t bytes, int64_t now_us);

#endif
