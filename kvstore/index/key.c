/* Keys.  Everything that decides the bytes of an entry is hashed into the root, so two policies
 * never share a key and no flag has to be remembered when weights change: the class of fault in
 * which an old policy's KV serves a new one cannot be expressed.  Each hash covers the one before
 * it, so equality of one hash is equality of a whole prefix, and a lookup may probe a chain
 * anywhere.
 *
 * XXH3-128 is not a cryptographic hash: it guards against accidents, not against a tenant who
 * crafts collisions.  Those are kept apart by the daemon's socket, which only its own user can
 * open.  SHA-256 would cost 15 times as much per token for a property this store does not offer
 * anyway. */
#include <string.h>

/* The library's state is opaque unless it is compiled in; on the stack it cannot run out of memory.
 */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "kvstore/client.h"

static void feed(XXH3_state_t *h, const void *data, uint64_t len)
{
    uint8_t prefix[8];

    for (int i = 0; i < 8; i++)
        prefix[i] = (uint8_t)(len >> 8 * i);
    XXH3_128bits_update(h, prefix, sizeof prefix);
    XXH3_128bits_update(h, data, len);
}

static struct kv_key canonical(XXH128_hash_t value)
{
    XXH128_canonical_t big_endian;
    struct kv_key key;

    XXH128_canonicalFromHash(&big_endian, value);
    memcpy(key.bytes, big_endian.digest, sizeof key.bytes);
    return key;
}

struct kv_key kv_root(const struct kv_identity *id)
{
    XXH3_state_t h;

    XXH3_128bits_reset(&h);
    feed(&h, id->model_fingerprint, sizeof id->model_fingerprint);
    feed(&h, id->policy_version, sizeof id->policy_version);
    feed(&h, id->tenant, strlen(id->tenant));
    return canonical(XXH3_128bits_digest(&h));
}

size_t kv_chain(const struct kv_key *root, const int32_t *tokens, size_t n_tokens, unsigned unit,
                struct kv_key *hashes)
{
    size_t n = unit ? n_tokens / unit : 0;
    const struct kv_key *before = root;

    for (size_t i = 0; i < n; i++) {
        XXH3_state_t h;
        XXH3_128bits_reset(&h);
        XXH3_128bits_update(&h, before->bytes, sizeof before->bytes);
        XXH3_128bits_update(&h, tokens + i * unit, unit * sizeof *tokens);
        hashes[i] = canonical(XXH3_128bits_digest(&h));
        before = &hashes[i];
    }
    return n;
}
