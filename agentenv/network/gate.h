/* The gate between the networks of sandboxes and the world.
 *
 * A sandbox's namespace has a loopback interface and nothing else: no link leads out of it, so what
 * is not allowed cannot be reached by construction, above all nothing of this machine.  What is
 * allowed is made local to it: an address inside for each name, a local route for each network.
 * The gate listens there, with sockets made in that namespace, and carries each connection over
 * to one of its own outside.  Published ports are the same thing the other way round.
 *
 * So nothing is left on the machine when the daemon is killed: no interface, no rule, no route of
 * the host's.  Listeners end with the process; the next daemon opens them again.
 *
 * Rejected: veth pairs with nftables and masquerading (state of the host that must be recorded and
 * undone, forwarding switched on for all, and a filter that fails open); a user-space TCP stack
 * (slirp4netns, passt: a process for each sandbox, and no filter of their own).  The price: TCP
 * only, ports must be named, and connections end with the daemon.
 *
 * Threads: one accepts; each connection has one, at most GATE_CONNECTIONS for a sandbox. */
#ifndef AGENTENV_NETWORK_GATE_H
#define AGENTENV_NETWORK_GATE_H

#include "agentenv/network/rules.h"
#include "proto/cleanup.h"

enum { GATE_CONNECTIONS = 64, GATE_MAX_PORTS = 16 };

struct gate;

struct gate *gate_create(struct lh_error *err);
/* Every opening must have been closed. */
void gate_destroy(struct gate *g);

/* `inside` is reachable on 127.0.0.1:outside of this machine; 0 = any free one, filled in. */
struct gate_port {
    uint16_t inside, outside;
};

struct gate_opening;

/* Takes a copy of netns.  The namespace must have lo up.  What cannot be opened is an error and
 * leaves nothing: ALREADY_EXISTS for a port that somebody has. */
struct gate_opening *gate_open(struct gate *g, int netns, const struct net_rules *rules,
                               struct gate_port *ports, size_t n_ports, struct lh_error *err);
/* Ends its listeners and connections; does not wait for their threads.  NULL is fine. */
void gate_close(struct gate_opening *o);

struct gate_counts {
    uint64_t accepted, refused, bytes_out, bytes_in;
};
struct gate_counts gate_counts(struct gate *g);

#endif
