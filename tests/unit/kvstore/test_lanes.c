/* Loop B on a clock of its own: order, fairness, credits, drops. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>

#include "kvstore/throttle.h"

enum { MIB = 1 << 20, SECOND = 1000000 };

/* A store that takes one piece at a time. */
struct device {
    struct kv_lanes lanes;
    int64_t now_us;
    double bytes_per_us;
};

static void begin(struct device *d, uint64_t staging, double mb_per_s)
{
    *d = (struct device){.bytes_per_us = mb_per_s};
    kv_lanes_init(&d->lanes, staging, 4 * MIB, 0);
}

static struct kv_op *move(struct device *d)
{
    uint64_t bytes;
    struct kv_op *op = kv_lanes_next(&d->lanes, d->now_us, &bytes);

    if (!op)
        return NULL;
    int64_t began = d->now_us;
    d->now_us += (int64_t)((double)bytes / d->bytes_per_us);
    kv_lanes_done(&d->lanes, op, bytes, began, d->now_us, true);
    return op;
}

static struct kv_op op_of(enum kv_lane_class class, uint64_t flow, uint64_t bytes)
{
    return (struct kv_op){.class = class, .flow = flow, .bytes = bytes, .staging = bytes};
}

Test(lanes, measures_what_was_delivered_and_follows_a_drift)
{
    struct device d;
    struct kv_op op = op_of(KV_LANE_LOAD, 1, 8192ull * MIB);

    begin(&d, 1ull << 40, 1000);
    kv_lanes_add(&d.lanes, &op, 0);
    for (int i = 0; i < 500; i++)
        move(&d);
    cr_assert(epsilon_eq(dbl, d.lanes.load.per_s, 1e9, 1e7));
    d.bytes_per_us = 250;
    for (int64_t until = d.now_us + 3 * SECOND; d.now_us < until;)
        move(&d);
    cr_assert(epsilon_eq(dbl, d.lanes.load.per_s, 2.5e8, 2.5e7), "a quarter, three seconds later");
    d.now_us += 3600ll * SECOND;
    move(&d);
    cr_assert(epsilon_eq(dbl, d.lanes.load.per_s, 2.5e8, 2.5e7), "a rest is no slowness");
}

Test(lanes, loads_that_have_begun_share_the_store)
{
    struct device d;
    struct kv_op ops[4];
    uint64_t moved[4] = {0};

    begin(&d, 1ull << 40, 1000);
    for (int i = 0; i < 4; i++) {
        ops[i] = op_of(KV_LANE_LOAD, (uint64_t)i, (uint64_t)(i + 1) * 400 * MIB);
        kv_lanes_add(&d.lanes, &ops[i], 0);
    }
    for (int i = 0; i < 40; i++) {
        struct kv_op *op = move(&d);
        moved[op - ops] += 4 * MIB;
    }
    for (int i = 0; i < 4; i++)
        cr_assert(eq(u64, moved[i], 40 * MIB), "flow %d", i);
}

Test(lanes, few_begin_the_shortest_first_but_age_wins)
{
    struct device d;
    struct kv_op large[KV_ACTIVE_LOADS], big, small;

    begin(&d, 1ull << 40, 1000);
    for (int i = 0; i < KV_ACTIVE_LOADS; i++) {
        large[i] = op_of(KV_LANE_LOAD, (uint64_t)i, 1000 * MIB);
        kv_lanes_add(&d.lanes, &large[i], 0);
        move(&d);
    }
    big = op_of(KV_LANE_LOAD, 100, 800 * MIB);
    small = op_of(KV_LANE_LOAD, 101, 8 * MIB);
    kv_lanes_add(&d.lanes, &big, d.now_us);
    kv_lanes_add(&d.lanes, &small, d.now_us);
    for (int i = 0; i < 200; i++)
        move(&d);
    cr_assert(not(big.active), "eight have begun and are not over");
    cr_assert(not(small.active));
    kv_lanes_remove(&d.lanes, &large[0]);
    large[0].bytes = 0;
    move(&d);
    cr_assert(small.active);
    cr_assert(not(big.active));
    struct kv_op late = op_of(KV_LANE_LOAD, 102, 4 * MIB);
    d.now_us += 6 * SECOND;
    kv_lanes_add(&d.lanes, &late, d.now_us);
    kv_lanes_remove(&d.lanes, &large[1]);
    move(&d);
    cr_assert(big.active, "it has waited longer than five seconds");
    cr_assert(not(late.active));
}

Test(lanes, loads_go_first_and_spills_are_not_starved)
{
    struct device d;
    struct kv_op load = op_of(KV_LANE_LOAD, 1, 4000ull * MIB);
    struct kv_op spill = op_of(KV_LANE_SPILL, 2, 4000ull * MIB);
    int spilled = 0;

    begin(&d, 1ull << 40, 1000);
    cr_assert(kv_lanes_add(&d.lanes, &spill, 0));
    kv_lanes_add(&d.lanes, &load, 0);
    cr_assert(eq(ptr, move(&d), &load));
    for (int i = 0; i < 1000; i++)
        spilled += move(&d) == &spill;
    cr_assert(ge(int, spilled, 100));
    cr_assert(le(int, spilled, 150));
}

