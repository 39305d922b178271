/* TOML 1.0 as JSON values, for task.toml files.  Debian has no C library for it.
 *
 * Numbers and texts become JSON's; dates and times, which no key of ours has, become text; not
 * finite numbers are refused.  Every key knows its line, for messages.  From outside: bounded in
 * size and depth, and fuzzed (tests/fuzz/fuzz_toml.c). */
#ifndef AGENTENV_TASK_TOML_H
#define AGENTENV_TASK_TOML_H

#include <jansson.h>

#include "proto/error.h"

struct toml {
    json_t *root;  /* an object */
    json_t *lines; /* "environment.cpus" or "steps[0].name" → line */
};

/* INVALID_ARGUMENT "NAME:LINE: ..." */
int toml_parse(const char *name, const char *text, size_t len, struct toml *out,
               struct lh_error *err);
void toml_finish(struct toml *t);

/* Of the key with this path, or of the closest above it; 1 when there is none. */
int toml_line(const struct toml *t, const char *path);

#endif
