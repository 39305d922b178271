/* Client of kvstored, the external KV store of a node.
 *
 * Keys.  A root names everything that decides the bytes: model fingerprint (config, dtype, layout,
 * tokenizer), policy version id, tenant.  Token ids are hashed in units; the hash of unit i covers
 * every token before it, so one hash certifies a whole prefix.  An entry is the attention KV of one
 * unit (a block), or the recurrent state of all KDA layers at a unit's end (a state).
 *
 * A hit is the longest boundary where all blocks exist and a state exists exactly there.  A put
 * stores blocks first..last and the state at last's end, all or nothing, never with a hole before
 * it.
 *
 * Every operation has a deadline, and every failure (store down, full, corrupt, slow) means "miss"
 * or "not stored": the caller recomputes.  CRC32C guards every extent.  Thread-safe: requests are
 * serialised on one connection, copies are not.  The client reconnects by itself.
 *
 * Operations are asynchronous (struct kv_async): begun here, run on a thread of the client's,
 * waited for, cancelled.  The calls that return when all is done, further below, are the same
 * operations run where they are called. */
#ifndef KVSTORE_CLIENT_H
#define KVSTORE_CLIENT_H

#include <stddef.h>
#include <stdint.h>

#include "proto/cleanup.h"
#include "proto/error.h"

struct kv_key {
    uint8_t bytes[16];
};

struct kv_identity {
    uint8_t model_fingerprint[16];
    uint8_t policy_version[16];
    const char *tenant; /* "" is one too */
};

/* XXH3-128 of the identity's fields, each with its length. */
struct kv_key kv_root(const struct kv_identity *id);
/* hashes[i] = H(i ? hashes[i-1] : root, tokens of unit i); n_tokens / unit of them. */
size_t kv_chain(const struct kv_key *root, const int32_t *tokens, size_t n_tokens, unsigned unit,
                struct kv_key *hashes);

struct kv_client;

struct kv_options {
    const char *path;     /* socket of kvstored */
    const char *name;     /* for people: "rollout-0" */
    const char *tenant;   /* whose quota counts; NULL = "", everybody's who has no name */
    unsigned unit_tokens; /* 16..65536 */
    size_t block_bytes;   /* of one unit; 0 = the model has no attention layer */
    size_t state_bytes;   /* 0 = no KDA layer */
    int timeout_ms;       /* of one operation; 0 = 1000 */
};

/* Succeeds even while kvstored is away; operations then miss. */
struct kv_client *kv_client_create(const struct kv_options *o, struct lh_error *err);
/* What was made of it (operations, trajectories, buffers, hits) has been given back before. */
void kv_client_destroy(struct kv_client *c);
LH_DEFINE_AUTO(kv_client, kv_client_destroy)
/* "" without a client, too. */
const char *kv_client_tenant(const struct kv_client *c);

/* Makes `root` the one to put under and look up in; every other root of this store becomes
 * unmatchable at once when `retire_others`. */
int kv_use_root(struct kv_client *c, const struct kv_key *root, uint64_t policy_step,
                int retire_others, struct lh_error *err);

/* ---- asynchronous operations ---- */

/* Whose operations they are: a name for `kvstore show`, one call to cancel them all, and sums. */
struct kv_trajectory;
struct kv_trajectory *kv_trajectory_open(struct kv_client *c, const char *name,
                                         struct lh_error *err);
/* Its operations go on. */
void kv_trajectory_close(struct kv_trajectory *t);
LH_DEFINE_AUTO(kv_trajectory, kv_trajectory_close)
void kv_trajectory_cancel(struct kv_trajectory *t);
/* Of operations that have ended. */
struct kv_trajectory_counts {
    uint64_t operations, failed; /* failed: those that were cancelled or missed, too */
    uint64_t put_bytes, got_bytes;
};
struct kv_trajectory_counts kv_trajectory_counts(struct kv_trajectory *t);

/* Memory that operations read and write: its pages are made present, so that no copy stops for
 * them, and an operation that names it may not leave it. */
struct kv_buffer;
struct kv_buffer *kv_buffer_register(struct kv_client *c, void *base, size_t bytes,
                                     struct lh_error *err);
/* Cancels the operations that use it and waits for them: afterwards the memory is the caller's
 * alone. */
void kv_buffer_unregister(struct kv_buffer *b);
LH_DEFINE_AUTO(kv_buffer, kv_buffer_unregister)

/* What loop A reads: smoothed wait of the store's load and spill queues, and its fill. */
struct kv_pressure {
    double load_wait_ms, spill_wait_ms;
    uint64_t capacity_bytes, used_bytes;
};

