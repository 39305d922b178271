#include "rollout/worker/inbox.h"

#include <time.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "proto/wait.h"

LH_LOG_COMPONENT("rollout");

enum { RECEIVE_MS = 100, AFTER_ERROR_MS = 100 };

void inbox_init(struct inbox *in)
{
    *in = (struct inbox){0};
    pthread_mutex_init(&in->lock, NULL);
    pthread_cond_init(&in->rung, NULL);
}

void inbox_ring(void *inbox)
{
    struct inbox *in = inbox;
    LH_LOCKED(&in->lock);

    in->ringing = true;
    pthread_cond_signal(&in->rung);
}

static bool stopping(struct inbox *in)
{
    LH_LOCKED(&in->lock);
    return in->stop;
}

static void put(struct inbox *in, struct channel_message *m)
{
    LH_LOCKED(&in->lock);

    if (in->count == INBOX_MAX) {
        channel_message_free(m);
        return;
    }
    in->messages[(in->first + in->count++) % INBOX_MAX] = m;
    in->ringing = true;
    pthread_cond_signal(&in->rung);
}

static void *receive_thread(void *arg)
{
    static const struct timespec after_error = {0, AFTER_ERROR_MS * 1000000L};
    struct inbox *in = arg;

    while (!stopping(in)) {
        struct lh_error err = {0};
        struct channel_message *m = channel_worker_recv(in->channel, RECEIVE_MS, &err);
        if (m) {
            put(in, m);
        } else if (err.code != LH_DEADLINE_EXCEEDED) {
            lh_warn("receive", "%s", err.message);
            nanosleep(&after_error, NULL);
        }
    }
    return NULL;
}

int inbox_start(struct inbox *in, struct channel_worker *channel, struct lh_error *err)
{
    in->channel = channel;
    int r = pthread_create(&in->thread, NULL, receive_thread, in);
    in->started = r == 0;
    return r ? lh_fail_errno(err, r, "receive thread") : 0;
}

void inbox_finish(struct inbox *in)
{
    pthread_mutex_lock(&in->lock);
    in->stop = true;
    pthread_mutex_unlock(&in->lock);
    if (in->started)
        pthread_join(in->thread, NULL);
    for (struct channel_message *m; (m = inbox_take(in));)
        channel_message_free(m);
    pthread_cond_destroy(&in->rung);
    pthread_mutex_destroy(&in->lock);
}

void inbox_wait(struct inbox *in, int timeout_ms)
{
    int64_t deadline = lh_now_ms() + timeout_ms;
    LH_LOCKED(&in->lock);

    while (!in->ringing && !in->stop)
        if (!lh_wait_until(&in->rung, &in->lock, deadline))
            break;
    in->ringing = false;
}

struct channel_message *inbox_take(struct inbox *in)
{
    LH_LOCKED(&in->lock);

    if (!in->count)
        return NULL;
    struct channel_message *m = in->messages[in->first];
    in->first = (in->first + 1) % INBOX_MAX;
    in->count--;
    return m;
}
