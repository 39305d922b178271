/* Loop A of the throttle (docs/DESIGN.md 3.8): how many trajectories the engine works on at once.
 *
 * Contexts grow while a trajectory runs, so a number that is right at the start is too large later,
 * and the engine would preempt and reload in a circle.  The window follows what it causes:
 *   shrink  x0.8  after a preemption, when the KV forecast passes 0.95 of the budget, or when loads
 *                 from the store wait longer than LOAD_WAIT_MAX_MS;
 *   grow    +max(1, W/32)  when work is queued, the forecast is below 0.85 and loads wait less than
 *                 LOAD_WAIT_LOW_MS; doubling instead while in slow start;
 *   hold    otherwise.
 * The marks of the load wait were found with tests/bench/sim: 2 s and 250 ms, as first proposed,
 * made the window flap, because one restore of a million tokens alone takes longer. At most one
 * change a period, a period being about one turn: the effect of a change is not visible earlier.
 * After a weight change everybody prefills again at once; the window then restarts from what fits
 * (budget / mean length) and leaves slow start at its first decrease.
 *
 * A pure function of its inputs, so it is tested on synthetic signals. */
#ifndef ROLLOUT_SCHEDULER_WINDOW_H
#define ROLLOUT_SCHEDULER_WINDOW_H

#include <stdbool.h>
#include <stdint.h>

#include "kvstore/trace.h"

struct window_signals {
    unsigned active, queued;
    uint64_t preemptions; /* counter */
    double forecast;      /* KV at the end of the turns that run, as a share of the budget */
    double load_wait_ms;
};

struct window {
    double size;
    unsigned limit; /* never above */
    bool slow_start;
    uint64_t preemptions; /* at the last change */
    int64_t changed_ms;
};

void window_init(struct window *w, unsigned limit);
/* After a weight change: `fits` sequences of the present mean length fill the budget. */
void window_restart(struct window *w, double fits, int64_t now_ms);
/* Whole trajectories to admit now, at least 1. */
unsigned window_size(const struct window *w);
/* Why it changed; KV_DECISION_COUNT when it did not. */
enum kv_decision window_update(struct window *w, const struct window_signals *s, int64_t period_ms,
                               int64_t now_ms);

#endif
