/* One connection to one Redis server: hiredis connects and parses, the waiting is done here, with
 * deadlines.  (Its own waiting is bounded for each piece and not for the reply, and its reader has
 * no limit: a peer that sends a byte a second, or an array of a thousand million, would hold a
 * thread or all memory.)
 *
 * A connection that has failed in any way is closed at once: what comes on it later would be taken
 * for the answer to something else. */
#ifndef KVSTORE_TIER_REMOTE_LINK_H
#define KVSTORE_TIER_REMOTE_LINK_H

#include <hiredis/hiredis.h>
#include <stdint.h>
#include <sys/uio.h>

#include "kvstore/tier/remote_secrets.h"
#include "proto/error.h"

enum {
    KV_LINK_ARGS = 5,
    KV_LINK_ELEMENTS = 16384, /* of an array: as many as there are slots */
    KV_LINK_REPLY = 1 << 20,  /* bytes of a reply that is no object */
};

struct kv_link_redis {
    redisContext *context; /* NULL = closed */
    redisReplyObjectFunctions functions;
    void *(*create_array)(const redisReadTask *task, int elements);
    int stop_fd;
};

/* Connects and, when there is a password, says who we are. */
int kv_link_redis_open(struct kv_link_redis *l, const char *host, int port,
                       const struct kv_secrets *secrets, int64_t deadline_ms, struct lh_error *err);
/* Takes over a connection; its replies are bounded from now on. */
void kv_link_redis_adopt(struct kv_link_redis *l, redisContext *context);
void kv_link_redis_close(struct kv_link_redis *l);

/* An argument may be in two pieces. */
struct kv_link_arg {
    struct iovec parts[2];
};
struct kv_link_arg kv_link_text(const char *text);

/* Sends one command and returns its reply, an error reply too, of at most `max` bytes; NULL when
 * the connection has failed: DEADLINE_EXCEEDED, UNAVAILABLE, CANCELLED (stop_fd), INTERNAL (what
 * came is no RESP), OUT_OF_RANGE (more than `max`).  The caller frees it with freeReplyObject(). */
redisReply *kv_link_redis_call(struct kv_link_redis *l, const struct kv_link_arg *args, int n,
                               size_t max, int64_t deadline_ms, struct lh_error *err);

#endif
