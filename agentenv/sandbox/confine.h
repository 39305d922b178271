/* What a sandbox's processes may ask of the kernel: seccomp, capabilities, resource limits. */
#ifndef AGENTENV_SANDBOX_CONFINE_H
#define AGENTENV_SANDBOX_CONFINE_H

#include <stdint.h>

#include "proto/error.h"

/* Compiles the seccomp programs, once (some milliseconds), into a sealed memfd in the form that
 * init reads: for each program its length in instructions, then the instructions. */
int confine_compile(struct lh_error *err);

/* Cuts the calling process down to what init is to have: bounding set, no_new_privs, limits that
 * need no user.  0, or -1 with errno. */
int confine_self(uint64_t file_bytes);

#endif
