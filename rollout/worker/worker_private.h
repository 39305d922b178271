/* Between worker.c (construction, the loop), drive.c and heartbeat.c. */
#ifndef ROLLOUT_WORKER_WORKER_PRIVATE_H
#define ROLLOUT_WORKER_WORKER_PRIVATE_H

#include "proto/id.h"
#include "rollout/engine/engine.h"
#include "rollout/scheduler/scheduler.h"
#include "rollout/worker/gate.h"
#include "rollout/worker/inbox.h"
#include "rollout/worker/worker.h"

struct worker {
    struct worker_options o;
    char name[32], instance[LH_ID_SIZE];
    struct inbox inbox;
    struct gate gate;
    struct policy_model *model;
    struct arbiter *arbiter;
    struct kv_client *store;
    struct kv_trace *trace;
    struct channel_worker *channel;
    struct rpc_channel *agentenv;
    struct tools *tools;
    struct rest *rest;
    struct harness *harness;
    struct engine *engine; /* once the weights are there */
    struct scheduler scheduler;
    struct engine_options eo;
    const struct arbiter_weights_header *weights;
    int64_t heartbeat_ms, weights_try_ms, weightless_since_ms;
    bool stopped; /* by STOP */
};

/* At most one pass of the engine; *worked when tokens were processed. */
int worker_drive(struct worker *w, bool *worked, struct lh_error *err);
/* Says that it lives and what it holds, when it is time. */
void worker_heartbeat(struct worker *w);
/* Trajectories that it asks for at most. */
unsigned worker_capacity(const struct worker *w);

#endif
