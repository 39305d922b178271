/* Peers that are not ours, or send more than is taken. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#include "channel_kit.h"
#include "proto/parse.h"

TestSuite(channel_hostile, .init = channel_enter, .fini = channel_leave, .timeout = 120);

static void *raw_peer(void *context, const char *id)
{
    void *s = zmq_socket(context, ZMQ_DEALER);
    int linger = 1000;

    zmq_setsockopt(s, ZMQ_LINGER, &linger, sizeof linger);
    if (id)
        zmq_setsockopt(s, ZMQ_ROUTING_ID, id, strlen(id));
    cr_assert(eq(int, zmq_connect(s, channel_endpoint), 0));
    return s;
}

static void send_raw(void *socket, Envelope e, uint64_t seq, const char *instance, int extra_parts)
{
    size_t len;

    e.seq = seq;
    e.instance = (char *)instance;
    lh_autofree uint8_t *p = lh_pack(&e.base, &len, NULL);
    zmq_send(socket, p, len, extra_parts ? ZMQ_SNDMORE : 0);
    for (; extra_parts; extra_parts--)
        zmq_send(socket, "x", 1, extra_parts > 1 ? ZMQ_SNDMORE : 0);
}

static void wait_dropped(struct channel_intake *in, uint64_t n)
{
    for (int i = 0; i < 500 && channel_intake_dropped(in) < n; i++)
        usleep(10000);
    cr_assert(eq(u64, channel_intake_dropped(in), n));
}

Test(channel_hostile, reordered_and_repeated_messages)
{
    static const struct {
        uint64_t seq;
        uint32_t turn;
    } sent[] = {{2, 0}, {1, 1}, {1, 0}, {3, 0}, {2, 2}, {2, 0}, {3, 3}, {1, 0}, {3, 0}, {4, 4}};
    lh_auto(channel_intake) in = intake();
    void *context = zmq_ctx_new(), *s = raw_peer(context, "rollout-0/A1");
    Envelope sync = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;

    send_raw(s, segment(0), 1, "A1", 0); /* before its begin is known: ignored, comes again */
    send_raw(s, sync, 0, "A1", 0);
    for (size_t i = 0; i < LH_ARRAY_SIZE(sent); i++)
        send_raw(s, segment(sent[i].turn), sent[i].seq, "A1", 0);
    for (int i = 1; i <= 4; i++)
        cr_assert(eq(int, next_turn(in, 5000, true), i));
    cr_assert(eq(int, next_turn(in, 100, true), -1));
    cr_assert(eq(u64, channel_intake_dropped(in), 0));
    zmq_close(s);
    zmq_ctx_term(context);
}

Test(channel_hostile, garbage_is_dropped_and_counted)
{
    static const char *const bad_ids[] = {NULL,
                                          "rollout-0",
                                          "/A1",
                                          "Rollout/A1",
                                          "a b/A1",
                                          "x/B2",
                                          "0123456789012345678901234567890123456789"
                                          "012345678901234567890123456789/A1"};
    lh_auto(channel_intake) in = intake();
    void *context = zmq_ctx_new();
    Envelope sync = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;
    uint64_t bad = 0;
    struct lh_error e = {0};

    for (size_t i = 0; i < LH_ARRAY_SIZE(bad_ids); i++) {
        void *s = raw_peer(context, bad_ids[i]);
        send_raw(s, segment(1), 1, "A1", 1);
        wait_dropped(in, ++bad);
        zmq_close(s);
    }
    void *s = raw_peer(context, "rollout-9/A1");
    send_raw(s, sync, 0, "A1", 0);
    zmq_send(s, "\xff\xff\xff", 3, 0);
    zmq_send(s, "\x1a\x02\xc3\x28", 4, 0);
    send_raw(s, sync, 5, "A1", 0);       /* numbered, but without a body */
    send_raw(s, segment(1), 1, "A1", 5); /* too many parts */
    send_raw(s, segment(1), 1, "A1", 9);
    send_raw(s, segment(1), 1, "../../x", 0);
    wait_dropped(in, bad + 6);
    zmq_close(s);
    zmq_ctx_term(context);
    lh_auto(channel_worker) w = worker("rollout-0", "A1", 0);
    send_turn(w, 1, 10, true, 1000, &e);
    cr_assert(eq(int, next_turn(in, 5000, true), 1), "it goes on");
}

