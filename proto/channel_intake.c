/* The intake's end.
 *
 * The thread owns the ROUTER socket.  It decides which message comes next (channel_peers.c) and
 * hands it to the owner; while the owner's queue is full it does not read, and the workers' windows
 * fill. A message that is too large is handed on without its frames: silence would make its sender
 * repeat it, and the owner can answer.  Only a part more than twice too large ends the connection,
 * which is ZeroMQ's own protection.  Acknowledgements are one number for each stream, so those that
 * come close together leave as one. A send is carried out by the thread while its caller waits:
 * only the socket knows whether the worker is connected. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/channel_core.h"
#include "proto/clock.h"
#include "proto/id.h"
#include "proto/log.h"

LH_LOG_COMPONENT("channel");

enum { IDLE_MS = 1000, RECV_BATCH = 64, ENVELOPE_PART = 1 };

/* On the stack of the thread that waits for it. */
struct request {
    struct request *next;
    struct channel_parts parts;
    char to[2 * CHANNEL_PEER];
    int result; /* errno value */
    bool done;
};

struct channel_intake {
    struct channel_end end;
    char instance[LH_ID_SIZE];
    size_t max_message;
    struct channel_peers peers;
    struct request *first, **last;
    uint64_t dropped;
};

/* ---- on the thread --------------------------------------------------------------------------- */

/* Each power of two, so that a flood of garbage does not become a flood of lines. */
static void count_dropped(struct channel_intake *in, const char *why)
{
    in->dropped++;
    if (!(in->dropped & (in->dropped - 1)))
        lh_warn("message dropped", "%s (%llu so far)", why, (unsigned long long)in->dropped);
}

static void take(struct channel_intake *in, const zmq_msg_t *id, struct channel_message *m)
{
    lh_auto(channel_message) owned = m;
    struct channel_peer *from = NULL;

    pthread_mutex_lock(&in->end.mutex);
    enum channel_verdict v = channel_peers_take(&in->peers, zmq_msg_data((zmq_msg_t *)id),
                                                zmq_msg_size(id), m->envelope, lh_now_ms(), &from);
    if (from)
        strcpy(m->peer, from->name);
    if (v == CHANNEL_HOSTILE)
        count_dropped(in, "its sender is not a worker");
    pthread_mutex_unlock(&in->end.mutex);
    if (v == CHANNEL_DELIVER && channel_end_push(&in->end, m))
        owned = NULL;
}

/* Part 0 is the sender's id. */
static struct channel_message *unpack(struct channel_intake *in, struct channel_parts *p,
                                      struct lh_error *err)
{
    bool oversized = channel_parts_bytes(p) - zmq_msg_size(&p->part[0]) > in->max_message;

    if (oversized)
        channel_parts_cut(p, ENVELOPE_PART + 1);
    struct channel_message *m = channel_message_from_parts(p, ENVELOPE_PART, err);
    if (m)
        m->oversized = oversized;
    return m;
}

static void receive(struct channel_intake *in)
{
    for (int i = 0; i < RECV_BATCH && channel_end_has_room(&in->end); i++) {
        struct channel_parts p;
        struct lh_error e = {0};
        zmq_msg_t id;
        int r = channel_parts_recv(in->end.socket, &p);
        if (r && r != EMSGSIZE)
            return;
        struct channel_message *m = NULL;
        zmq_msg_init(&id);
        if (!r) {
            zmq_msg_copy(&id, &p.part[0]);
            m = unpack(in, &p, &e);
        }
        if (m) {
            take(in, &id, m);
        } else {
            LH_LOCKED(&in->end.mutex);
            count_dropped(in, r ? "too many parts" : e.message);
        }
        zmq_msg_close(&id);
    }
}

static void address(const struct channel_peer *p, char id[2 * CHANNEL_PEER])
{
    snprintf(id, 2 * CHANNEL_PEER, "%s/%s", p->name, p->instance);
}

/* Lost when the worker is away: it asks again by its sync. */
static void send_ack(struct channel_intake *in, struct channel_peer *p)
{
    Longhaul__Experience__V1__Envelope ack = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;
    char id[2 * CHANNEL_PEER];
    struct channel_parts parts;

    p->ack_due = false;
    if (channel_parts_from_frames(&parts, NULL, 0, NULL))
        return;
    address(p, id);
    if (!channel_parts_set_envelope(&parts, &ack, 0, p->durable, in->instance, NULL))
        channel_parts_send(in->end.socket, id, &parts);
    channel_parts_finish(&parts);
}

static void send_what_is_due(struct channel_intake *in)
{
    LH_LOCKED(&in->end.mutex);
    for (struct channel_peer *p = in->peers.newest; p; p = p->older)
        if (p->ack_due)
            send_ack(in, p);
    for (struct request *r = in->first; r; r = r->next) {
        r->result = channel_parts_send(in->end.socket, r->to, &r->parts);
        r->done = true;
    }
    in->first = NULL;
    in->last = &in->first;
    pthread_cond_broadcast(&in->end.changed);
}

