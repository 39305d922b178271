/* Jobs that take away what a trajectory leaves outside the process.  Nobody waits for them; a
 * failure is logged, and what stays behind is found by its owner's label. */
#ifndef ROLLOUT_HARNESS_CLEAN_H
#define ROLLOUT_HARNESS_CLEAN_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/rpc.h"
#include "rollout/harness/tools.h"

enum clean_what {
    CLEAN_ALL,      /* every sandbox and snapshot of the owner */
    CLEAN_SANDBOX,  /* one sandbox: another attempt goes on from the snapshots */
    CLEAN_SNAPSHOT, /* the owner's hold on one snapshot */
};

struct clean {
    enum clean_what what;
    const char *owner, *id; /* copied; id "" with CLEAN_ALL */
    uint32_t attempt;
};

void clean_submit(struct tools *tools, struct rpc_channel *agentenv, const struct clean *c);
/* Frees the job when it is one of these. */
bool clean_finished(struct tool_job *job);

#endif