/* ---- more than is taken ---- */

enum { LIMIT = 4096 };

static struct channel_worker *limited_worker(size_t max_message)
{
    struct lh_error e = {0};
    struct channel_worker_options o = {.endpoint = channel_endpoint,
                                       .name = "rollout-0",
                                       .instance = "A1",
                                       .resend_ms = 50,
                                       .max_message = max_message};
    struct channel_worker *w = channel_worker_create(&o, &e);

    cr_assert(w != NULL, "%s", e.message);
    return w;
}

static struct channel_intake *limited_intake(void)
{
    struct lh_error e = {0};
    struct channel_intake *in = channel_intake_create(channel_endpoint, LIMIT, &e);

    cr_assert(in != NULL, "%s", e.message);
    return in;
}

/* Both ends draw the line at the same byte: what is accepted here arrives whole there. */
Test(channel_hostile, the_worker_refuses_what_the_intake_would_not_take)
{
    lh_auto(channel_intake) in = limited_intake();
    lh_auto(channel_worker) w = limited_worker(LIMIT);
    struct lh_error e = {0};
    size_t accepted = 0, refused = 0;

    for (size_t len = LIMIT - 64; len <= LIMIT; len++) {
        int r = send_turn(w, (uint32_t)len, len, true, 1000, &e);
        if (r < 0) {
            cr_assert(eq(int, r, LH_OUT_OF_RANGE), "%s", e.message);
            refused++;
            continue;
        }
        cr_assert(eq(sz, refused, 0), "the line is crossed once");
        lh_auto(channel_message) m = channel_intake_recv(in, 5000, &e);
        cr_assert(m != NULL, "%s", e.message);
        cr_assert(not(m->oversized));
        cr_assert(eq(sz, m->frames[0].len, len));
        cr_assert(eq(int, channel_intake_ack(in, m, &e), 0));
        accepted++;
    }
    cr_assert(gt(sz, accepted, 0));
    cr_assert(gt(sz, refused, 0));
    wait_acked(w, accepted);
    cr_assert(eq(sz, channel_worker_pending(w), 0), "nothing of a refused one is kept");
}

Test(channel_hostile, an_oversized_message_comes_without_its_frames)
{
    lh_auto(channel_intake) in = limited_intake();
    lh_auto(channel_worker) w = limited_worker(2 * LIMIT);
    struct lh_error e = {0};

    cr_assert(eq(int, send_turn(w, 1, LIMIT, true, 1000, &e), 0), "%s", e.message);
    cr_assert(eq(int, send_turn(w, 2, 10, true, 1000, &e), 0), "%s", e.message);
    lh_auto(channel_message) m = channel_intake_recv(in, 5000, &e);
    cr_assert(m != NULL, "%s", e.message);
    cr_assert(m->oversized);
    cr_assert(eq(u32, m->envelope->segment->turn, 1));
    cr_assert(eq(sz, m->n_frames, 0));
    cr_assert(eq(int, channel_intake_ack(in, m, &e), 0));
    cr_assert(eq(int, next_turn(in, 5000, true), 2), "and what is behind it comes, too");
    wait_acked(w, 2);
}

/* It would be dropped there as garbage, and resent. */
Test(channel_hostile, text_that_is_not_utf8_is_refused_by_the_worker)
{
    lh_auto(channel_worker) w = worker("rollout-0", "A1", 0);
    struct lh_error e = {0};
    Envelope bad = segment(1);

    bad.segment->snapshot = (char *)"\xff";
    cr_assert(eq(int, channel_worker_send(w, &bad, NULL, 0, true, 1000, &e), LH_INVALID_ARGUMENT));
    cr_assert(eq(sz, channel_worker_pending(w), 0));
}
