/* Between remote.c and the two kinds of peers it may speak to: one object of a kind per thread,
 * with connections of its own.  Nothing of a peer's is believed that is not checked here or by the
 * header of the object. */
#ifndef KVSTORE_TIER_REMOTE_PEER_H
#define KVSTORE_TIER_REMOTE_PEER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include "kvstore/tier/remote_secrets.h"
#include "proto/error.h"

struct kv_peer_options {
    const char *place;                /* behind the scheme */
    const struct kv_secrets *secrets; /* outlive it */
    uint32_t ttl_s;
    int stop_fd; /* readable: give up */
};

/* An object is two pieces of memory, one after the other: header and bytes.  Every operation ends
 * at its deadline.  Errors: NOT_FOUND, DATA_LOSS (something else is there under this name); all
 * others say that the peer failed. */
struct kv_peer_kind {
    const char *scheme;
    uint64_t object_max;
    /* Connects to nothing yet. */
    void *(*open)(const struct kv_peer_options *o, struct lh_error *err);
    void (*close)(void *self);
    int (*has)(void *self, const char *name, int64_t deadline_ms, bool *has, struct lh_error *err);
    int (*put)(void *self, const char *name, const struct iovec parts[2], int64_t deadline_ms,
               struct lh_error *err);
    int (*get)(void *self, const char *name, const struct iovec parts[2], int64_t deadline_ms,
               struct lh_error *err);
};

extern const struct kv_peer_kind kv_peer_redis, kv_peer_s3;

#endif
