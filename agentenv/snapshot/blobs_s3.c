/* An S3-compatible service as a store (proto/s3.h).
 *
 * Where and as whom is the operator's business, not the caller's: the daemon takes
 * AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN from
 * its environment, as every other program of that world does, so a request can name a bucket but
 * not carry the keys elsewhere. */
#include <errno.h>
#include <unistd.h>

#include "agentenv/snapshot/blobs.h"
#include "proto/s3.h"

enum { TRIES = 3 };

static void *s3_open(const char *rest, struct lh_error *err)
{
    struct lh_s3_options o = {.bucket = rest,
                              .endpoint = getenv("AWS_ENDPOINT_URL"),
                              .region = getenv("AWS_REGION"),
                              .key = getenv("AWS_ACCESS_KEY_ID"),
                              .secret = getenv("AWS_SECRET_ACCESS_KEY"),
                              .token = getenv("AWS_SESSION_TOKEN"),
                              .tries = TRIES};

    if (!o.key || !o.secret)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "agentenvd has no AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in its "
                       "environment"),
               NULL;
    return lh_s3_open(&o, err);
}

static void s3_close(void *self)
{
    lh_s3_close(self);
}

static int told(int r, struct lh_error *err)
{
    return r == LH_PERMISSION_DENIED ? lh_wrap(err, "check the AWS_ variables of agentenvd") : r;
}

static int s3_has(void *self, const char *name, int64_t deadline_ms, bool *has,
                  struct lh_error *err)
{
    return told(lh_s3_has(self, name, deadline_ms, has, err), err);
}

static ssize_t read_file(void *fd, uint64_t at, void *to, size_t n)
{
    ssize_t got = pread(*(int *)fd, to, n, (off_t)at);

    return got < 0 ? -errno : got;
}

/* What an earlier try has left goes with the first piece. */
static int write_file(void *fd, uint64_t at, const void *data, size_t n)
{
    if (at == 0 && ftruncate(*(int *)fd, 0) < 0)
        return -errno;
    for (size_t done = 0; done < n;) {
        ssize_t put = pwrite(*(int *)fd, (const char *)data + done, n - done, (off_t)(at + done));
        if (put < 0 && errno != EINTR)
            return -errno;
        done += put > 0 ? (size_t)put : 0;
    }
    return 0;
}

static int s3_put(void *self, const char *name, int fd, int64_t deadline_ms, struct lh_error *err)
{
    struct lh_s3_source from = {read_file, &fd};

    return told(lh_s3_put(self, name, &from, deadline_ms, err), err);
}

static int s3_get(void *self, const char *name, int fd, uint64_t max, int64_t deadline_ms,
                  struct lh_error *err)
{
    struct lh_s3_sink to = {write_file, &fd};

    return told(lh_s3_get(self, name, &to, max, deadline_ms, err), err);
}

const struct blobs_kind blobs_s3 = {
    .scheme = "s3://",
    .open = s3_open,
    .close = s3_close,
    .has = s3_has,
    .put = s3_put,
    .get = s3_get,
};
