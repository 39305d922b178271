#include "kvstore/tier/remote_object.h"

#include <endian.h>
#include <stdio.h>
#include <string.h>

#include "proto/crc.h"
#include "proto/hex.h"

static const char MAGIC[8] = "LHKVOBJ1";

struct header {
    char magic[8];
    struct kv_key root, hash;
    uint32_t part, unit, unit_tokens, bytes, crc32c;
    uint8_t zero[32];
    uint32_t header_crc32c;
};
_Static_assert(sizeof(struct header) == KV_REMOTE_HEADER, "no padding");

void kv_remote_name(const struct kv_remote_object *o, char name[KV_REMOTE_NAME])
{
    char root[33], hash[33];

    lh_hex_print(o->root.bytes, sizeof o->root.bytes, root);
    lh_hex_print(o->hash.bytes, sizeof o->hash.bytes, hash);
    snprintf(name, KV_REMOTE_NAME, "%s/%s.%c", root, hash, o->part ? 's' : 'b');
}

void kv_remote_header(const struct kv_remote_object *o, uint8_t to[KV_REMOTE_HEADER])
{
    struct header h = {.root = o->root,
                       .hash = o->hash,
                       .part = htole32(o->part),
                       .unit = htole32(o->unit),
                       .unit_tokens = htole32(o->unit_tokens),
                       .bytes = htole32(o->bytes),
                       .crc32c = htole32(o->crc32c)};

    memcpy(h.magic, MAGIC, sizeof h.magic);
    h.header_crc32c = htole32(lh_crc32c(0, &h, offsetof(struct header, header_crc32c)));
    memcpy(to, &h, sizeof h);
}

bool kv_remote_header_is(const uint8_t from[KV_REMOTE_HEADER], struct kv_remote_object *want)
{
    struct kv_remote_object o = *want;
    uint8_t same[KV_REMOTE_HEADER];
    uint32_t crc32c;

    memcpy(&crc32c, from + offsetof(struct header, crc32c), sizeof crc32c);
    o.crc32c = le32toh(crc32c);
    kv_remote_header(&o, same);
    if (memcmp(from, same, sizeof same) != 0)
        return false;
    want->crc32c = o.crc32c;
    return true;
}
