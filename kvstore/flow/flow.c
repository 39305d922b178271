#include "kvstore/flow/flow.h"

#include <math.h>

static const double ALPHA = 0.3, HALF_LIFE_US = 500e3;

bool kv_flow_admits(const struct kv_flow *f, const struct kv_share *s, enum kv_direction d,
                    uint64_t bytes)
{
    uint64_t now = s->in_flight[d];

    return now == 0 || (now <= f->limit && bytes <= f->limit - now);
}

double kv_flow_wait_ms(const struct kv_flow *f, enum kv_direction d, int64_t now_us)
{
    const struct kv_lane *l = &f->lanes[d];

    return l->wait_ms * exp2(-(double)(now_us - l->updated_us) / HALF_LIFE_US);
}

double kv_flow_begin(struct kv_flow *f, struct kv_share *s, enum kv_direction d, uint64_t bytes,
                     int64_t now_us)
{
    struct kv_lane *l = &f->lanes[d];
    double wait = l->bytes_per_ms > 0 ? (double)l->in_flight / l->bytes_per_ms : 0;
    double before = kv_flow_wait_ms(f, d, now_us);

    l->wait_ms = before + ALPHA * (wait - before);
    l->updated_us = now_us;
    l->in_flight += bytes;
    s->in_flight[d] += bytes;
    return wait;
}

void kv_flow_end(struct kv_flow *f, struct kv_share *s, enum kv_direction d, uint64_t bytes,
                 int64_t began_us, int64_t now_us, bool done)
{
    struct kv_lane *l = &f->lanes[d];
    double ms = (double)(now_us - began_us) / 1000;

    l->in_flight -= bytes;
    s->in_flight[d] -= bytes;
    if (!done || !bytes)
        return;
    double rate = (double)bytes / (ms > 0.001 ? ms : 0.001);
    l->bytes_per_ms =
        l->bytes_per_ms > 0 ? l->bytes_per_ms + ALPHA * (rate - l->bytes_per_ms) : rate;
}
