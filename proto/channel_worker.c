/* The worker's end.
 *
 * One list holds, in the order of sending, what waits to be sent and what was sent but not yet
 * acknowledged; `unsent` points to where sending goes on.  A reliable message leaves the list when
 * it is acknowledged, any other one when it is sent.  To resend is to move `unsent` back to the
 * start. ZeroMQ keeps one copy of the bytes for all of it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/channel_core.h"
#include "proto/clock.h"
#include "proto/log.h"

LH_LOG_COMPONENT("channel");

enum {
    DEFAULT_WINDOW = 16 << 20,
    DEFAULT_RESEND_MS = 500,
    RESEND_GROWTH = 4, /* up to this many times resend_ms while nothing is acknowledged */
    TRANSIENT_MAX = 256,
    IDLE_MS = 1000,
    RECV_BATCH = 64,
};

struct outgoing {
    struct outgoing *next;
    uint64_t seq; /* 0 = sent once */
    size_t bytes;
    struct channel_parts parts;
};

struct channel_worker {
    struct channel_end end;
    char instance[CHANNEL_PEER], intake[CHANNEL_PEER]; /* of the intake: its instance */
    size_t window, max_message, pending_bytes, transient;
    int resend_ms, silence_ms;                /* silence_ms: to wait before the next resend */
    struct outgoing *first, **last, **unsent; /* the last two point to links of the list */
    uint64_t sent_seq, acked;
    int64_t progress_ms; /* of the last acknowledgement, resend, or first message */
    bool sync_due;
};

/* ---- on the thread, with the mutex held ------------------------------------------------------ */

static void drop(struct channel_worker *w, struct outgoing **link)
{
    struct outgoing *o = *link;

    *link = o->next;
    if (w->last == &o->next)
        w->last = link;
    if (w->unsent == &o->next)
        w->unsent = link;
    if (o->seq)
        w->pending_bytes -= o->bytes;
    else
        w->transient--;
    channel_parts_finish(&o->parts);
    free(o);
}

static void drop_acknowledged(struct channel_worker *w)
{
    for (struct outgoing **link = &w->first; *link && (*link)->seq <= w->acked;) {
        if ((*link)->seq)
            drop(w, link);
        else
            link = &(*link)->next;
    }
    pthread_cond_broadcast(&w->end.changed);
}

static void rewind_sending(struct channel_worker *w)
{
    w->unsent = &w->first;
    w->sync_due = true;
    w->progress_ms = lh_now_ms();
}

static bool send_sync(struct channel_worker *w)
{
    Longhaul__Experience__V1__Envelope sync = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;
    struct channel_parts p;

    if (channel_parts_from_frames(&p, NULL, 0, NULL) ||
        channel_parts_set_envelope(&p, &sync, 0, w->acked, w->instance, NULL))
        return false;
    int e = channel_parts_send(w->end.socket, NULL, &p);
    channel_parts_finish(&p);
    w->sync_due = e != 0;
    return !e;
}

/* Sends from `unsent` on until ZeroMQ takes no more. */
static void flush(struct channel_worker *w)
{
    LH_LOCKED(&w->end.mutex);
    if (w->sync_due && !send_sync(w))
        return;
    while (*w->unsent) {
        struct outgoing *o = *w->unsent;
        if (channel_parts_send(w->end.socket, NULL, &o->parts))
            return;
        if (o->seq)
            w->unsent = &o->next;
        else
            drop(w, w->unsent);
    }
}

/* An envelope of the intake's channel: what is durable, and whether it is still the same intake. */
static void take_control(struct channel_worker *w, const Longhaul__Experience__V1__Envelope *e)
{
    LH_LOCKED(&w->end.mutex);
    if (strcmp(w->intake, e->instance) != 0) {
        if (*w->intake)
            rewind_sending(w);
        snprintf(w->intake, sizeof w->intake, "%s", e->instance);
    }
    if (e->ack <= w->acked || e->ack > w->sent_seq)
        return;
    w->acked = e->ack;
    w->progress_ms = lh_now_ms();
    w->silence_ms = w->resend_ms;
    drop_acknowledged(w);
}

static void receive(struct channel_worker *w)
{
    for (int i = 0; i < RECV_BATCH; i++) {
        struct channel_parts p;
        struct lh_error e = {0};
        int r = channel_parts_recv(w->end.socket, &p);
        if (r && r != EMSGSIZE)
            return;
        lh_auto(channel_message) m = r ? NULL : channel_message_from_parts(&p, 0, &e);
        if (!m)
            lh_warn("message dropped", "%s", r ? "too many parts" : e.message);
        else if (m->envelope->body_case == LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY__NOT_SET)
            take_control(w, m->envelope);
        else if (channel_end_push(&w->end, m))
            m = NULL;
        else
            lh_warn("message dropped", "%d others wait to be received", CHANNEL_QUEUE);
    }
}

/* Milliseconds until something has to be resent; does it when that is now. */
static int resend_when_silent(struct channel_worker *w)
{
    LH_LOCKED(&w->end.mutex);
    if (!w->pending_bytes)
        return IDLE_MS;
    int64_t due = w->progress_ms + w->silence_ms;
    if (due > lh_now_ms())
        return lh_ms_left(due);
    lh_debug("resend", "seq %llu.. after %d ms of silence", (unsigned long long)w->acked + 1,
             w->silence_ms);
    rewind_sending(w);
    if (w->silence_ms < RESEND_GROWTH * w->resend_ms)
        w->silence_ms *= 2;
    return w->silence_ms;
}

static bool has_unsent(struct channel_worker *w)
{
    LH_LOCKED(&w->end.mutex);
    return *w->unsent || w->sync_due;
}

