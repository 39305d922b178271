/* What the channel received, and the bell that wakes the engine's thread.
 *
 * Anyone rings; the engine's thread waits for a ring or a time.  Messages are received by a thread
 * of its own, because the channel also acknowledges and resends while it receives. */
#ifndef ROLLOUT_WORKER_INBOX_H
#define ROLLOUT_WORKER_INBOX_H

#include <pthread.h>
#include <stdbool.h>

#include "proto/channel.h"

enum { INBOX_MAX = 1024 }; /* more are dropped: the intake repeats what matters */

struct inbox {
    pthread_mutex_t lock;
    pthread_cond_t rung;
    bool ringing, stop, started;
    struct channel_message *messages[INBOX_MAX];
    unsigned first, count;
    struct channel_worker *channel;
    pthread_t thread;
};

void inbox_init(struct inbox *in);
int inbox_start(struct inbox *in, struct channel_worker *channel, struct lh_error *err);
void inbox_finish(struct inbox *in);

void inbox_ring(void *inbox);
/* Until somebody rings, at most timeout_ms. */
void inbox_wait(struct inbox *in, int timeout_ms);
struct channel_message *inbox_take(struct inbox *in);

#endif
