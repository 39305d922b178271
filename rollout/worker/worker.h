/* A rollout worker: one process, one engine, many trajectories.
 *
 * Threads: the engine's (worker_run: everything that moves trajectories), one that receives from
 * the channel, a few for sandboxes, one for the store, and arbiterd's client.  They meet in queues;
 * the engine's thread sleeps while all of them are empty. */
#ifndef ROLLOUT_WORKER_WORKER_H
#define ROLLOUT_WORKER_WORKER_H

#include <signal.h>
#include <stdbool.h>

#include "longhaul/job/v1/job.pb-c.h"
#include "proto/cleanup.h"
#include "proto/error.h"

struct worker;

struct worker_options {
    const char *job_dir;
    const Longhaul__Job__V1__Job *job;
    unsigned index;                    /* names it: "rollout-INDEX" */
    const volatile sig_atomic_t *stop; /* set by SIGTERM */
};

struct worker *worker_create(const struct worker_options *o, struct lh_error *err);
/* False when a sandbox call was still running after a few seconds; then nothing was freed and the
 * process should end at once. */
bool worker_shut_down(struct worker *w);
void worker_destroy(struct worker *w);
LH_DEFINE_AUTO(worker, worker_destroy)

/* Until STOP or a signal: 0.  UNAVAILABLE = arbiterd or valid weights are gone: try again later. */
int worker_run(struct worker *w, struct lh_error *err);

#endif
