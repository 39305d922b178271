#include "kvstore/index/heap.h"

#include <errno.h>
#include <stdlib.h>

#include "kvstore/index/index.h"

int kv_heap_init(struct kv_heap *h, uint32_t room, struct lh_error *err)
{
    *h = (struct kv_heap){.at = calloc(room, sizeof *h->at)};
    return h->at ? 0 : lh_fail_errno(err, ENOMEM, "eviction order of %u entries", room);
}

void kv_heap_finish(struct kv_heap *h)
{
    free(h->at);
}

static void place(struct kv_heap *h, uint32_t i, struct kv_node *n)
{
    h->at[i] = n;
    n->heap_at = i;
}

static void sift_up(struct kv_heap *h, uint32_t i, struct kv_node *n)
{
    for (; i; i = (i - 1) / 2) {
        struct kv_node *up = h->at[(i - 1) / 2];
        if (up->used <= n->used)
            break;
        place(h, i, up);
    }
    place(h, i, n);
}

static void sift_down(struct kv_heap *h, uint32_t i, struct kv_node *n)
{
    for (;;) {
        uint32_t c = 2 * i + 1;
        if (c + 1 < h->n && h->at[c + 1]->used < h->at[c]->used)
            c++;
        if (c >= h->n || n->used <= h->at[c]->used)
            break;
        place(h, i, h->at[c]);
        i = c;
    }
    place(h, i, n);
}

void kv_heap_add(struct kv_heap *h, struct kv_node *n)
{
    sift_up(h, h->n++, n);
}

void kv_heap_remove(struct kv_heap *h, struct kv_node *n)
{
    uint32_t hole = n->heap_at;
    struct kv_node *last = h->at[--h->n];

    if (last == n)
        return;
    sift_up(h, hole, last);
    sift_down(h, last->heap_at, last);
}
