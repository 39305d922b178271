/* Blocking clients: each call has a completion queue of its own, so calls of many threads share a
 * channel and nothing else.  The calling thread drives the connection while it waits.
 *
 * A channel reconnects by itself, within half a second of the server's return.  Every call waits
 * for the connection, at most until its own deadline; nothing is sent twice by us. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/file.h"
#include "proto/rpc_core.h"
#include "proto/unix_socket.h"

enum { BACKOFF_MIN_MS = 50, BACKOFF_MAX_MS = 500, CONNECT_MS = 1000, INTERRUPT_MS = 200 };

struct rpc_channel {
    char *path; /* or HOST:PORT */
    grpc_channel *channel;
    uint32_t open_flags; /* of a call's first operation */
    grpc_metadata bearer;
    size_t n_bearer; /* 0 or 1 */
    atomic_bool interrupted;
};

struct client_call {
    struct rpc_channel *channel;
    const char *method;
    int timeout_ms;
    grpc_call *call;
    grpc_completion_queue *cq;
    grpc_metadata_array head, trail;
    grpc_byte_buffer *request, *reply;
    grpc_status_code status;
    grpc_slice details;
};

/* ---- channel --------------------------------------------------------------------------------- */

static grpc_arg number(const char *key, int value)
{
    return (grpc_arg){.type = GRPC_ARG_INTEGER, .key = (char *)key, .value.integer = value};
}

/* Takes the reference to credentials. */
static grpc_channel *open_channel(const char *target, grpc_channel_credentials *credentials)
{
    grpc_arg args[] = {
        number(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, BACKOFF_MIN_MS),
        number(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, CONNECT_MS), /* for one attempt to connect */
        number(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, BACKOFF_MAX_MS),
        number(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, RPC_MAX_MESSAGE),
        number(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1), /* channels do not share back-off */
    };
    grpc_channel_args list = {LH_ARRAY_SIZE(args), args};
    grpc_channel *ch =
        target && credentials ? grpc_channel_create(target, credentials, &list) : NULL;

    if (credentials)
        grpc_channel_credentials_release(credentials);
    return ch;
}

static struct rpc_channel *channel_new(const char *where, const char *target, const char *ca,
                                       const char *bearer, struct lh_error *err)
{
    struct rpc_channel *ch = calloc(1, sizeof *ch);

    if (!ch)
        return lh_fail_errno(err, ENOMEM, "a channel to %s", where), NULL;
    rpc_core_open();
    ch->path = strdup(where);
    ch->channel = open_channel(target, bearer ? grpc_ssl_credentials_create(ca, NULL, NULL, NULL)
                                              : grpc_insecure_credentials_create());
    ch->open_flags = bearer ? 0 : GRPC_INITIAL_METADATA_WAIT_FOR_READY;
    lh_autofree char *value = bearer ? lh_format("Bearer %s", bearer) : NULL;
    if (value) {
        ch->bearer.key = grpc_slice_from_static_string("authorization");
        ch->bearer.value = grpc_slice_from_copied_string(value);
        ch->n_bearer = 1;
    }
    if (ch->path && ch->channel && !bearer == !value)
        return ch;
    lh_fail(err, LH_RESOURCE_EXHAUSTED, "cannot make a channel to %s", where);
    rpc_channel_destroy(ch);
    return NULL;
}

struct rpc_channel *rpc_channel_create(const char *path, struct lh_error *err)
{
    lh_autofree char *target = lh_format("unix:%s", path);
    struct sockaddr_un address;

    if (lh_unix_address(path, &address, err))
        return NULL;
    return channel_new(path, target, NULL, NULL, err);
}

struct rpc_channel *rpc_channel_create_tls(const char *address, const char *ca, const char *bearer,
                                           struct lh_error *err)
{
    lh_autofree char *target = lh_format("dns:%s", address);

    return channel_new(address, target, ca, bearer, err);
}

void rpc_channel_destroy(struct rpc_channel *ch)
{
    if (!ch)
        return;
    if (ch->channel)
        grpc_channel_destroy(ch->channel);
    if (ch->n_bearer)
        grpc_slice_unref(ch->bearer.value);
    free(ch->path);
    free(ch);
    rpc_core_close();
}

void rpc_channel_interrupt(struct rpc_channel *ch)
{
    ch->interrupted = true;
}

/* ---- one call -------------------------------------------------------------------------------- */

