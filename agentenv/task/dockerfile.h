/* The part of the Dockerfile language that needs no network: FROM an imported image, COPY, RUN,
 * ENV, WORKDIR, USER.  Everything else, and what these would need beyond it (other stages, flags,
 * variables, patterns, here-documents), is refused with its line: a build that means something else
 * than its author thinks is worse than none.  Fuzzed: tests/fuzz/fuzz_dockerfile.c. */
#ifndef AGENTENV_TASK_DOCKERFILE_H
#define AGENTENV_TASK_DOCKERFILE_H

#include <stddef.h>

#include "longhaul/sandbox/v1/sandbox.pb-c.h"
#include "proto/error.h"

enum docker_kind { DOCKER_RUN, DOCKER_COPY, DOCKER_ENV, DOCKER_WORKDIR, DOCKER_USER };

struct docker_step {
    enum docker_kind kind;
    unsigned line;
    char **words; /* RUN: the command; COPY: sources, then the destination; ENV: one NAME=value */
    size_t n_words;
};

struct dockerfile {
    const char *what; /* "Dockerfile", for messages about a step; borrowed */
    char *from;       /* name of an image of ours: "python:3.12-slim" is "python-3.12-slim" */
    struct docker_step *steps;
    size_t n;
};

/* INVALID_ARGUMENT, or UNIMPLEMENTED for what Docker would take; both "NAME:LINE: ...". */
int dockerfile_parse(const char *name, const char *text, size_t len, struct dockerfile *out,
                     struct lh_error *err);
void dockerfile_finish(struct dockerfile *f);

/* What agentenvd is asked to build; COPY takes its files from below the directory `context`, none
 * through a symbolic link.  Free with lh_message_free(). */
Longhaul__Sandbox__V1__BuildImageRequest *dockerfile_request(const struct dockerfile *f,
                                                             const char *name, const char *context,
                                                             struct lh_error *err);

#endif
