/* The throttle between an engine and the store: loops B and C of docs/DESIGN.md 3.8 (loop A is
 * rollout/scheduler/window.h, which reads what is measured here).
 *
 * Pure: no thread, no clock, no memory of its own.  Times come in as microseconds of whatever clock
 * the caller has, operations are members of the caller's own jobs, so the rollout engine and the
 * simulator of tests/bench/sim run the very same code.  Nothing is configured about speed: every
 * rate is measured from what was delivered, and follows a rate that drifts.
 *
 * One caller at a time. */
#ifndef KVSTORE_THROTTLE_H
#define KVSTORE_THROTTLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvstore/trace.h"

/* ---- what is measured (kvstore/flow/rates.c) ---- */

/* Something per second, smoothed over the seconds in which it was at work: idle time neither counts
 * nor lets the value fade.  0 = not known yet. */
struct kv_rate {
    double per_s;
};
void kv_rate_add(struct kv_rate *r, double amount, double seconds);

/* Seconds of computing: a prompt of n tokens behind `start` others takes
 *     C(n, start) = a n + c n (start + n/2)
 * (projections and recurrence are linear, attention looks back), and a pass that decodes takes
 * `decode_s` besides.  The shape, c/a, is a property of the model and the speed one of the machine
 * and of the hour: so the speed is smoothed over few passes, and the shape is the least squares of
 * many passes brought to one speed, older ones fading by 0.98 a pass.  When those passes do not
 * tell a from c (all of one context length), the shape stays. */
struct kv_compute {
    double a_s, c_s;           /* the present fit */
    double decode_s;           /* of one pass without prompts, smoothed */
    unsigned pass_tokens;      /* of prompts in one pass; given */
    double nn, nc, cc, ns, cs; /* sums of products of tokens, token-contexts and seconds */
    double shape_a, shape_c;
    double slowness; /* seconds of the present over those of the shape */
};
void kv_compute_init(struct kv_compute *c, unsigned pass_tokens);
/* One pass: `decoding` rows of one token, and prompts with `tokens` and sum n (start + n/2). */
void kv_compute_pass(struct kv_compute *c, unsigned decoding, double tokens, double contexts,
                     double seconds);
/* Of tokens [from, to), sharing its passes with decoding; 0 while nothing is known. */
double kv_compute_seconds(const struct kv_compute *c, double from, double to);
bool kv_compute_known(const struct kv_compute *c);

/* ---- loop B: the order of transfers (kvstore/flow/lanes.c) ---- */

enum kv_lane_class {
    KV_LANE_LOAD,     /* somebody waits for it */
    KV_LANE_PREFETCH, /* somebody will */
    KV_LANE_SPILL,
    KV_LANE_CLASSES
};

enum { KV_QUANTUM_BYTES = 4 << 20, KV_ACTIVE_LOADS = 8 };

/* One transfer, a member of the caller's job.  The caller fills the first part. */
struct kv_op {
    enum kv_lane_class class;
    uint64_t flow;    /* whose: bandwidth is shared fairly between flows */
    uint64_t bytes;   /* not handed out yet */
    uint64_t staging; /* host memory it holds from its start (a spill: from its add) to its end */
    bool whole;       /* cannot be cut into quanta */
    int64_t deadline_us; /* after it, nobody wants it any more */
    int64_t start_by_us; /* of a spill: not begun by then, it is dropped */

    int64_t queued_us; /* the rest belongs to the lanes */
    bool active, started;
    uint64_t in_flight;
    double tag;
    struct kv_op *next;
};

struct kv_lanes {
    struct kv_op *ops[KV_LANE_CLASSES]; /* by arrival */
    struct kv_rate load, spill;         /* bytes a second, of the busy time */
    uint64_t staging_limit, staging;    /* bytes */
    uint64_t quantum;                   /* bytes: the piece that flows take turns with */
    uint64_t in_flight;
    uint64_t owed; /* bytes that spills may take before the next load */
    double clock[KV_LANE_CLASSES];
    int64_t last_us;  /* end of the last piece, or start of the first after a rest */
    double latency_s; /* least of a piece, of the present and the last 10 s */
    double latency_next_s;
    int64_t latency_us;
};

