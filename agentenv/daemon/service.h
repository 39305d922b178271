/* Handlers of longhaul.sandbox.v1.Sandboxes that lie beside what they serve.  Each checks its
 * request and calls the inside (daemon.h, snapshot.h); the short ones are in service.c. */
#ifndef AGENTENV_DAEMON_SERVICE_H
#define AGENTENV_DAEMON_SERVICE_H

#include "proto/rpc.h"

struct access;
struct daemon;

rpc_stream_fn service_exec, service_watch, service_upload, service_download, service_watch_files;
rpc_unary_fn service_exec_input, service_list_files, service_stat_file, service_fork;
rpc_unary_fn service_take_snapshot, service_list_snapshots, service_retain, service_release,
    service_reconcile, service_gc;

/* The caller's deadline, or WAIT_DEFAULT_MS from now. */
int64_t call_deadline_ms(const struct rpc_call *call);

/* A new message of TYPE, one of V1() in internal.h, as *reply, or the handler returns. */
#define NEW_REPLY(TYPE, init, var)                                                                 \
    V1(TYPE) *var = calloc(1, sizeof *var);                                                        \
    if (!var)                                                                                      \
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory");                                   \
    init(var);                                                                                     \
    *reply = &var->base

struct service_options {
    const char *socket;
    struct access *access;
    const char *tls_address, *tls_cert, *tls_key; /* as in struct rpc_server_options */
};

struct rpc_server *service_start(struct daemon *d, const struct service_options *options,
                                 struct lh_error *err);

#endif
