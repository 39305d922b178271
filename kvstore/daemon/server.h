/* The socket side of kvstored: one poll loop on one thread.  Requests take microseconds and never
 * wait, so threads would only add locks; copying, which takes time, is the clients' own. */
#ifndef KVSTORE_DAEMON_SERVER_H
#define KVSTORE_DAEMON_SERVER_H

#include "kvstore/daemon/lent.h"
#include "kvstore/daemon/service.h"

enum { KV_MAX_CLIENTS = 256 };

struct kv_server_options {
    int listen_fd, stop_fd;
    const char *metrics;  /* IPV4:PORT of /metrics; "" = none */
    struct kv_lent *lent; /* NULL = the memory is nobody else's */
};

/* Serves until stop_fd is readable.  UNAVAILABLE when arbiterd is lost. */
int kv_server_run(struct kv_service *service, const struct kv_server_options *o,
                  struct lh_error *err);

#endif
