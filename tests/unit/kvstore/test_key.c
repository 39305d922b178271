#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdio.h>
#include <string.h>

#include "kvstore/client.h"
#include "proto/hex.h"

static const char *hex(const struct kv_key *k, char text[33])
{
    lh_hex_print(k->bytes, sizeof k->bytes, text);
    return text;
}

static struct kv_identity identity(void)
{
    struct kv_identity id = {.tenant = "acme"};

    for (int i = 0; i < 16; i++) {
        id.model_fingerprint[i] = (uint8_t)i;
        id.policy_version[i] = (uint8_t)(100 + i);
    }
    return id;
}

/* The values are of XXH3's own command line tool over the same bytes: a stored key means the same
 * in every build. */
Test(key, known_values)
{
    struct kv_identity id = identity();
    struct kv_key root = kv_root(&id), chain[2];
    int32_t tokens[32];
    char text[33];

    for (int i = 0; i < 32; i++)
        tokens[i] = i * 7;
    cr_assert(eq(sz, kv_chain(&root, tokens, 32, 16, chain), 2));
    cr_assert(eq(str, (char *)hex(&root, text), (char *)"e7f5e595a5b20dcbe954172daf6467bb"));
    cr_assert(eq(str, (char *)hex(&chain[0], text), (char *)"66a5f6747be9ec2c2df61c93259d8bbf"));
    cr_assert(eq(str, (char *)hex(&chain[1], text), (char *)"b282843812cf92aad1da321f75952f34"));
}

Test(key, every_field_of_the_identity_counts)
{
    struct kv_identity a = identity(), b = identity();
    struct kv_key base = kv_root(&a), other;

    b.model_fingerprint[15] ^= 1;
    other = kv_root(&b);
    cr_assert(memcmp(&base, &other, sizeof base) != 0);
    b = identity();
    b.policy_version[0] ^= 1;
    other = kv_root(&b);
    cr_assert(memcmp(&base, &other, sizeof base) != 0, "I4");
    b = identity();
    b.tenant = "acm";
    other = kv_root(&b);
    cr_assert(memcmp(&base, &other, sizeof base) != 0);
}

Test(key, a_chain_does_not_depend_on_how_it_was_cut)
{
    struct kv_identity id = identity();
    struct kv_key root = kv_root(&id), whole[8], part[8];
    int32_t tokens[8 * 16 + 5];

    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        tokens[i] = (int32_t)(i * i);
    cr_assert(eq(sz, kv_chain(&root, tokens, 8 * 16 + 5, 16, whole), 8), "the rest has no hash");
    cr_assert(eq(sz, kv_chain(&root, tokens, 3 * 16 + 15, 16, part), 3));
    cr_assert(eq(sz, kv_chain(&part[2], tokens + 3 * 16, 5 * 16, 16, part + 3), 5));
    cr_assert(memcmp(whole, part, sizeof whole) == 0);
    tokens[0] ^= 1;
    kv_chain(&root, tokens, 8 * 16, 16, part);
    cr_assert(memcmp(&whole[7], &part[7], 16) != 0, "the last hash covers the first token");
    cr_assert(eq(sz, kv_chain(&root, tokens, 15, 16, part), 0));
}
