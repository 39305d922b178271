/* Stores outside: files under names made of [a-z0-9./], written whole or not at all and never
 * changed.  A directory that hosts share, or an S3-compatible service. */
#ifndef AGENTENV_SNAPSHOT_BLOBS_H
#define AGENTENV_SNAPSHOT_BLOBS_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/cleanup.h"
#include "proto/error.h"

struct blobs;

/* "file:///absolute/directory" or "s3://BUCKET[/PREFIX]"; INVALID_ARGUMENT for anything else. */
struct blobs *blobs_open(const char *location, struct lh_error *err);
void blobs_close(struct blobs *b); /* NULL is fine */
LH_DEFINE_AUTO(blobs, blobs_close)

/* Each waits until deadline_ms (lh_now_ms()) at most. */

int blobs_has(struct blobs *b, const char *name, int64_t deadline_ms, bool *has,
              struct lh_error *err);
/* The file open as `fd`, from its beginning to its end. */
int blobs_put(struct blobs *b, const char *name, int fd, int64_t deadline_ms, struct lh_error *err);
/* Into `fd`, at its beginning.  RESOURCE_EXHAUSTED beyond `max` bytes, NOT_FOUND without it. */
int blobs_get(struct blobs *b, const char *name, int fd, uint64_t max, int64_t deadline_ms,
              struct lh_error *err);

/* ---- between blobs.c and its kinds ---- */

struct blobs_kind {
    const char *scheme;
    void *(*open)(const char *rest, struct lh_error *err);
    void (*close)(void *self);
    int (*has)(void *self, const char *name, int64_t deadline_ms, bool *has, struct lh_error *err);
    int (*put)(void *self, const char *name, int fd, int64_t deadline_ms, struct lh_error *err);
    int (*get)(void *self, const char *name, int fd, uint64_t max, int64_t deadline_ms,
               struct lh_error *err);
};

extern const struct blobs_kind blobs_dir, blobs_s3;

#endif
