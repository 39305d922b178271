#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/channel_core.h"
#include "proto/parse.h"

enum { ENVELOPE_HEAP = 8 << 20, ALIGNMENT = 8 };

/* A message as its owner sees it, and what it is made of. */
struct received {
    struct channel_message message;
    struct channel_parts parts;
    void *aligned[CHANNEL_FRAMES];
};

void channel_parts_cut(struct channel_parts *p, size_t n)
{
    while (p->n > n)
        zmq_msg_close(&p->part[--p->n]);
}

void channel_parts_finish(struct channel_parts *p)
{
    channel_parts_cut(p, 0);
}

static int copy_part(zmq_msg_t *part, const void *data, size_t len, struct lh_error *err)
{
    if (zmq_msg_init_size(part, len) < 0)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a frame of %zu bytes", len);
    if (len)
        memcpy(zmq_msg_data(part), data, len);
    return 0;
}

/* part[0] is left for the envelope. */
int channel_parts_from_frames(struct channel_parts *p, const struct channel_frame *frames, size_t n,
                              struct lh_error *err)
{
    p->n = 0;
    if (n > CHANNEL_FRAMES)
        return lh_fail(err, LH_INVALID_ARGUMENT, "%zu frames; a message has at most %d", n,
                       CHANNEL_FRAMES);
    zmq_msg_init(&p->part[p->n++]);
    for (size_t i = 0; i < n; i++) {
        int r = copy_part(&p->part[p->n], frames[i].data, frames[i].len, err);
        if (r) {
            channel_parts_finish(p);
            return r;
        }
        p->n++;
    }
    return 0;
}

int channel_parts_set_envelope(struct channel_parts *p,
                               Longhaul__Experience__V1__Envelope *envelope, uint64_t seq,
                               uint64_t ack, const char *instance, struct lh_error *err)
{
    char *kept = envelope->instance; /* the caller may own it */

    envelope->seq = seq;
    envelope->ack = ack;
    envelope->instance = (char *)instance;
    size_t len = protobuf_c_message_get_packed_size(&envelope->base);
    zmq_msg_close(&p->part[0]);
    if (zmq_msg_init_size(&p->part[0], len) < 0) {
        zmq_msg_init(&p->part[0]);
        envelope->instance = kept;
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for an envelope of %zu bytes", len);
    }
    protobuf_c_message_pack(&envelope->base, zmq_msg_data(&p->part[0]));
    envelope->instance = kept;
    return 0;
}

size_t channel_parts_bytes(const struct channel_parts *p)
{
    size_t bytes = 0;

    for (size_t i = 0; i < p->n; i++)
        bytes += zmq_msg_size(&p->part[i]);
    return bytes;
}

static Longhaul__Experience__V1__Envelope *parse_envelope(const zmq_msg_t *part,
                                                          struct lh_error *err)
{
    return (void *)lh_parse(&longhaul__experience__v1__envelope__descriptor,
                            zmq_msg_data((zmq_msg_t *)part), zmq_msg_size(part),
                            (struct lh_parse_limits){.heap = ENVELOPE_HEAP}, err);
}

int channel_parts_check(const struct channel_parts *p, size_t max_bytes, struct lh_error *err)
{
    size_t bytes = channel_parts_bytes(p);

    if (bytes > max_bytes)
        return lh_fail(err, LH_OUT_OF_RANGE, "a message of %zu bytes; the intake takes %zu", bytes,
                       max_bytes);
    lh_automsg(Longhaul__Experience__V1__Envelope) e = parse_envelope(&p->part[0], err);
    return e ? 0 : lh_wrap(err, "the intake would refuse this message");
}

static int send_part(void *socket, const zmq_msg_t *part, bool more)
{
    zmq_msg_t copy;

    zmq_msg_init(&copy);
    if (zmq_msg_copy(&copy, (zmq_msg_t *)part) == 0 &&
        zmq_msg_send(&copy, socket, ZMQ_DONTWAIT | (more ? ZMQ_SNDMORE : 0)) >= 0)
        return 0;
    int r = errno;
    zmq_msg_close(&copy);
    return r;
}

/* When the first part is taken the rest must follow, even if one fails: ZeroMQ would take what
 * comes next for the missing parts. */
int channel_parts_send(void *socket, const char *to, const struct channel_parts *p)
{
    int r = 0;

    if (to && zmq_send(socket, to, strlen(to), ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0)
        return errno;
    for (size_t i = 0; i < p->n; i++) {
        int e = send_part(socket, &p->part[i], i + 1 < p->n);
        if (e && !i && !to)
            return e;
        r = r ? r : e;
    }
    return r;
}

int channel_parts_recv(void *socket, struct channel_parts *p)
{
    bool more = true, too_many = false;

    for (p->n = 0; more;) {
        zmq_msg_t part;
        zmq_msg_init(&part);
        if (zmq_msg_recv(&part, socket, ZMQ_DONTWAIT) < 0) {
            int e = errno;
            zmq_msg_close(&part);
            channel_parts_finish(p);
            return e;
        }
        more = zmq_msg_more(&part);
        too_many = too_many || p->n == sizeof p->part / sizeof *p->part;
        if (too_many)
            zmq_msg_close(&part);
        else
            p->part[p->n++] = part; /* moved: a zmq_msg_t is plain bytes */
    }
    if (too_many)
        channel_parts_finish(p);
    return too_many ? EMSGSIZE : 0;
}

/* ZeroMQ hands out small messages wherever they lie in its buffer; large ones are aligned. */
static int take_frame(struct received *r, zmq_msg_t *part, struct lh_error *err)
{
    size_t i = r->message.n_frames++;
    struct channel_frame *f = &r->message.frames[i];

    *f = (struct channel_frame){zmq_msg_data(part), zmq_msg_size(part)};
    if ((uintptr_t)f->data % ALIGNMENT == 0)
        return 0;
    r->aligned[i] = malloc(f->len + 1);
    if (!r->aligned[i])
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a frame of %zu bytes", f->len);
    memcpy(r->aligned[i], f->data, f->len);
    f->data = r->aligned[i];
    return 0;
}

static int fill(struct received *r, size_t first, struct lh_error *err)
{
    struct channel_parts *p = &r->parts;

    if (p->n <= first || p->n - first - 1 > CHANNEL_FRAMES)
        return lh_fail(err, LH_INVALID_ARGUMENT, "a message of %zu parts", p->n);
    r->message.envelope = parse_envelope(&p->part[first], err);
    if (!r->message.envelope)
        return LH_INVALID_ARGUMENT;
    for (size_t i = first + 1; i < p->n; i++) {
        int e = take_frame(r, &p->part[i], err);
        if (e)
            return e;
    }
    return 0;
}

struct channel_message *channel_message_from_parts(struct channel_parts *p, size_t first,
                                                   struct lh_error *err)
{
    struct received *r = calloc(1, sizeof *r);

    if (!r) {
        channel_parts_finish(p);
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a message");
        return NULL;
    }
    r->message.owned = r;
    r->parts = *p; /* moved */
    p->n = 0;
    if (!fill(r, first, err))
        return &r->message;
    channel_message_free(&r->message);
    return NULL;
}

void channel_message_free(struct channel_message *m)
{
    if (!m)
        return;
    struct received *r = m->owned;
    if (m->envelope)
        lh_message_free(&m->envelope->base);
    channel_parts_finish(&r->parts);
    for (size_t i = 0; i < CHANNEL_FRAMES; i++)
        free(r->aligned[i]);
    free(r);
}
