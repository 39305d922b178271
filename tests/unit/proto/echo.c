#include "echo.h"

#include <limits.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/parse.h"
#include "test.pb-c.h"

enum { MAX_REQUEST = 1 << 20, STEP_MS = 5 };

static atomic_uint cancelled, sent;

/* False when the call was cancelled meanwhile. */
static bool sleep_in_call(struct rpc_call *call, unsigned ms)
{
    int64_t until = lh_now_ms() + ms;

    while (!rpc_cancelled(call) && lh_ms_left(until))
        poll(NULL, 0, lh_ms_left(until) < STEP_MS ? lh_ms_left(until) : STEP_MS);
    if (!rpc_cancelled(call))
        return true;
    atomic_fetch_add(&cancelled, 1);
    return false;
}

static int echo(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                ProtobufCMessage **reply, struct lh_error *err)
{
    const Longhaul__Test__V1__EchoRequest *rq = (const void *)request;
    int64_t deadline = rpc_deadline_ms(call);

    if (!sleep_in_call(call, rq->sleep_ms))
        return lh_fail(err, LH_CANCELLED, "cancelled while asleep");
    if (rq->fail)
        return lh_fail(err, -rq->fail, "asked to fail: \xe2\x82\xac \"%s\"", rq->text);
    Longhaul__Test__V1__EchoReply *rp = calloc(1, sizeof *rp);
    longhaul__test__v1__echo_reply__init(rp);
    rp->text = strdup(rq->text);
    rp->payload.len = rq->payload.len;
    rp->payload.data = malloc(rq->payload.len + 1);
    memcpy(rp->payload.data, rq->payload.data ? rq->payload.data : (void *)"", rq->payload.len);
    rp->left_ms = deadline == INT64_MAX ? -1 : deadline - lh_now_ms();
    rp->peer_uid = rpc_peer_uid(call);
    rp->server_pid = getpid();
    *reply = &rp->base;
    return 0;
}

static int count(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                 struct lh_error *err)
{
    const Longhaul__Test__V1__CountRequest *rq = (const void *)request;
    Longhaul__Test__V1__CountReply rp = LONGHAUL__TEST__V1__COUNT_REPLY__INIT;
    lh_autofree uint8_t *payload = calloc(1, rq->payload_bytes + 1);

    rp.payload = (ProtobufCBinaryData){rq->payload_bytes, payload};
    for (rp.i = 0; rp.i < rq->n; rp.i++) {
        if (rq->interval_ms && !sleep_in_call(call, rq->interval_ms))
            return lh_fail(err, LH_CANCELLED, "cancelled while asleep");
        int r = rpc_send(call, &rp.base, err);
        if (r) {
            atomic_fetch_add(&cancelled, 1);
            return r;
        }
        atomic_fetch_add(&sent, 1);
    }
    return rq->fail ? lh_fail(err, -rq->fail, "after %u messages", rq->n) : 0;
}

static int stats(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                 ProtobufCMessage **reply, struct lh_error *err)
{
    Longhaul__Test__V1__StatsReply *rp = calloc(1, sizeof *rp);

    longhaul__test__v1__stats_reply__init(rp);
    rp->cancelled = cancelled;
    rp->sent = sent;
    *reply = &rp->base;
    return 0;
}

struct rpc_server *echo_server_create(const char *path, unsigned threads, struct lh_error *err)
{
    static const struct rpc_method methods[] = {
        {"Echo", .unary = echo}, {"Count", .stream = count}, {"Stats", .unary = stats}, {0}};
    const struct rpc_service service = {&longhaul__test__v1__echo__descriptor, methods, NULL};

    return rpc_server_create(&(struct rpc_server_options){.path = path,
                                                          .threads = threads,
                                                          .max_message = MAX_REQUEST,
                                                          .services = &service,
                                                          .n_services = 1},
                             err);
}
