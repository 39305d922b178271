#include "rollout/scheduler/scheduler.h"

#include <string.h>

#include "proto/clock.h"

enum { LOOK_EVERY_MS = 50 }; /* signals are gathered at most so often */
static const double PERIOD_MIN_MS = 100, PERIOD_MAX_MS = 10000;

void scheduler_init(struct scheduler *s, struct engine *engine, unsigned max_running)
{
    *s = (struct scheduler){.engine = engine, .period_ms = 1000, .looked_ms = lh_now_ms()};
    window_init(&s->window, max_running);
}

static double fits(const struct engine_stats *st)
{
    return st->mean_bytes ? (double)st->budget_bytes / (double)st->mean_bytes : (double)UINT32_MAX;
}

int scheduler_resume(struct scheduler *s, const struct policy_version *version,
                     struct lh_error *err)
{
    struct engine_stats before = engine_stats(s->engine);
    bool changed = memcmp(engine_version(s->engine), version, sizeof *version) != 0;
    int r = engine_resume(s->engine, version, err);

    if (r == 0 && changed) {
        window_restart(&s->window, fits(&before), lh_now_ms());
        engine_note_window(s->engine, KV_WINDOW_SLOW_START, window_size(&s->window));
    }
    return r;
}

/* With A sequences active and T turns ended in dt, a turn takes A*dt/T (Little). */
static void measure_period(struct scheduler *s, const struct engine_stats *st, int64_t dt_ms)
{
    uint64_t turns = st->turns - s->turns;

    s->turns = st->turns;
    if (!turns)
        return;
    double turn_ms = (double)(st->running + st->waiting + 1) * (double)dt_ms / (double)turns;
    s->period_ms += 0.1 * (turn_ms - s->period_ms);
    if (s->period_ms < PERIOD_MIN_MS)
        s->period_ms = PERIOD_MIN_MS;
    if (s->period_ms > PERIOD_MAX_MS)
        s->period_ms = PERIOD_MAX_MS;
}

static void look(struct scheduler *s)
{
    int64_t now = lh_now_ms(), dt = now - s->looked_ms;

    if (dt < LOOK_EVERY_MS)
        return;
    struct engine_stats st = engine_stats(s->engine);
    s->load_wait_ms = engine_load_wait_ms(s->engine);
    struct window_signals signals = {
        .active = st.running,
        .queued = st.waiting,
        .preemptions = st.preemptions,
        .forecast = (double)st.horizon_bytes / (double)st.budget_bytes,
        .load_wait_ms = s->load_wait_ms,
    };
    measure_period(s, &st, dt);
    enum kv_decision why = window_update(&s->window, &signals, (int64_t)s->period_ms, now);
    if (why != KV_DECISION_COUNT)
        engine_note_window(s->engine, why, window_size(&s->window));
    s->looked_ms = now;
}

int scheduler_step(struct scheduler *s, size_t *tokens, struct lh_error *err)
{
    look(s);
    while (engine_running(s->engine) < window_size(&s->window) && engine_admit(s->engine))
        ;
    return engine_step(s->engine, tokens, err);
}
