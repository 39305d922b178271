/* What both ends of proto/channel.h share; private to them.
 *
 * The wire.  A message is one ZeroMQ multi-part message: Envelope, then up to CHANNEL_FRAMES
 * arrays. A worker's routing id is "name/instance", so what is meant for one instance never reaches
 * its successor.  An Envelope without a body is the channel's own:
 *
 *   worker ▸ intake   "my stream begins behind `ack`": at the start and before every resend.  From
 * it an intake that has just started knows which message comes next. intake ▸ worker   "durable up
 * to `ack`", with the intake's own instance, by which a worker recognises a restart and resends at
 * once. */
#ifndef PROTO_CHANNEL_CORE_H
#define PROTO_CHANNEL_CORE_H

#include <pthread.h>
#include <zmq.h>

#include "proto/channel.h"

enum { CHANNEL_QUEUE = 1024 }; /* received messages kept for the owner */

/* ---- channel_parts.c: the parts of one message ---- */
struct channel_parts {
    size_t n;
    zmq_msg_t part[1 + 1 + CHANNEL_FRAMES]; /* routing id (at the intake), envelope, frames */
};

void channel_parts_finish(struct channel_parts *p);
/* Frames first, as they are big and need no lock; the envelope when its sequence number is known.
 */
int channel_parts_from_frames(struct channel_parts *p, const struct channel_frame *frames, size_t n,
                              struct lh_error *err);
int channel_parts_set_envelope(struct channel_parts *p,
                               Longhaul__Experience__V1__Envelope *envelope, uint64_t seq,
                               uint64_t ack, const char *instance, struct lh_error *err);
size_t channel_parts_bytes(const struct channel_parts *p);
/* What the intake asks of a message: OUT_OF_RANGE, INVALID_ARGUMENT. */
int channel_parts_check(const struct channel_parts *p, size_t max_bytes, struct lh_error *err);
/* Closes the parts from `n` on. */
void channel_parts_cut(struct channel_parts *p, size_t n);
/* Never blocks.  0, or an errno value; `to` (a routing id) may be NULL.  The parts stay as they are
 * and share their bytes with what was sent. */
int channel_parts_send(void *socket, const char *to, const struct channel_parts *p);
/* Never blocks.  0, EAGAIN when nothing is there, EMSGSIZE for one with too many parts (skipped).
 */
int channel_parts_recv(void *socket, struct channel_parts *p);
/* Takes part `first` as the envelope and the rest as frames; *p is empty afterwards. */
struct channel_message *channel_message_from_parts(struct channel_parts *p, size_t first,
                                                   struct lh_error *err);

/* ---- channel_core.c: a socket, the thread that owns it, and the queue of what it received ---- */
struct channel_end {
    void *context, *socket;
    int wake_fd;
    const char *path; /* of the listening ipc socket, in `endpoint`; or NULL */
    ino_t inode;
    char *endpoint;
    pthread_t thread;
    bool running, stopping;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct channel_message **queue; /* ring of CHANNEL_QUEUE */
    size_t first, n;
};

bool channel_name_valid(const char *name);     /* [a-z0-9-], 1..CHANNEL_PEER-1 */
bool channel_instance_valid(const char *name); /* [A-Za-z0-9-], 1..CHANNEL_PEER-1 */

int channel_end_init(struct channel_end *e, int socket_type, struct lh_error *err);
int channel_end_set(struct channel_end *e, int option, int value, struct lh_error *err);
int channel_end_bind(struct channel_end *e, const char *endpoint, struct lh_error *err);
int channel_end_connect(struct channel_end *e, const char *endpoint, struct lh_error *err);
int channel_end_start(struct channel_end *e, void *(*run)(void *), void *arg, struct lh_error *err);
void channel_end_finish(struct channel_end *e); /* ends the thread first */

/* On the thread: waits for the socket or a wake, at most timeout_ms.  False = end now. */
bool channel_end_poll(struct channel_end *e, bool want_in, bool want_out, int timeout_ms);
bool channel_end_has_room(struct channel_end *e);
bool channel_end_push(struct channel_end *e, struct channel_message *m); /* takes m; false = full */
/* For the owner. */
void channel_end_wake(struct channel_end *e);
struct channel_message *channel_end_pop(struct channel_end *e, int timeout_ms,
                                        struct lh_error *err);
/* With the mutex held: until somebody broadcasts `changed`; false after the deadline. */
bool channel_end_wait(struct channel_end *e, int64_t deadline_ms);

/* ---- channel_peers.c: the streams an intake knows ---- */
struct channel_peer {
    char name[CHANNEL_PEER], instance[CHANNEL_PEER];
    bool synced;      /* it is known where the stream begins */
    uint64_t next;    /* seq that is handed on next */
    uint64_t durable; /* acknowledged by the owner */
    bool ack_due;     /* the worker has to be told `durable` */
    int64_t heard_ms;
    struct channel_peer *older;
};

struct channel_peers {
    struct channel_peer *newest;
    size_t n;
};

enum channel_verdict {
    CHANNEL_DELIVER,
    CHANNEL_CONTROL,   /* the channel's own message */
    CHANNEL_DUPLICATE, /* was delivered before */
    CHANNEL_GAP,       /* something before it was lost; it will come again */
    CHANNEL_HOSTILE,   /* not from a worker of ours */
};

/* What becomes of an envelope that came from routing id `id`; *from is its stream unless HOSTILE.
 */
enum channel_verdict channel_peers_take(struct channel_peers *ps, const void *id, size_t id_len,
                                        const Longhaul__Experience__V1__Envelope *envelope,
                                        int64_t now_ms, struct channel_peer **from);
/* Newest instance when `instance` is NULL; NULL when unknown. */
struct channel_peer *channel_peers_find(const struct channel_peers *ps, const char *name,
                                        const char *instance);
void channel_peers_finish(struct channel_peers *ps);

#endif
