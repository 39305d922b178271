/* The audit: proves from ledger and checkpoints alone that nothing acknowledged was lost and that
 * no group was trained on twice in the lineage of the surviving weights.
 *
 * The proof of the second: a version's id is a hash of its parent's id, its step and the batch. The
 * audit makes the batch of every step again from the ledger, and with it the chain of ids from the
 * first version to the one in the checkpoint.  A group has one step, so a chain that fits leaves no
 * room for a second use, for a lost one, or for other tokens or rewards than those recorded. */
#ifndef TRAINER_LEARN_AUDIT_H
#define TRAINER_LEARN_AUDIT_H

#include <stdio.h>

#include "proto/error.h"

/* Prints a table to `out` and each problem to `problems`.  The number of problems, or an error when
 * the job directory cannot be read. */
int audit_job(const char *job_dir, FILE *out, FILE *problems, struct lh_error *err);

#endif
