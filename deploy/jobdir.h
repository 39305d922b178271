/* A job directory on disk: made once, locked while somebody supervises it (docs/JOBDIR.md). */
#ifndef DEPLOY_JOBDIR_H
#define DEPLOY_JOBDIR_H

#include <argp.h>
#include <stdbool.h>
#include <sys/types.h>

#include "longhaul/job/v1/job.pb-c.h"
#include "proto/error.h"

/* Makes the directory for a new job: absent or empty before, everything but the job file in it
 * after. Gives the job its id. */
int jobdir_create(const char *dir, const char *yaml_path, Longhaul__Job__V1__Job *job,
                  struct lh_error *err);

/* Exclusive lock for the life of the returned fd.  FAILED_PRECONDITION, with the pid of the holder,
 * when the job is being supervised. */
int jobdir_lock(const char *dir, struct lh_error *err);
/* The supervisor's pid, 0 when nobody holds the lock. */
pid_t jobdir_supervisor(const char *dir);

/* The tail of a parser of arguments whose only one is JOBDIR: sets *dir, insists on it. */
error_t jobdir_argument(int key, char *arg, struct argp_state *state, const char **dir);

/* Absolute path; too long for unix sockets in it is an error. */
char *jobdir_resolve(const char *dir, struct lh_error *err);

/* Program beside our own or in $LONGHAUL_PATH.  The caller frees. */
char *program_path(const char *name, struct lh_error *err);

#endif
