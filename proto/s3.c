#include "proto/s3.h"

#include <curl/curl.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sodium.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/file.h"
#include "proto/hex.h"

enum {
    RETRY_MS = 200,
    CONNECT_MS = 10000,
    STALLED_S = 30,
    PIECE = 256 << 10,
    ANSWER_MAX = 1 << 20 /* of what a PUT or HEAD is answered with */
};

struct lh_s3 {
    CURL *curl;
    char *base;                        /* ENDPOINT/BUCKET[/PREFIX] */
    char *sigv4, *credentials, *token; /* token: a header, or NULL */
    int tries;
    bool (*cancelled)(void *ctx);
    void *cancelled_ctx;
};

void lh_s3_close(struct lh_s3 *s)
{
    if (!s)
        return;
    char *secrets[] = {s->credentials, s->token};
    for (size_t i = 0; i < LH_ARRAY_SIZE(secrets); i++)
        if (secrets[i])
            sodium_memzero(secrets[i], strlen(secrets[i]));
    curl_easy_cleanup(s->curl);
    free(s->base);
    free(s->sigv4);
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

static int configure(struct lh_s3 *s, const struct lh_s3_options *o, struct lh_error *err)
{
    const char *region = o->region ? o->region : "us-east-1";

    s->base = o->endpoint ? lh_format("%s/%s", o->endpoint, o->bucket)
                          : lh_format("https://s3.%s.amazonaws.com/%s", region, o->bucket);
    s->sigv4 = lh_format("aws:amz:%s:s3", region);
    s->credentials = lh_format("%s:%s", o->key, o->secret);
    s->token = o->token ? lh_format("x-amz-security-token: %s", o->token) : NULL;
    s->curl = curl_easy_init();
    s->tries = o->tries;
    s->cancelled = o->cancelled;
    s->cancelled_ctx = o->cancelled_ctx;
    if (!s->base || !s->sigv4 || !s->credentials || !s->curl || (o->token && !s->token))
        return lh_fail_errno(err, ENOMEM, "s3://%s", o->bucket);
    for (size_t n = strlen(s->base); n && s->base[n - 1] == '/'; n--)
        s->base[n - 1] = 0;
    return 0;
}

struct lh_s3 *lh_s3_open(const struct lh_s3_options *o, struct lh_error *err)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/";
    const char *b = o->bucket;

    pthread_once(&curl_once, start_curl);
    if (curl_ready != CURLE_OK || sodium_init() < 0)
        return lh_fail(err, LH_INTERNAL, "libcurl or libsodium cannot start"), NULL;
    if (!*b || *b == '/' || b[strspn(b, allowed)] || strstr(b, ".."))
        return lh_fail(err, LH_INVALID_ARGUMENT, "s3://%.200s: BUCKET/PREFIX of [A-Za-z0-9._-]", b),
               NULL;
    struct lh_s3 *s = calloc(1, sizeof *s);
    if (!s)
        return lh_fail_errno(err, ENOMEM, "s3://%s", b), NULL;
    if (configure(s, o, err) < 0) {
        lh_s3_close(s);
        return NULL;
    }
    return s;
}

/* ---- one request ---- */

struct request {
    const char *verb; /* "HEAD", "GET", "PUT" */
    const char *name;
    const struct lh_s3_source *from; /* of a PUT */
    const struct lh_s3_sink *to;     /* of a GET */
    uint64_t max;                    /* bytes of the answer */
    int64_t deadline_ms;
    CURL *curl;

    char sha256[2 * crypto_hash_sha256_BYTES + 1]; /* of what is sent */
    uint64_t size, sent, received;
    bool too_long;
    int io_errno;        /* of the source or the sink */
    char complaint[512]; /* the server's, of a failed request */
};

static size_t send_body(char *to, size_t size, size_t n, void *ctx)
{
    struct request *q = ctx;
    ssize_t got = q->from->read(q->from->ctx, q->sent, to, size * n);

    if (got < 0) {
        q->io_errno = (int)-got;
        return CURL_READFUNC_ABORT;
    }
    q->sent += (uint64_t)got;
    return (size_t)got;
}

static void take_complaint(struct request *q, const char *data, size_t len)
{
    size_t room = sizeof q->complaint - 1 - strlen(q->complaint);

    strncat(q->complaint, data, len < room ? len : room);
}

/* Of the object; what comes with a failure is its text and nothing of the object. */
static size_t take_body(char *data, size_t size, size_t n, void *ctx)
{
    struct request *q = ctx;
    size_t len = size * n;
    long status = 0;

    curl_easy_getinfo(q->curl, CURLINFO_RESPONSE_CODE, &status);
    if (status / 100 != 2) {
        take_complaint(q, data, len);
        return len;
    }
    q->too_long = len > q->max || q->received > q->max - len;
    int r = q->too_long ? -EFBIG : q->to ? q->to->write(q->to->ctx, q->received, data, len) : 0;
    if (r < 0 && !q->too_long)
        q->io_errno = -r;
    q->received += len;
    return r < 0 ? 0 : len;
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
    for (; q->from && (n = q->from->read(q->from->ctx, q->size, piece, PIECE)) > 0;
         q->size += (uint64_t)n)
        crypto_hash_sha256_update(&h, piece, (size_t)n);
    if (n < 0)
        return lh_fail_errno(err, (int)-n, "reading %s", q->name);
    crypto_hash_sha256_final(&h, digest);
    lh_hex_print(digest, sizeof digest, q->sha256);
    return 0;
}

static int ask_owner(void *ctx, curl_off_t a, curl_off_t b, curl_off_t c, curl_off_t d)
{
    const struct lh_s3 *s = ctx;

    return s->cancelled(s->cancelled_ctx);
}

