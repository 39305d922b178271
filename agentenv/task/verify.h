/* Judging what an agent left behind. */
#ifndef AGENTENV_TASK_VERIFY_H
#define AGENTENV_TASK_VERIFY_H

#include "agentenv/task/judge.h"

/* 0 with a verdict, whatever it is.  An error only when it makes no sense to ask again: no such
 * sandbox, a lower attempt, the caller gone. */
int verify(const struct verify_subject *s, struct judgement *out, struct lh_error *err);

/* The verdict on the task's files as no agent has touched them. */
int verify_untouched(const struct verify_subject *s, struct judgement *out, struct lh_error *err);

/* Sandboxes.Verify. */
int verify_rpc(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
               ProtobufCMessage **reply, struct lh_error *err);

#endif
