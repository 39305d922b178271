#include "rpc_kit.h"

#include <stdlib.h>
#include <unistd.h>

#include "proto/file.h"

#define ECHO  "/longhaul.test.v1.Echo/Echo"
#define COUNT "/longhaul.test.v1.Echo/Count"

char rpc_dir[] = "/tmp/lh-rpc-XXXXXX", *rpc_path;

void rpc_enter(void)
{
    cr_assert(mkdtemp(rpc_dir) != NULL);
    rpc_path = lh_format("%s/s", rpc_dir);
}

void rpc_leave(void)
{
    lh_remove_tree(rpc_dir, NULL);
    free(rpc_path);
}

struct rpc_server *serve(unsigned threads)
{
    struct lh_error e = {0};
    struct rpc_server *s = echo_server_create(rpc_path, threads, &e);

    cr_assert(s != NULL, "%s", e.message);
    return s;
}

struct rpc_channel *channel(void)
{
    struct lh_error e = {0};
    struct rpc_channel *ch = rpc_channel_create(rpc_path, &e);

    cr_assert(ch != NULL, "%s", e.message);
    return ch;
}

int echo(struct rpc_channel *ch, const Longhaul__Test__V1__EchoRequest *rq, int timeout_ms,
         Longhaul__Test__V1__EchoReply **rp, struct lh_error *e)
{
    return rpc_unary(ch, ECHO, &rq->base, &longhaul__test__v1__echo_reply__descriptor, timeout_ms,
                     (ProtobufCMessage **)rp, e);
}

int ping(struct rpc_channel *ch, int timeout_ms, struct lh_error *e)
{
    Longhaul__Test__V1__EchoRequest rq = LONGHAUL__TEST__V1__ECHO_REQUEST__INIT;
    lh_automsg(Longhaul__Test__V1__EchoReply) rp = NULL;
    int r = echo(ch, &rq, timeout_ms, &rp, e);

    return r ? r : rp->server_pid;
}

Longhaul__Test__V1__StatsReply stats(struct rpc_channel *ch)
{
    Longhaul__Test__V1__StatsRequest rq = LONGHAUL__TEST__V1__STATS_REQUEST__INIT;
    lh_automsg(Longhaul__Test__V1__StatsReply) rp = NULL;
    struct lh_error e = {0};

    cr_assert(eq(int,
                 rpc_unary(ch, "/longhaul.test.v1.Echo/Stats", &rq.base,
                           &longhaul__test__v1__stats_reply__descriptor, 5000,
                           (ProtobufCMessage **)&rp, &e),
                 0),
              "%s", e.message);
    return *rp;
}

static int count_one(void *ctx, const ProtobufCMessage *m, struct lh_error *err)
{
    struct counter *c = ctx;

    c->in_order &= ((const Longhaul__Test__V1__CountReply *)m)->i == c->got++;
    if (c->delay_us)
        usleep(c->delay_us);
    return c->got == c->stop_at ? lh_fail(err, LH_ABORTED, "seen enough") : 0;
}

int count(struct rpc_channel *ch, const Longhaul__Test__V1__CountRequest *rq, int timeout_ms,
          struct counter *c, struct lh_error *e)
{
    c->in_order = true;
    return rpc_stream(ch, COUNT, &rq->base, &longhaul__test__v1__count_reply__descriptor,
                      timeout_ms, count_one, c, e);
}
