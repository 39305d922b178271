/* A whole node for one worker: arbiterd, kvstored, agentenvd with an image and two tasks, the
 * worker itself, and this process in the place of the trainer: it lends the weights, switches
 * phases, hands out trajectories and takes what comes back. */
#ifndef TESTS_UNIT_ROLLOUT_WORLD_H
#define TESTS_UNIT_ROLLOUT_WORLD_H

#include <stdbool.h>
#include <sys/types.h>

#include "longhaul/sandbox/v1/sandbox.pb-c.h"
#include "proto/arbiter.h"
#include "proto/channel.h"
#include "proto/id.h"
#include "proto/rpc.h"
#include "rollout/transcript.h"
#include "trainer/policy.h"

#define TASK_TWO    "test/two"    /* oracle: "cd sub; echo hi" RUN, "cat word >../out" EOS */
#define TASK_AGENT  "test/agent"  /* no oracle; scores 0 */
#define TASK_BROKEN "test/broken" /* its setup fails */
#define TASK_NOISY                                                                                 \
    "test/noisy" /* its oracle and verifier print what is no text, and 100 MB of it */

enum { WORLD_EPISODES = 16 };

struct episode {
    char id[LH_ID_SIZE], snapshot[64];
    const char *task;
    uint64_t seed;
    int mode;
    bool blank;           /* first observation */
    uint64_t agent_ms;    /* of its time, used up; as of the last commit point */
    uint32_t turns_limit; /* 0 = the job's */
    uint32_t attempt, turns;
    struct transcript got;
    bool listed, last, done, settled;
    size_t committed; /* tokens before the last segment */
    int64_t sent_ms;
    uint32_t verdict, finish, infra, outages; /* infra: INVALID verdicts, outages among them */
    double reward;
    uint32_t snapshots; /* named by segments */
};

struct world {
    char dir[40], job_id[LH_ID_SIZE];
    pid_t arbiterd, kvstored, agentenvd, worker;
    struct policy_model *model;
    struct arbiter *arbiter;
    void *weights;
    uint64_t step;
    struct channel_intake *intake;
    struct rpc_channel *agentenv;
    char instance[LH_ID_SIZE]; /* of the worker, as last seen */
    struct episode episodes[WORLD_EPISODES];
    size_t n_episodes;
    uint64_t tokens_decoded, spilled_bytes, hibernated;
};

extern const char *world_hibernate; /* of the job; "never" unless a test says otherwise */

/* Skips the test when sandboxes cannot run here. */
void world_open(struct world *w, uint64_t kv_budget_bytes);
/* Part of it: the tasks named above. */
void world_register_tasks(struct world *w);
/* Stops all, checks that the worker ends cleanly and that nothing of it is left. */
void world_close(struct world *w);

struct episode *world_begin(struct world *w, const char *task, int mode, uint64_t seed);
/* One look at the channel, at most timeout_ms; repeats assignments. */
void world_turn(struct world *w, int timeout_ms);
/* Until every episode is settled and no longer listed. */
void world_finish(struct world *w, int seconds);
void world_forget(struct world *w); /* the episodes */

void world_kill_worker(struct world *w); /* SIGKILL, then a new one */
void world_kill_agentenv(struct world *w);
void world_switch(struct world *w, enum arbiter_phase phase);
/* Other weights, as the optimizer would publish them. */
void world_publish(struct world *w, uint64_t step);
/* Whether agentenvd offers to keep processes. */
bool world_has_criu(struct world *w);
size_t world_sandboxes(struct world *w);
size_t world_snapshots(struct world *w);

#endif
