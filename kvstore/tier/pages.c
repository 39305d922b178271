#include "kvstore/tier/pages.h"

#include <errno.h>
#include <stdlib.h>

enum { WORD = 64 };

int kv_pages_init(struct kv_pages *p, uint32_t n, struct lh_error *err)
{
    *p = (struct kv_pages){.n = n, .high = n};
    p->taken = calloc((n + WORD - 1) / WORD, sizeof *p->taken);
    if (!p->taken)
        return lh_fail_errno(err, ENOMEM, "page table of %u pages", n);
    return 0;
}

void kv_pages_finish(struct kv_pages *p)
{
    free(p->taken);
}

/* First page at or above `at` whose bit is `value`; `n` when there is none. */
static uint32_t next_with(const struct kv_pages *p, uint32_t at, bool value)
{
    while (at < p->n) {
        uint64_t word = p->taken[at / WORD];
        uint64_t left = (value ? word : ~word) >> at % WORD;
        if (left) {
            at += (uint32_t)__builtin_ctzll(left);
            return at < p->n ? at : p->n;
        }
        at = (at / WORD + 1) * WORD;
    }
    return p->n;
}

/* One past the last page below `end` whose bit is `value`; 0 when there is none. */
static uint32_t last_with(const struct kv_pages *p, uint32_t end, bool value)
{
    while (end) {
        uint32_t at = end - 1;
        uint64_t word = p->taken[at / WORD];
        uint64_t left = (value ? word : ~word) << (WORD - 1 - at % WORD);
        if (left)
            return end - (uint32_t)__builtin_clzll(left);
        end = at / WORD * WORD;
    }
    return 0;
}

static void mark(struct kv_pages *p, uint32_t first, uint32_t count, bool value)
{
    for (uint32_t i = first; i < first + count; i++) {
        uint64_t bit = (uint64_t)1 << i % WORD;
        if (value)
            p->taken[i / WORD] |= bit;
        else
            p->taken[i / WORD] &= ~bit;
    }
}

static bool find_up(struct kv_pages *p, uint32_t count, uint32_t *first)
{
    uint32_t at = p->low = next_with(p, p->low, false);

    while (at < p->high) {
        uint32_t end = next_with(p, at, true);
        if (end - at >= count) {
            *first = at;
            return true;
        }
        at = next_with(p, end, false);
    }
    return false;
}

static bool find_down(struct kv_pages *p, uint32_t count, uint32_t *first)
{
    uint32_t end = p->high = last_with(p, p->high, false);

    while (end > p->low) {
        uint32_t at = last_with(p, end, true);
        if (end - at >= count) {
            *first = end - count;
            return true;
        }
        end = last_with(p, at, false);
    }
    return false;
}

void kv_pages_take_at(struct kv_pages *p, uint32_t first, uint32_t count)
{
    mark(p, first, count, true);
    p->used += count;
}

bool kv_pages_take(struct kv_pages *p, uint32_t count, enum kv_end end, struct kv_extent *out)
{
    uint32_t first;

    if (count > p->n - p->used)
        return false;
    if (!(end == KV_BOTTOM ? find_up : find_down)(p, count, &first))
        return false;
    kv_pages_take_at(p, first, count);
    *out = (struct kv_extent){.page = first, .pages = count};
    return true;
}

void kv_pages_give(struct kv_pages *p, struct kv_extent *e)
{
    mark(p, e->page, e->pages, false);
    p->used -= e->pages;
    if (e->pages && e->page < p->low)
        p->low = e->page;
    if (e->pages && e->page + e->pages > p->high)
        p->high = e->page + e->pages;
    *e = (struct kv_extent){0};
}
