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
 * or "not stored": the caller recomputes.  CRC32C guards every extent.  Thread-safe: calls are
 * serialised on one connection, copies are not.  The client reconnects by itself. */
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
    unsigned unit_tokens; /* 16..65536 */
    size_t block_bytes;   /* of one unit; 0 = the model has no attention layer */
    size_t state_bytes;   /* 0 = no KDA layer */
    int timeout_ms;       /* of one operation; 0 = 1000 */
};

/* Succeeds even while kvstored is away; operations then miss. */
struct kv_client *kv_client_create(const struct kv_options *o, struct lh_error *err);
void kv_client_destroy(struct kv_client *c);
LH_DEFINE_AUTO(kv_client, kv_client_destroy)

/* Makes `root` the one to put under and look up in; every other root of this store becomes
 * unmatchable at once when `retire_others`. */
int kv_use_root(struct kv_client *c, const struct kv_key *root, uint64_t policy_step,
                int retire_others, struct lh_error *err);

/* Stores units first..n-1 of the chain (blocks[i] belongs to unit first+i, block_bytes each) and
 * the state at the end of unit n-1.  Units already stored are skipped.  Returns bytes copied (>=
 * 0), or an error: RESOURCE_EXHAUSTED = full, FAILED_PRECONDITION = unit first-1 is not there. */
int64_t kv_put(struct kv_client *c, const struct kv_key *chain, size_t first, size_t n,
               const void *const *blocks, const void *state, const char *trajectory,
               struct lh_error *err);

/* A hit; its extents are pinned until kv_hit_destroy(). */
struct kv_hit;
/* Longest stored boundary of chain[0..n), longer than at_least units.  NULL with NOT_FOUND = miss.
 */
struct kv_hit *kv_lookup(struct kv_client *c, const struct kv_key *chain, size_t n, size_t at_least,
                         const char *trajectory, struct lh_error *err);
size_t kv_hit_units(const struct kv_hit *h);
/* Copies block of unit i (at_least <= i < units) or the state out; DATA_LOSS on a wrong CRC, which
 * also drops the objects from the store. */
int kv_hit_block(struct kv_hit *h, size_t unit, void *to, struct lh_error *err);
int kv_hit_state(struct kv_hit *h, void *to, struct lh_error *err);
void kv_hit_destroy(struct kv_hit *h);
LH_DEFINE_AUTO(kv_hit, kv_hit_destroy)

/* What loop A reads: smoothed wait of the store's load and spill queues, and its fill. */
struct kv_pressure {
    double load_wait_ms, spill_wait_ms;
    uint64_t capacity_bytes, used_bytes;
};
int kv_pressure(struct kv_client *c, struct kv_pressure *out, struct lh_error *err);

#endif
