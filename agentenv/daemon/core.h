/* Opening and closing the daemon's object; for main() and tests. */
#ifndef AGENTENV_DAEMON_CORE_H
#define AGENTENV_DAEMON_CORE_H

#include "agentenv/daemon/daemon.h"
#include "agentenv/sandbox/box.h"

/* Makes state_dir this process's as long as the descriptor is open.  Before the host is created, so
 * that its cgroup has one owner, too.  ALREADY_EXISTS when another process has it. */
int daemon_lock(const char *state_dir, struct lh_error *err);

/* Opens the registry under state_dir (created if absent), recovers, and starts the threads that
 * watch over sandboxes.  The host must have been created while the process had one thread; it
 * outlives the daemon. */
struct daemon *daemon_open(const char *state_dir, const struct daemon_hooks *hooks,
                           struct box_host *host, struct lh_error *err);
/* Sandboxes run on. */
void daemon_close(struct daemon *d);
LH_DEFINE_AUTO(daemon, daemon_close)

/* Of what snapshots hold, 0 = none; before anything is served. */
void daemon_limit_store(struct daemon *d, uint64_t bytes);

int daemon_remove_all(struct daemon *d, struct lh_error *err);

#endif
