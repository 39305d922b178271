#include <string.h>

#include "agentenv/daemon/internal.h"
#include "agentenv/daemon/service.h"
#include "proto/clock.h"

enum { POLL_MS = 200 }; /* how soon a watcher that went away is noticed */

void watch_publish(struct daemon *d, const struct sandbox *s, int from, int to, int cause)
{
    if (to == SB_DEAD && cause > 0 && cause < DEATH_CAUSES)
        d->deaths[cause]++;
    for (struct watcher *w = d->watchers; w; w = w->next) {
        if (w->count == WATCH_BACKLOG) {
            w->overrun = true;
            continue;
        }
        size_t at = (w->head + w->count++) % WATCH_BACKLOG;
        longhaul__sandbox__v1__event__init(&w->queue[at]);
        memcpy(w->ids[at], s->id, sizeof w->ids[at]);
        w->queue[at].at_ms = lh_unix_ms();
        w->queue[at].from = (V1(State))from;
        w->queue[at].to = (V1(State))to;
        w->queue[at].cause = (V1(DeathCause))cause;
        pthread_cond_signal(&w->ready);
    }
}

static struct watcher *watcher_add(struct daemon *d)
{
    struct watcher *w = calloc(1, sizeof *w);
    pthread_condattr_t attr;

    if (!w)
        return NULL;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&w->ready, &attr);
    pthread_condattr_destroy(&attr);
    LH_LOCKED(&d->lock);
    w->next = d->watchers;
    d->watchers = w;
    return w;
}

static void watcher_remove(struct daemon *d, struct watcher *w)
{
    pthread_mutex_lock(&d->lock);
    struct watcher **at = &d->watchers;
    while (*at != w)
        at = &(*at)->next;
    *at = w->next;
    pthread_mutex_unlock(&d->lock);
    pthread_cond_destroy(&w->ready);
    free(w);
}

/* True when there was one within POLL_MS. */
static bool next_event(struct daemon *d, struct watcher *w, V1(Event) * event, char id[LH_ID_SIZE])
{
    int64_t until_ms = lh_now_ms() + POLL_MS;
    struct timespec until = {until_ms / 1000, until_ms % 1000 * 1000000};

    LH_LOCKED(&d->lock);
    if (w->count == 0)
        pthread_cond_timedwait(&w->ready, &d->lock, &until);
    if (w->count == 0)
        return false;
    *event = w->queue[w->head];
    memcpy(id, w->ids[w->head], LH_ID_SIZE);
    w->head = (w->head + 1) % WATCH_BACKLOG;
    w->count--;
    return true;
}

int service_watch(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                  struct lh_error *err)
{
    struct daemon *d = ctx;
    struct watcher *w = watcher_add(d);
    char id[LH_ID_SIZE];
    V1(Event) event;
    int r = 0;

    (void)request;
    if (!w)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for another watcher");
    while (r == 0 && !rpc_cancelled(call)) {
        if (next_event(d, w, &event, id)) {
            event.sandbox = id;
            r = rpc_send(call, &event.base, err);
        } else if (w->overrun) {
            r = lh_fail(err, LH_RESOURCE_EXHAUSTED,
                        "more than %d events were waiting: list again, then watch again",
                        WATCH_BACKLOG);
        }
    }
    watcher_remove(d, w);
    return r;
}
