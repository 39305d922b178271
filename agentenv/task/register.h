/* Accepting tasks into the registry. */
#ifndef AGENTENV_TASK_REGISTER_H
#define AGENTENV_TASK_REGISTER_H

#include "agentenv/task/registry.h"

/* Runs the task's oracle, which must pass, and nothing at all, which must score 0.  The error says
 * what the verifier did and printed. */
int task_prove(struct daemon *d, const Task *task, struct rpc_call *call, struct lh_error *err);

/* Tasks.Add. */
int task_add_rpc(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                 struct lh_error *err);

#endif
