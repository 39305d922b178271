/* The verifier's own interpreter: a read-only layer with a static busybox, mounted above whatever
 * the agent left. */
#ifndef AGENTENV_TASK_LAYER_H
#define AGENTENV_TASK_LAYER_H

#include "agentenv/daemon/daemon.h"

/* Makes it in the daemon's state directory, or finds it there. */
int verifier_layer_make(struct daemon *d, struct lh_error *err);
/* Its directory; free() it. */
char *verifier_layer_path(struct daemon *d, struct lh_error *err);

#endif
