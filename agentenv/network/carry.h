/* A connection outside, and the bytes between two. */
#ifndef AGENTENV_NETWORK_CARRY_H
#define AGENTENV_NETWORK_CARRY_H

#include <stdatomic.h>
#include <stdint.h>

#include "proto/error.h"

/* Connects to `name`, or to `address` (host order) when it is "".  Whatever it resolves to: no
 * address of this machine, no loopback, link-local or multicast one (PERMISSION_DENIED). */
int carry_dial(const char *name, uint32_t address, uint16_t port, int64_t deadline_ms,
               struct lh_error *err);

struct carry_counts {
    atomic_ullong out, in; /* bytes from the first to the second, and back */
};

/* Until both have ended, or neither has said anything for an hour. */
void carry_both(int first, int second, struct carry_counts *counts);

#endif
