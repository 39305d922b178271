/* The inside of struct arbiter, for the two files that are the client: arbiter.c calls,
 * arbiter_listen.c is the thread that reads what arbiterd sends. */
#ifndef PROTO_ARBITER_CLIENT_H
#define PROTO_ARBITER_CLIENT_H

#include <pthread.h>

#include "proto/arbiter.h"
#include "proto/arbiter_region.h"

enum { ARBITER_CALL_MS = 10000 }; /* that arbiterd may take for anything but a switch */

struct arbiter {
    int fd;
    char client[64];
    int (*on_revoke)(void *ctx, enum arbiter_phase next, int64_t deadline_ms);
    void (*on_phase)(void *ctx, enum arbiter_phase phase, uint64_t epoch);
    void *ctx;
    pthread_t thread;
    pthread_mutex_t lock, calling;
    pthread_cond_t changed;
    struct arbiter_region *regions; /* under lock */
    struct arbiter_imports imports; /* likewise */
    enum arbiter_phase phase;       /* 0 while a switch runs */
    uint64_t epoch;
    bool lost, stop;
    uint64_t call, answered;
    Longhaul__Arbiter__V1__ServerMessage *answer; /* of `answered` */
    struct arbiter_region *declaring;             /* its grant is on the way */
};

int arbiter_send(struct arbiter *a, Longhaul__Arbiter__V1__ClientMessage *m, struct lh_error *err);

/* The thread; ends at `stop`, or when arbiterd is lost. */
void *arbiter_listen(void *arbiter);

#endif
