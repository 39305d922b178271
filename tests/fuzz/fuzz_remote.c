/* What comes back from a remote tier.  The input is what a Redis server says to one command, over a
 * real socket: whatever it is, the call ends, keeps no more than it was told to, and what it makes
 * of a map of slots or a redirection is within bounds.  And it is an object: it is taken for the
 * one that was asked for only if it is that to the byte. */
#include <hiredis/hiredis.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "kvstore/tier/remote_link.h"
#include "kvstore/tier/remote_object.h"
#include "kvstore/tier/remote_slots.h"
#include "proto/clock.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

enum { MAX = 4096, ANSWER_MS = 5000, INPUT_MAX = 65536 };

static void require(int condition)
{
    if (!condition)
        abort();
}

static void check_place(const struct kv_redis_place *p)
{
    require(p->port >= 1 && p->port <= 65535 && memchr(p->host, 0, sizeof p->host));
}

static void check_map(const redisReply *r)
{
    for (size_t i = 0; i < r->elements; i++) {
        unsigned first, last;
        struct kv_redis_place master;
        if (!kv_redis_range(r, i, &first, &last, &master))
            continue;
        require(first <= last && last < KV_REDIS_SLOTS);
        check_place(&master);
    }
}

static void check_reply(const redisReply *r)
{
    if (r->type == REDIS_REPLY_ARRAY) {
        check_map(r);
    } else if (r->type == REDIS_REPLY_ERROR) {
        struct kv_redis_place to;
        enum kv_redis_error e = kv_redis_explain(r->str, (size_t)r->len, &to);
        if (e == KV_REDIS_MOVED || e == KV_REDIS_ASK)
            check_place(&to);
    }
}

static void try_reply(const uint8_t *p, size_t n)
{
    struct kv_link_arg arg = kv_link_text("PING");
    struct kv_link_redis l = {.stop_fd = -1};
    struct lh_error err = {0};
    int fds[2];

    require(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    require(send(fds[1], p, n, MSG_DONTWAIT) == (ssize_t)n);
    require(shutdown(fds[1], SHUT_WR) == 0);
    kv_link_redis_adopt(&l, redisConnectFd(fds[0]));
    redisReply *r = kv_link_redis_call(&l, &arg, 1, MAX, lh_now_ms() + ANSWER_MS, &err);
    require(r ? n > 0 : err.code < 0 && err.code != LH_DEADLINE_EXCEEDED && !l.context);
    if (r)
        check_reply(r);
    freeReplyObject(r);
    kv_link_redis_close(&l);
    close(fds[1]);
}

static void try_header(const uint8_t *p, size_t n)
{
    struct kv_remote_object want = {.unit = 3, .unit_tokens = 16, .bytes = 100};
    uint8_t header[KV_REMOTE_HEADER];

    if (n < sizeof header || !kv_remote_header_is(p, &want))
        return;
    kv_remote_header(&want, header);
    require(!memcmp(header, p, sizeof header));
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    if (n > INPUT_MAX)
        return 0;
    try_header(p, n);
    try_reply(p, n);
    return 0;
}
