/* Starts the processes of a job, keeps them running, and ends them.
 *
 * Every process can die at any instant and is simply started again with the same command line: what
 * it needs to go on lies in the job directory.  The supervisor knows no more about them than that,
 * their exit statuses (docs/JOBDIR.md), and the order in which they can start.  Children die with
 * their supervisor (PR_SET_PDEATHSIG), so nothing runs on unsupervised but sandboxes, which
 * `resume` and `stop` find again through agentenvd. */
#ifndef DEPLOY_SUPERVISE_H
#define DEPLOY_SUPERVISE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "longhaul/job/v1/job.pb-c.h"
#include "proto/error.h"

enum { SUPERVISE_MAX = 300, SUPERVISE_ARGS = 12 };

struct process {
    char name[32];              /* of its log */
    char *argv[SUPERVISE_ARGS]; /* argv[0] = path; owned */
    pid_t pid;                  /* 0 = not running */
    int restarts;               /* in a row without a minute of life */
    int64_t started_ms, start_at_ms;
    int status; /* of the last end */
    bool ready; /* it has been up once */
    bool done;  /* a worker that the trainer has sent home */
};

struct supervisor {
    const char *dir; /* absolute */
    struct process processes[SUPERVISE_MAX];
    size_t n;
    struct process *trainer;
    struct process command; /* one at a time */
    bool ending;
    int signals; /* signalfd: SIGCHLD, SIGTERM, SIGINT */
};

int supervisor_init(struct supervisor *s, const char *dir, struct lh_error *err);
void supervisor_finish(struct supervisor *s);

/* Daemons first, then what runs on them.  `trainer_args` (may be NULL, ends with NULL) go behind
 * the trainer's job directory. */
int supervisor_start_daemons(struct supervisor *s, struct lh_error *err);
int supervisor_start_job(struct supervisor *s, const Longhaul__Job__V1__Job *job,
                         const char *const *trainer_args, struct lh_error *err);

/* Looks after everything until the trainer has ended (0 = done, its failure otherwise) or a signal
 * asks to stop (CANCELLED).  `tick` is called twice a second. */
int supervisor_run(struct supervisor *s, void (*tick)(void *ctx), void *ctx, struct lh_error *err);

/* SIGTERM to the job's processes, then to the daemons; SIGKILL after a grace. */
void supervisor_stop(struct supervisor *s);

/* Runs a program to its end with output in its log; error with the last lines of it. */
int supervisor_command(struct supervisor *s, const char *name, const char *const *args,
                       int timeout_ms, struct lh_error *err);
/* Removes every sandbox of the job; agentenvd must be up. */
int supervisor_remove_sandboxes(struct supervisor *s, struct lh_error *err);

#endif
