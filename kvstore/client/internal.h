/* Between the files of the client. */
#ifndef KVSTORE_CLIENT_INTERNAL_H
#define KVSTORE_CLIENT_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "kvstore/client.h"
#include "kvstore/client/link.h"

struct kv_client {
    struct kv_options options; /* its texts are our own copies */
    pthread_mutex_t lock;      /* guards the connection and the root */
    struct kv_link link;
    uint64_t generation; /* of the connection; leases and tickets die with it */
    int64_t retry_at_ms; /* no attempt to connect before */
    bool has_root, owes_retire;
    struct kv_key root;
    uint64_t policy_step;

    struct kv_queue {
        pthread_mutex_t lock; /* guards this part; taken without the other */
        pthread_cond_t changed;
        pthread_t thread;
        bool started, stop;
        unsigned running;
        struct kv_async *first, **last; /* not begun */
        struct kv_async *all;
    } queue;
};

enum kv_async_state { KV_ASYNC_QUEUED, KV_ASYNC_RUNS, KV_ASYNC_ENDED };

/* An operation.  `result`, `units`, `hit_found` and `error` are its runner's until it has ended. */
struct kv_async {
    struct kv_client *client;
    enum kv_async_kind kind;
    struct kv_batch batch;            /* with its defaults filled in */
    const char *name;                 /* of the trajectory */
    struct kv_trajectory *trajectory; /* a reference; NULL: a synchronous call */
    atomic_bool cancelled;
    int64_t result;
    size_t units;
    struct kv_hit *hit_found;
    struct kv_pressure pressure;
    struct lh_error error;
    enum kv_async_state state; /* under queue.lock, as the lists are */
    pthread_t teller;          /* of its end, while `telling` */
    bool telling, orphan;
    struct kv_async *next, *next_of_all;
};

/* One that is run where it was called for; returns its result. */
int64_t kv_async_run_here(struct kv_async *io, struct lh_error *err);
/* CANCELLED or DEADLINE_EXCEEDED, or 0: to be asked before every copy. */
int kv_async_check(const struct kv_async *io, struct lh_error *err);
/* What the kinds do; >= 0 is bytes. */
int64_t kv_run_put(struct kv_async *io, struct lh_error *err);
int64_t kv_run_get(struct kv_async *io, struct lh_error *err);
int64_t kv_run_prefetch(struct kv_async *io, struct lh_error *err);
int64_t kv_run_look(struct kv_async *io, struct lh_error *err);

/* What an operation of several requests must keep together. */
struct kv_visit {
    uint64_t generation; /* 0 = any connection will do */
    struct kv_map *map;  /* a reference, once there was a reply */
};

void kv_queue_stop(struct kv_queue *q); /* ends its thread */
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
