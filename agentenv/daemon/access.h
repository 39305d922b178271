/* Who may call what: the guard of agentenvd's server, tokens, and the audit log.
 *
 * Peers of the unix socket are root or the daemon's own user and may do everything.  Whoever comes
 * by TLS shows a bearer token, 256 random bits of which the registry keeps a hash.  A token has a
 * scope (a table says what each method needs; what it does not name needs the highest), perhaps a
 * prefix that owners must begin with, and perhaps a number of sandboxes of that prefix.
 *
 * STATE/audit.log gets a line of JSON for each call that changes something, and for each that was
 * refused: when, who, what, with which result.  At 64 MiB it becomes audit.log.1. */
#ifndef AGENTENV_DAEMON_ACCESS_H
#define AGENTENV_DAEMON_ACCESS_H

#include "agentenv/daemon/daemon.h"

struct access;

struct access *access_create(struct daemon *d, struct lh_error *err);
void access_destroy(struct access *a);
LH_DEFINE_AUTO(access, access_destroy)
/* For the server's options; lives as long as `a`. */
const struct rpc_guard *access_guard(struct access *a);

rpc_unary_fn service_create_token, service_list_tokens, service_revoke_token;

#endif
