#include "kvstore/index/policy.h"

#include <string.h>

#include "proto/cleanup.h"

static const double HORIZON_US = 60e6; /* most tools are back by then */
static const double KNEE_TOKENS = 32768;
static const double SMOOTHING = 1.0 / 64;

enum { USES_MAX = 3 };

static uint32_t units_since_boundary(struct kv_index *ix, const struct kv_node *n)
{
    const struct kv_node *at = kv_parent(ix, n);
    uint32_t units = 1;

    for (; at && !kv_node_is_boundary(ix, at); at = kv_parent(ix, at))
        units++;
    return units;
}

/* Tokens' worth of computing that a byte saves. */
static double value_of(struct kv_index *ix, const struct kv_node *n)
{
    const struct kv_geometry *g = &kv_root_of(ix, n)->geometry;
    uint32_t units = units_since_boundary(ix, n);
    double tokens = (double)units * g->unit_tokens;
    double start = (double)(n->unit + 1 - units) * g->unit_tokens;
    double bytes = (double)units * g->block_bytes + g->state_bytes;

    return tokens * (1 + (start + tokens / 2) / KNEE_TOKENS) / bytes;
}

/* What its value adds to the time of its last use. */
static uint64_t bonus_of(struct kv_index *ix, const struct kv_node *n)
{
    double value = value_of(ix, n), sum = value + ix->mean_value;

    return sum > 0 ? (uint64_t)(HORIZON_US * value / sum) : 0;
}

static void touch_value(struct kv_index *ix, struct kv_node *n)
{
    double value = value_of(ix, n);

    ix->mean_value =
        ix->mean_value > 0 ? ix->mean_value + SMOOTHING * (value - ix->mean_value) : value;
    n->rank = kv_index_tick(ix) + bonus_of(ix, n);
}

static void touch_recency(struct kv_index *ix, struct kv_node *n)
{
    n->rank = kv_index_tick(ix);
}

/* ---- S3-FIFO ---- */

static uint32_t fingerprint(const struct kv_node *n)
{
    uint32_t f;

    memcpy(&f, n->hash.bytes + 4, sizeof f);
    return f ? f : 1;
}

/* By hash instead of in a queue: a ghost is forgotten when another takes its place. */
static uint32_t *ghost_of(struct kv_index *ix, const struct kv_node *n)
{
    return &ix->ghosts[fingerprint(n) % KV_GHOSTS];
}

static void touch_fifo(struct kv_index *ix, struct kv_node *n)
{
    if (n->uses < USES_MAX && n->queued_before)
        n->uses++;
    if (n->queued_before)
        return;
    n->queued_before = true;
    n->main = *ghost_of(ix, n) == fingerprint(n);
    n->rank = kv_index_tick(ix);
}

static bool spare_fifo(struct kv_index *ix, struct kv_node *n)
{
    if (!n->uses) {
        if (!n->main)
            *ghost_of(ix, n) = fingerprint(n);
        return false;
    }
    n->uses = n->main ? (uint8_t)(n->uses - 1) : 0;
    n->main = true;
    n->rank = kv_index_tick(ix);
    return true;
}

static const struct kv_policy policies[] = {
    {.name = "value", .touch = touch_value, .bonus = bonus_of},
    {.name = "lru", .touch = touch_recency},
    {.name = "s3-fifo", .touch = touch_fifo, .spare = spare_fifo, .two_queues = true},
};

const struct kv_policy *kv_policy_default(void)
{
    return &policies[0];
}

const struct kv_policy *kv_policy_find(const char *name)
{
    for (size_t i = 0; i < LH_ARRAY_SIZE(policies); i++)
        if (!strcmp(policies[i].name, name))
            return &policies[i];
    return NULL;
}
