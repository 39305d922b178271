/* Between the files of the supervisor. */
#ifndef DEPLOY_SUPERVISE_PRIVATE_H
#define DEPLOY_SUPERVISE_PRIVATE_H

#include <sys/wait.h>

#include "deploy/supervise.h"

enum { SUPERVISE_TICK_MS = 50 };

static inline bool process_exited_with(const struct process *p, int code)
{
    return WIFEXITED(p->status) && WEXITSTATUS(p->status) == code;
}

int supervisor_spawn(const struct supervisor *s, const char *name, char *const argv[], pid_t *pid,
                     struct lh_error *err);

/* What everything that waits does meanwhile, at most `ms` long: reaps, restarts, and fails when
 * asked to stop or when something cannot be kept running.  At the job's end only daemons are
 * restarted, to clean up, and being asked to stop is no news. */
int supervisor_look_after(struct supervisor *s, int ms, struct lh_error *err);

/* Sets an error from the last line of a process's log; returns its code. */
int supervisor_log_tail(const struct supervisor *s, const char *name, struct lh_error *err);

#endif
