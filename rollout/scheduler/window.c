#include "rollout/scheduler/window.h"

static const double DECREASE = 0.8;
static const double FORECAST_HIGH = 0.95, FORECAST_LOW = 0.85; /* share of the KV budget */
static const double LOAD_WAIT_MAX_MS = 10000, LOAD_WAIT_LOW_MS = 1250;

static double clamp(double x, double low, double high)
{
    return x < low ? low : x > high ? high : x;
}

void window_init(struct window *w, unsigned limit)
{
    *w = (struct window){.size = limit, .limit = limit};
}

void window_restart(struct window *w, double fits, int64_t now_ms)
{
    w->size = clamp(fits, 1, w->limit);
    w->slow_start = true;
    w->changed_ms = now_ms;
}

unsigned window_size(const struct window *w)
{
    return w->size < 1 ? 1 : (unsigned)w->size;
}

/* KV_DECISION_COUNT = no congestion. */
static enum kv_decision congestion(const struct window *w, const struct window_signals *s)
{
    if (s->preemptions > w->preemptions)
        return KV_WINDOW_SHRANK_PREEMPTIONS;
    if (s->forecast > FORECAST_HIGH)
        return KV_WINDOW_SHRANK_FORECAST;
    return s->load_wait_ms > LOAD_WAIT_MAX_MS ? KV_WINDOW_SHRANK_LOADS : KV_DECISION_COUNT;
}

static bool has_room(const struct window *w, const struct window_signals *s)
{
    return s->queued && s->active >= window_size(w) && s->forecast < FORECAST_LOW &&
           s->load_wait_ms < LOAD_WAIT_LOW_MS;
}

static double increase(const struct window *w)
{
    double step = w->size / 32;

    if (w->slow_start)
        return w->size;
    return step > 1 ? step : 1;
}

enum kv_decision window_update(struct window *w, const struct window_signals *s, int64_t period_ms,
                               int64_t now_ms)
{
    enum kv_decision why = congestion(w, s);
    double size = w->size;

    if (now_ms - w->changed_ms < period_ms)
        return KV_DECISION_COUNT;
    if (why != KV_DECISION_COUNT) {
        size *= DECREASE;
        w->slow_start = false;
    } else if (has_room(w, s)) {
        size += increase(w);
        why = KV_WINDOW_GREW;
    } else {
        return KV_DECISION_COUNT;
    }
    w->size = clamp(size, 1, w->limit);
    w->preemptions = s->preemptions;
    w->changed_ms = now_ms;
    return why;
}
