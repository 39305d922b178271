/* Events in their order: the end of a pass, the end of a piece of a transfer, the return of a tool.
 * In the middle of the work the phases switch once: everything leaves the devices, they train, and
 * everybody comes back. */
#include <math.h>
#include <stdlib.h>

#include "tests/bench/sim/engine.h"

static const int64_t TRAIN_US = 20000000, NEVER = INT64_MAX;
static const double LOOK_S = 0.05;

struct run {
    struct engine e;
    int64_t pass_us, pass_began_us; /* end of the pass that runs; NEVER = none */
    int64_t trains_until_us;
    bool switched;
    uint64_t half;
    double period_ms; /* of a turn, as rollout/scheduler measures it */
    uint64_t turns;
    int64_t looked_us;
    struct sim_result *result;
};

/* As rollout/scheduler/scheduler.c. */
static void look(struct run *r)
{
    struct engine *e = &r->e;
    double dt = (double)(e->now_us - r->looked_us) * 1e-3;

    if (dt < LOOK_S * 1e3)
        return;
    unsigned running = engine_count(e, RUNNING), waiting = engine_count(e, WAITING);
    double turn = (running + waiting + 1) * dt / (double)(e->turns - r->turns + 1e-9);
    if (e->turns > r->turns)
        r->period_ms = fmin(fmax(r->period_ms + 0.1 * (turn - r->period_ms), 100), 10000);
    struct window_signals s = {
        .active = running,
        .queued = waiting,
        .preemptions = e->preemptions,
        .forecast = engine_forecast(e),
        .load_wait_ms = e->o->mode == SIM_THROTTLE ? kv_lanes_wait_s(&e->lanes, false) * 1e3 : 0,
    };
    window_update(&e->window, &s, (int64_t)r->period_ms, e->now_us / 1000);
    unsigned w = window_size(&e->window);
    r->result->window_min = w < r->result->window_min ? w : r->result->window_min;
    r->result->window_max = w > r->result->window_max ? w : r->result->window_max;
    r->turns = e->turns;
    r->looked_us = e->now_us;
}

static int64_t next_tool(const struct engine *e, struct sequence **who)
{
    int64_t at = NEVER;

    for (unsigned i = 0; i < e->n; i++)
        if (e->sequences[i].phase == IDLE && e->sequences[i].tool_us < at) {
            *who = &e->sequences[i];
            at = (*who)->tool_us;
        }
    return at;
}

static void start_pass(struct run *r)
{
    struct engine *e = &r->e;

    if (r->pass_us != NEVER || e->now_us < r->trains_until_us)
        return;
    look(r);
    engine_admit(e);
    double seconds = engine_plan(e);
    if (seconds > 0) {
        r->pass_began_us = e->now_us;
        r->pass_us = e->now_us + (int64_t)(seconds * 1e6) + 1;
    }
}

static void end_pass(struct run *r)
{
    struct engine *e = &r->e;

    engine_pass_done(e, (double)(r->pass_us - r->pass_began_us) * 1e-6);
    r->pass_us = NEVER;
    if (r->switched || e->turns < r->half)
        return;
    r->switched = true;
    engine_park(e);
    window_restart(&e->window, 64, e->now_us / 1000);
    r->trains_until_us = e->now_us + TRAIN_US;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* False when nothing is going to happen any more. */
static bool step(struct run *r)
{
    struct engine *e = &r->e;
    struct sequence *who = NULL;

    start_pass(r);
    restore_pump(e);
    int64_t tool = next_tool(e, &who), piece = e->first ? e->first->ends_us : NEVER;
    int64_t train = r->trains_until_us > e->now_us ? r->trains_until_us : NEVER;
    int64_t at = least(least(tool, piece), least(train, r->pass_us));
    if (at == NEVER)
        return false;
    e->now_us = at > e->now_us ? at : e->now_us;
    if (at == piece)
        restore_piece_done(e);
    else if (at == r->pass_us)
        end_pass(r);
    else if (at == tool)
        engine_ask(e, who);
    return !e->failed;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Two means, because a storm costs everybody one wait: who has few turns waits long a turn, who has
 * many waits long in all.  Unfair is what is far above both. */
static void measure_waits(struct engine *e, struct sim_result *r)
{
    double sum = 0, squares = 0, worst = 0, total = 0;

    qsort(e->waits, e->turns, sizeof *e->waits, by_value);
    r->wait_p50_s = e->waits[e->turns / 2];
    r->wait_p99_s = e->waits[e->turns * 99 / 100];
    for (unsigned i = 0; i < e->n; i++) {
        double w = e->sequences[i].waited_s / e->sequences[i].t->n_turns;
        sum += w;
        squares += w * w;
        worst = w > worst ? w : worst;
        total += e->sequences[i].waited_s;
    }
    for (unsigned i = 0; i < e->n && sum > 0; i++) {
        double in_all = e->sequences[i].waited_s, a_turn = in_all / e->sequences[i].t->n_turns;
        r->worst_of_both = fmax(r->worst_of_both, fmin(in_all * e->n / total, a_turn * e->n / sum));
    }
    r->mean_wait_s = sum / e->n;
    r->worst_wait = sum > 0 ? worst * e->n / sum : 1;
    r->jain = squares > 0 ? sum * sum / (e->n * squares) : 1;
}

static void measure(struct engine *e, struct sim_result *r)
{
    r->finish_s = (double)e->now_us * 1e-6;
    r->hit = (double)e->found_tokens / (double)e->known_tokens;
    r->ideal = (double)e->ever_tokens / (double)e->known_tokens;
    r->preemptions = e->preemptions;
    r->turns = e->turns;
    r->written_per_token = (double)e->machine.written / (double)e->new_tokens;
    r->staging_peak = e->staging_peak;
    r->wrong_bytes = sim_vault_wrong(e->vault);
    for (int d = 0; d < KV_DECISION_COUNT; d++)
        r->decisions[d] = kv_trace_count(e->trace, (enum kv_decision)d);
    measure_waits(e, r);
}

int sim_run(const struct sim_options *o, struct sim_result *result, struct lh_error *err)
{
    struct sim_workload w;
    struct run r = {.pass_us = NEVER, .period_ms = 1000, .result = result};

    *result = (struct sim_result){.window_min = UINT32_MAX};
    int status = sim_workload_init(&w, o->trajectories, o->seed, err);
    if (status == 0)
        status = engine_init(&r.e, o, &w, err);
    r.half = w.turns / 2;
    window_restart(&r.e.window, 64, 0);
    while (status == 0 && r.e.over < r.e.n)
        if (!step(&r))
            status = lh_fail(err, LH_INTERNAL, "%u of %u trajectories stand still at %.1f s",
                             r.e.n - r.e.over, r.e.n, (double)r.e.now_us * 1e-6);
    if (status == 0)
        measure(&r.e, result);
    while (r.e.first)
        restore_piece_done(&r.e);
    engine_finish(&r.e);
    sim_workload_finish(&w);
    return status;
}
