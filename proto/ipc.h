/* Node-local control connections that carry file descriptors: protobuf messages over SOCK_SEQPACKET
 * unix sockets, fds by SCM_RIGHTS.  arbiterd and kvstored speak it; gRPC cannot pass fds.
 *
 * One message is one packet of 1..IPC_MAX bytes and at most IPC_MAX_FDS fds.  An empty packet
 * cannot be told from the end of a connection, so a message with no field set is refused.  The
 * listener's socket is 0600 and peers are checked by SO_PEERCRED.  All fds are non-blocking and
 * close-on-exec; several threads may send on one connection, one may receive.
 *
 * After any error but DEADLINE_EXCEEDED the connection is of no more use: close it. */
#ifndef PROTO_IPC_H
#define PROTO_IPC_H

#include <poll.h>
#include <protobuf-c/protobuf-c.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/error.h"

enum { IPC_MAX = 4 << 20, IPC_MAX_FDS = 64 };

/* Listening fd.  ALREADY_EXISTS when a live server has the socket; a stale file is replaced. */
int ipc_listen(const char *path, struct lh_error *err);
/* Next client: connected fd, its pid in *pid.  Peers of other uids (root excepted) are dropped.
 * Never waits: UNAVAILABLE when nobody is there, so poll(2) the listener. */
int ipc_accept(int listen_fd, pid_t *pid, struct lh_error *err);

/* A listener in a poll loop.  When descriptors have run out, accept fails while its client goes on
 * waiting, and poll would come back for it at once, for ever: so the listener is left out of the
 * loop for IPC_REST_MS, and those who are connected are served meanwhile. */
enum { IPC_REST_MS = 100 };
struct ipc_listener {
    int fd;
    int64_t rest_until_ms; /* 0 = it does not rest */
};
/* What to poll, and for how long at most instead of timeout_ms (negative = without end). */
struct pollfd ipc_listener_poll(const struct ipc_listener *l);
int ipc_listener_timeout(const struct ipc_listener *l, int timeout_ms);
/* As ipc_accept(); RESOURCE_EXHAUSTED begins a rest. */
int ipc_listener_accept(struct ipc_listener *l, pid_t *pid, struct lh_error *err);

/* Waits for the server up to timeout_ms. */
int ipc_connect(const char *path, int timeout_ms, struct lh_error *err);

/* Whole message or an error; UNAVAILABLE when the peer is gone; DEADLINE_EXCEEDED after timeout_ms
 * (0 = do not wait, -1 never allowed).  fds stay the caller's. */
int ipc_send(int fd, const ProtobufCMessage *m, const int *fds, size_t n_fds, int timeout_ms,
             struct lh_error *err);
/* The caller frees the message and closes the fds (close-on-exec).  *n_fds: room in, count out;
 * NULL = none expected.  More fds than there is room for are an error. */
ProtobufCMessage *ipc_recv(int fd, const ProtobufCMessageDescriptor *type, int *fds, size_t *n_fds,
                           int timeout_ms, struct lh_error *err);

#endif
