/* What the trainer writes for people: metrics.jsonl and status.json (docs/JOBDIR.md). */
#ifndef DEPLOY_METRICS_H
#define DEPLOY_METRICS_H

#include <jansson.h>
#include <stddef.h>

/* Calls `each` for every complete line from *offset on that is a JSON object, and moves *offset
 * behind them.  A torn last line is left for the next time.  A file that has shrunk (a resumed job)
 * is read from its new end. */
void metrics_read(const char *job_dir, long *offset, void (*each)(void *ctx, json_t *line),
                  void *ctx);

/* status.json; NULL when there is none yet.  The caller decrefs. */
json_t *metrics_status(const char *job_dir);

/* Member as a number or a string, with a default. */
double metrics_number(const json_t *o, const char *key, double otherwise);
const char *metrics_text(const json_t *o, const char *key, const char *otherwise);

#endif
