/* Images made by commands. */
#ifndef AGENTENV_TASK_BUILD_H
#define AGENTENV_TASK_BUILD_H

#include "agentenv/daemon/daemon.h"

int build_table_create(struct daemon *d, struct lh_error *err);

/* Sandboxes.BuildImage. */
rpc_unary_fn image_build_rpc;

#endif
