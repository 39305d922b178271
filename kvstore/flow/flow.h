/* The thin throttle of the store: how long is the queue, and is there room in it.
 *
 * Clients copy by themselves, so the store's "queue" is the bytes that are granted or pinned and
 * not yet given back, and the wait of the next one is those bytes over the bandwidth at which
 * earlier ones came back: Q / bw, separately for loads and spills, smoothed with alpha 0.3.  The
 * estimate fades with a half-life of half a second while nothing happens, because loop A of the
 * rollout reads it and must not be held by the memory of an old storm.
 *
 * A client may have `limit` bytes in flight in each direction; one that has none may always have
 * one operation, however large, so that a long trajectory is never locked out.  A spill beyond the
 * limit is refused at once and the caller drops it (it can always be recomputed); nobody waits
 * here. */
#ifndef KVSTORE_FLOW_FLOW_H
#define KVSTORE_FLOW_FLOW_H

#include <stdbool.h>
#include <stdint.h>

enum kv_direction { KV_LOAD, KV_SPILL, KV_DIRECTIONS };
enum kv_refusal { KV_FULL, KV_INFLIGHT, KV_PARENT, KV_QUOTA, KV_AWAY, KV_REFUSALS };

struct kv_lane {
    uint64_t in_flight;  /* bytes */
    double bytes_per_ms; /* smoothed; 0 = nothing has come back yet */
    double wait_ms;      /* smoothed */
    int64_t updated_us;
};

struct kv_flow {
    struct kv_lane lanes[KV_DIRECTIONS];
    uint64_t limit; /* bytes of one client in one direction */
    uint64_t refused[KV_REFUSALS];
};

/* Of one client. */
struct kv_share {
    uint64_t in_flight[KV_DIRECTIONS];
};

bool kv_flow_admits(const struct kv_flow *f, const struct kv_share *s, enum kv_direction d,
                    uint64_t bytes);
/* Returns the wait in ms that lies before these bytes. */
double kv_flow_begin(struct kv_flow *f, struct kv_share *s, enum kv_direction d, uint64_t bytes,
                     int64_t now_us);
/* `done`: the bytes were really copied, so the time they took says something. */
void kv_flow_end(struct kv_flow *f, struct kv_share *s, enum kv_direction d, uint64_t bytes,
                 int64_t began_us, int64_t now_us, bool done);
double kv_flow_wait_ms(const struct kv_flow *f, enum kv_direction d, int64_t now_us);

#endif
