/* A bucket of an S3-compatible service: objects put, got and looked for by name, by libcurl with
 * its AWS signature (version 4).
 *
 * Addressing is by path (ENDPOINT/BUCKET/NAME), which every compatible server takes.  The payload's
 * hash is computed before the upload and signed, so a damaged upload is refused by the server.
 * What may be tried again (no connection, 429, 5xx) is, as often as its owner allows.
 *
 * A bucket keeps its connection from one operation to the next and serves one thread at a time; any
 * number of them may be open.  Every operation ends at its deadline (lh_now_ms()), but for the
 * resolving of a name, which has the system's own.
 *
 * What a peer can do: it is never believed about a size (the sink is asked for every piece and may
 * refuse), only http and https are spoken, and no redirection is followed. */
#ifndef PROTO_S3_H
#define PROTO_S3_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/cleanup.h"
#include "proto/error.h"

struct lh_s3;

struct lh_s3_options {
    const char *bucket;   /* BUCKET[/PREFIX] of [A-Za-z0-9._-] */
    const char *endpoint; /* "http://host:port"; NULL = Amazon's, of the region */
    const char *region;   /* NULL = us-east-1 */
    const char *key, *secret;
    const char *token;            /* of a session; NULL = none */
    int tries;                    /* of an operation, at least 1 */
    bool (*cancelled)(void *ctx); /* asked about once a second at least; NULL = never */
    void *cancelled_ctx;
};

/* Everything is copied.  INVALID_ARGUMENT for a bucket that could name something else. */
struct lh_s3 *lh_s3_open(const struct lh_s3_options *o, struct lh_error *err);
void lh_s3_close(struct lh_s3 *s); /* NULL is fine; the keys are wiped */
LH_DEFINE_AUTO(lh_s3, lh_s3_close)

/* Bytes at `at`, up to n; 0 only at the end, negative = -errno.  Read twice: hashed, then sent. */
struct lh_s3_source {
    ssize_t (*read)(void *ctx, uint64_t at, void *to, size_t n);
    void *ctx;
};
/* The n bytes at `at`; 0, or -errno to refuse.  A second try begins at 0 again. */
struct lh_s3_sink {
    int (*write)(void *ctx, uint64_t at, const void *data, size_t n);
    void *ctx;
};

/* Errors: NOT_FOUND; PERMISSION_DENIED (401, 403); DEADLINE_EXCEEDED; UNAVAILABLE (no connection,
 * cut off, 429, 5xx); INTERNAL (any other answer); the sink's or source's own. */
int lh_s3_has(struct lh_s3 *s, const char *name, int64_t deadline_ms, bool *has,
              struct lh_error *err);
int lh_s3_put(struct lh_s3 *s, const char *name, const struct lh_s3_source *from,
              int64_t deadline_ms, struct lh_error *err);
/* RESOURCE_EXHAUSTED beyond `max` bytes. */
int lh_s3_get(struct lh_s3 *s, const char *name, const struct lh_s3_sink *to, uint64_t max,
              int64_t deadline_ms, struct lh_error *err);

#endif
