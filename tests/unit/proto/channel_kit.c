#include "channel_kit.h"

#include <stdlib.h>
#include <unistd.h>

#include "proto/file.h"

char channel_dir[] = "/tmp/lh-channel-XXXXXX", *channel_path, *channel_endpoint;

void channel_enter(void)
{
    cr_assert(mkdtemp(channel_dir) != NULL);
    channel_path = lh_format("%s/s", channel_dir);
    channel_endpoint = lh_format("ipc://%s", channel_path);
}

void channel_leave(void)
{
    lh_remove_tree(channel_dir, NULL);
    free(channel_endpoint);
    free(channel_path);
}

struct channel_intake *intake(void)
{
    struct lh_error e = {0};
    struct channel_intake *in = channel_intake_create(channel_endpoint, 0, &e);

    cr_assert(in != NULL, "%s", e.message);
    return in;
}

struct channel_worker *worker(const char *name, const char *instance, size_t window)
{
    struct lh_error e = {0};
    struct channel_worker_options o = {channel_endpoint, name, instance, window, 50, 0};
    struct channel_worker *w = channel_worker_create(&o, &e);

    cr_assert(w != NULL, "%s", e.message);
    return w;
}

Envelope segment(uint32_t turn)
{
    static _Thread_local Longhaul__Experience__V1__Segment s;
    Envelope e = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;

    longhaul__experience__v1__segment__init(&s);
    s.turn = turn;
    e.body_case = LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_SEGMENT;
    e.segment = &s;
    return e;
}

int send_turn(struct channel_worker *w, uint32_t turn, size_t bytes, bool reliable, int timeout_ms,
              struct lh_error *err)
{
    lh_autofree char *data = calloc(1, bytes + 1);
    struct channel_frame f = {data, bytes};
    Envelope e = segment(turn);

    return channel_worker_send(w, &e, &f, 1, reliable, timeout_ms, err);
}

int next_turn(struct channel_intake *in, int timeout_ms, bool ack)
{
    struct lh_error e = {0};
    lh_auto(channel_message) m = channel_intake_recv(in, timeout_ms, &e);

    if (!m)
        return -1;
    if (ack)
        cr_assert(eq(int, channel_intake_ack(in, m, &e), 0), "%s", e.message);
    return (int)m->envelope->segment->turn;
}

void wait_acked(struct channel_worker *w, uint64_t seq)
{
    for (int i = 0; i < 500 && channel_worker_acked(w) < seq; i++)
        usleep(10000);
    cr_assert(eq(u64, channel_worker_acked(w), seq));
}