static void set_options(struct lh_s3 *s, struct request *q, const char *url,
                        struct curl_slist *headers)
{
    long left = (long)lh_ms_left(q->deadline_ms) + 1;
    CURL *c = s->curl;

    q->curl = c;
    curl_easy_reset(c); /* the connection stays */
    curl_easy_setopt(c, CURLOPT_URL, url);
    curl_easy_setopt(c, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(c, CURLOPT_AWS_SIGV4, s->sigv4);
    curl_easy_setopt(c, CURLOPT_USERPWD, s->credentials);
    curl_easy_setopt(c, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(c, CURLOPT_CONNECTTIMEOUT_MS, left < CONNECT_MS ? left : CONNECT_MS);
    curl_easy_setopt(c, CURLOPT_LOW_SPEED_LIMIT, 1L);
    curl_easy_setopt(c, CURLOPT_LOW_SPEED_TIME, (long)STALLED_S);
    curl_easy_setopt(c, CURLOPT_TIMEOUT_MS, left);
    curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, take_body);
    curl_easy_setopt(c, CURLOPT_WRITEDATA, q);
    if (s->cancelled) {
        curl_easy_setopt(c, CURLOPT_NOPROGRESS, 0L);
        curl_easy_setopt(c, CURLOPT_XFERINFOFUNCTION, ask_owner);
        curl_easy_setopt(c, CURLOPT_XFERINFODATA, s);
    }
    if (!strcmp(q->verb, "HEAD"))
        curl_easy_setopt(c, CURLOPT_NOBODY, 1L);
    if (!q->from)
        return;
    curl_easy_setopt(c, CURLOPT_UPLOAD, 1L);
    curl_easy_setopt(c, CURLOPT_READFUNCTION, send_body);
    curl_easy_setopt(c, CURLOPT_READDATA, q);
    curl_easy_setopt(c, CURLOPT_INFILESIZE_LARGE, (curl_off_t)q->size);
}

/* Status of the answer, or a negative CURLcode. */
static long perform(struct lh_s3 *s, struct request *q, const char *url)
{
    lh_autofree char *hash = lh_format("x-amz-content-sha256: %s", q->sha256);
    struct curl_slist *headers = hash ? curl_slist_append(NULL, hash) : NULL;
    long status = 0;
    CURLcode code = CURLE_OUT_OF_MEMORY;

    q->sent = q->received = 0;
    q->complaint[0] = 0;
    if (headers && s->token)
        curl_slist_append(headers, s->token);
    if (headers)
        curl_slist_append(headers, "Expect:"); /* no round trip to ask whether it may send */
    if (headers) {
        set_options(s, q, url, headers);
        code = curl_easy_perform(s->curl);
        curl_easy_getinfo(s->curl, CURLINFO_RESPONSE_CODE, &status);
    }
    curl_slist_free_all(headers);
    return code == CURLE_OK ? status : -(long)code;
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
    if (q->io_errno)
        return lh_fail_errno(err, q->io_errno, q->to ? "keeping %s" : "reading %s", q->name);
    if (status == -CURLE_OPERATION_TIMEDOUT)
        return lh_fail(err, LH_DEADLINE_EXCEEDED, "%s %s: no end in time", q->verb, url);
    if (status < 0)
        return lh_fail(err, LH_UNAVAILABLE, "%s %s: %s", q->verb, url,
                       curl_easy_strerror((CURLcode)-status));
    if (status == 404)
        return lh_fail(err, LH_NOT_FOUND, "%s is not there", url);
    if (status == 401 || status == 403)
        return lh_fail(err, LH_PERMISSION_DENIED, "%s %s: status %ld; check the keys: %s", q->verb,
                       url, status, q->complaint);
    return status / 100 == 2 ? 0
                             : lh_fail(err, may_retry(status) ? LH_UNAVAILABLE : LH_INTERNAL,
                                       "%s %s: status %ld: %s", q->verb, url, status, q->complaint);
}

static int run(struct lh_s3 *s, struct request *q, struct lh_error *err)
{
    lh_autofree char *url = lh_format("%s/%s", s->base, q->name);
    int r = url ? hash_body(q, err) : lh_fail_errno(err, ENOMEM, "%s", q->name);

    if (r < 0)
        return r;
    long status = perform(s, q, url);
    for (int i = 1; i < s->tries && may_retry(status); i++) {
        if (lh_ms_left(q->deadline_ms) < RETRY_MS << i)
            break;
        poll(NULL, 0, RETRY_MS << i);
        status = perform(s, q, url);
    }
    return conclude(q, url, status, err);
}

/* ---- the operations ---- */

int lh_s3_has(struct lh_s3 *s, const char *name, int64_t deadline_ms, bool *has,
              struct lh_error *err)
{
    struct request q = {
        .verb = "HEAD", .name = name, .max = ANSWER_MAX, .deadline_ms = deadline_ms};
    struct lh_error why = {0};
    int r = run(s, &q, &why);

    *has = r == 0;
    return r == 0 || r == LH_NOT_FOUND ? 0 : lh_fail(err, r, "%s", why.message);
}

int lh_s3_put(struct lh_s3 *s, const char *name, const struct lh_s3_source *from,
              int64_t deadline_ms, struct lh_error *err)
{
    struct request q = {
        .verb = "PUT", .name = name, .from = from, .max = ANSWER_MAX, .deadline_ms = deadline_ms};

    return run(s, &q, err);
}

int lh_s3_get(struct lh_s3 *s, const char *name, const struct lh_s3_sink *to, uint64_t max,
              int64_t deadline_ms, struct lh_error *err)
{
    struct request q = {
        .verb = "GET", .name = name, .to = to, .max = max, .deadline_ms = deadline_ms};

    return run(s, &q, err);
}
