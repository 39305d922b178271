/* Making a sandbox the one that a task describes. */
#ifndef AGENTENV_TASK_SETUP_H
#define AGENTENV_TASK_SETUP_H

#include "agentenv/daemon/daemon.h"
#include "agentenv/task/task.h"

/* The hook of daemon.h. */
int task_setup(struct daemon *d, const char *name, const char *sandbox, int64_t deadline_ms,
               struct lh_error *err);

int task_put_files(struct daemon *d, const char *sandbox, Longhaul__Task__V1__File *const *files,
                   size_t n, struct lh_error *err);

/* Then no process has lived in a sandbox that task_setup() has just finished. */
bool task_runs_nothing_before_the_agent(const Task *t);

#endif
