/* A server of test.proto, its clients, and what its tests ask of it. */
#ifndef TESTS_UNIT_PROTO_RPC_KIT_H
#define TESTS_UNIT_PROTO_RPC_KIT_H

#include <criterion/criterion.h>
#include <criterion/new/assert.h>

#include "echo.h"
#include "proto/parse.h"
#include "test.pb-c.h"

extern char rpc_dir[], *rpc_path;

/* For .init and .fini. */
void rpc_enter(void);
void rpc_leave(void);

struct rpc_server *serve(unsigned threads);
struct rpc_channel *channel(void);
int echo(struct rpc_channel *ch, const Longhaul__Test__V1__EchoRequest *rq, int timeout_ms,
         Longhaul__Test__V1__EchoReply **rp, struct lh_error *e);
/* Pid of the server that answered, or the failure. */
int ping(struct rpc_channel *ch, int timeout_ms, struct lh_error *e);
Longhaul__Test__V1__StatsReply stats(struct rpc_channel *ch);

struct counter {
    unsigned got, stop_at;
    bool in_order;
    unsigned delay_us;
};
int count(struct rpc_channel *ch, const Longhaul__Test__V1__CountRequest *rq, int timeout_ms,
          struct counter *c, struct lh_error *e);

#endif
