/* One call at the server: its life time, its batches, its handler.
 *
 * gRPC reports the end of every batch on the server's completion queue, which one event thread
 * reads. A handler runs on a pool thread and blocks: it starts a batch and waits until the event
 * thread has seen it complete.  A call is kept by one reference for each batch under way and one
 * for the pool, so it is freed exactly when nothing can mention it any more.
 *
 * The request message is read only when a pool thread has the call, so queued calls cost no more
 * than their headers and memory is bounded by threads × max_message.
 *
 * Rejected: a completion queue for each call, which the handler would read itself.  Then nobody
 * sees a cancellation while the handler is busy, short of polling. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "proto/rpc_core.h"
#include "proto/wait.h"

LH_LOG_COMPONENT("rpc");

enum { REQUEST_MS = 30000 }; /* for a request to arrive once its call has a thread */

struct rpc_call *rpc_call_create(struct rpc_server *s)
{
    struct rpc_call *c = calloc(1, sizeof *c);

    if (!c)
        return NULL;
    c->server = s;
    c->refs = 1;
    c->peer_uid = (uid_t)-1;
    grpc_call_details_init(&c->details);
    grpc_metadata_array_init(&c->metadata);
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->batch_done, NULL);
    return c;
}

void rpc_call_unref(struct rpc_call *c)
{
    if (atomic_fetch_sub(&c->refs, 1) != 1)
        return;
    if (c->request)
        grpc_byte_buffer_destroy(c->request);
    if (c->last)
        grpc_byte_buffer_destroy(c->last);
    free(c->bearer);
    grpc_metadata_array_destroy(&c->metadata);
    grpc_call_details_destroy(&c->details);
    if (c->call)
        grpc_call_unref(c->call);
    pthread_cond_destroy(&c->batch_done);
    pthread_mutex_destroy(&c->mutex);
    free(c);
}

bool rpc_call_start(struct rpc_call *c, const grpc_op *ops, size_t n, struct rpc_tag *tag,
                    void (*done)(struct rpc_call *c, bool ok))
{
    *tag = (struct rpc_tag){done, c};
    atomic_fetch_add(&c->refs, 1);
    grpc_call_error e = grpc_call_start_batch(c->call, ops, n, tag, NULL);
    if (e == GRPC_CALL_OK)
        return true;
    lh_err("batch refused", "%s", grpc_call_error_to_string(e));
    rpc_call_unref(c);
    return false;
}

size_t rpc_call_message_ops(struct rpc_call *c, grpc_op ops[2], grpc_byte_buffer *message)
{
    size_t n = 0;

    memset(ops, 0, 2 * sizeof *ops);
    if (!c->headers_sent)
        ops[n++].op = GRPC_OP_SEND_INITIAL_METADATA;
    c->headers_sent = true;
    if (!message)
        return n;
    ops[n].op = GRPC_OP_SEND_MESSAGE;
    ops[n].data.send_message.send_message = message;
    return n + 1;
}

static void ignore(struct rpc_call *c, bool ok)
{
}

void rpc_call_finish(struct rpc_call *c, grpc_byte_buffer *reply, int status, const char *details)
{
    grpc_slice text = grpc_slice_from_copied_string(details);
    grpc_op ops[3];
    size_t n = rpc_call_message_ops(c, ops, reply);

    memset(&ops[n], 0, sizeof ops[n]);
    ops[n].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
    ops[n].data.send_status_from_server.status = status <= 0 && status >= LH_UNAUTHENTICATED
                                                     ? (grpc_status_code)-status
                                                     : GRPC_STATUS_UNKNOWN;
    ops[n].data.send_status_from_server.status_details = &text;
    rpc_call_start(c, ops, n + 1, &c->on_batch, ignore);
    if (reply)
        grpc_byte_buffer_destroy(reply);
    grpc_slice_unref(text);
}

/* ---- on a pool thread ------------------------------------------------------------------------ */

static void wake_handler(struct rpc_call *c, bool ok)
{
    LH_LOCKED(&c->mutex);
    c->batch_pending = false;
    c->batch_ok = ok;
    pthread_cond_signal(&c->batch_done);
}

/* Waits for the batch; at wait_until the call is cancelled, which completes every batch of it. */
static bool run_batch(struct rpc_call *c, const grpc_op *ops, size_t n, int64_t wait_until)
{
    bool in_time = true;

    c->batch_pending = true;
    if (!rpc_call_start(c, ops, n, &c->on_batch, wake_handler))
        return false;
    LH_LOCKED(&c->mutex);
    while (c->batch_pending && in_time)
        in_time = lh_wait_until(&c->batch_done, &c->mutex, wait_until);
    if (c->batch_pending)
        grpc_call_cancel(c->call, NULL);
    while (c->batch_pending)
        pthread_cond_wait(&c->batch_done, &c->mutex);
    return c->batch_ok;
}

