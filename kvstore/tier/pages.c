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

/* First page in [at, end) whose bit is `value`; `end` when there is none. */
static uint32_t next_with(const struct kv_pages *p, uint32_t at, uint32_t end, bool value)
{
    while (at < end) {
        uint64_t word = p->taken[at / WORD];
        uint64_t left = (value ? word : ~word) >> at % WORD;
        if (left) {
            at += (uint32_t)__builtin_ctzll(left);
            return at < end ? at : end;
        }
        at = (at / WORD + 1) * WORD;
    }
    return end;
}

/* One past the last page in [begin, end) whose bit is `value`; `begin` when there is none. */
static uint32_t last_with(const struct kv_pages *p, uint32_t begin, uint32_t end, bool value)
{
    while (end > begin) {
        uint32_t at = end - 1;
        uint64_t word = p->taken[at / WORD];
        uint64_t left = (value ? word : ~word) << (WORD - 1 - at % WORD);
        if (left) {
            end -= (uint32_t)__builtin_clzll(left);
            return end > begin ? end : begin;
        }
        end = at / WORD * WORD;
    }
    return begin;
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

/* Of a free run no more is looked at than is needed: an empty tier is one run. */
static bool find_up(struct kv_pages *p, uint32_t count, uint32_t *first)
{
    uint32_t at = p->low = next_with(p, p->low, p->n, false);

    while (at < p->high && p->high - at >= count) {
        uint32_t end = next_with(p, at, at + count, true);
        if (end - at == count) {
            *first = at;
            return true;
        }
        at = next_with(p, end, p->n, false);
    }
    return false;
}

static bool find_down(struct kv_pages *p, uint32_t count, uint32_t *first)
{
    uint32_t end = p->high = last_with(p, 0, p->high, false);

    while (end > p->low && end - p->low >= count) {
        uint32_t at = last_with(p, end - count, end, true);
        if (at == end - count) {
            *first = at;
            return true;
        }
        end = last_with(p, 0, at, false);
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
