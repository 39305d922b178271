/* What kvstored, its client and its command line agree on: bounds, and how two versions of them
 * come to terms (kv.proto, HelloRequest). */
#ifndef KVSTORE_PROTOCOL_H
#define KVSTORE_PROTOCOL_H

#include <stdint.h>

enum {
    KV_PROTOCOL_OLDEST = 1,  /* that this build still speaks */
    KV_PROTOCOL = 1,         /* and the newest */
    KV_VERSION_MAX = 63,     /* bytes */
    KV_MAX_UNITS = 65536,    /* of one sequence: 1 Mi tokens in units of 16 */
    KV_MAX_GRANTS = 1024,    /* open leases and tickets of one client */
    KV_NAME_MAX = 63,        /* bytes of a client's name */
    KV_TRAJECTORY_MAX = 128, /* bytes */
    KV_TENANT_MAX = 63,
    KV_LEASE_MS = 60000,
    KV_TICKET_MAX_MS = 60000,
    KV_LIST_MAX = 4096,
};

/* Bits of hello: what was added within a protocol. */
enum kv_feature {
    KV_FEATURE_TENANTS = 1 << 0, /* OPEN_ROOT says whose it is */
    KV_FEATURE_SHOW = 1 << 1,
    KV_FEATURES = KV_FEATURE_TENANTS | KV_FEATURE_SHOW,
};

/* The newest protocol that this build and a peer of oldest..newest both speak (oldest 0: newest
 * alone); 0 = none. */
static inline uint32_t kv_protocol_shared(uint32_t oldest, uint32_t newest)
{
    uint32_t shared = newest < KV_PROTOCOL ? newest : KV_PROTOCOL;

    oldest = oldest ? oldest : newest;
    return shared >= oldest && shared >= KV_PROTOCOL_OLDEST ? shared : 0;
}

#endif
