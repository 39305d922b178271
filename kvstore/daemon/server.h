/* The socket side of kvstored: one poll loop on one thread.  Requests take microseconds and never
 * wait, so threads would only add locks; copying, which takes time, is the clients' own. */
#ifndef KVSTORE_DAEMON_SERVER_H
#define KVSTORE_DAEMON_SERVER_H

#include "kvstore/daemon/service.h"

enum { KV_MAX_CLIENTS = 256 };

struct kv_server_options {
    int listen_fd, stop_fd;
    const char *metrics; /* IPV4:PORT of /metrics; "" = none */
};

/* Serves until stop_fd is readable. */
int kv_server_run(struct kv_service *service, const struct kv_server_options *o,
                  struct lh_error *err);

#endif
