/* The service of test.proto, for tests of clients. */
#ifndef TESTS_UNIT_PROTO_ECHO_H
#define TESTS_UNIT_PROTO_ECHO_H

#include "proto/rpc.h"

/* A server of `path` with `threads` handlers and requests of at most 1 MiB. */
struct rpc_server *echo_server_create(const char *path, unsigned threads, struct lh_error *err);

#endif
