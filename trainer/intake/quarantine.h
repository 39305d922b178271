/* The tasks that agentenvd has in quarantine.  It decides, durably and for all jobs; a job asks
 * every few seconds and draws none of them meanwhile.  Rejected: that agentenvd refuses sandboxes
 * of such tasks, because whoever mends one must be able to try it. */
#ifndef TRAINER_INTAKE_QUARANTINE_H
#define TRAINER_INTAKE_QUARANTINE_H

#include <stdbool.h>
#include <stddef.h>

#include "proto/error.h"
#include "proto/rpc.h"

struct quarantine {
    char **names; /* sorted */
    size_t n;
};

/* A call of at most timeout_ms; *q is set on success only. */
int quarantine_ask(struct rpc_channel *agentenv, int timeout_ms, struct quarantine *q,
                   struct lh_error *err);
bool quarantine_has(const struct quarantine *q, const char *task);
void quarantine_finish(struct quarantine *q);

#endif
