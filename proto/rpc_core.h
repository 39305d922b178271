/* What the files of proto/rpc.h share; private to them.  The only header that includes gRPC's. */
#ifndef PROTO_RPC_CORE_H
#define PROTO_RPC_CORE_H

#include <grpc/grpc.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <pthread.h>
#include <stdatomic.h>

#include "proto/parse.h"
#include "proto/rpc.h"

enum { RPC_MAX_MESSAGE = 64 << 20, RPC_MAX_STREAMS = 256 };

/* ---- rpc_core.c: both ends ---- */

/* Each server and each channel holds gRPC open. */
void rpc_core_open(void);
void rpc_core_close(void);

grpc_byte_buffer *rpc_buffer_from_message(const ProtobufCMessage *m);
/* NULL and *err on anything that proto/parse.h refuses. */
ProtobufCMessage *rpc_message_from_buffer(const ProtobufCMessageDescriptor *type,
                                          grpc_byte_buffer *buffer, size_t max_message,
                                          struct lh_error *err);
int64_t rpc_ms_from_deadline(gpr_timespec deadline); /* on the clock of lh_now_ms() */

/* ---- a call at the server ---- */

/* What is given to gRPC as the tag of a batch: what to do when it completes. */
struct rpc_tag {
    void (*done)(struct rpc_call *c, bool ok);
    struct rpc_call *call;
};

struct rpc_call {
    struct rpc_server *server;
    grpc_call *call;
    grpc_call_details details;
    grpc_metadata_array metadata;
    int64_t deadline_ms;
    uid_t peer_uid;
    bool local;                        /* of the unix socket */
    char *bearer;                      /* or NULL */
    const struct rpc_service *service; /* NULL for health and unknown methods */
    const struct rpc_method *method;
    const ProtobufCMethodDescriptor *descriptor;
    grpc_byte_buffer *request;
    grpc_byte_buffer *last; /* goes with the status; or NULL */
    struct rpc_tag on_new, on_close, on_batch;
    int close_cancelled; /* written by gRPC before on_close */
    atomic_bool cancelled;
    atomic_int refs; /* one per outstanding batch, one for the pool */
    bool headers_sent;

    pthread_mutex_t mutex; /* for the three below: a pool thread waits for its batch */
    pthread_cond_t batch_done;
    bool batch_pending, batch_ok;

    struct rpc_call *next; /* in the pool's queue or the list of watchers */
};

struct rpc_call *rpc_call_create(struct rpc_server *s);
void rpc_call_unref(struct rpc_call *c);
/* Runs done(c, ok) on the event thread when the batch has completed, and holds the call until then.
 * False when gRPC refused the batch: a bug here, or the call is over. */
bool rpc_call_start(struct rpc_call *c, const grpc_op *ops, size_t n, struct rpc_tag *tag,
                    void (*done)(struct rpc_call *c, bool ok));
/* Sends reply (may be NULL; consumed) and status, which ends the call.  Does not wait. */
void rpc_call_finish(struct rpc_call *c, grpc_byte_buffer *reply, int status, const char *details);
/* Initial metadata if they are due, then the message unless NULL.  Returns the number of ops. */
size_t rpc_call_message_ops(struct rpc_call *c, grpc_op ops[2], grpc_byte_buffer *message);
/* What the client's headers say. */
void rpc_call_read_metadata(struct rpc_call *c);
/* Reads the request, runs the handler, sends the status.  On a pool thread. */
void rpc_call_serve(struct rpc_call *c);

/* ---- the pool: calls wait here for a thread ---- */
struct rpc_pool;

struct rpc_pool *rpc_pool_create(unsigned threads, struct lh_error *err);
void rpc_pool_add(struct rpc_pool *p, struct rpc_call *c); /* takes over one reference */
void rpc_pool_destroy(struct rpc_pool *p);                 /* serves what is queued, then ends */

/* ---- health: answered on the event thread, so a busy pool does not look like a dead server ----
 */
struct rpc_health {
    pthread_mutex_t mutex;
    bool stopping;
    struct rpc_call *watchers;
};

/* False when `path` is no method of grpc.health.v1.Health. */
bool rpc_health_serve(struct rpc_call *c, const char *path);
void rpc_health_forget(struct rpc_call *c); /* a client has gone; it may have been watching */
void rpc_health_stop(struct rpc_health *h); /* NOT_SERVING from now on; ends the watches */

/* ---- reflection: added to every server ---- */
extern const struct rpc_service rpc_reflection;
extern const unsigned char rpc_descriptors[]; /* a google.protobuf.FileDescriptorSet */
extern const size_t rpc_descriptors_size;

/* ---- the server ---- */
struct rpc_server {
    char *path;
    size_t max_message;
    struct rpc_service *services;
    size_t n_services;
    grpc_server *server;
    grpc_completion_queue *cq;
    grpc_server_credentials *credentials, *tls;
    int tls_port;
    struct rpc_guard guard; /* enter NULL = none */
    struct rpc_pool *pool;
    struct rpc_health health;
    int listen_fd, stop_fd;
    ino_t socket_inode; /* ours, to be removed at the end */
    pthread_t events, acceptor;
    bool events_running, acceptor_running, started;
    struct rpc_tag on_down;
    pthread_mutex_t mutex; /* for `down` */
    pthread_cond_t is_down;
    bool down;
};

#endif
