/* Progress of a job: a live line on a terminal, plain lines in a pipe. */
#ifndef DEPLOY_PROGRESS_H
#define DEPLOY_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct progress {
    const char *dir;
    bool terminal;
    long offset; /* into metrics.jsonl */
    int64_t next_ms;
};

void progress_init(struct progress *p, const char *job_dir);
/* As supervisor_run's tick; draws at most twice a second. */
void progress_tick(void *progress);
/* Draws what is left and clears the live line. */
void progress_finish(struct progress *p);

/* The table and the reward curve of all of metrics.jsonl. */
void report_print(const char *job_dir);

#endif