enum kv_async_kind {
    KV_PUT,      /* stores units first..n-1 and the state at the end of unit n-1 */
    KV_GET,      /* copies out: units of `hit`, or those of the longest boundary it finds */
    KV_PREFETCH, /* finds and pins, with everything brought into the store's memory */
    KV_LOOK,     /* asks for the pressure; its batch says nothing but when and whom to tell */
    KV_ASYNC_KINDS
};
struct kv_async;
struct kv_hit;

/* What an operation is about.  All it points to stays as it is until the operation has ended. */
struct kv_batch {
    const struct kv_key *chain; /* hashes of units 0..n-1; of no use to a GET with `hit` */
    size_t first, n;
    void *const *blocks; /* of unit first, first+1 ...: `pieces` pointers each, in equal parts */
    unsigned pieces;     /* that a block is in, in the caller's memory; 0 = 1 */
    void *state;         /* NULL: a GET leaves it out */
    struct kv_hit *hit;  /* of a GET: borrowed; its units first..n-1, none when first is n */
    struct kv_buffer *buffer; /* all of blocks and state lie in it; NULL = anywhere */
    int64_t deadline_ms;      /* as of lh_now_ms(); 0 = timeout_ms from now */
    /* Called when it ends, on whatever thread that is; may ask for the result, begin others and
     * destroy this one, and must not wait for it.  NULL = nobody. */
    void (*done)(void *ctx, struct kv_async *io);
    void *ctx;
};

/* Begins one; operations run in the order in which they were begun.  NULL: INVALID_ARGUMENT, or no
 * memory. */
struct kv_async *kv_async_begin(struct kv_trajectory *t, enum kv_async_kind kind,
                                const struct kv_batch *b, struct lh_error *err);
/* Waits for its end, which its deadline and those of operations before it bound.  One whose turn it
 * is runs where it is waited for. Returns bytes copied, or a negative status: CANCELLED,
 * DEADLINE_EXCEEDED, and those of the calls below.  What a failed GET has written is of no use. */
int64_t kv_async_wait(struct kv_async *io, struct lh_error *err);
/* It ends before its next block is copied; a PUT stores nothing then.  Returns at once. */
void kv_async_cancel(struct kv_async *io);
/* When it has ended, or in done(): what kv_async_wait() would return; units that a GET or PREFETCH
 * has found; the hit of a PREFETCH, which is the caller's from here. */
int64_t kv_async_result(const struct kv_async *io, struct lh_error *err);
size_t kv_async_units(const struct kv_async *io);
struct kv_pressure kv_async_pressure(const struct kv_async *io);
struct kv_hit *kv_async_take_hit(struct kv_async *io);
/* Cancels it and waits for its end; in done() it is gone when that returns. */
void kv_async_destroy(struct kv_async *io);
LH_DEFINE_AUTO(kv_async, kv_async_destroy)

/* ---- the same, done when they return ---- */

/* Stores units first..n-1 of the chain (blocks[i] belongs to unit first+i, block_bytes each) and
 * the state at the end of unit n-1.  Units already stored are skipped.  Returns bytes copied (>=
 * 0), or an error: RESOURCE_EXHAUSTED = full or the tenant's quota, FAILED_PRECONDITION = unit
 * first-1 is not there. */
int64_t kv_put(struct kv_client *c, const struct kv_key *chain, size_t first, size_t n,
               const void *const *blocks, const void *state, const char *trajectory,
               struct lh_error *err);

/* Longest stored boundary of chain[0..n), longer than at_least units; its extents are pinned until
 * kv_hit_destroy().  NULL with NOT_FOUND = miss. */
struct kv_hit *kv_lookup(struct kv_client *c, const struct kv_key *chain, size_t n, size_t at_least,
                         const char *trajectory, struct lh_error *err);
size_t kv_hit_units(const struct kv_hit *h);
/* Copies block of unit i (at_least <= i < units) or the state out; DATA_LOSS on a wrong CRC, which
 * also drops the objects from the store. */
int kv_hit_block(struct kv_hit *h, size_t unit, void *to, struct lh_error *err);
int kv_hit_state(struct kv_hit *h, void *to, struct lh_error *err);
void kv_hit_destroy(struct kv_hit *h);
LH_DEFINE_AUTO(kv_hit, kv_hit_destroy)

int kv_pressure(struct kv_client *c, struct kv_pressure *out, struct lh_error *err);

#endif