void kv_lanes_init(struct kv_lanes *l, uint64_t staging_limit, uint64_t quantum, int64_t now_us);
/* False (and not added): a spill for which there is no staging.  Loads wait for theirs. */
bool kv_lanes_add(struct kv_lanes *l, struct kv_op *op, int64_t now_us);
/* The predicted return has come: a prefetch becomes a load and keeps its place in time. */
void kv_lanes_promote(struct kv_lanes *l, struct kv_op *op);
/* What to move next, and how many bytes of it; NULL when nothing may start now.
 *   - loads first, then prefetches, then spills; spills are owed 15 % of what moves, so that a
 *     storm of loads does not starve them for ever;
 *   - at most KV_ACTIVE_LOADS loads have begun, shortest first, whoever waited 5 s before others;
 *     those that have begun take turns, one quantum each (start-time fair queueing), so the next
 *     piece of a flow is at most KV_ACTIVE_LOADS quanta away;
 *   - never a load before an older spill of the same flow: that spill goes first, as a load;
 *   - bytes in flight stay below max(2 quanta, 1.25 x rate x least latency): more only queue. */
struct kv_op *kv_lanes_next(struct kv_lanes *l, int64_t now_us, uint64_t *bytes);
/* A piece handed out by kv_lanes_next() has ended; `moved` false: its time tells nothing. */
void kv_lanes_done(struct kv_lanes *l, struct kv_op *op, uint64_t bytes, int64_t began_us,
                   int64_t now_us, bool moved);
/* Its staging is free again.  Pieces in flight must have ended. */
void kv_lanes_remove(struct kv_lanes *l, struct kv_op *op);
/* An operation to give up, or NULL: past its deadline, or a spill past start_by_us.  Of a flow's
 * spills the newest comes first, so what remains of a prefix never has a hole.  Not removed. */
struct kv_op *kv_lanes_overdue(struct kv_lanes *l, int64_t now_us);
/* Seconds until a load (or spill) added now would begin. */
double kv_lanes_wait_s(const struct kv_lanes *l, bool spill);
/* Seconds until the rest of a load that was added has come. */
double kv_lanes_left_s(const struct kv_lanes *l, const struct kv_op *op);

/* ---- loop C: load, compute, or both (kvstore/flow/choice.c) ---- */

/* A sequence that comes back, or leaves. */
struct kv_case {
    unsigned unit_tokens;
    size_t block_bytes, state_bytes;
    size_t have;                 /* units on the device (a spill: in the store already) */
    size_t stored;               /* units the store has (a spill: would have), ending at a state */
    unsigned floor_tokens;       /* fewer are never loaded */
    double load_wait_s;          /* kv_lanes_wait_s() for a new load */
    double compute_wait_s;       /* prompts that go first */
    unsigned loading, computing; /* others that wait for the store, and for passes */
    double left_s;               /* until its deadline; 0 = none */
    double reuse;                /* of a spill: expected times it is read before its version ends */
};

struct kv_plan {
    enum kv_decision decision; /* a RESTORE_ or SPILL_ one */
    size_t split;             /* compute to here, load the rest; = have: load all, = stored: none */
    double load_s, compute_s; /* of either way alone */
    double plan_s;            /* of this plan */
};

/* A plan computes the tokens before `split` and loads the rest while it does (Cake, ICML 2025); a
 * hybrid model needs no state before the end, so its one state comes with the tail.  The cheapest
 * split is taken, where a plan costs
 *     max(T_load, T_compute) + S x loading + C x computing:
 * the time of this sequence, and what its S seconds of the store and its C seconds of passes cost
 * those that wait for either.  The lengths of the two queues are the prices of the two machines:
 * with nobody else both ways end together, and in a crowd both are kept busy, the front, whose
 * tokens look back at little, being computed and the tail loaded.  (Choosing by T alone was tried:
 * it computes whenever the store's queue is a moment longer, and lost 10 % at 8 GB/s.)  Loading or
 * computing alone is taken when the best split gains less than a tenth of it. */
struct kv_plan kv_choose_restore(const struct kv_case *k, const struct kv_lanes *l,
                                 const struct kv_compute *c);
/* Spill iff   reuse x computing x (seconds of passes saved)  >  price x (bytes / spill rate),
 * the price being `loading` + spill wait / 0.5 s: a store that nobody waits for costs nothing.
 * Saved is what the best split of the part saves of computing it: C - C L / (C + L) = C^2 / (C +
 * L). */
struct kv_plan kv_choose_spill(const struct kv_case *k, const struct kv_lanes *l,
                               const struct kv_compute *c);

#endif
