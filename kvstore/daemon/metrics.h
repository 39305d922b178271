/* What kvstored counts, in Prometheus' text format (proto/metrics.h): the fields of its STAT, so
 * that `kvstore stat`, `kvstore metrics` and /metrics cannot differ. */
#ifndef KVSTORE_DAEMON_METRICS_H
#define KVSTORE_DAEMON_METRICS_H

#include "longhaul/kv/v1/kv.pb-c.h"
#include "proto/error.h"

/* free() it. */
char *kv_metrics_text(const Longhaul__Kv__V1__StatReply *stat, struct lh_error *err);

#endif
