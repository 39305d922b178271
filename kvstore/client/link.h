/* One connection to kvstored: hello, the mapped segment, one request and its reply at a time. */
#ifndef KVSTORE_CLIENT_LINK_H
#define KVSTORE_CLIENT_LINK_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "kvstore/protocol.h"
#include "longhaul/kv/v1/kv.pb-c.h"
#include "proto/error.h"

/* A mapped segment outlives its connection while someone copies from it: after a restart of
 * kvstored a hit of the old one still reads the old memory, which nobody changes any more. */
struct kv_map {
    atomic_int refs;
    uint8_t *base;
    uint64_t bytes;
};
struct kv_map *kv_map_ref(struct kv_map *m);
void kv_map_unref(struct kv_map *m); /* NULL is fine */
/* Address of an extent, or NULL when it does not lie in the segment. */
uint8_t *kv_map_at(const struct kv_map *m, uint64_t offset, uint64_t bytes);

struct kv_link {
    int fd; /* -1 = closed */
    struct kv_map *map;
    unsigned owed; /* replies to kv_link_post() that have not been read yet */
    uint64_t features;
    char peer[KV_VERSION_MAX + 1]; /* version of kvstored; "" = it did not say */
};
/* UNIMPLEMENTED, with both versions, when kvstored has not the feature that `what` needs. */
int kv_link_needs(const struct kv_link *l, enum kv_feature feature, const char *what,
                  struct lh_error *err);

/* Does not wait for a server that is not there: UNAVAILABLE.  Deadlines as of lh_now_ms(). */
int kv_link_open(struct kv_link *l, const char *path, const char *name, int64_t deadline_ms,
                 struct lh_error *err);
void kv_link_close(struct kv_link *l);
/* NULL and *err: a refusal by kvstored (then the link stays open), or a broken or late connection
 * (then it is closed, for the reply of the lost request must never be taken for the next one's). */
Longhaul__Kv__V1__Reply *kv_link_call(struct kv_link *l, const Longhaul__Kv__V1__Request *q,
                                      int64_t deadline_ms, struct lh_error *err);
/* A request whose reply nobody needs, such as a release: it costs no wait.  The reply is read
 * before that of the next call. */
int kv_link_post(struct kv_link *l, const Longhaul__Kv__V1__Request *q, int64_t deadline_ms,
                 struct lh_error *err);

#endif
