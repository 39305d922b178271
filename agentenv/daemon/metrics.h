/* What agentenvd counts, in Prometheus' text format (proto/metrics.h): one table (metrics.c), read
 * by the rpc Metrics and, where --metrics asks for it, by HTTP at /metrics. */
#ifndef AGENTENV_DAEMON_METRICS_H
#define AGENTENV_DAEMON_METRICS_H

#include "agentenv/daemon/daemon.h"

struct metrics;

/* `address` is "IPV4:PORT", NULL = no HTTP. */
struct metrics *metrics_create(struct daemon *d, const char *address, struct lh_error *err);
void metrics_destroy(struct metrics *m);
LH_DEFINE_AUTO(metrics, metrics_destroy)

/* A call has ended; from any thread.  `method` is "Service/Method", one of the server's. */
void metrics_call(struct metrics *m, const char *method, int status, int64_t took_us);
/* free() it. */
char *metrics_text(struct metrics *m, struct lh_error *err);

rpc_unary_fn service_metrics;

#endif
