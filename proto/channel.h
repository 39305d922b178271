/* The experience channel: reliable messages between one intake (ROUTER) and its workers (DEALER).
 *
 * A message is an Envelope (proto/longhaul/experience/v1) and raw array frames.  From worker to
 * intake it is at-least-once: numbered, kept until the intake acknowledges that it is durable,
 * resent after a silence, bounded by a window in bytes.  The intake hands each message on once in
 * order per (worker, instance), so duplicates end here.  From intake to worker nothing is kept:
 * what is said there is level-triggered and repeated by its owner.
 *
 * ZeroMQ's own guarantees are not relied on: PUSH/PULL and LINGER lose messages, ipc:// drops at
 * close, ROUTER drops silently.  Heartbeats detect dead peers.  All functions are
 * thread-safe, except that nothing may be under way when an end is destroyed. */
#ifndef PROTO_CHANNEL_H
#define PROTO_CHANNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "longhaul/experience/v1/experience.pb-c.h"
#include "proto/cleanup.h"
#include "proto/error.h"

enum {
    CHANNEL_FRAMES = 4,
    CHANNEL_PEER = 64,
    CHANNEL_MAX_MESSAGE = 64 << 20, /* bytes of a message, envelope and frames, if not set */
};

struct channel_frame {
    const void *data;
    size_t len; /* bytes */
};

/* A received message.  Free with channel_message_free(). */
struct channel_message {
    char peer[CHANNEL_PEER]; /* the worker's name; "" at a worker */
    Longhaul__Experience__V1__Envelope *envelope;
    struct channel_frame frames[CHANNEL_FRAMES]; /* aligned to 8 bytes, owned by the message */
    size_t n_frames;
    bool oversized; /* at the intake: it was larger than is taken, and its frames are gone */
    void *owned;
};
void channel_message_free(struct channel_message *m);
LH_DEFINE_AUTO(channel_message, channel_message_free)

/* ---- worker ---- */
struct channel_worker;

struct channel_worker_options {
    const char *endpoint; /* ipc:///path or, on one node, tcp://127.0.0.1:port */
    const char *name;     /* stable across restarts, [a-z0-9-], below CHANNEL_PEER */
    const char *instance; /* new id each start */
    size_t window_bytes;  /* unacknowledged bytes before channel_send waits; 0 = 16 MiB */
    int resend_ms;        /* silence before unacknowledged messages are sent again; 0 = 500 */
    size_t max_message;   /* as the intake's; 0 = CHANNEL_MAX_MESSAGE */
};

struct channel_worker *channel_worker_create(const struct channel_worker_options *o,
                                             struct lh_error *err);
void channel_worker_destroy(struct channel_worker *w);
LH_DEFINE_AUTO(channel_worker, channel_worker_destroy)

/* `reliable` messages (SEGMENT, DONE) wait for window up to timeout_ms
 * (RESOURCE_EXHAUSTED after it) and are copied; others are sent once, in order with them, and
 * refused with UNAVAILABLE when 256 of them wait for a lost intake.  envelope->seq and ack are set
 * here, instance is sent but not set.  A message larger than the window goes alone.
 *
 * A reliable message that the intake would never take is not accepted here either, because it would
 * be resent for ever: OUT_OF_RANGE when it is larger than max_message, INVALID_ARGUMENT when its
 * envelope would not be parsed (text that is not UTF-8). */
int channel_worker_send(struct channel_worker *w, Longhaul__Experience__V1__Envelope *envelope,
                        const struct channel_frame *frames, size_t n_frames, bool reliable,
                        int timeout_ms, struct lh_error *err);
/* Next message for this worker; NULL with err->code DEADLINE_EXCEEDED when none came. */
struct channel_message *channel_worker_recv(struct channel_worker *w, int timeout_ms,
                                            struct lh_error *err);
/* Highest seq the intake has acknowledged, and bytes not yet acknowledged.  A
 * reliable message is safe once this reaches the seq that its envelope was given. */
uint64_t channel_worker_acked(const struct channel_worker *w);
size_t channel_worker_pending(const struct channel_worker *w);

/* ---- intake ---- */
struct channel_intake;

struct channel_intake *channel_intake_create(const char *endpoint, size_t max_message,
                                             struct lh_error *err);
void channel_intake_destroy(struct channel_intake *in);
LH_DEFINE_AUTO(channel_intake, channel_intake_destroy)

/* Next message of any worker, in order and once per (worker, instance).  One larger than
 * max_message (0 = CHANNEL_MAX_MESSAGE) comes as `oversized`, so that its sender can be answered.
 */
struct channel_message *channel_intake_recv(struct channel_intake *in, int timeout_ms,
                                            struct lh_error *err);
/* Everything up to and including this reliable message is durable. */
int channel_intake_ack(struct channel_intake *in, const struct channel_message *m,
                       struct lh_error *err);
/* Once, without guarantee; UNAVAILABLE when the worker is not connected. */
int channel_intake_send(struct channel_intake *in, const char *peer,
                        Longhaul__Experience__V1__Envelope *envelope,
                        const struct channel_frame *frames, size_t n_frames, struct lh_error *err);
/* Milliseconds since the worker was last heard of; INT64_MAX if never. */
int64_t channel_intake_silence_ms(const struct channel_intake *in, const char *peer);
/* Messages thrown away because they were malformed or not from a worker. */
uint64_t channel_intake_dropped(const struct channel_intake *in);

#endif
