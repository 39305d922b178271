/* An S3-compatible service as a store, by libcurl with its AWS signature (version 4).
 *
 * Where and as whom is the operator's business, not the caller's: the daemon takes
 * AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN from
 * its environment, as every other program of that world does, so a request can name a bucket but
 * not carry the keys elsewhere.  Addressing is by path (ENDPOINT/BUCKET/NAME), which every
 * compatible server takes.
 *
 * The payload's hash is computed before the upload and signed, so a damaged upload is refused by
 * the server.  What may be tried again (no connection, 429, 5xx) is, three times in all. */
#include <curl/curl.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sodium.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agentenv/snapshot/blobs.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/hex.h"

enum { TRIES = 3, RETRY_MS = 200, CONNECT_S = 10, STALLED_S = 30, PIECE = 256 << 10 };

struct s3 {
    char *base;                        /* ENDPOINT/BUCKET[/PREFIX] */
    char *sigv4, *credentials, *token; /* token: a header, or NULL */
};

static void s3_close(void *self)
{
    struct s3 *s = self;

    free(s->base);
    free(s->sigv4);
    if (s->credentials)
        sodium_memzero(s->credentials, strlen(s->credentials));
    free(s->credentials);
    free(s->token);
    free(s);
}

static pthread_once_t curl_once = PTHREAD_ONCE_INIT;
static CURLcode curl_ready;

static void start_curl(void)
{
    curl_ready = curl_global_init(CURL_GLOBAL_DEFAULT);
}

static int configure(struct s3 *s, const char *bucket, struct lh_error *err)
{
    const char *key = getenv("AWS_ACCESS_KEY_ID"), *secret = getenv("AWS_SECRET_ACCESS_KEY");
    const char *region = getenv("AWS_REGION"), *endpoint = getenv("AWS_ENDPOINT_URL");
    const char *token = getenv("AWS_SESSION_TOKEN");

    if (!key || !secret)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "agentenvd has no AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in its "
                       "environment");
    region = region ? region : "us-east-1";
    s->base = endpoint ? lh_format("%s/%s", endpoint, bucket)
                       : lh_format("https://s3.%s.amazonaws.com/%s", region, bucket);
    s->sigv4 = lh_format("aws:amz:%s:s3", region);
    s->credentials = lh_format("%s:%s", key, secret);
    s->token = token ? lh_format("x-amz-security-token: %s", token) : NULL;
    if (!s->base || !s->sigv4 || !s->credentials || (token && !s->token))
        return lh_fail_errno(err, ENOMEM, "s3://%s", bucket);
    for (size_t n = strlen(s->base); n && s->base[n - 1] == '/'; n--)
        s->base[n - 1] = 0;
    return 0;
}

static void *s3_open(const char *rest, struct lh_error *err)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/";

    pthread_once(&curl_once, start_curl);
    if (curl_ready != CURLE_OK || sodium_init() < 0)
        return lh_fail(err, LH_INTERNAL, "libcurl or libsodium cannot start"), NULL;
    if (!*rest || *rest == '/' || rest[strspn(rest, allowed)] || strstr(rest, ".."))
        return lh_fail(err, LH_INVALID_ARGUMENT, "s3://%.200s: BUCKET/PREFIX of [A-Za-z0-9._-]",
                       rest),
               NULL;
    struct s3 *s = calloc(1, sizeof *s);
    if (!s)
        return lh_fail_errno(err, ENOMEM, "s3://%s", rest), NULL;
    if (configure(s, rest, err) < 0) {
        s3_close(s);
        return NULL;
    }
    return s;
}

/* ---- one request ---- */

struct request {
    const char *verb; /* "HEAD", "GET", "PUT" */
    const char *name;
    int fd;                                        /* body: read for PUT, written for GET */
    uint64_t max;                                  /* of what GET writes */
    int64_t size;                                  /* of what PUT reads */
    char sha256[2 * crypto_hash_sha256_BYTES + 1]; /* of that */
    int64_t deadline_ms;

    uint64_t received;
    bool too_long;
    int write_errno;
    char complaint[512]; /* the server's, of a failed request */
};

