/* A few threads for what blocks: calls to agentenvd and waits for the channel's window.
 *
 * The engine's thread submits a job and goes on; whatever the job works on belongs to the pool
 * until tools_finished() hands it back.  Jobs bound their own time. */
#ifndef ROLLOUT_HARNESS_TOOLS_H
#define ROLLOUT_HARNESS_TOOLS_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/cleanup.h"
#include "proto/error.h"

struct tool_job {
    void (*run)(struct tool_job *job); /* on a thread of the pool */
    struct tool_job *next;
};

struct tools;

/* wake(ctx) is called on a pool thread after each job. */
struct tools *tools_create(unsigned threads, void (*wake)(void *ctx), void *ctx,
                           struct lh_error *err);
/* Jobs not begun are handed back first; false when a running one had not ended at the deadline, and
 * then nothing is freed. */
bool tools_stop(struct tools *t, int64_t deadline_ms);
/* After tools_stop() was true, or before the first submit. */
void tools_destroy(struct tools *t);
LH_DEFINE_AUTO(tools, tools_destroy)

void tools_submit(struct tools *t, struct tool_job *job);
/* A job that has run (or was never begun because of tools_stop()); NULL when there is none. */
struct tool_job *tools_finished(struct tools *t);

#endif
