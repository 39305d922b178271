/* agentenvd for an ordinary user. */
#ifndef AGENTENV_SANDBOX_ROOTLESS_H
#define AGENTENV_SANDBOX_ROOTLESS_H

#include "proto/error.h"

/* Makes this process root of a user namespace (see rootless.c) and fills in facts.h.  While the
 * process has one thread, and before box_host_create().  `state_dir` must exist and be this
 * process's alone; with `cgroup_parent` it finds the sandboxes that an earlier daemon left running.
 * Both NULL: only to try what a daemon would find.
 * FAILED_PRECONDITION names what the host does not allow and the next step. */
int box_rootless_enter(const char *state_dir, const char *cgroup_parent, struct lh_error *err);

#endif