static void call_init(struct client_call *c, struct rpc_channel *ch, const char *method,
                      const ProtobufCMessage *request, int timeout_ms)
{
    gpr_timespec deadline =
        gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(timeout_ms, GPR_TIMESPAN));
    grpc_slice name = grpc_slice_from_copied_string(method);

    *c = (struct client_call){.channel = ch, .method = method, .timeout_ms = timeout_ms};
    c->cq = grpc_completion_queue_create_for_pluck(NULL);
    c->call = grpc_channel_create_call(ch->channel, NULL, GRPC_PROPAGATE_DEFAULTS, c->cq, name,
                                       NULL, deadline, NULL);
    grpc_slice_unref(name);
    grpc_metadata_array_init(&c->head);
    grpc_metadata_array_init(&c->trail);
    c->details = grpc_empty_slice();
    c->request = request ? rpc_buffer_from_message(request) : NULL;
}

static void call_finish(struct client_call *c)
{
    if (c->request)
        grpc_byte_buffer_destroy(c->request);
    if (c->reply)
        grpc_byte_buffer_destroy(c->reply);
    grpc_slice_unref(c->details);
    grpc_metadata_array_destroy(&c->head);
    grpc_metadata_array_destroy(&c->trail);
    grpc_call_unref(c->call);
    grpc_completion_queue_shutdown(c->cq);
    grpc_completion_queue_destroy(c->cq);
}

/* Ends by the call's deadline: then gRPC completes every batch. */
static bool call_batch(struct client_call *c, const grpc_op *ops, size_t n)
{
    if (grpc_call_start_batch(c->call, ops, n, c, NULL) != GRPC_CALL_OK)
        return false;
    for (;;) {
        gpr_timespec look = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                         gpr_time_from_millis(INTERRUPT_MS, GPR_TIMESPAN));
        grpc_event e = grpc_completion_queue_pluck(c->cq, c, look, NULL);
        if (e.type == GRPC_OP_COMPLETE)
            return e.success;
        if (c->channel->interrupted)
            grpc_call_cancel(c->call, NULL);
    }
}

static void first_op(struct client_call *c, grpc_op *o)
{
    o->op = GRPC_OP_SEND_INITIAL_METADATA;
    o->flags = c->channel->open_flags;
    o->data.send_initial_metadata.count = c->channel->n_bearer;
    o->data.send_initial_metadata.metadata = &c->channel->bearer;
}

static size_t open_ops(struct client_call *c, grpc_op *o)
{
    first_op(c, &o[0]);
    o[1].op = GRPC_OP_SEND_MESSAGE;
    o[1].data.send_message.send_message = c->request;
    o[2].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    o[3].op = GRPC_OP_RECV_INITIAL_METADATA;
    o[3].data.recv_initial_metadata.recv_initial_metadata = &c->head;
    return 4;
}

static void receive_op(struct client_call *c, grpc_op *o)
{
    o->op = GRPC_OP_RECV_MESSAGE;
    o->data.recv_message.recv_message = &c->reply;
}

static void status_op(struct client_call *c, grpc_op *o)
{
    o->op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    o->data.recv_status_on_client.trailing_metadata = &c->trail;
    o->data.recv_status_on_client.status = &c->status;
    o->data.recv_status_on_client.status_details = &c->details;
}

/* A server's own error passes through unchanged; what the transport says gets the path. */
static int call_result(struct client_call *c, struct lh_error *err)
{
    int code = c->status <= 16 ? -(int)c->status : LH_UNKNOWN;

    if (!code)
        return 0;
    if (code == LH_DEADLINE_EXCEEDED &&
        grpc_channel_check_connectivity_state(c->channel->channel, 0) != GRPC_CHANNEL_READY)
        return lh_fail(err, LH_UNAVAILABLE, "%s: nobody served %s for %d ms", c->method,
                       c->channel->path, c->timeout_ms);
    char *details = grpc_slice_to_c_string(c->details);
    if (code == LH_UNAVAILABLE || code == LH_DEADLINE_EXCEEDED)
        lh_fail(err, code, "%s at %s: %s", c->method, c->channel->path, details);
    else
        lh_fail(err, code, "%s", *details ? details : c->method);
    gpr_free(details);
    return code;
}

static ProtobufCMessage *take_reply(struct client_call *c, const ProtobufCMessageDescriptor *type,
                                    struct lh_error *err)
{
    ProtobufCMessage *m = rpc_message_from_buffer(type, c->reply, RPC_MAX_MESSAGE, err);

    grpc_byte_buffer_destroy(c->reply);
    c->reply = NULL;
    return m;
}

/* After the batch that got status and, perhaps, a reply. */
static int call_reply(struct client_call *c, bool done, const ProtobufCMessageDescriptor *type,
                      ProtobufCMessage **reply, struct lh_error *err)
{
    int r =
        done ? call_result(c, err) : lh_fail(err, LH_INTERNAL, "%s: gRPC refused it", c->method);

    if (!r && !c->reply)
        r = lh_fail(err, LH_INTERNAL, "%s: success without a reply", c->method);
    if (r)
        return r;
    *reply = take_reply(c, type, err);
    return *reply ? 0 : LH_INTERNAL;
}