/* 0 with c->request; NULL there when the client sends no more. */
static int read_message(struct rpc_call *c, struct lh_error *err)
{
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
    int64_t until = lh_now_ms() + REQUEST_MS;

    op.data.recv_message.recv_message = &c->request;
    if (run_batch(c, &op, 1, until) && !(rpc_cancelled(c) && !c->request))
        return 0;
    return lh_ms_left(until)
               ? lh_fail(err, LH_CANCELLED, "%s: the client has gone", c->method->name)
               : lh_fail(err, LH_DEADLINE_EXCEEDED, "%s: no message for %d ms", c->method->name,
                         REQUEST_MS);
}

static ProtobufCMessage *parse_message(struct rpc_call *c, struct lh_error *err)
{
    ProtobufCMessage *m =
        rpc_message_from_buffer(c->descriptor->input, c->request, c->server->max_message, err);

    grpc_byte_buffer_destroy(c->request);
    c->request = NULL;
    return m;
}

static ProtobufCMessage *read_request(struct rpc_call *c, struct lh_error *err)
{
    if (read_message(c, err) < 0 || !c->request) {
        lh_fail(err, LH_INVALID_ARGUMENT, "%s: no request came", c->method->name);
        return NULL;
    }
    return parse_message(c, err);
}

int rpc_receive(struct rpc_call *c, ProtobufCMessage **message, struct lh_error *err)
{
    int r = read_message(c, err);

    if (r < 0 || !c->request)
        return r;
    *message = parse_message(c, err);
    return *message ? 1 : err->code;
}

static int handle(struct rpc_call *c, const ProtobufCMessage *request, ProtobufCMessage **reply,
                  struct lh_error *err)
{
    if (c->method->stream)
        return c->method->stream(c->service->ctx, c, request, err);
    int r = c->method->unary(c->service->ctx, c, request, reply, err);
    if (!r && !*reply)
        return lh_fail(err, LH_INTERNAL, "%s: the handler gave no reply", c->method->name);
    return r;
}

static int run_handler(struct rpc_call *c, ProtobufCMessage **reply, struct lh_error *err)
{
    lh_automsg(ProtobufCMessage) request = read_request(c, err);
    const struct rpc_guard *g = &c->server->guard;

    char name[128];

    if (!request)
        return err->code;
    snprintf(name, sizeof name, "%s/%s", c->service->descriptor->short_name, c->method->name);
    if (!g->enter || c->service->descriptor == rpc_reflection.descriptor)
        return handle(c, request, reply, err);
    int64_t started = lh_now_us();
    int r = g->enter(g->ctx, c, name, request, err);
    bool entered = r == 0;
    if (entered)
        r = handle(c, request, reply, err);
    g->leave(g->ctx, c, name, request, entered, r, lh_now_us() - started);
    return r;
}

void rpc_call_serve(struct rpc_call *c)
{
    lh_automsg(ProtobufCMessage) reply = NULL;
    struct lh_error e = {0};
    int r = LH_CANCELLED;

    if (!rpc_cancelled(c))
        r = run_handler(c, &reply, &e);
    if (!r && reply)
        rpc_send_last(c, reply);
    rpc_call_finish(c, r ? NULL : lh_steal(&c->last), r, r ? e.message : "");
}

void rpc_send_last(struct rpc_call *c, const ProtobufCMessage *message)
{
    if (c->last)
        grpc_byte_buffer_destroy(c->last);
    c->last = rpc_buffer_from_message(message);
}

bool rpc_cancelled(const struct rpc_call *c)
{
    return c->cancelled;
}

int64_t rpc_deadline_ms(const struct rpc_call *c)
{
    return c->deadline_ms;
}

bool rpc_is_local(const struct rpc_call *c)
{
    return c->local;
}

static const char BEARER[] = "Bearer ";

const char *rpc_bearer(const struct rpc_call *c)
{
    size_t len = strlen(BEARER);

    return c->bearer && !strncasecmp(c->bearer, BEARER, len) ? c->bearer + len : NULL;
}

void rpc_call_read_metadata(struct rpc_call *c)
{
    for (size_t i = 0; i < c->metadata.count && !c->bearer; i++)
        if (grpc_slice_str_cmp(c->metadata.metadata[i].key, "authorization") == 0) {
            char *text = grpc_slice_to_c_string(c->metadata.metadata[i].value);
            c->bearer = strdup(text);
            gpr_free(text);
        }
}

uid_t rpc_peer_uid(const struct rpc_call *c)
{
    return c->peer_uid;
}

int rpc_send(struct rpc_call *c, const ProtobufCMessage *message, struct lh_error *err)
{
    grpc_op ops[2];

    if (rpc_cancelled(c))
        return lh_fail(err, LH_CANCELLED, "%s: the client has gone", c->method->name);
    grpc_byte_buffer *buffer = rpc_buffer_from_message(message);
    size_t n = rpc_call_message_ops(c, ops, buffer);
    bool sent = run_batch(c, ops, n, INT64_MAX); /* ends with the call at the latest */
    grpc_byte_buffer_destroy(buffer);
    return sent ? 0 : lh_fail(err, LH_CANCELLED, "%s: the client has gone", c->method->name);
}
