/* The engine's passes: it is made when the weights are there, and steps while the phase is ROLLOUT
 * and the weights are valid. */
#include <errno.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "rollout/harness/harness.h"
#include "rollout/worker/worker_private.h"

enum { WEIGHTS_RETRY_MS = 100, WEIGHTS_PATIENCE_MS = 60000 };

/* One try; NOT_FOUND while the trainer has not declared them. */
static int attach_weights(struct worker *w, struct lh_error *err)
{
    uint8_t fingerprint[16];
    const void *addr;
    size_t bytes;
    int r = arbiter_attach(w->arbiter, "weights", &addr, &bytes, err);

    if (r < 0)
        return r;
    if (bytes < ARBITER_WEIGHTS_OFFSET + policy_model_floats(w->model) * sizeof(float))
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "the weights have %zu bytes, too few for the model at %s", bytes,
                       w->o.job->model->path);
    w->weights = addr;
    w->eo.weights = (const float *)((const char *)addr + ARBITER_WEIGHTS_OFFSET);
    policy_model_fingerprint(w->model, fingerprint);
    w->engine = engine_create(&w->eo, err);
    if (!w->engine)
        return err->code;
    scheduler_init(&w->scheduler, w->engine, w->eo.max_running);
    harness_use_engine(w->harness, w->engine);
    return 0;
}

/* Valid weights, or an error after a long time without. */
static int lacks_weights(struct worker *w, struct lh_error *err)
{
    int64_t now = lh_now_ms();

    if (!w->weightless_since_ms)
        w->weightless_since_ms = now;
    if (now - w->weightless_since_ms > WEIGHTS_PATIENCE_MS)
        return lh_fail(err, LH_UNAVAILABLE, "no valid weights for %d s in the rollout phase",
                       WEIGHTS_PATIENCE_MS / 1000);
    return 0;
}

/* Inside the gate.  True when the engine can step. */
static int ready_engine(struct worker *w, bool *ready, struct lh_error *err)
{
    struct policy_version v = {0};

    *ready = false;
    if (!arbiter_weights_read(w->weights, &v.step, v.id))
        return lacks_weights(w, err);
    w->weightless_since_ms = 0;
    int r = scheduler_resume(&w->scheduler, &v, err);
    *ready = r == 0;
    return r;
}

static int try_attach(struct worker *w, struct lh_error *err)
{
    struct lh_error why = {0};
    int64_t now = lh_now_ms();

    if (now < w->weights_try_ms)
        return 0;
    w->weights_try_ms = now + WEIGHTS_RETRY_MS;
    int r = attach_weights(w, &why);
    if (r == 0)
        return 0;
    if (r == LH_NOT_FOUND || r == LH_DEADLINE_EXCEEDED)
        return lacks_weights(w, err);
    *err = why;
    return r;
}

int worker_drive(struct worker *w, bool *worked, struct lh_error *err)
{
    bool discarded, ready = false;
    size_t tokens = 0;
    int r = 0;

    if (!harness_counts(w->harness).wants_engine)
        return 0;
    if (!w->engine)
        return try_attach(w, err);
    bool inside = gate_enter(&w->gate, &discarded);
    if (discarded)
        engine_pause(w->engine);
    if (!inside)
        return 0;
    r = ready_engine(w, &ready, err);
    if (r == 0 && ready)
        r = scheduler_step(&w->scheduler, &tokens, err);
    gate_leave(&w->gate);
    *worked = tokens > 0;
    return r;
}