static void *run(void *arg)
{
    struct channel_intake *in = arg;

    while (channel_end_poll(&in->end, channel_end_has_room(&in->end), false, IDLE_MS)) {
        receive(in);
        send_what_is_due(in);
    }
    return NULL;
}

/* ---- for the owner --------------------------------------------------------------------------- */

static int set_up(struct channel_intake *in, const char *endpoint, size_t max_message,
                  struct lh_error *err)
{
    in->max_message = max_message ? max_message : CHANNEL_MAX_MESSAGE;
    int64_t max_part = 2 * (int64_t)in->max_message;
    int r = channel_end_init(&in->end, ZMQ_ROUTER, err);

    if (r)
        return r;
    zmq_setsockopt(in->end.socket, ZMQ_MAXMSGSIZE, &max_part, sizeof max_part);
    r = channel_end_set(&in->end, ZMQ_ROUTER_MANDATORY, 1, err); /* not a silent drop */
    if (!r) /* a connection that comes back takes its id over from the one that was lost */
        r = channel_end_set(&in->end, ZMQ_ROUTER_HANDOVER, 1, err);
    if (!r)
        r = channel_end_bind(&in->end, endpoint, err);
    return r ? r : channel_end_start(&in->end, run, in, err);
}

struct channel_intake *channel_intake_create(const char *endpoint, size_t max_message,
                                             struct lh_error *err)
{
    struct channel_intake *in = calloc(1, sizeof *in);

    if (!in) {
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a channel");
        return NULL;
    }
    in->last = &in->first;
    lh_id_new_text(in->instance);
    if (set_up(in, endpoint, max_message, err)) {
        lh_wrap(err, "channel of the intake");
        channel_intake_destroy(in);
        return NULL;
    }
    return in;
}

void channel_intake_destroy(struct channel_intake *in)
{
    if (!in)
        return;
    channel_end_finish(&in->end);
    channel_peers_finish(&in->peers);
    free(in);
}

struct channel_message *channel_intake_recv(struct channel_intake *in, int timeout_ms,
                                            struct lh_error *err)
{
    return channel_end_pop(&in->end, timeout_ms, err);
}

int channel_intake_ack(struct channel_intake *in, const struct channel_message *m,
                       struct lh_error *err)
{
    uint64_t seq = m->envelope->seq;

    if (!seq)
        return 0;
    pthread_mutex_lock(&in->end.mutex);
    struct channel_peer *p = channel_peers_find(&in->peers, m->peer, m->envelope->instance);
    bool known = p && seq < p->next;
    if (known && seq > p->durable) {
        p->durable = seq;
        p->ack_due = true;
    }
    pthread_mutex_unlock(&in->end.mutex);
    if (!known)
        return lh_fail(err, LH_NOT_FOUND, "message %llu of %s was not received here",
                       (unsigned long long)seq, m->peer);
    channel_end_wake(&in->end);
    return 0;
}

/* With the mutex held; waits until the thread has carried it out. */
static int carry_out(struct channel_intake *in, struct request *r, const char *peer,
                     Longhaul__Experience__V1__Envelope *envelope, struct lh_error *err)
{
    const struct channel_peer *p = channel_peers_find(&in->peers, peer, NULL);

    if (!p)
        return lh_fail(err, LH_UNAVAILABLE, "worker %s has not been heard of", peer);
    address(p, r->to);
    int e = channel_parts_set_envelope(&r->parts, envelope, 0, p->durable, in->instance, err);
    if (e)
        return e;
    *in->last = r;
    in->last = &r->next;
    channel_end_wake(&in->end);
    while (!r->done)
        pthread_cond_wait(&in->end.changed, &in->end.mutex);
    if (!r->result)
        return 0;
    return lh_fail(err, LH_UNAVAILABLE, "worker %s %s", peer,
                   r->result == EAGAIN ? "takes no more messages" : "is not connected");
}

int channel_intake_send(struct channel_intake *in, const char *peer,
                        Longhaul__Experience__V1__Envelope *envelope,
                        const struct channel_frame *frames, size_t n_frames, struct lh_error *err)
{
    struct request r = {0};
    int e = channel_parts_from_frames(&r.parts, frames, n_frames, err);

    if (e)
        return e;
    pthread_mutex_lock(&in->end.mutex);
    e = carry_out(in, &r, peer, envelope, err);
    pthread_mutex_unlock(&in->end.mutex);
    channel_parts_finish(&r.parts);
    return e;
}

int64_t channel_intake_silence_ms(const struct channel_intake *in, const char *peer)
{
    LH_LOCKED((pthread_mutex_t *)&in->end.mutex);
    const struct channel_peer *p = channel_peers_find(&in->peers, peer, NULL);

    return p ? lh_now_ms() - p->heard_ms : INT64_MAX;
}

uint64_t channel_intake_dropped(const struct channel_intake *in)
{
    LH_LOCKED((pthread_mutex_t *)&in->end.mutex);
    return in->dropped;
}
