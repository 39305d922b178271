/* Listening on a unix socket, as every daemon of the project does it: mode 0600, one live server a
 * path, peers of this user (or root) only. */
#ifndef PROTO_UNIX_SOCKET_H
#define PROTO_UNIX_SOCKET_H

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>

#include "proto/error.h"

/* INVALID_ARGUMENT for a path that does not fit (107 bytes). */
int lh_unix_address(const char *path, struct sockaddr_un *a, struct lh_error *err);

/* Listening, non-blocking fd; `type` is SOCK_STREAM or SOCK_SEQPACKET.  ALREADY_EXISTS ("socket in
 * use") when a live server has the path or something that is no socket is there; the file of a dead
 * server is replaced.  *inode, for lh_unix_unlink(), may be NULL. */
int lh_unix_listen(const char *path, int type, ino_t *inode, struct lh_error *err);

/* Removes the socket's file, unless it is another server's by now. */
void lh_unix_unlink(const char *path, ino_t inode);

/* Next connection, non-blocking and close-on-exec, its peer in *peer (SO_PEERCRED).
 * PERMISSION_DENIED for a peer of another user, which is disconnected; UNAVAILABLE when nobody
 * waits. */
int lh_unix_accept(int listen_fd, struct ucred *peer, struct lh_error *err);

#endif