Test(lanes, a_load_waits_for_the_older_spill_of_its_flow)
{
    struct device d;
    struct kv_op other = op_of(KV_LANE_SPILL, 9, 4 * MIB);
    struct kv_op spill = op_of(KV_LANE_SPILL, 1, 8 * MIB);
    struct kv_op load = op_of(KV_LANE_LOAD, 1, 8 * MIB);

    begin(&d, 1ull << 40, 1000);
    kv_lanes_add(&d.lanes, &other, 0);
    kv_lanes_add(&d.lanes, &spill, 0);
    kv_lanes_add(&d.lanes, &load, 0);
    cr_assert(eq(ptr, move(&d), &spill));
    cr_assert(eq(ptr, move(&d), &spill));
    kv_lanes_remove(&d.lanes, &spill);
    cr_assert(eq(ptr, move(&d), &load));
    cr_assert(eq(ptr, move(&d), &load));
    cr_assert(eq(ptr, move(&d), &other));
}

Test(lanes, staging_bounds_what_has_begun)
{
    struct device d;
    struct kv_op first = op_of(KV_LANE_LOAD, 1, 100 * MIB), second = op_of(KV_LANE_LOAD, 2, MIB);
    struct kv_op spill = op_of(KV_LANE_SPILL, 3, 30 * MIB);

    begin(&d, 64 * MIB, 1000);
    kv_lanes_add(&d.lanes, &first, 0);
    kv_lanes_add(&d.lanes, &second, 1);
    while (first.bytes || second.active)
        cr_assert(ne(ptr, move(&d), NULL));
    cr_assert(eq(ptr, move(&d), NULL), "the large one is let through alone");
    cr_assert(not(kv_lanes_add(&d.lanes, &spill, d.now_us)), "no staging, no spill");
    kv_lanes_remove(&d.lanes, &first);
    cr_assert(eq(ptr, move(&d), &second));
    cr_assert(kv_lanes_add(&d.lanes, &spill, d.now_us));
    kv_lanes_remove(&d.lanes, &second);
    kv_lanes_remove(&d.lanes, &spill);
    cr_assert(eq(u64, d.lanes.staging, 0));
}

Test(lanes, more_than_the_store_can_hide_is_not_in_flight)
{
    struct device d;
    struct kv_op op = op_of(KV_LANE_LOAD, 1, 1000 * MIB);
    uint64_t bytes, flight = 0;

    begin(&d, 1ull << 40, 1000);
    kv_lanes_add(&d.lanes, &op, 0);
    while (kv_lanes_next(&d.lanes, 0, &bytes))
        flight += bytes;
    cr_assert(eq(u64, flight, 8 * MIB), "two pieces before anything is known");
    kv_lanes_done(&d.lanes, &op, 4 * MIB, 0, 40000, true); /* 0.1 GB/s, 40 ms away */
    cr_assert(eq(ptr, kv_lanes_next(&d.lanes, 40000, &bytes), &op));
}

Test(lanes, overdue_spills_leave_tail_first)
{
    struct device d;
    struct kv_op load = op_of(KV_LANE_LOAD, 9, 4000ull * MIB), a[3];

    begin(&d, 1ull << 40, 1000);
    kv_lanes_add(&d.lanes, &load, 0);
    for (int i = 0; i < 3; i++) {
        a[i] = op_of(KV_LANE_SPILL, 1, 400 * MIB);
        a[i].start_by_us = i == 0 ? SECOND : 10 * SECOND;
        kv_lanes_add(&d.lanes, &a[i], i);
    }
    cr_assert(eq(ptr, kv_lanes_overdue(&d.lanes, SECOND), NULL));
    for (int i = 2; i >= 0; i--) {
        cr_assert(eq(ptr, kv_lanes_overdue(&d.lanes, 2 * SECOND), &a[i]), "part %d", i);
        kv_lanes_remove(&d.lanes, &a[i]);
    }
    load.deadline_us = 5 * SECOND;
    cr_assert(eq(ptr, kv_lanes_overdue(&d.lanes, 2 * SECOND), NULL));
    cr_assert(eq(ptr, kv_lanes_overdue(&d.lanes, 6 * SECOND), &load));
}

Test(lanes, a_spill_that_has_begun_is_not_late)
{
    struct device d;
    struct kv_op spill = op_of(KV_LANE_SPILL, 1, 400 * MIB);

    begin(&d, 1ull << 40, 1000);
    spill.start_by_us = SECOND;
    kv_lanes_add(&d.lanes, &spill, 0);
    move(&d);
    cr_assert(eq(ptr, kv_lanes_overdue(&d.lanes, 2 * SECOND), NULL));
}

Test(lanes, a_prefetch_yields_to_loads_until_its_tool_returns)
{
    struct device d;
    struct kv_op early = op_of(KV_LANE_PREFETCH, 1, 100 * MIB);
    struct kv_op load = op_of(KV_LANE_LOAD, 2, 8 * MIB);

    begin(&d, 1ull << 40, 1000);
    kv_lanes_add(&d.lanes, &early, 0);
    cr_assert(eq(ptr, move(&d), &early));
    kv_lanes_add(&d.lanes, &load, d.now_us);
    cr_assert(eq(ptr, move(&d), &load));
    kv_lanes_promote(&d.lanes, &early);
    cr_assert(eq(ptr, move(&d), &early), "its turn: the other has had one");
    cr_assert(eq(ptr, move(&d), &load));
    cr_assert(epsilon_eq(dbl, kv_lanes_wait_s(&d.lanes, false), 92 * 1.048576e6 / 1e9, 1e-3));
}
