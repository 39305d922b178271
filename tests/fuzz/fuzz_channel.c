/* What any ROUTER socket may be sent: messages of any number of parts, of any content.  No message
 * makes the intake's receiving side fail, and what it delivers of a stream is numbered without gap
 * or repetition.  Input: per message the number of parts, per part two bytes of length and the
 * bytes. */
#include <stdlib.h>
#include <string.h>

#include "proto/channel_core.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

struct input {
    const uint8_t *at, *end;
};

static size_t number(struct input *in, size_t bytes)
{
    size_t v = 0;

    while (bytes-- && in->at < in->end)
        v = v << 8 | *in->at++;
    return v;
}

/* 1 to 6 parts, as a socket would hand them out. */
static void read_parts(struct input *in, struct channel_parts *p)
{
    size_t n = 1 + number(in, 1) % (CHANNEL_FRAMES + 2);

    for (p->n = 0; p->n < n; p->n++) {
        size_t len = number(in, 2), left = (size_t)(in->end - in->at);
        len = len > left ? left : len;
        zmq_msg_init_size(&p->part[p->n], len);
        memcpy(zmq_msg_data(&p->part[p->n]), in->at, len);
        in->at += len;
    }
}

static void check_frames(const struct channel_message *m)
{
    for (size_t i = 0; i < m->n_frames; i++) {
        const uint8_t *data = m->frames[i].data;
        volatile unsigned sum = 0;
        (void)sum;
        if ((uintptr_t)data % 8)
            abort();
        for (size_t k = 0; k < m->frames[i].len; k++)
            sum += data[k]; /* read, for ASan */
    }
}

static void take(struct channel_peers *peers, zmq_msg_t *id, const struct channel_message *m)
{
    struct channel_peer *from = NULL;
    enum channel_verdict v =
        channel_peers_take(peers, zmq_msg_data(id), zmq_msg_size(id), m->envelope, 1000, &from);

    if (v != CHANNEL_HOSTILE && !from)
        abort();
    if (v == CHANNEL_DELIVER && m->envelope->seq && m->envelope->seq + 1 != from->next)
        abort();
    if (from && channel_peers_find(peers, from->name, from->instance) != from)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    struct input in = {p, p + n};
    struct channel_peers peers = {0};

    while (in.at < in.end) {
        struct channel_parts parts;
        zmq_msg_t id;
        read_parts(&in, &parts);
        zmq_msg_init(&id);
        zmq_msg_copy(&id, &parts.part[0]);
        lh_auto(channel_message) m = channel_message_from_parts(&parts, 1, NULL);
        if (m) {
            check_frames(m);
            take(&peers, &id, m);
        }
        zmq_msg_close(&id);
    }
    channel_peers_finish(&peers);
    return 0;
}