int rpc_unary(struct rpc_channel *ch, const char *method, const ProtobufCMessage *request,
              const ProtobufCMessageDescriptor *reply_type, int timeout_ms,
              ProtobufCMessage **reply, struct lh_error *err)
{
    struct client_call c;
    grpc_op ops[6] = {0};

    call_init(&c, ch, method, request, timeout_ms);
    size_t n = open_ops(&c, ops);
    receive_op(&c, &ops[n++]);
    status_op(&c, &ops[n++]);
    int r = call_reply(&c, call_batch(&c, ops, n), reply_type, reply, err);
    call_finish(&c);
    return r;
}

static bool receive(struct client_call *c)
{
    grpc_op op = {0};

    receive_op(c, &op);
    return call_batch(c, &op, 1);
}

/* 1 = a message was handed on, 0 = the stream has ended, negative = `each` wants no more. */
static int hand_on(struct client_call *c, bool received, const ProtobufCMessageDescriptor *type,
                   rpc_each_fn *each, void *ctx, struct lh_error *err)
{
    if (!received || !c->reply)
        return 0;
    lh_automsg(ProtobufCMessage) m = take_reply(c, type, err);
    if (!m)
        return LH_INTERNAL;
    int r = each(ctx, m, err);
    return r < 0 ? r : 1;
}

int rpc_stream(struct rpc_channel *ch, const char *method, const ProtobufCMessage *request,
               const ProtobufCMessageDescriptor *reply_type, int timeout_ms, rpc_each_fn *each,
               void *ctx, struct lh_error *err)
{
    struct client_call c;
    grpc_op ops[5] = {0}, status = {0};

    call_init(&c, ch, method, request, timeout_ms);
    size_t n = open_ops(&c, ops);
    receive_op(&c, &ops[n++]);
    bool received = call_batch(&c, ops, n); /* a failure comes again as the status */
    int r;
    while ((r = hand_on(&c, received, reply_type, each, ctx, err)) > 0)
        received = receive(&c);
    if (r < 0)
        grpc_call_cancel(c.call, NULL);
    status_op(&c, &status);
    bool ended = call_batch(&c, &status, 1);
    if (r == 0)
        r = ended ? call_result(&c, err) : lh_fail(err, LH_INTERNAL, "%s: no status", method);
    call_finish(&c);
    return r;
}

/* ---- a stream from here ---------------------------------------------------------------------- */

struct rpc_upload {
    struct client_call call;
    char method[128];
};

struct rpc_upload *rpc_upload_begin(struct rpc_channel *ch, const char *method, int timeout_ms,
                                    struct lh_error *err)
{
    struct rpc_upload *u = malloc(sizeof *u);
    grpc_op op = {0};

    if (!u)
        return lh_fail_errno(err, ENOMEM, "%s", method), NULL;
    snprintf(u->method, sizeof u->method, "%s", method);
    call_init(&u->call, ch, u->method, NULL, timeout_ms);
    first_op(&u->call, &op);
    call_batch(&u->call, &op, 1); /* a failure comes again as the status */
    return u;
}

int rpc_upload_send(struct rpc_upload *u, const ProtobufCMessage *message, struct lh_error *err)
{
    grpc_byte_buffer *buffer = rpc_buffer_from_message(message);
    grpc_op op = {.op = GRPC_OP_SEND_MESSAGE};

    op.data.send_message.send_message = buffer;
    bool sent = call_batch(&u->call, &op, 1);
    grpc_byte_buffer_destroy(buffer);
    return sent ? 0 : lh_fail(err, LH_CANCELLED, "%s: the server wants no more", u->call.method);
}

int rpc_upload_end(struct rpc_upload *u, const ProtobufCMessageDescriptor *reply_type,
                   ProtobufCMessage **reply, struct lh_error *err)
{
    struct client_call *c = &u->call;
    grpc_op close = {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT}, ops[3] = {0};

    call_batch(c, &close, 1);
    ops[0].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[0].data.recv_initial_metadata.recv_initial_metadata = &c->head;
    receive_op(c, &ops[1]);
    status_op(c, &ops[2]);
    int r = call_reply(c, call_batch(c, ops, LH_ARRAY_SIZE(ops)), reply_type, reply, err);
    call_finish(c);
    free(u);
    return r;
}

void rpc_upload_cancel(struct rpc_upload *u)
{
    grpc_op status = {0};

    if (!u)
        return;
    grpc_call_cancel(u->call.call, NULL);
    status_op(&u->call, &status);
    call_batch(&u->call, &status, 1);
    call_finish(&u->call);
    free(u);
}
