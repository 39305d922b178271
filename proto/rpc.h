/* gRPC for C: servers with blocking handlers on a thread pool, blocking clients.
 *
 * proto/rpc_*.c are the only files that include gRPC headers (the core's C API is unstable between
 * versions).  Messages are protobuf-c structs; every request passes proto/parse.h before a handler
 * sees it.  Wire-compatible with any gRPC client: tests/integration/rpc_client.py is Python's.
 *
 * Processes that fork sandboxes: never fork after rpc_server_create() or rpc_channel_create()
 * (grpc_init); start a spawner before. */
#ifndef PROTO_RPC_H
#define PROTO_RPC_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/cleanup.h"
#include "proto/error.h"

struct rpc_call; /* a call being served; valid until the handler returns */

/* Fills *reply with a message that rpc frees (lh_message_free), or returns a negative lh_status
 * with *err, which becomes the client's status and details.  Runs on a pool thread; may block. */
typedef int rpc_unary_fn(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                         ProtobufCMessage **reply, struct lh_error *err);
/* Sends any number of messages with rpc_send(), then returns the status.  `request` is the first
 * message; if the client sends a stream, rpc_receive() has the rest. */
typedef int rpc_stream_fn(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                          struct lh_error *err);

struct rpc_method {
    const char *name;    /* as in the .proto */
    rpc_unary_fn *unary; /* exactly one of the two */
    rpc_stream_fn *stream;
};

struct rpc_service {
    const ProtobufCServiceDescriptor *descriptor; /* every method of it must be in `methods` */
    const struct rpc_method *methods;             /* ends with a NULL name */
    void *ctx;
};

/* True once the client has cancelled, gone away, or its deadline has passed.  Long handlers ask. */
bool rpc_cancelled(const struct rpc_call *call);
/* Absolute, on the clock of lh_now_ms(); INT64_MAX without one. */
int64_t rpc_deadline_ms(const struct rpc_call *call);
/* Blocks until the transport took the message: that is the back-pressure.  CANCELLED once the
 * client is gone. */
int rpc_send(struct rpc_call *call, const ProtobufCMessage *message, struct lh_error *err);
/* The stream's last message, which goes with the status when the handler returns 0, in one piece:
 * a thread less to wake than after rpc_send(). */
void rpc_send_last(struct rpc_call *call, const ProtobufCMessage *message);
/* The next message of a client that streams, to be freed with lh_message_free(): 1; 0 = it sends no
 * more.  One that stays away for half a minute ends the call (DEADLINE_EXCEEDED). */
int rpc_receive(struct rpc_call *call, ProtobufCMessage **message, struct lh_error *err);
/* Peer of a unix socket: uid from SO_PEERCRED. */
uid_t rpc_peer_uid(const struct rpc_call *call);

/* What the caller gave as "authorization: Bearer TOKEN", or NULL. */
const char *rpc_bearer(const struct rpc_call *call);
/* True for a peer of the unix socket, who passed its check; false for one that came by TLS. */
bool rpc_is_local(const struct rpc_call *call);

struct rpc_server;

/* Asked about every call but health and reflection, on the handler's thread; `method` is
 * "Service/Method".  A negative return of `enter` is the answer; `leave` is told how each call
 * ended, those too that did not get in. */
struct rpc_guard {
    int (*enter)(void *ctx, struct rpc_call *call, const char *method,
                 const ProtobufCMessage *request, struct lh_error *err);
    void (*leave)(void *ctx, struct rpc_call *call, const char *method,
                  const ProtobufCMessage *request, bool entered, int status, int64_t took_us);
    void *ctx;
};

struct rpc_server_options {
    const char *path;   /* unix socket; created 0600; a live server's socket is refused with
                           ALREADY_EXISTS, a dead one's file is replaced */
    unsigned threads;   /* handlers at a time; further calls wait; 0 = 16 */
    size_t max_message; /* bytes of a request; 0 = 64 MiB */
    const struct rpc_service *services; /* `n_services` of them; health and reflection are added */
    size_t n_services;
    const struct rpc_guard *guard; /* NULL = everybody who got through may call everything */
    const char *tls_address; /* "HOST:PORT" besides the socket, for callers with a guard's blessing;
                                NULL = none.  Port 0 = any: rpc_server_port() */
    const char *tls_cert, *tls_key; /* PEM: certificate chain and private key */
};

/* Serves from its own threads until destroyed.  Connections are accepted here, checked by
 * SO_PEERCRED (root or the server's own uid), then handed to gRPC. */
struct rpc_server *rpc_server_create(const struct rpc_server_options *o, struct lh_error *err);
/* Of tls_address; 0 = none. */
int rpc_server_port(const struct rpc_server *s);
/* No new calls; running ones get `grace_ms`, then are cancelled; returns when all have ended. */
void rpc_server_destroy(struct rpc_server *s, int grace_ms);

struct rpc_channel;

/* Does not connect yet; thread-safe from then on. `path` is a unix socket. */
struct rpc_channel *rpc_channel_create(const char *path, struct lh_error *err);
/* To "HOST:PORT" by TLS, as who has the token `bearer`.  The server's certificate must be for HOST
 * and lead to one of `ca` (PEM; NULL = the machine's own).  Calls do not wait for a server that
 * cannot be reached or believed: UNAVAILABLE, with the reason. */
struct rpc_channel *rpc_channel_create_tls(const char *address, const char *ca, const char *bearer,
                                           struct lh_error *err);
void rpc_channel_destroy(struct rpc_channel *ch);
/* From any thread: calls under way and to come end with CANCELLED, within a fifth of a second. */
void rpc_channel_interrupt(struct rpc_channel *ch);
LH_DEFINE_AUTO(rpc_channel, rpc_channel_destroy)

/* One request, one reply.  `method` is "/package.Service/Method"; `reply_type` parses the answer.
 * Waits for the server to be there, at most timeout_ms in all. */
int rpc_unary(struct rpc_channel *ch, const char *method, const ProtobufCMessage *request,
              const ProtobufCMessageDescriptor *reply_type, int timeout_ms,
              ProtobufCMessage **reply, struct lh_error *err);

/* Called for each message of a stream; a negative return cancels the call and is returned. */
typedef int rpc_each_fn(void *ctx, const ProtobufCMessage *message, struct lh_error *err);
int rpc_stream(struct rpc_channel *ch, const char *method, const ProtobufCMessage *request,
               const ProtobufCMessageDescriptor *reply_type, int timeout_ms, rpc_each_fn *each,
               void *ctx, struct lh_error *err);

/* A call that sends a stream and gets one reply. */
struct rpc_upload;

struct rpc_upload *rpc_upload_begin(struct rpc_channel *ch, const char *method, int timeout_ms,
                                    struct lh_error *err);
/* Blocks until the transport took it.  After an error the reason comes from rpc_upload_end(). */
int rpc_upload_send(struct rpc_upload *u, const ProtobufCMessage *message, struct lh_error *err);
/* No more messages: waits for the reply. Frees u. */
int rpc_upload_end(struct rpc_upload *u, const ProtobufCMessageDescriptor *reply_type,
                   ProtobufCMessage **reply, struct lh_error *err);
/* Gives up.  Frees u; NULL is fine. */
void rpc_upload_cancel(struct rpc_upload *u);

#endif
