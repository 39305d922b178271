/* The inside of a sandbox's network namespace, from outside.  A socket belongs to the namespace it
 * was made in, whoever holds it. */
#ifndef AGENTENV_NETWORK_INSIDE_H
#define AGENTENV_NETWORK_INSIDE_H

#include "agentenv/network/rules.h"

/* Runs fn(ctx) on a thread that has entered `netns`, and returns what it returned. */
int net_inside(int netns, int (*fn)(void *ctx, struct lh_error *err), void *ctx,
               struct lh_error *err);

/* For such functions.  Makes every address of address/mask one of the namespace's own. */
int net_take_addresses(uint32_t address, uint32_t mask, struct lh_error *err);
/* A listening TCP socket, non-blocking.  Host order; address 0 = all.  `shared`: the port may be
 * taken at other addresses, and at all, by more of these.  ALREADY_EXISTS: somebody else has it. */
int net_listen(uint32_t address, uint16_t port, bool shared, struct lh_error *err);
/* A connected TCP socket, non-blocking. */
int net_connect(uint32_t address, uint16_t port, int64_t deadline_ms, struct lh_error *err);

#endif
