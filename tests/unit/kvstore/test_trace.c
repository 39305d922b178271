/* The record of decisions: counted, kept in a ring, read from a file while it is written. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvstore/trace.h"

struct seen {
    unsigned n;
    struct kv_record last;
};

static int see(void *ctx, const struct kv_record *r, int64_t clock_ms)
{
    struct seen *s = ctx;

    cr_assert(gt(i64, clock_ms, 0));
    cr_assert(s->n == 0 || r->at_us > s->last.at_us, "oldest first");
    s->last = *r;
    s->n++;
    return 0;
}

static void path_of(char *path, size_t size, const char *name)
{
    snprintf(path, size, "/tmp/longhaul-trace-%d-%s", (int)getpid(), name);
}

Test(trace, one_trajectory_is_found_among_all)
{
    char path[64];
    struct lh_error err = {0};
    struct seen a = {0}, all = {0};
    uint64_t counts[KV_DECISION_COUNT];

    path_of(path, sizeof path, "one");
    lh_auto(kv_trace) t = kv_trace_create(path, 100, &err);
    cr_assert(ne(ptr, t, NULL), "%s", err.message);
    for (int i = 0; i < 50; i++) {
        struct kv_record r = {.at_us = i, .decision = i % 2 ? KV_SPILLED : KV_RESTORE_SPLIT};
        kv_trace_add(t, &r, i % 5 ? "b" : "a");
    }
    cr_assert(eq(int, kv_trace_read(path, "a", see, &a, &err), 0));
    cr_assert(eq(u32, a.n, 10));
    cr_assert(eq(int, kv_trace_read(path, NULL, see, &all, &err), 0));
    cr_assert(eq(u32, all.n, 50));
    cr_assert(eq(int, kv_trace_read_counts(path, counts, &err), 0));
    cr_assert(eq(u64, counts[KV_SPILLED], 25));
    cr_assert(eq(u64, kv_trace_count(t, KV_RESTORE_SPLIT), 25));
    unlink(path);
}

Test(trace, the_ring_keeps_the_newest_and_counts_all)
{
    char path[64], name[100];
    struct lh_error err = {0};
    struct seen s = {0};

    path_of(path, sizeof path, "ring");
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    lh_auto(kv_trace) t = kv_trace_create(path, 7, &err);
    cr_assert(ne(ptr, t, NULL));
    for (int i = 0; i < 1000; i++)
        kv_trace_add(t, &(struct kv_record){.at_us = i, .decision = KV_LOADED}, name);
    cr_assert(eq(int, kv_trace_read(path, name, see, &s, &err), 0));
    cr_assert(eq(u32, s.n, 7));
    cr_assert(eq(i64, s.last.at_us, 999));
    cr_assert(eq(sz, strlen(s.last.trajectory), KV_RECORD_TRAJECTORY));
    cr_assert(eq(u64, kv_trace_count(t, KV_LOADED), 1000));
    unlink(path);
}

Test(trace, what_is_no_trace_is_refused)
{
    char path[64];
    struct lh_error err = {0};
    struct seen s = {0};

    path_of(path, sizeof path, "bad");
    cr_assert(eq(int, kv_trace_read(path, "a", see, &s, &err), LH_NOT_FOUND));
    FILE *f = fopen(path, "w");
    for (int i = 0; i < 5000; i++)
        fputc('x', f);
    fclose(f);
    cr_assert(eq(int, kv_trace_read(path, "a", see, &s, &err), LH_DATA_LOSS));
    cr_assert(eq(int, truncate(path, 10), 0));
    cr_assert(eq(int, kv_trace_read(path, "a", see, &s, &err), LH_DATA_LOSS));
    unlink(path);
}

Test(trace, every_decision_has_a_loop_and_a_text)
{
    for (unsigned d = 0; d < KV_DECISION_COUNT; d++) {
        cr_assert(ge(chr, kv_decision_loop(d), 'A'));
        cr_assert(le(chr, kv_decision_loop(d), 'C'));
        cr_assert(gt(sz, strlen(kv_decision_text(d)), 0));
    }
    cr_assert(eq(int, strcmp(kv_decision_name(KV_DECISION_COUNT), "?"), 0));
}
