/* STATE/audit.log: a line of JSON for each call that changed something or was refused. */
#ifndef AGENTENV_DAEMON_AUDIT_LOG_H
#define AGENTENV_DAEMON_AUDIT_LOG_H

#include <stdbool.h>
#include <sys/types.h>

#include "proto/error.h"

struct audit_log;

struct audit_entry {
    bool local;
    uid_t uid;         /* of a local caller */
    const char *token; /* its name, "" = none or not known */
    const char *method, *sandbox, *owner;
    int status; /* lh_status */
};

struct audit_log *audit_log_open(const char *state_dir, struct lh_error *err);
void audit_log_close(struct audit_log *l);
/* One write each, so that lines of threads do not mix.  A failure is logged: the call is done. */
void audit_log_write(struct audit_log *l, const struct audit_entry *e);

#endif
