#include "kvstore/index/heap.h"

#include <stdlib.h>

#include "kvstore/index/index.h"

enum { FIRST_ROOM = 64 };

void kv_heap_finish(struct kv_heap *h)
{
    free(h->at);
    *h = (struct kv_heap){0};
}

static uint64_t key(const struct kv_heap *h, const struct kv_node *n)
{
    return h->place && n->probation ? 0 : n->rank;
}

/* The nodes that one reader passed have one rank; of those, the end of a chain goes first. */
static bool goes_before(const struct kv_heap *h, const struct kv_node *a, const struct kv_node *b)
{
    uint64_t ka = key(h, a), kb = key(h, b);

    return ka < kb || (ka == kb && a->unit > b->unit);
}

static struct kv_node *node(const struct kv_index *ix, const struct kv_heap *h, uint32_t i)
{
    return &ix->nodes[h->at[i]];
}

static void place(struct kv_index *ix, struct kv_heap *h, uint32_t i, struct kv_node *n)
{
    h->at[i] = kv_ref_of(ix, n);
    n->place[h->place] = i;
}

static void sift_up(struct kv_index *ix, struct kv_heap *h, uint32_t i, struct kv_node *n)
{
    for (; i; i = (i - 1) / 2) {
        struct kv_node *up = node(ix, h, (i - 1) / 2);
        if (!goes_before(h, n, up))
            break;
        place(ix, h, i, up);
    }
    place(ix, h, i, n);
}

static void sift_down(struct kv_index *ix, struct kv_heap *h, uint32_t i, struct kv_node *n)
{
    for (;;) {
        uint32_t c = 2 * i + 1;
        if (c + 1 < h->n && goes_before(h, node(ix, h, c + 1), node(ix, h, c)))
            c++;
        if (c >= h->n || !goes_before(h, node(ix, h, c), n))
            break;
        place(ix, h, i, node(ix, h, c));
        i = c;
    }
    place(ix, h, i, n);
}

bool kv_heap_add(struct kv_index *ix, struct kv_heap *h, struct kv_node *n)
{
    if (h->n == h->room) {
        uint32_t room = h->room ? 2 * h->room : FIRST_ROOM;
        kv_ref *at = reallocarray(h->at, room, sizeof *at);
        if (!at)
            return false;
        h->at = at;
        h->room = room;
    }
    sift_up(ix, h, h->n++, n);
    return true;
}

void kv_heap_remove(struct kv_index *ix, struct kv_heap *h, struct kv_node *n)
{
    uint32_t hole = n->place[h->place];
    struct kv_node *last = node(ix, h, --h->n);

    if (last == n)
        return;
    sift_up(ix, h, hole, last);
    sift_down(ix, h, last->place[h->place], last);
}

struct kv_node *kv_heap_first(const struct kv_index *ix, const struct kv_heap *h)
{
    return h->n ? node(ix, h, 0) : NULL;
}
