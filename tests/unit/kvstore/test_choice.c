/* Loop C, and the rates it is made from. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>

#include "kvstore/throttle.h"

static const double A = 1e-5, C = 2e-10; /* seconds a token, and a token looking at a token */

/* An engine that has run passes of many lengths. */
static struct kv_compute engine(double slowness)
{
    struct kv_compute c;

    kv_compute_init(&c, 4096);
    kv_compute_pass(&c, 8, 0, 0, 0.01);
    for (int i = 0; i < 300; i++) {
        double n = 500 + i % 7 * 300, start = i % 11 * 10000, contexts = n * (start + n / 2);
        kv_compute_pass(&c, 8, n, contexts, slowness * (A * n + C * contexts) + 0.01);
    }
    return c;
}

static struct kv_lanes store(double bytes_per_s)
{
    struct kv_lanes l;

    kv_lanes_init(&l, 1ull << 40, 0, 0);
    l.load.per_s = l.spill.per_s = bytes_per_s;
    return l;
}

/* 64 K tokens of a Kimi-Linear-48B. */
static const struct kv_case prefix = {
    .unit_tokens = 512,
    .block_bytes = 512 * 8064,
    .state_bytes = 43417600,
    .stored = 128,
    .floor_tokens = 1024,
    .reuse = 1,
};

Test(rates, computing_is_told_from_looking_back)
{
    struct kv_compute c = engine(1);

    cr_assert(epsilon_eq(dbl, c.a_s, A, A / 100));
    cr_assert(epsilon_eq(dbl, c.c_s, C, C / 100));
    cr_assert(epsilon_eq(dbl, kv_compute_seconds(&c, 1000, 5096), A * 4096 + C * 4096 * 3048 + 0.01,
                         1e-4));
}

Test(rates, an_engine_that_slows_down_is_followed)
{
    struct kv_compute c = engine(1);

    for (int i = 0; i < 200; i++)
        kv_compute_pass(&c, 0, 2048, 2048 * 20000.0, 4 * (A * 2048 + C * 2048 * 20000));
    cr_assert(epsilon_eq(dbl, kv_compute_seconds(&c, 18976, 21024),
                         4 * (A * 2048 + C * 2048 * 20000) + 0.005, 2e-3));
}

Test(rates, passes_of_one_length_keep_the_ratio)
{
    struct kv_compute c = engine(1);
    double ratio = c.c_s / c.a_s;

    for (int i = 0; i < 1000; i++)
        kv_compute_pass(&c, 0, 1000, 1000 * 500.0, 2 * (A * 1000 + C * 1000 * 500));
    cr_assert(epsilon_eq(dbl, c.c_s / c.a_s, ratio, ratio / 4));
    cr_assert(epsilon_eq(dbl, kv_compute_seconds(&c, 0, 1000),
                         2 * (A * 1000 + C * 1000 * 500) + 0.01 * 1000 / 4096, 1e-4));
}

Test(choice, the_sooner_way_is_taken)
{
    struct kv_compute c = engine(1);
    struct kv_lanes slow = store(1e7), fast = store(1e11);

    cr_assert(eq(int, kv_choose_restore(&prefix, &slow, &c).decision, KV_RESTORE_COMPUTE));
    cr_assert(eq(int, kv_choose_restore(&prefix, &fast, &c).decision, KV_RESTORE_LOAD));
}

Test(choice, between_them_both_ways_end_together)
{
    struct kv_compute c = engine(1);
    struct kv_lanes l = store(0.6e9);
    struct kv_plan p = kv_choose_restore(&prefix, &l, &c);
    double tail = (double)(128 - p.split) * 512 * 8064 + 43417600;

    cr_assert(eq(int, p.decision, KV_RESTORE_SPLIT));
    cr_assert(lt(dbl, p.plan_s, 0.7 * p.load_s));
    cr_assert(lt(dbl, p.plan_s, 0.7 * p.compute_s));
    cr_assert(
        epsilon_eq(dbl, tail / 0.6e9, kv_compute_seconds(&c, 0, (double)p.split * 512), 0.02));
}

Test(choice, a_queue_before_one_way_moves_the_split)
{
    struct kv_compute c = engine(1);
    struct kv_lanes l = store(0.6e9);
    struct kv_case k = prefix;
    struct kv_op queued = {.class = KV_LANE_LOAD, .flow = 1, .bytes = 100000000};
    size_t even = kv_choose_restore(&k, &l, &c).split;

    k.compute_wait_s = 0.2;
    cr_assert(lt(sz, kv_choose_restore(&k, &l, &c).split, even));
    k.compute_wait_s = 0;
    kv_lanes_add(&l, &queued, 0);
    k.load_wait_s = kv_lanes_wait_s(&l, false);
    cr_assert(gt(sz, kv_choose_restore(&k, &l, &c).split, even));
}

Test(choice, what_is_unknown_is_tried_and_what_is_short_is_not)
{
    struct kv_compute c = engine(1), nothing;
    struct kv_lanes l = store(0), fast = store(1e11);
    struct kv_case k = prefix;

    kv_compute_init(&nothing, 4096);
    cr_assert(eq(int, kv_choose_restore(&k, &l, &c).decision, KV_RESTORE_PROBE));
    cr_assert(eq(int, kv_choose_restore(&k, &fast, &nothing).decision, KV_RESTORE_PROBE));
    k.have = 126;
    cr_assert(eq(int, kv_choose_restore(&k, &fast, &c).decision, KV_RESTORE_SHORT));
    k.have = 128;
    k.floor_tokens = 0;
    cr_assert(eq(int, kv_choose_restore(&k, &fast, &c).decision, KV_RESTORE_SHORT));
}

Test(choice, a_load_that_would_be_late_is_computed)
{
    struct kv_compute c = engine(30);
    struct kv_lanes l = store(1e8);
    struct kv_case k = prefix;

    k.left_s = 1;
    cr_assert(eq(int, kv_choose_restore(&k, &l, &c).decision, KV_RESTORE_LATE));
}

Test(choice, the_longer_queue_is_spared)
{
    struct kv_compute c = engine(1);
    struct kv_lanes l = store(0.6e9);
    struct kv_case k = prefix;
    size_t alone = kv_choose_restore(&k, &l, &c).split;

    k.computing = 20;
    cr_assert(eq(int, kv_choose_restore(&k, &l, &c).decision, KV_RESTORE_LOAD));
    k.loading = 20;
    k.computing = 2;
    cr_assert(gt(sz, kv_choose_restore(&k, &l, &c).split, alone));
}

Test(choice, a_spill_pays_for_a_busy_store)
{
    struct kv_compute c = engine(1);
    struct kv_lanes l = store(0.5e9), fast = store(8e9);
    struct kv_case k = prefix, turn = prefix;

    turn.have = 124; /* four units more than are stored: little to save, a whole state to write */
    cr_assert(eq(int, kv_choose_spill(&turn, &l, &c).decision, KV_SPILL_WORTH));
    turn.loading = 1;
    cr_assert(eq(int, kv_choose_spill(&turn, &l, &c).decision, KV_SPILL_WORTHLESS));
    cr_assert(eq(int, kv_choose_spill(&turn, &fast, &c).decision, KV_SPILL_WORTH));
    turn.computing = 20;
    cr_assert(eq(int, kv_choose_spill(&turn, &l, &c).decision, KV_SPILL_WORTH));
    k.reuse = 0;
    cr_assert(eq(int, kv_choose_spill(&k, &l, &c).decision, KV_SPILL_DYING));
}
