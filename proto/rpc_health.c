/* grpc.health.v1.Health.  A server is SERVING from its start until it is told to stop, so there is
 * one state and one change of it; Watch tells both. */
#include <stdlib.h>
#include <string.h>

#include "grpc/health/v1/health.pb-c.h"
#include "proto/rpc_core.h"

#define STATUS(name) GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__##name

enum { MAX_HEALTH_REQUEST = 4096 };

static grpc_byte_buffer *response(Grpc__Health__V1__HealthCheckResponse__ServingStatus status)
{
    Grpc__Health__V1__HealthCheckResponse r = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;

    r.status = status;
    return rpc_buffer_from_message(&r.base);
}

static bool known_service(const struct rpc_server *s, const char *name)
{
    if (!*name)
        return true;
    for (size_t i = 0; i < s->n_services; i++)
        if (!strcmp(s->services[i].descriptor->name, name))
            return true;
    return false;
}

static bool stopping(struct rpc_health *h)
{
    LH_LOCKED(&h->mutex);
    return h->stopping;
}

static void answer_check(struct rpc_call *c, bool known)
{
    if (known)
        rpc_call_finish(
            c, response(stopping(&c->server->health) ? STATUS(NOT_SERVING) : STATUS(SERVING)),
            LH_OK, "");
    else
        rpc_call_finish(c, NULL, LH_NOT_FOUND, "no such service here");
}

static void end_watch(struct rpc_call *c)
{
    rpc_call_finish(c, response(STATUS(NOT_SERVING)), LH_UNAVAILABLE, "the server is stopping");
}

/* The first message is out: from here the call waits for the change, or for its client to go. */
static void watch(struct rpc_call *c, bool ok)
{
    struct rpc_health *h = &c->server->health;

    if (!ok || rpc_cancelled(c)) {
        rpc_call_finish(c, NULL, LH_CANCELLED, "");
        return;
    }
    pthread_mutex_lock(&h->mutex);
    bool over = h->stopping;
    if (!over) {
        atomic_fetch_add(&c->refs, 1);
        c->next = h->watchers;
        h->watchers = c;
    }
    pthread_mutex_unlock(&h->mutex);
    if (over)
        end_watch(c);
}

static void answer_watch(struct rpc_call *c, bool known)
{
    grpc_byte_buffer *message = response(known ? STATUS(SERVING) : STATUS(SERVICE_UNKNOWN));
    grpc_op ops[2];
    size_t n = rpc_call_message_ops(c, ops, message);

    rpc_call_start(c, ops, n, &c->on_batch, watch);
    grpc_byte_buffer_destroy(message);
}

static void got_request(struct rpc_call *c, bool watching)
{
    struct lh_error e = {0};
    lh_automsg(Grpc__Health__V1__HealthCheckRequest) rq = NULL;

    if (c->request)
        rq = (void *)rpc_message_from_buffer(&grpc__health__v1__health_check_request__descriptor,
                                             c->request, MAX_HEALTH_REQUEST, &e);
    if (!rq)
        rpc_call_finish(c, NULL, LH_INVALID_ARGUMENT, e.message);
    else if (watching)
        answer_watch(c, known_service(c->server, rq->service));
    else
        answer_check(c, known_service(c->server, rq->service));
}

static void got_check(struct rpc_call *c, bool ok)
{
    got_request(c, false);
}

static void got_watch(struct rpc_call *c, bool ok)
{
    got_request(c, true);
}

bool rpc_health_serve(struct rpc_call *c, const char *path)
{
    bool check = !strcmp(path, "/grpc.health.v1.Health/Check");
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};

    if (!check && strcmp(path, "/grpc.health.v1.Health/Watch") != 0)
        return false;
    op.data.recv_message.recv_message = &c->request;
    rpc_call_start(c, &op, 1, &c->on_batch, check ? got_check : got_watch);
    return true;
}

static bool unlink_watcher(struct rpc_health *h, const struct rpc_call *c)
{
    LH_LOCKED(&h->mutex);
    for (struct rpc_call **p = &h->watchers; *p; p = &(*p)->next) {
        if (*p != c)
            continue;
        *p = c->next;
        return true;
    }
    return false;
}

void rpc_health_forget(struct rpc_call *c)
{
    if (!unlink_watcher(&c->server->health, c))
        return;
    rpc_call_finish(c, NULL, LH_CANCELLED, "");
    rpc_call_unref(c);
}

void rpc_health_stop(struct rpc_health *h)
{
    pthread_mutex_lock(&h->mutex);
    struct rpc_call *list = h->watchers;
    h->watchers = NULL;
    h->stopping = true;
    pthread_mutex_unlock(&h->mutex);
    while (list) {
        struct rpc_call *c = list;
        list = c->next;
        end_watch(c);
        rpc_call_unref(c);
    }
}
