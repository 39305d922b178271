/* A bucket as a remote tier (proto/s3.h).  No second try here: the gate of remote.c tries again,
 * and a lookup that waits has better things to do. */
#include <poll.h>
#include <string.h>

#include "kvstore/tier/remote_peer.h"
#include "proto/s3.h"

static bool is_stopping(void *stop_fd)
{
    struct pollfd p = {.fd = (int)(intptr_t)stop_fd, .events = POLLIN};

    return poll(&p, 1, 0) > 0;
}

static void *s3_open(const struct kv_peer_options *o, struct lh_error *err)
{
    const char *const *v = o->secrets->value;
    struct lh_s3_options s = {.bucket = o->place,
                              .endpoint = v[KV_S3_ENDPOINT],
                              .region = v[KV_S3_REGION],
                              .key = v[KV_S3_KEY],
                              .secret = v[KV_S3_SECRET],
                              .token = v[KV_S3_TOKEN],
                              .tries = 1,
                              .cancelled = is_stopping,
                              .cancelled_ctx = (void *)(intptr_t)o->stop_fd};

    if (!s.key || !s.secret)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "kvstore.remote is s3://, and kvstore.remote_credentials does not give "
                       "aws_access_key_id and aws_secret_access_key"),
               NULL;
    return lh_s3_open(&s, err);
}

static void s3_close(void *self)
{
    lh_s3_close(self);
}

static int s3_has(void *self, const char *name, int64_t deadline_ms, bool *has,
                  struct lh_error *err)
{
    return lh_s3_has(self, name, deadline_ms, has, err);
}

static size_t size_of(const struct iovec parts[2])
{
    return parts[0].iov_len + parts[1].iov_len;
}

/* Where byte `at` of an object lies, and how many follow it there. */
static char *place_of(const struct iovec parts[2], uint64_t at, size_t *room)
{
    bool first = at < parts[0].iov_len;
    size_t skip = (size_t)at - (first ? 0 : parts[0].iov_len);

    *room = parts[!first].iov_len - skip;
    return (char *)parts[!first].iov_base + skip;
}

static ssize_t read_parts(void *ctx, uint64_t at, void *to, size_t n)
{
    const struct iovec *parts = ctx;
    size_t room;

    if (at >= size_of(parts))
        return 0;
    const char *from = place_of(parts, at, &room);
    n = n < room ? n : room;
    memcpy(to, from, n);
    return (ssize_t)n;
}

static int s3_put(void *self, const char *name, const struct iovec parts[2], int64_t deadline_ms,
                  struct lh_error *err)
{
    struct lh_s3_source from = {read_parts, (void *)parts};

    return lh_s3_put(self, name, &from, deadline_ms, err);
}

struct sink {
    const struct iovec *parts;
    uint64_t end; /* of what has come */
};

/* No more comes than fits: lh_s3_get() was told. */
static int write_parts(void *ctx, uint64_t at, const void *data, size_t n)
{
    struct sink *s = ctx;
    size_t room;

    for (size_t done = 0; done < n;) {
        char *to = place_of(s->parts, at + done, &room);
        size_t piece = n - done < room ? n - done : room;
        memcpy(to, (const char *)data + done, piece);
        done += piece;
    }
    s->end = at + n;
    return 0;
}

static int s3_get(void *self, const char *name, const struct iovec parts[2], int64_t deadline_ms,
                  struct lh_error *err)
{
    struct sink sink = {parts, 0};
    struct lh_s3_sink to = {write_parts, &sink};
    struct lh_error why = {0};
    int r = lh_s3_get(self, name, &to, size_of(parts), deadline_ms, &why);

    if (r == LH_RESOURCE_EXHAUSTED || (r == 0 && sink.end != size_of(parts)))
        return lh_fail(err, LH_DATA_LOSS, "%s has not %zu bytes", name, size_of(parts));
    return r < 0 ? lh_fail(err, r, "%s", why.message) : 0;
}

const struct kv_peer_kind kv_peer_s3 = {
    .scheme = "s3://",
    .object_max = UINT64_C(5) << 30, /* of one PUT */
    .open = s3_open,
    .close = s3_close,
    .has = s3_has,
    .put = s3_put,
    .get = s3_get,
};
