/* What an object is called in a remote tier, and the header that stands before its bytes there.
 *
 * The header is 96 bytes, little-endian (the bytes themselves are as the model left them; their
 * layout is part of the root).  It repeats the identity, so that a peer that mixes up its keys, a
 * key of another program and a bucket that somebody else writes to are found out, and its own
 * checksum covers all of it. */
#ifndef KVSTORE_TIER_REMOTE_OBJECT_H
#define KVSTORE_TIER_REMOTE_OBJECT_H

#include <stdbool.h>
#include <stdint.h>

#include "kvstore/client.h"
#include "proto/error.h"

enum {
    KV_REMOTE_HEADER = 96,
    KV_REMOTE_NAME = 68, /* ROOT/HASH.PART in hexadecimal digits, with its NUL */
};

struct kv_remote_object {
    struct kv_key root, hash;
    uint32_t unit;
    uint32_t unit_tokens;
    uint32_t bytes;  /* behind the header */
    uint32_t crc32c; /* of them */
    uint8_t part;
};

void kv_remote_name(const struct kv_remote_object *o, char name[KV_REMOTE_NAME]);
void kv_remote_header(const struct kv_remote_object *o, uint8_t to[KV_REMOTE_HEADER]);
/* Whether `from` is the header of `*want`, whose checksum alone is not known: it is filled in. */
bool kv_remote_header_is(const uint8_t from[KV_REMOTE_HEADER], struct kv_remote_object *want);

#endif
