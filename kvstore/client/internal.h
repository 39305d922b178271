/* Between the files of the client. */
#ifndef KVSTORE_CLIENT_INTERNAL_H
#define KVSTORE_CLIENT_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>

#include "kvstore/client.h"
#include "kvstore/client/link.h"

struct kv_client {
    struct kv_options options; /* path and name are our own copies */
    pthread_mutex_t lock;      /* guards the rest */
    struct kv_link link;
    uint64_t generation; /* of the connection; leases and tickets die with it */
    int64_t retry_at_ms; /* no attempt to connect before */
    bool has_root, owes_retire;
    struct kv_key root;
    uint64_t policy_step;
};

/* What an operation of several requests must keep together. */
struct kv_visit {
    uint64_t generation; /* 0 = any connection will do */
    struct kv_map *map;  /* a reference, once there was a reply */
};

int64_t kv_client_deadline(const struct kv_client *c);
/* One request, connecting as needed.  UNAVAILABLE when visit->generation is over. */
Longhaul__Kv__V1__Reply *kv_client_call(struct kv_client *c, const Longhaul__Kv__V1__Request *q,
                                        struct kv_visit *visit, int64_t deadline_ms,
                                        struct lh_error *err);
/* FAILED_PRECONDITION before kv_use_root(). */
int kv_client_root(struct kv_client *c, struct kv_key *root, int64_t deadline_ms,
                   struct lh_error *err);
/* Ends a lease or gives a ticket up. */
void kv_client_release(struct kv_client *c, struct kv_visit *visit, uint64_t id, bool corrupt);

#endif
