#include "rollout/worker/gate.h"

#include <errno.h>
#include <time.h>

void gate_init(struct gate *g, void (*wake)(void *ctx), void *ctx)
{
    pthread_condattr_t monotonic;

    *g = (struct gate){.wake = wake, .ctx = ctx};
    pthread_mutex_init(&g->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&g->left, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

void gate_finish(struct gate *g)
{
    pthread_cond_destroy(&g->left);
    pthread_mutex_destroy(&g->lock);
}

int gate_on_revoke(void *gate, enum arbiter_phase next, int64_t deadline_ms)
{
    struct gate *g = gate;
    struct timespec until = {deadline_ms / 1000, deadline_ms % 1000 * 1000000};
    LH_LOCKED(&g->lock);

    (void)next;
    g->told = g->discarded = true;
    g->open = false;
    while (g->inside)
        if (pthread_cond_timedwait(&g->left, &g->lock, &until) == ETIMEDOUT)
            return g->inside ? LH_DEADLINE_EXCEEDED : 0;
    return 0;
}

void gate_on_phase(void *gate, enum arbiter_phase phase, uint64_t epoch)
{
    struct gate *g = gate;

    (void)epoch;
    pthread_mutex_lock(&g->lock);
    g->told = true;
    g->open = phase == ARBITER_ROLLOUT;
    pthread_mutex_unlock(&g->lock);
    g->wake(g->ctx);
}

void gate_first_phase(struct gate *g, enum arbiter_phase phase)
{
    LH_LOCKED(&g->lock);

    if (!g->told)
        g->open = phase == ARBITER_ROLLOUT;
}

bool gate_enter(struct gate *g, bool *discarded)
{
    LH_LOCKED(&g->lock);

    *discarded = g->discarded;
    g->discarded = false;
    return g->inside = g->open;
}

void gate_leave(struct gate *g)
{
    LH_LOCKED(&g->lock);

    g->inside = false;
    pthread_cond_broadcast(&g->left);
}
