/* Loop B.  Why fair between few instead of all: taking turns between a hundred loads makes every
 * one of them end last, and each holds staging memory meanwhile.  So few loads have begun, chosen
 * shortest first, with age as the tie that always wins in the end; those few share. */
#include <math.h>
#include <stdlib.h>

#include "kvstore/throttle.h"

static const double SPILL_SHARE = 0.15, HEADROOM = 1.25;
static const double AGE_S = 5; /* waited so long, a load goes by age alone */
static const double LATENCY_S = 10;

void kv_lanes_init(struct kv_lanes *l, uint64_t staging_limit, uint64_t quantum, int64_t now_us)
{
    *l = (struct kv_lanes){.staging_limit = staging_limit,
                           .quantum = quantum ? quantum : KV_QUANTUM_BYTES,
                           .latency_us = now_us};
}

/* One operation is always let through, however large. */
static bool staging_fits(const struct kv_lanes *l, uint64_t bytes, double share)
{
    return !l->staging || (double)(l->staging + bytes) <= share * (double)l->staging_limit;
}

static void append(struct kv_op **list, struct kv_op *op)
{
    while (*list)
        list = &(*list)->next;
    op->next = NULL;
    *list = op;
}

static void unlink_op(struct kv_op **list, const struct kv_op *op)
{
    while (*list && *list != op)
        list = &(*list)->next;
    if (*list)
        *list = op->next;
}

/* A flow's operations of a class are served one after the other. */
static double first_tag(const struct kv_lanes *l, const struct kv_op *op)
{
    double tag = l->clock[op->class];

    for (const struct kv_op *o = l->ops[op->class]; o; o = o->next)
        if (o->flow == op->flow && o != op && o->active)
            tag = fmax(tag, o->tag + (double)o->bytes);
    return tag;
}

static void activate(struct kv_lanes *l, struct kv_op *op)
{
    op->active = true;
    op->tag = first_tag(l, op);
    l->staging += op->staging;
}

bool kv_lanes_add(struct kv_lanes *l, struct kv_op *op, int64_t now_us)
{
    op->queued_us = now_us;
    op->active = op->started = false;
    op->in_flight = 0;
    if (op->class == KV_LANE_SPILL && !staging_fits(l, op->staging, 1))
        return false;
    if (op->class == KV_LANE_SPILL)
        activate(l, op);
    append(&l->ops[op->class], op);
    return true;
}

void kv_lanes_promote(struct kv_lanes *l, struct kv_op *op)
{
    if (op->class != KV_LANE_PREFETCH)
        return;
    unlink_op(&l->ops[KV_LANE_PREFETCH], op);
    op->class = KV_LANE_LOAD;
    if (op->active)
        op->tag = first_tag(l, op);
    append(&l->ops[KV_LANE_LOAD], op);
}

static struct kv_op *older_spill(const struct kv_lanes *l, const struct kv_op *load)
{
    for (struct kv_op *o = l->ops[KV_LANE_SPILL]; o; o = o->next)
        if (o->flow == load->flow && o->queued_us <= load->queued_us)
            return o;
    return NULL;
}

/* When it would end if it were alone, counted from when it was added; old ones by age only. */
static double urgency(const struct kv_lanes *l, const struct kv_op *op, int64_t now_us)
{
    double queued = (double)op->queued_us * 1e-6, waited = (double)now_us * 1e-6 - queued;
    double own = l->load.per_s > 0 ? (double)op->bytes / l->load.per_s : 0;

    return queued + (waited < AGE_S ? own : 0);
}

static struct kv_op *most_urgent(const struct kv_lanes *l, enum kv_lane_class class, double share,
                                 int64_t now_us)
{
    struct kv_op *best = NULL;

    for (struct kv_op *o = l->ops[class]; o; o = o->next)
        if (!o->active && staging_fits(l, o->staging, share) &&
            (!best || urgency(l, o, now_us) < urgency(l, best, now_us)))
            best = o;
    return best;
}

static unsigned active_loads(const struct kv_lanes *l)
{
    unsigned n = 0;

    for (int class = KV_LANE_LOAD; class <= KV_LANE_PREFETCH; class ++)
        for (const struct kv_op *o = l->ops[class]; o; o = o->next)
            n += o->active && o->bytes;
    return n;
}

static void activate_loads(struct kv_lanes *l, enum kv_lane_class class, double share,
                           int64_t now_us)
{
    for (unsigned n = active_loads(l); n < KV_ACTIVE_LOADS; n++) {
        struct kv_op *op = most_urgent(l, class, share, now_us);
        if (!op)
            return;
        activate(l, op);
    }
}

/* The active operation whose turn it is. */
static struct kv_op *by_tag(const struct kv_lanes *l, enum kv_lane_class class)
{
    struct kv_op *best = NULL;

    for (struct kv_op *o = l->ops[class]; o; o = o->next)
        if (o->active && o->bytes && (!best || o->tag < best->tag))
            best = o;
    return best;
}

static struct kv_op *next_load(struct kv_lanes *l, int64_t now_us)
{
    activate_loads(l, KV_LANE_LOAD, 1, now_us);
    struct kv_op *op = by_tag(l, KV_LANE_LOAD);
    if (op)
        return op;
    activate_loads(l, KV_LANE_PREFETCH, 0.5, now_us);
    return by_tag(l, KV_LANE_PREFETCH);
}

