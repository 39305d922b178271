/* metrics.jsonl and status.json of the job directory (docs/JOBDIR.md). */
#ifndef TRAINER_LEARN_METRICS_H
#define TRAINER_LEARN_METRICS_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/cleanup.h"
#include "proto/error.h"

struct metrics;

/* Drops lines of steps past the given ones: a resumed job writes them again. */
struct metrics *metrics_open(const char *job_dir, uint64_t warm_steps, uint64_t steps,
                             struct lh_error *err);
void metrics_close(struct metrics *m);
LH_DEFINE_AUTO(metrics, metrics_close)

/* One line; takes the reference, adds at_ms.  A failure is logged: metrics do not stop a job,
 * except by the disk that is full for the ledger too.  Thread-safe. */
void metrics_write(struct metrics *m, json_t *line);
/* Whether the file had an `eval` line of that name and step when it was opened. */
bool metrics_has_eval(const struct metrics *m, const char *name, uint64_t step);

/* Replaces status.json, without syncing: it is worthless after a crash.  Takes the reference. */
void metrics_status(const char *job_dir, json_t *status);

#endif