static size_t send_body(char *to, size_t size, size_t n, void *ctx)
{
    const struct request *q = ctx;
    ssize_t got = read(q->fd, to, size * n);

    return got < 0 ? CURL_READFUNC_ABORT : (size_t)got;
}

static size_t take_body(char *data, size_t size, size_t n, void *ctx)
{
    struct request *q = ctx;
    size_t len = size * n, room = sizeof q->complaint - 1, have = strlen(q->complaint);

    if (have < room) /* in case it is an error's text */
        strncat(q->complaint, data, len < room - have ? len : room - have);
    q->received += len;
    q->too_long = q->received > q->max;
    struct lh_error err = {0};
    if (q->too_long)
        return 0;
    if (strcmp(q->verb, "GET") == 0 && lh_write_all(q->fd, data, len, &err) < 0) {
        q->write_errno = ENOSPC;
        return 0;
    }
    return len;
}

static int hash_body(struct request *q, struct lh_error *err)
{
    lh_autofree uint8_t *piece = malloc(PIECE);
    crypto_hash_sha256_state h;
    uint8_t digest[crypto_hash_sha256_BYTES];
    ssize_t n = 0;

    if (!piece)
        return lh_fail_errno(err, ENOMEM, "%s", q->name);
    crypto_hash_sha256_init(&h);
    q->size = 0;
    for (; strcmp(q->verb, "PUT") == 0 && (n = pread(q->fd, piece, PIECE, q->size)) > 0;
         q->size += n)
        crypto_hash_sha256_update(&h, piece, (size_t)n);
    if (n < 0)
        return lh_fail_errno(err, errno, "reading %s", q->name);
    crypto_hash_sha256_final(&h, digest);
    lh_hex_print(digest, sizeof digest, q->sha256);
    return 0;
}

static void set_options(CURL *c, const struct s3 *s, struct request *q, const char *url,
                        struct curl_slist *headers)
{
    curl_easy_setopt(c, CURLOPT_URL, url);
    curl_easy_setopt(c, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(c, CURLOPT_AWS_SIGV4, s->sigv4);
    curl_easy_setopt(c, CURLOPT_USERPWD, s->credentials);
    curl_easy_setopt(c, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(c, CURLOPT_CONNECTTIMEOUT, (long)CONNECT_S);
    curl_easy_setopt(c, CURLOPT_LOW_SPEED_LIMIT, 1L);
    curl_easy_setopt(c, CURLOPT_LOW_SPEED_TIME, (long)STALLED_S);
    curl_easy_setopt(c, CURLOPT_TIMEOUT_MS, (long)lh_ms_left(q->deadline_ms) + 1);
    curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, take_body);
    curl_easy_setopt(c, CURLOPT_WRITEDATA, q);
    if (!strcmp(q->verb, "HEAD"))
        curl_easy_setopt(c, CURLOPT_NOBODY, 1L);
    if (strcmp(q->verb, "PUT") != 0)
        return;
    curl_easy_setopt(c, CURLOPT_UPLOAD, 1L);
    curl_easy_setopt(c, CURLOPT_READFUNCTION, send_body);
    curl_easy_setopt(c, CURLOPT_READDATA, q);
    curl_easy_setopt(c, CURLOPT_INFILESIZE_LARGE, (curl_off_t)q->size);
}

/* Status of the answer, or a negative CURLcode. */
static long perform(const struct s3 *s, struct request *q, const char *url)
{
    lh_autofree char *hash = lh_format("x-amz-content-sha256: %s", q->sha256);
    struct curl_slist *headers = hash ? curl_slist_append(NULL, hash) : NULL;
    CURL *c = curl_easy_init();
    long status = 0;
    CURLcode code = CURLE_OUT_OF_MEMORY;

    if (headers && s->token)
        curl_slist_append(headers, s->token);
    if (headers)
        curl_slist_append(headers, "Expect:"); /* no round trip to ask whether it may send */
    if (c && headers) {
        set_options(c, s, q, url, headers);
        code = curl_easy_perform(c);
        curl_easy_getinfo(c, CURLINFO_RESPONSE_CODE, &status);
    }
    curl_slist_free_all(headers);
    curl_easy_cleanup(c);
    return code == CURLE_OK ? status : -(long)code;
}

static int rewind_body(struct request *q, struct lh_error *err)
{
    bool get = !strcmp(q->verb, "GET");

    q->received = 0;
    q->complaint[0] = 0;
    if (strcmp(q->verb, "HEAD") != 0 &&
        (lseek(q->fd, 0, SEEK_SET) < 0 || (get && ftruncate(q->fd, 0) < 0)))
        return lh_fail_errno(err, errno, "%s", q->name);
    return 0;
}

static bool may_retry(long status)
{
    return status == -CURLE_COULDNT_CONNECT || status == -CURLE_COULDNT_RESOLVE_HOST ||
           status == -CURLE_GOT_NOTHING || status == -CURLE_RECV_ERROR ||
           status == -CURLE_SEND_ERROR || status == -CURLE_PARTIAL_FILE || status == 429 ||
           status >= 500;
}

static int conclude(const struct request *q, const char *url, long status, struct lh_error *err)
{
    if (q->too_long)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%s has more than %llu bytes", url,
                       (unsigned long long)q->max);
    if (q->write_errno)
        return lh_fail_errno(err, q->write_errno, "keeping %s", q->name);
    if (status == -CURLE_OPERATION_TIMEDOUT)
        return lh_fail(err, LH_DEADLINE_EXCEEDED, "%s %s: no end in time", q->verb, url);
    if (status < 0)
        return lh_fail(err, LH_UNAVAILABLE, "%s %s: %s", q->verb, url,
                       curl_easy_strerror((CURLcode)-status));
    if (status == 404)
        return lh_fail(err, LH_NOT_FOUND, "%s is not there", url);
    if (status == 401 || status == 403)
        return lh_fail(err, LH_PERMISSION_DENIED, "%s %s: status %ld; check the AWS_ variables: %s",
                       q->verb, url, status, q->complaint);
    return status / 100 == 2 ? 0
                             : lh_fail(err, may_retry(status) ? LH_UNAVAILABLE : LH_INTERNAL,
                                       "%s %s: status %ld: %s", q->verb, url, status, q->complaint);
}

