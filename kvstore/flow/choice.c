#include <math.h>

#include "kvstore/throttle.h"

static const double WORTH_SPLITTING = 0.9; /* of the better way alone */
static const double SPILL_PATIENCE_S = 0.5;

static double tail_bytes(const struct kv_case *k, size_t from)
{
    return from < k->stored
               ? (double)(k->stored - from) * (double)k->block_bytes + (double)k->state_bytes
               : 0;
}

static double load_seconds(const struct kv_case *k, const struct kv_lanes *l, size_t from)
{
    double bytes = tail_bytes(k, from);

    return bytes && l->load.per_s > 0 ? k->load_wait_s + bytes / l->load.per_s : 0;
}

static double compute_seconds(const struct kv_case *k, const struct kv_compute *c, size_t to)
{
    double unit = k->unit_tokens;

    return to > k->have ? k->compute_wait_s +
                              kv_compute_seconds(c, (double)k->have * unit, (double)to * unit)
                        : 0;
}

/* What a plan costs everybody: its own time, and what others wait meanwhile. */
static double cost(const struct kv_case *k, const struct kv_lanes *l, const struct kv_compute *c,
                   size_t x)
{
    double load = load_seconds(k, l, x), compute = compute_seconds(k, c, x);
    double device = l->load.per_s > 0 ? tail_bytes(k, x) / l->load.per_s : 0;
    double engine = compute > 0 ? compute - k->compute_wait_s : 0;

    return fmax(load, compute) + device * k->loading + engine * k->computing;
}

/* The cost is convex in x as long as something is loaded. */
static size_t cheapest_split(const struct kv_case *k, const struct kv_lanes *l,
                             const struct kv_compute *c)
{
    size_t low = k->have, high = k->stored - 1;

    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (cost(k, l, c, mid + 1) < cost(k, l, c, mid))
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static struct kv_plan plan_of(enum kv_decision d, size_t split, double seconds)
{
    return (struct kv_plan){.decision = d, .split = split, .plan_s = seconds};
}

static struct kv_plan best(const struct kv_case *k, const struct kv_lanes *l,
                           const struct kv_compute *c)
{
    double load = cost(k, l, c, k->have), compute = cost(k, l, c, k->stored);
    size_t x = cheapest_split(k, l, c);
    struct kv_plan p = load <= compute ? plan_of(KV_RESTORE_LOAD, k->have, load)
                                       : plan_of(KV_RESTORE_COMPUTE, k->stored, compute);

    if (x > k->have && (k->stored - x) * k->unit_tokens > k->floor_tokens &&
        cost(k, l, c, x) < WORTH_SPLITTING * p.plan_s)
        p = plan_of(KV_RESTORE_SPLIT, x, 0);
    p.plan_s = fmax(load_seconds(k, l, p.split), compute_seconds(k, c, p.split));
    if (k->left_s > 0 && p.split < k->stored && p.plan_s > k->left_s)
        p = plan_of(KV_RESTORE_LATE, k->stored, compute_seconds(k, c, k->stored));
    return p;
}

struct kv_plan kv_choose_restore(const struct kv_case *k, const struct kv_lanes *l,
                                 const struct kv_compute *c)
{
    struct kv_plan p;

    if (k->stored <= k->have || (k->stored - k->have) * k->unit_tokens <= k->floor_tokens)
        p = plan_of(KV_RESTORE_SHORT, k->stored, 0);
    else if (l->load.per_s <= 0 || !kv_compute_known(c))
        p = plan_of(KV_RESTORE_PROBE, k->have, 0);
    else
        p = best(k, l, c);
    p.load_s = load_seconds(k, l, k->have);
    p.compute_s = compute_seconds(k, c, k->stored);
    return p;
}

struct kv_plan kv_choose_spill(const struct kv_case *k, const struct kv_lanes *l,
                               const struct kv_compute *c)
{
    double unit = k->unit_tokens, blocks = (double)(k->stored - k->have) * (double)k->block_bytes;
    double bytes = blocks + (double)k->state_bytes;
    double load = l->load.per_s > 0 ? (k->have ? blocks : bytes) / l->load.per_s : 0;
    double compute = kv_compute_seconds(c, (double)k->have * unit, (double)k->stored * unit);
    double saved = compute > 0 ? compute * compute / (compute + load) : 0;
    double write = l->spill.per_s > 0 ? bytes / l->spill.per_s : 0;
    double price = k->loading + kv_lanes_wait_s(l, true) / SPILL_PATIENCE_S;
    struct kv_plan p = {.decision = KV_SPILL_WORTH, .load_s = load, .compute_s = compute};

    p.plan_s = write;
    if (k->reuse <= 0)
        p.decision = KV_SPILL_DYING;
    else if (kv_compute_known(c) && k->reuse * saved * fmax(k->computing, 1) <= price * write)
        p.decision = KV_SPILL_WORTHLESS;
    return p;
}
