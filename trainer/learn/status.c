/* status.json, twice a second, from its own thread. */
#include <errno.h>
#include <unistd.h>

#include "proto/clock.h"
#include "trainer/learn/trainer.h"

enum { PERIOD_MS = 500, NAP_MS = 50 };

static const char *memory_owner(const struct trainer *t)
{
    static const char *const names[] = {"-", "ROLLOUT", "TRAIN", "SYNC"};
    unsigned p = (unsigned)arbiter_phase_now(t->arbiter);

    return p < LH_ARRAY_SIZE(names) ? names[p] : "-";
}

static json_t *snapshot(struct trainer *t, const struct intake_stats *s, double tokens_per_s)
{
    struct progress *p = &t->progress;

    LH_LOCKED(&p->lock);
    double left = p->steps > p->step ? (double)(p->steps - p->step) : 0;
    return json_pack("{ss sI sI sf sf sf sI sI sI sI sI ss sf}", "phase", p->phase, "step",
                     (json_int_t)p->step, "steps", (json_int_t)p->steps, "reward_mean",
                     p->reward_mean, "success", p->success, "tokens_per_s", tokens_per_s, "workers",
                     (json_int_t)s->workers, "running", (json_int_t)s->running, "waiting",
                     (json_int_t)s->waiting, "in_tool", (json_int_t)s->in_tool, "spilled",
                     (json_int_t)s->spilled, "memory", memory_owner(t), "eta_s", left * p->step_s);
}

static bool flows_alike(const struct intake_stats *a, const struct intake_stats *b)
{
    return a->window == b->window && a->kv_used_bytes == b->kv_used_bytes &&
           (int)a->load_wait_ms == (int)b->load_wait_ms;
}

/* What the throttle does, for the plot in the report; a line only when something has changed. */
static void note_flow(struct trainer *t, const struct intake_stats *s)
{
    json_t *line = json_pack("{ss sI sI sI sI sf}", "kind", "flow", "window", (json_int_t)s->window,
                             "running", (json_int_t)s->running, "kv_used_bytes",
                             (json_int_t)s->kv_used_bytes, "kv_budget_bytes",
                             (json_int_t)s->kv_budget_bytes, "load_wait_ms", s->load_wait_ms);

    if (line)
        metrics_write(t->metrics, line);
}

static void *serve(void *arg)
{
    struct trainer *t = arg;
    struct intake_stats before, now;
    int64_t at = lh_now_ms();

    intake_stats(t->intake, &before);
    while (!atomic_load(&t->status_stop)) {
        usleep(NAP_MS * 1000);
        int64_t passed = lh_now_ms() - at;
        if (passed < PERIOD_MS)
            continue;
        intake_stats(t->intake, &now);
        double tokens = (double)(now.tokens_decoded - before.tokens_decoded);
        json_t *status = snapshot(t, &now, tokens * 1000 / (double)passed);
        if (status)
            metrics_status(t->job_dir, status);
        if (!flows_alike(&now, &before))
            note_flow(t, &now);
        before = now;
        at += passed;
    }
    return NULL;
}

int status_start(struct trainer *t, struct lh_error *err)
{
    int r = pthread_create(&t->status_thread, NULL, serve, t);

    if (r != 0)
        return lh_fail_errno(err, r, "starting the status writer");
    t->status_runs = true;
    return 0;
}

void status_stop(struct trainer *t)
{
    if (!t->status_runs)
        return;
    atomic_store(&t->status_stop, true);
    pthread_join(t->status_thread, NULL);
    t->status_runs = false;
}

void status_phase(struct trainer *t, const char *phase, uint64_t step, uint64_t steps)
{
    LH_LOCKED(&t->progress.lock);
    t->progress.phase = phase;
    t->progress.step = step;
    t->progress.steps = steps;
}