static int run(const struct s3 *s, struct request *q, struct lh_error *err)
{
    lh_autofree char *url = lh_format("%s/%s", s->base, q->name);
    long status = 0;
    int r = url ? hash_body(q, err) : lh_fail_errno(err, ENOMEM, "%s", q->name);

    for (int i = 0; r == 0 && i < TRIES; i++) {
        r = rewind_body(q, err);
        status = r == 0 ? perform(s, q, url) : 0;
        if (!may_retry(status) || lh_ms_left(q->deadline_ms) < RETRY_MS << i)
            break;
        poll(NULL, 0, RETRY_MS << i);
    }
    return r < 0 ? r : conclude(q, url, status, err);
}

/* ---- the operations ---- */

static int s3_has(void *self, const char *name, int64_t deadline_ms, bool *has,
                  struct lh_error *err)
{
    struct request q = {.verb = "HEAD", .name = name, .fd = -1, .deadline_ms = deadline_ms};
    struct lh_error why = {0};
    int r = run(self, &q, &why);

    *has = r == 0;
    return r == 0 || r == LH_NOT_FOUND ? 0 : lh_fail(err, r, "%s", why.message);
}

static int s3_put(void *self, const char *name, int fd, int64_t deadline_ms, struct lh_error *err)
{
    struct request q = {
        .verb = "PUT", .name = name, .fd = fd, .max = 1 << 20, .deadline_ms = deadline_ms};

    return run(self, &q, err);
}

static int s3_get(void *self, const char *name, int fd, uint64_t max, int64_t deadline_ms,
                  struct lh_error *err)
{
    struct request q = {
        .verb = "GET", .name = name, .fd = fd, .max = max, .deadline_ms = deadline_ms};

    return run(self, &q, err);
}

const struct blobs_kind blobs_s3 = {
    .scheme = "s3://",
    .open = s3_open,
    .close = s3_close,
    .has = s3_has,
    .put = s3_put,
    .get = s3_get,
};
