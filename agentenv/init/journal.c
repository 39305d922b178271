#include <stdlib.h>
#include <string.h>

#include "agentenv/init/init.h"

struct piece {
    uint32_t stream, len;
};

void journal_init(struct journal *j, size_t cap)
{
    *j = (struct journal){.cap = cap};
}

void journal_finish(struct journal *j)
{
    free(j->bytes);
    j->bytes = NULL;
}

static bool reserve(struct journal *j, size_t more)
{
    size_t size = j->size ? j->size : 4096;

    while (size - j->used < more)
        size *= 2;
    if (size == j->size)
        return true;
    char *bytes = realloc(j->bytes, size);
    if (!bytes)
        return false;
    j->bytes = bytes;
    j->size = size;
    return true;
}

/* The header is stored unaligned; memcpy reads it back. */
void journal_append(struct journal *j, enum wire_event_kind stream, const void *data, size_t len)
{
    size_t room = j->cap - j->kept, keep = len < room ? len : room;
    struct piece p = {stream, (uint32_t)keep};

    j->produced += len;
    if (keep == 0 || !reserve(j, sizeof p + keep))
        return;
    memcpy(j->bytes + j->used, &p, sizeof p);
    memcpy(j->bytes + j->used + sizeof p, data, keep);
    j->used += sizeof p + keep;
    j->kept += keep;
}

bool journal_next(const struct journal *j, size_t *cursor, enum wire_event_kind *stream,
                  const char **data, size_t *len)
{
    struct piece p;

    if (*cursor >= j->used)
        return false;
    memcpy(&p, j->bytes + *cursor, sizeof p);
    *stream = p.stream;
    *data = j->bytes + *cursor + sizeof p;
    *len = p.len;
    *cursor += sizeof p + p.len;
    return true;
}
