/* When the engine may touch device memory.
 *
 * arbiterd takes the KV region and the scratch away at a phase switch.  The gate is the agreement
 * between its client's thread, which gives them back, and the engine's thread, which uses them: the
 * engine is inside only between gate_enter() and gate_leave(), one forward pass at a time, and a
 * revocation waits for it to come out and lets it in no more.  Nothing else is asked of the
 * engine's thread, so a revocation never waits for a tool or the intake; and for the store only
 * after a weight change, by the deadline of two of its operations. */
#ifndef ROLLOUT_WORKER_GATE_H
#define ROLLOUT_WORKER_GATE_H

#include <pthread.h>
#include <stdbool.h>

#include "proto/arbiter.h"

struct gate {
    pthread_mutex_t lock;
    pthread_cond_t left;
    bool open, inside;
    bool told;      /* a callback has come: it knows better than the first look */
    bool discarded; /* the memory was taken away since the last gate_enter() */
    void (*wake)(void *ctx);
    void *ctx;
};

void gate_init(struct gate *g, void (*wake)(void *ctx), void *ctx);
void gate_finish(struct gate *g);

/* arbiter_options.on_revoke and on_phase; ctx is the gate. */
int gate_on_revoke(void *gate, enum arbiter_phase next, int64_t deadline_ms);
void gate_on_phase(void *gate, enum arbiter_phase phase, uint64_t epoch);
/* The phase found when connecting. */
void gate_first_phase(struct gate *g, enum arbiter_phase phase);

/* False outside ROLLOUT.  *discarded: everything that was in the memory is gone. */
bool gate_enter(struct gate *g, bool *discarded);
void gate_leave(struct gate *g);

#endif