static void *run(void *arg)
{
    struct channel_worker *w = arg;
    int wait_ms = 0;

    while (channel_end_poll(&w->end, true, has_unsent(w), wait_ms)) {
        receive(w);
        wait_ms = resend_when_silent(w);
        flush(w);
    }
    return NULL;
}

/* ---- for the owner --------------------------------------------------------------------------- */

static int set_up(struct channel_worker *w, const struct channel_worker_options *o,
                  struct lh_error *err)
{
    char id[2 * CHANNEL_PEER];
    int r = channel_end_init(&w->end, ZMQ_DEALER, err);

    if (r)
        return r;
    if (!channel_name_valid(o->name) || !channel_instance_valid(o->instance))
        return lh_fail(err, LH_INVALID_ARGUMENT, "\"%s\", instance \"%s\": not a worker's name",
                       o->name, o->instance);
    strcpy(w->instance, o->instance);
    int len = snprintf(id, sizeof id, "%s/%s", o->name, o->instance);
    zmq_setsockopt(w->end.socket, ZMQ_ROUTING_ID, id, (size_t)len);
    r = channel_end_set(&w->end, ZMQ_IMMEDIATE, 1, err); /* queue here, not for a lost connection */
    if (!r)
        r = channel_end_set(&w->end, ZMQ_RECONNECT_IVL, 50, err);
    if (!r)
        r = channel_end_set(&w->end, ZMQ_RECONNECT_IVL_MAX, 500, err);
    if (!r)
        r = channel_end_connect(&w->end, o->endpoint, err);
    return r ? r : channel_end_start(&w->end, run, w, err);
}

struct channel_worker *channel_worker_create(const struct channel_worker_options *o,
                                             struct lh_error *err)
{
    struct channel_worker *w = calloc(1, sizeof *w);

    if (!w) {
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a channel");
        return NULL;
    }
    w->last = w->unsent = &w->first;
    w->sync_due = true;
    w->window = o->window_bytes ? o->window_bytes : DEFAULT_WINDOW;
    w->max_message = o->max_message ? o->max_message : CHANNEL_MAX_MESSAGE;
    w->resend_ms = w->silence_ms = o->resend_ms ? o->resend_ms : DEFAULT_RESEND_MS;
    if (set_up(w, o, err)) {
        lh_wrap(err, "channel of worker %s", o->name);
        channel_worker_destroy(w);
        return NULL;
    }
    return w;
}

void channel_worker_destroy(struct channel_worker *w)
{
    if (!w)
        return;
    channel_end_finish(&w->end);
    while (w->first)
        drop(w, &w->first);
    free(w);
}

/* With the mutex held. */
static int wait_for_window(struct channel_worker *w, size_t bytes, int timeout_ms,
                           struct lh_error *err)
{
    int64_t deadline = lh_now_ms() + timeout_ms;

    while (w->pending_bytes && w->pending_bytes + bytes > w->window)
        if (!channel_end_wait(&w->end, deadline) && w->pending_bytes)
            return lh_fail(err, LH_RESOURCE_EXHAUSTED,
                           "%zu bytes wait for the intake's acknowledgement, the window is %zu",
                           w->pending_bytes, w->window);
    return 0;
}

/* With the mutex held. */
static void append(struct channel_worker *w, struct outgoing *o)
{
    if (o->seq) {
        if (!w->pending_bytes)
            w->progress_ms = lh_now_ms();
        w->pending_bytes += o->bytes;
        w->sent_seq = o->seq;
    } else {
        w->transient++;
    }
    *w->last = o;
    w->last = &o->next;
}

static int enqueue(struct channel_worker *w, struct outgoing *o,
                   Longhaul__Experience__V1__Envelope *envelope, bool reliable, int timeout_ms,
                   struct lh_error *err)
{
    size_t estimate = channel_parts_bytes(&o->parts) +
                      protobuf_c_message_get_packed_size(&envelope->base) + CHANNEL_PEER;

    LH_LOCKED(&w->end.mutex);
    int r = 0;
    if (reliable)
        r = wait_for_window(w, estimate, timeout_ms, err);
    else if (w->transient >= TRANSIENT_MAX)
        r = lh_fail(err, LH_UNAVAILABLE, "the intake is away: %d messages wait", TRANSIENT_MAX);
    if (r)
        return r;
    o->seq = reliable ? w->sent_seq + 1 : 0;
    r = channel_parts_set_envelope(&o->parts, envelope, o->seq, w->acked, w->instance, err);
    if (!r && reliable)
        r = channel_parts_check(&o->parts, w->max_message, err);
    if (r)
        return r;
    o->bytes = channel_parts_bytes(&o->parts);
    append(w, o);
    return 0;
}

int channel_worker_send(struct channel_worker *w, Longhaul__Experience__V1__Envelope *envelope,
                        const struct channel_frame *frames, size_t n_frames, bool reliable,
                        int timeout_ms, struct lh_error *err)
{
    struct outgoing *o = calloc(1, sizeof *o);

    if (!o)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a message");
    int r = channel_parts_from_frames(&o->parts, frames, n_frames, err);
    if (!r)
        r = enqueue(w, o, envelope, reliable, timeout_ms, err);
    if (r) {
        channel_parts_finish(&o->parts);
        free(o);
        return r;
    }
    channel_end_wake(&w->end);
    return 0;
}

struct channel_message *channel_worker_recv(struct channel_worker *w, int timeout_ms,
                                            struct lh_error *err)
{
    return channel_end_pop(&w->end, timeout_ms, err);
}

uint64_t channel_worker_acked(const struct channel_worker *w)
{
    LH_LOCKED((pthread_mutex_t *)&w->end.mutex);
    return w->acked;
}

size_t channel_worker_pending(const struct channel_worker *w)
{
    LH_LOCKED((pthread_mutex_t *)&w->end.mutex);
    return w->pending_bytes;
}
