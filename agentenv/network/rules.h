/* What a sandbox may reach, and who may reach it.
 *
 * An egress rule is "HOST:PORT[,PORT...]": HOST is an IPv4 address, a network in CIDR notation, or
 * a DNS name (no wildcards).  TCP only.  A name has an address of its own inside the sandbox, in
 * 127.64.0.0/24, that /etc/hosts there says; it is resolved outside at each connection. */
#ifndef AGENTENV_NETWORK_RULES_H
#define AGENTENV_NETWORK_RULES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/error.h"

enum { NET_MAX_ALLOW = 256, NET_MAX_NAMES = 200, NET_NAME_MAX = 253 };

struct net_allow {
    char name[NET_NAME_MAX + 1]; /* "" = by address */
    uint32_t address, mask;      /* host order; of a name: its address inside, all bits */
    uint16_t port;
};

struct net_rules {
    struct net_allow allow[NET_MAX_ALLOW];
    size_t n;
};

/* INVALID_ARGUMENT names the rule and what is wrong with it. */
int net_rules_parse(char *const *egress, size_t n, struct net_rules *out, struct lh_error *err);

/* The rule that a connection to address:port (host order) falls under; NULL = none. */
const struct net_allow *net_rules_find(const struct net_rules *r, uint32_t address, uint16_t port);

/* `hosts` (may be NULL) without the lines of an earlier call and with one for each name; free(). */
char *net_rules_hosts(const struct net_rules *r, const char *hosts, struct lh_error *err);

#endif
