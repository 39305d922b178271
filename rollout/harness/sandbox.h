/* The sandbox of one trajectory, by calls to agentenvd.
 *
 * Every call has a deadline and is repeated with the same idempotency key while agentenvd is away.
 * UNAVAILABLE is the code of an outage, and of nothing else: nobody was there until the deadline,
 * or somebody was and did not answer (stopped, or drowned), ended in the middle, or had no disk,
 * memory or descriptors left.
 *
 * An exec has a name in its sandbox: the same call again joins it where the connection broke, so it
 * runs once. When the sandbox itself is lost it is rebuilt from the last commit point, and the
 * action runs again: history and files stay one point in time (I3).
 *
 * No process outlives an action (snapshots keep files only), so the shell's directory and exported
 * variables are carried from action to action in a file of the sandbox, SANDBOX_SHELL_STATE.  Being
 * a file, it is part of every snapshot: a resumed trajectory finds them as they were.
 *
 * Blocking; one thread at a time. */
#ifndef ROLLOUT_HARNESS_SANDBOX_H
#define ROLLOUT_HARNESS_SANDBOX_H

#include <stdbool.h>
#include <stdint.h>

#include "longhaul/sandbox/v1/sandbox.pb-c.h"
#include "longhaul/task/v1/service.pb-c.h"
#include "proto/id.h"
#include "proto/rpc.h"
#include "rollout/harness/rest.h"

#define SANDBOX_SHELL_STATE "/tmp/.longhaul-shell"

struct sandbox {
    struct rpc_channel *agentenv; /* borrowed */
    char *owner;                  /* "JOB/TRAJECTORY" */
    const char *task;             /* borrowed */
    uint32_t attempt;
    unsigned builds;   /* sandboxes made in this attempt */
    unsigned actions;  /* begun in this attempt: names of execs */
    struct rest *rest; /* borrowed; NULL = it is never put away */
    bool resting;      /* it is, or is about to be */
    char id[64];       /* "" = none now */
    char snapshot[64]; /* last commit point; "" = the task as registered */
};

/* Copies owner and snapshot. */
int sandbox_init(struct sandbox *s, struct rpc_channel *agentenv, const char *owner,
                 const char *task, uint32_t attempt, const char *snapshot, struct lh_error *err);
void sandbox_finish(struct sandbox *s);

/* Removes what earlier attempts left, keeps only `snapshot` of their snapshots, starts a sandbox.
 */
int sandbox_start(struct sandbox *s, int timeout_ms, struct lh_error *err);

struct sandbox_result {
    char *output; /* stdout and stderr in order, at most max_output bytes; free() */
    size_t len, produced;
    int status;
    bool timed_out;
    bool dead; /* the action ended the sandbox */
};
/* Runs `/bin/sh -c action`, in the task's directory and environment or where the last one left off.
 */
int sandbox_run(struct sandbox *s, const char *action, uint32_t timeout_ms, size_t max_output,
                struct sandbox_result *out, struct lh_error *err);

/* Puts it away, if that is worth it, until the next action: the model thinks now.  What fails here
 * changes nothing. */
void sandbox_rest(struct sandbox *s);

/* A new commit point: retained under `owner`, and what sandbox_run() rebuilds from.
 * FAILED_PRECONDITION when the sandbox is dead. */
int sandbox_commit(struct sandbox *s, uint32_t turn, int timeout_ms, struct lh_error *err);
/* The verdict.  An infrastructure failure is a verdict too: INVALID with a code (I8). */
Longhaul__Task__V1__Verdict *sandbox_verify(struct sandbox *s, int timeout_ms,
                                            struct lh_error *err);
int sandbox_release(struct rpc_channel *agentenv, const char *owner, const char *snapshot,
                    struct lh_error *err);
/* Everything of the owner: sandboxes and retained snapshots but `keep_snapshot` ("" = none).
 * No owner is a prefix of another, because all ids have one length. */
int sandbox_clear(struct rpc_channel *agentenv, const char *owner, uint32_t attempt,
                  const char *keep_snapshot, struct lh_error *err);
void sandbox_remove(struct sandbox *s);

Longhaul__Task__V1__RegisteredTask *sandbox_task(struct rpc_channel *agentenv, const char *name,
                                                 int timeout_ms, struct lh_error *err);
/* "boot" and the like as a verdict: INVALID. */
/* `outage`: nothing of the task failed, a daemon was away. */
Longhaul__Task__V1__Verdict *sandbox_invalid(const char *code, const char *message, bool outage);

#endif
