/* Between the trajectories and the engine: admits turns inside the window, steps, measures.
 *
 * Resumed trajectories go first and the newest yields first; both follow from the engine's order.
 * Owned by the engine's thread. */
#ifndef ROLLOUT_SCHEDULER_SCHEDULER_H
#define ROLLOUT_SCHEDULER_SCHEDULER_H

#include "rollout/engine/engine.h"
#include "rollout/scheduler/window.h"

struct scheduler {
    struct engine *engine;
    struct window window;
    double period_ms; /* about one turn, smoothed */
    uint64_t turns;   /* at the last look */
    int64_t looked_ms;
    double load_wait_ms; /* then */
};

void scheduler_init(struct scheduler *s, struct engine *engine, unsigned max_running);
/* engine_resume(), with a slow start when the version is a new one. */
int scheduler_resume(struct scheduler *s, const struct policy_version *version,
                     struct lh_error *err);
/* Adjusts the window, admits, runs one pass.  *tokens = 0 when there was nothing to do. */
int scheduler_step(struct scheduler *s, size_t *tokens, struct lh_error *err);

#endif
