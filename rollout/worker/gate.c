#include "rollout/worker/gate.h"

#include "proto/wait.h"

void gate_init(struct gate *g, void (*wake)(void *ctx), void *ctx)
{
    *g = (struct gate){.wake = wake, .ctx = ctx};
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->left, NULL);
}

void gate_finish(struct gate *g)
{
    pthread_cond_destroy(&g->left);
    pthread_mutex_destroy(&g->lock);
}

int gate_on_revoke(void *gate, enum arbiter_phase next, int64_t deadline_ms)
{
    struct gate *g = gate;
    LH_LOCKED(&g->lock);

    (void)next;
    g->told = g->discarded = true;
    g->open = false;
    while (g->inside)
        if (!lh_wait_until(&g->left, &g->lock, deadline_ms))
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
