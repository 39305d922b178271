/* The job file: YAML in, a resolved and checked longhaul.job.v1.Job out.
 *
 * One table (job_fields.c) has a row for every field: where it goes, bounds, default, unit and
 * documentation.  Parsing, bounds, `--dry-run` and `longhaul run --fields` all read it, so they
 * cannot disagree. */
#ifndef DEPLOY_JOB_H
#define DEPLOY_JOB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "longhaul/job/v1/job.pb-c.h"
#include "proto/error.h"

enum job_type {
    JOB_U32,
    JOB_U64,
    JOB_BYTES,
    JOB_FLOAT,
    JOB_BOOL,
    JOB_STRING,
    JOB_PATH,
    JOB_CHOICE
};

struct job_field {
    const char *section; /* "" = top level */
    const char *name;
    enum job_type type;
    size_t offset;       /* in the section's message */
    double min, max;     /* numbers; strings: length */
    const char *initial; /* as it would stand in the file; NULL = must be given */
    const char *choices; /* JOB_CHOICE: "a|b", values 0, 1, .. */
    const char *doc;     /* with the unit */
};
extern const struct job_field job_fields[];
extern const size_t job_n_fields;

/* Reads and resolves the file; relative paths in it are relative to its directory.  Every error
 * names file and line.  The caller frees with job_destroy(). */
Longhaul__Job__V1__Job *job_load(const char *path, struct lh_error *err);
/* Impossible combinations and missing files. */
int job_check(const Longhaul__Job__V1__Job *job, const char *path, struct lh_error *err);
void job_destroy(Longhaul__Job__V1__Job *job);

/* The message that holds a field's section. */
void *job_section(Longhaul__Job__V1__Job *job, const char *section);

/* As a job file again, every field with its value. */
void job_print(Longhaul__Job__V1__Job *job, FILE *to);
/* The table of fields for people. */
void job_print_fields(FILE *to);

/* JOB/job.pb. */
Longhaul__Job__V1__Job *job_read(const char *job_dir, struct lh_error *err);
int job_write(const Longhaul__Job__V1__Job *job, const char *job_dir, struct lh_error *err);

#endif
