/* What a sandbox's processes may ask of the kernel: seccomp, capabilities, resource limits. */
#ifndef AGENTENV_SANDBOX_CONFINE_H
#define AGENTENV_SANDBOX_CONFINE_H

#include <stdint.h>

#include "proto/error.h"

/* Compiles the seccomp programs, once (some milliseconds), into a sealed memfd in the form that
 * init reads: for each program its length in instructions, then the instructions. */
int confine_compile(struct lh_error *err);

/* rlimits for all processes of a sandbox; 0 = as inherited.  The last two stand in for cgroups. */
struct confine_limits {
    uint64_t file_bytes; /* of a file */
    uint64_t data_bytes; /* of writable private memory, of a process */
    uint32_t processes;  /* of a user id */
};

/* Cuts the calling process down to what init is to have: bounding set, no_new_privs, limits that
 * need no user.  0, or -1 with errno. */
int confine_self(const struct confine_limits *l);

#endif
