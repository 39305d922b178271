/* The shell-tool harness: trajectories from ASSIGN to SETTLED.
 *
 * Each is a small state machine.  The engine's thread moves it from turn to turn and samples; all
 * that blocks (sandbox calls, verification, waits for the channel) is one job at a time on the tool
 * threads, and the trajectory belongs to that job until it returns.
 *
 * Commit points.  After every action: snapshot retained under "JOB/TRAJECTORY", then SEGMENT.  The
 * snapshot of turn n is released once SEGMENT n+1 is durable.  The last turn has none: its SEGMENT
 * is marked `last`, says snapshot "", and is sent after the verdict, right before DONE.  If the
 * worker dies between the two, the intake resumes from the turn before, whose snapshot is still
 * retained, and the last turn is sampled again from the same counters; the intake keeps the segment
 * of the higher attempt. */
#ifndef ROLLOUT_HARNESS_HARNESS_H
#define ROLLOUT_HARNESS_HARNESS_H

#include <stddef.h>

#include "proto/channel.h"
#include "proto/rpc.h"
#include "rollout/engine/engine.h"
#include "rollout/harness/rest.h"
#include "rollout/harness/tools.h"

struct harness;

struct harness_options {
    struct rpc_channel *agentenv; /* borrowed, as all here */
    struct channel_worker *channel;
    struct tools *tools;
    struct rest *rest; /* whether sandboxes are put away while the model thinks; NULL = never */
    const char *job_id;
    Longhaul__Experience__V1__Budgets budgets; /* the job's, where ASSIGN and task say nothing */
    unsigned capacity;                         /* trajectories that are worked on */
};

struct harness *harness_create(const struct harness_options *o, struct lh_error *err);
/* After tools_stop(); what was still to be cleaned up is left to the owner of the job. */
void harness_destroy(struct harness *h);
LH_DEFINE_AUTO(harness, harness_destroy)

/* The engine may come later than the first assignments: demonstrations need none. */
void harness_use_engine(struct harness *h, struct engine *engine);

/* Takes an ASSIGN, CANCEL or SETTLED.  Repetitions are ignored. */
void harness_receive(struct harness *h, struct channel_message *m);
/* Moves everything that can move; true when something did. */
bool harness_poll(struct harness *h);

struct harness_counts {
    unsigned held, in_tool;
    bool wants_engine; /* a turn waits for weights */
};
struct harness_counts harness_counts(const struct harness *h);
/* Names of the trajectories held, at most max; they stay valid until the next call of this module.
 */
size_t harness_names(const struct harness *h, char **names, size_t max);

#endif
