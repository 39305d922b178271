/* Bounds that kvstored, its client and its command line agree on. */
#ifndef KVSTORE_PROTOCOL_H
#define KVSTORE_PROTOCOL_H

enum {
    KV_PROTOCOL = 1,
    KV_MAX_UNITS = 65536,    /* of one sequence: 1 Mi tokens in units of 16 */
    KV_MAX_GRANTS = 1024,    /* open leases and tickets of one client */
    KV_NAME_MAX = 63,        /* bytes of a client's name */
    KV_TRAJECTORY_MAX = 128, /* bytes */
    KV_LEASE_MS = 60000,
    KV_TICKET_MAX_MS = 60000,
    KV_LIST_MAX = 4096,
};

#endif