static struct kv_op *choose(struct kv_lanes *l, int64_t now_us)
{
    struct kv_op *spill = by_tag(l, KV_LANE_SPILL), *load = next_load(l, now_us), *before;

    if (!load || (spill && l->owed >= l->quantum))
        return spill;
    before = older_spill(l, load);
    if (!before)
        return load;
    return before->bytes ? before : spill; /* its last piece is under way */
}

static uint64_t flight_limit(const struct kv_lanes *l)
{
    double enough = HEADROOM * l->load.per_s * l->latency_s;

    return enough > (double)(2 * l->quantum) ? (uint64_t)enough : 2 * l->quantum;
}

struct kv_op *kv_lanes_next(struct kv_lanes *l, int64_t now_us, uint64_t *bytes)
{
    if (l->in_flight && l->in_flight + l->quantum > flight_limit(l))
        return NULL;
    struct kv_op *op = choose(l, now_us);
    if (!op)
        return NULL;
    *bytes = op->whole || op->bytes < l->quantum ? op->bytes : l->quantum;
    if (!l->in_flight)
        l->last_us = now_us;
    if (op->class == KV_LANE_SPILL)
        l->owed -= *bytes < l->owed ? *bytes : l->owed;
    else if (l->ops[KV_LANE_SPILL])
        l->owed += (uint64_t)(SPILL_SHARE * (double)*bytes);
    l->clock[op->class] = fmax(l->clock[op->class], op->tag);
    op->tag += (double)*bytes;
    op->started = true;
    op->bytes -= *bytes;
    op->in_flight += *bytes;
    l->in_flight += *bytes;
    return op;
}

static void note_latency(struct kv_lanes *l, double seconds, int64_t now_us)
{
    if ((double)(now_us - l->latency_us) * 1e-6 > LATENCY_S) {
        l->latency_s = l->latency_next_s;
        l->latency_next_s = 0;
        l->latency_us = now_us;
    }
    if (!l->latency_s || seconds < l->latency_s)
        l->latency_s = seconds;
    if (!l->latency_next_s || seconds < l->latency_next_s)
        l->latency_next_s = seconds;
}

/* The time since the piece before it ended is what this piece took of the store. */
void kv_lanes_done(struct kv_lanes *l, struct kv_op *op, uint64_t bytes, int64_t began_us,
                   int64_t now_us, bool moved)
{
    struct kv_rate *rate = op->class == KV_LANE_SPILL ? &l->spill : &l->load;
    int64_t from = l->last_us > began_us ? l->last_us : began_us;

    op->in_flight -= bytes;
    l->in_flight -= bytes;
    if (moved) {
        kv_rate_add(rate, (double)bytes, (double)(now_us - from + 1) * 1e-6);
        note_latency(l, (double)(now_us - began_us + 1) * 1e-6, now_us);
    }
    l->last_us = now_us;
}

void kv_lanes_remove(struct kv_lanes *l, struct kv_op *op)
{
    unlink_op(&l->ops[op->class], op);
    if (op->active)
        l->staging -= op->staging;
    op->active = false;
}

static struct kv_op *newest_spill(const struct kv_lanes *l, uint64_t flow)
{
    struct kv_op *newest = NULL;

    for (struct kv_op *o = l->ops[KV_LANE_SPILL]; o; o = o->next)
        if (o->flow == flow)
            newest = o;
    return newest;
}

struct kv_op *kv_lanes_overdue(struct kv_lanes *l, int64_t now_us)
{
    for (int class = 0; class < KV_LANE_CLASSES; class ++)
        for (struct kv_op *o = l->ops[class]; o; o = o->next) {
            bool late = o->deadline_us && now_us > o->deadline_us;
            late |=
                class == KV_LANE_SPILL && o->start_by_us && !o->started && now_us > o->start_by_us;
            struct kv_op *first = late && class == KV_LANE_SPILL ? newest_spill(l, o->flow) : o;
            if (late && !first->in_flight)
                return first;
        }
    return NULL;
}

double kv_lanes_wait_s(const struct kv_lanes *l, bool spill)
{
    double rate = spill ? l->spill.per_s : l->load.per_s, bytes = 0;

    for (int class = 0; class < KV_LANE_CLASSES; class ++) {
        if ((class == KV_LANE_SPILL) != spill)
            continue;
        for (const struct kv_op *o = l->ops[class]; o; o = o->next)
            bytes += (double)(o->bytes + o->in_flight);
    }
    return rate > 0 ? bytes / rate : 0;
}

/* Bytes of another load that move before the last one of `op`: those that have begun take turns
 * with one that has begun; for one that has not, they and the older ones go before. */
static double bytes_before(const struct kv_op *other, const struct kv_op *op)
{
    double theirs = (double)(other->bytes + other->in_flight);
    double own = (double)(op->bytes + op->in_flight);

    if (op->active)
        return !other->active ? 0 : theirs < own ? theirs : own;
    return other->active || other->queued_us <= op->queued_us ? theirs : 0;
}

double kv_lanes_left_s(const struct kv_lanes *l, const struct kv_op *op)
{
    double bytes = (double)(op->bytes + op->in_flight);

    for (const struct kv_op *o = l->ops[op->class]; o; o = o->next)
        if (o != op)
            bytes += bytes_before(o, op);
    return l->load.per_s > 0 ? bytes / l->load.per_s : 0;
}
