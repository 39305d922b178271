#include "agentenv/snapshot/blobs.h"

#include <errno.h>
#include <string.h>

struct blobs {
    const struct blobs_kind *kind;
    void *self;
};

static const struct blobs_kind *const kinds[] = {&blobs_dir, &blobs_s3};

struct blobs *blobs_open(const char *location, struct lh_error *err)
{
    lh_auto(blobs) b = calloc(1, sizeof *b);

    if (!b)
        return lh_fail_errno(err, ENOMEM, "%s", location), NULL;
    for (size_t i = 0; i < LH_ARRAY_SIZE(kinds); i++) {
        size_t n = strlen(kinds[i]->scheme);
        if (strncmp(location, kinds[i]->scheme, n) != 0)
            continue;
        b->kind = kinds[i];
        b->self = b->kind->open(location + n, err);
        return b->self ? lh_steal(&b) : NULL;
    }
    lh_fail(err, LH_INVALID_ARGUMENT,
            "\"%.200s\" is no store: file:///DIRECTORY or s3://BUCKET/PREFIX", location);
    return NULL;
}

void blobs_close(struct blobs *b)
{
    if (b && b->self)
        b->kind->close(b->self);
    free(b);
}

int blobs_has(struct blobs *b, const char *name, int64_t deadline_ms, bool *has,
              struct lh_error *err)
{
    return b->kind->has(b->self, name, deadline_ms, has, err);
}

int blobs_put(struct blobs *b, const char *name, int fd, int64_t deadline_ms, struct lh_error *err)
{
    return b->kind->put(b->self, name, fd, deadline_ms, err);
}

int blobs_get(struct blobs *b, const char *name, int fd, uint64_t max, int64_t deadline_ms,
              struct lh_error *err)
{
    return b->kind->get(b->self, name, fd, max, deadline_ms, err);
}
