/* The output of one exec, in memory until a reader has it.
 *
 * Pieces of two streams in the order of arrival, each behind a header with its position in the
 * whole output, so that a reader who lost its connection goes on at the byte where it was.  A
 * journal keeps either the head of the output (a command's result: what follows is counted and
 * dropped) or the tail (a terminal: the oldest pieces are dropped, never one that an attached
 * reader still has to get). */
#include <stdlib.h>
#include <string.h>

#include "agentenv/init/init.h"

struct piece {
    uint64_t offset; /* of its first byte in the output */
    uint32_t stream, len;
};

void journal_init(struct journal *j, size_t cap, bool tail)
{
    *j = (struct journal){.cap = cap, .tail = tail};
}

void journal_finish(struct journal *j)
{
    free(j->bytes);
    j->bytes = NULL;
}

/* Headers are stored unaligned; memcpy reads them back. */
static struct piece piece_at(const struct journal *j, size_t at)
{
    struct piece p;

    memcpy(&p, j->bytes + at, sizeof p);
    return p;
}

static void close_gap(struct journal *j)
{
    memmove(j->bytes, j->bytes + j->start, j->used - j->start);
    j->base += j->start;
    j->used -= j->start;
    j->start = 0;
}

static bool reserve(struct journal *j, size_t more)
{
    size_t size = j->size ? j->size : 4096;

    if (j->start > 0 && j->start >= j->used / 2)
        close_gap(j);
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

void journal_append(struct journal *j, enum wire_event_kind stream, const void *data, size_t len)
{
    size_t room = j->tail ? len : j->cap - j->kept, keep = len < room ? len : room;
    struct piece p = {j->produced, stream, (uint32_t)keep};

    j->produced += len;
    if (keep == 0 || !reserve(j, sizeof p + keep))
        return;
    memcpy(j->bytes + j->used, &p, sizeof p);
    memcpy(j->bytes + j->used + sizeof p, data, keep);
    j->used += sizeof p + keep;
    j->kept += keep;
}

bool journal_full(const struct journal *j)
{
    return j->tail && j->used - j->start >= j->cap;
}

void journal_trim(struct journal *j, const struct journal_cursor *reader)
{
    while (journal_full(j) && (!reader || j->base + j->start < reader->at)) {
        struct piece p = piece_at(j, j->start);
        j->start += sizeof p + p.len;
        j->kept -= p.len;
    }
}

struct journal_cursor journal_seek(const struct journal *j, uint64_t offset)
{
    size_t at = j->start;

    for (; at < j->used; at += sizeof(struct piece) + piece_at(j, at).len) {
        struct piece p = piece_at(j, at);
        if (p.offset + p.len > offset)
            return (struct journal_cursor){j->base + at, offset > p.offset ? offset : p.offset};
    }
    return (struct journal_cursor){j->base + at, offset < j->produced ? offset : j->produced};
}

bool journal_next(const struct journal *j, struct journal_cursor *c, struct journal_piece *out)
{
    if (c->at < j->base + j->start) /* its pieces were dropped while it was away */
        *c = (struct journal_cursor){j->base + j->start, 0};
    if (c->at >= j->base + j->used)
        return false;
    size_t at = c->at - j->base;
    struct piece p = piece_at(j, at);
    size_t skip = c->offset > p.offset ? c->offset - p.offset : 0;
    *out = (struct journal_piece){p.stream, p.offset + skip, j->bytes + at + sizeof p + skip,
                                  p.len - skip};
    *c = (struct journal_cursor){c->at + sizeof p + p.len, p.offset + p.len};
    return true;
}
