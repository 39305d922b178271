/* One shell command in a sandbox on behalf of a task: setup, healthcheck, an oracle's action, a
 * verifier.  The end of its output is kept for messages. */
#ifndef AGENTENV_TASK_EXEC_H
#define AGENTENV_TASK_EXEC_H

#include "agentenv/daemon/daemon.h"
#include "agentenv/task/task.h"

struct task_command {
    const char *const *argv;  /* NULL at the end */
    const char *cwd;          /* NULL = the task's workdir */
    const char *user;         /* "" = root of the sandbox */
    const char *extra_env[3]; /* NAME=value, NULL at the end; come after the task's own */
    uint32_t timeout_ms;
    struct rpc_call *call; /* may be NULL; when cancelled the command is killed */
};

struct task_result {
    Longhaul__Sandbox__V1__ExecExit exit;
    char output[600]; /* its end, without trailing newlines */
    size_t len;
};

/* The task's variables are set, secrets from the daemon's LONGHAUL_SECRET_NAME. */
int task_exec(struct daemon *d, const Task *task, const char *sandbox, const struct task_command *c,
              struct task_result *result, struct lh_error *err);

/* The task's own variables as NAME=value; the caller frees each of the *n and the array, also after
 * an error. */
int task_variables(const Task *task, char ***env, size_t *n, struct lh_error *err);

/* "exit status 2", "signal 9", "no end within 60000 ms", with the output behind it. */
void task_describe(const struct task_result *result, char *text, size_t size);

#endif
