#include "trainer/learn/version.h"

#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "proto/hex.h"

static void store(XXH128_hash_t h, uint8_t to[16])
{
    XXH128_canonical_t c;

    XXH128_canonicalFromHash(&c, h);
    memcpy(to, c.digest, 16);
}

struct version version_initial(const uint8_t fingerprint[16], const float *weights, size_t floats)
{
    struct version v = {0};
    uint8_t parts[32];

    memcpy(parts, fingerprint, 16);
    store(XXH3_128bits(weights, floats * sizeof *weights), parts + 16);
    store(XXH3_128bits(parts, sizeof parts), v.id);
    return v;
}

struct version_digest *version_digest_create(void)
{
    XXH3_state_t *s = XXH3_createState();

    if (s)
        XXH3_128bits_reset(s);
    return (struct version_digest *)s;
}

/* With its length, so that the cut between pieces is part of the digest. */
void version_digest_add(struct version_digest *d, const void *data, size_t len)
{
    uint64_t n = len;

    XXH3_128bits_update((XXH3_state_t *)d, &n, sizeof n);
    XXH3_128bits_update((XXH3_state_t *)d, data, len);
}

void version_digest_trajectory(struct version_digest *d, const int32_t *tokens,
                               const float *logprobs, const uint8_t *mask, uint32_t n,
                               double reward)
{
    version_digest_add(d, tokens, n * sizeof *tokens);
    version_digest_add(d, logprobs, n * sizeof *logprobs);
    version_digest_add(d, mask, n);
    version_digest_add(d, &reward, sizeof reward);
}

void version_digest_destroy(struct version_digest *d)
{
    XXH3_freeState((XXH3_state_t *)d);
}

struct version version_next(const struct version *parent, struct version_digest *d,
                            uint8_t batch[16])
{
    struct version v = {.step = parent->step + 1};
    uint8_t parts[16 + 8 + 16];

    store(XXH3_128bits_digest((XXH3_state_t *)d), batch);
    version_digest_destroy(d);
    memcpy(parts, parent->id, 16);
    memcpy(parts + 16, &v.step, 8);
    memcpy(parts + 24, batch, 16);
    store(XXH3_128bits(parts, sizeof parts), v.id);
    return v;
}

void version_print(const struct version *v, char text[VERSION_TEXT])
{
    lh_hex_print(v->id, sizeof v->id, text);
}
