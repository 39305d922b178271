/* Both ends in one process. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "channel_kit.h"
#include "proto/clock.h"

TestSuite(channel, .init = channel_enter, .fini = channel_leave, .timeout = 120);

Test(channel, both_directions_with_aligned_frames)
{
    lh_auto(channel_intake) in = intake();
    lh_auto(channel_worker) w = worker("rollout-0", "A1", 0);
    const char *text = "0123456789abcdef0123456789abcdef0123456789";
    struct channel_frame frames[] = {{text, 3}, {text, 0}, {text, 41}, {text, 8}};
    Envelope up = segment(7);
    struct lh_error e = {0};

    cr_assert(eq(int, channel_worker_send(w, &up, frames, 4, true, 1000, &e), 0), "%s", e.message);
    cr_assert(eq(u64, up.seq, 1));
    lh_auto(channel_message) m = channel_intake_recv(in, 5000, &e);
    cr_assert(m != NULL, "%s", e.message);
    cr_assert(eq(str, m->peer, (char *)"rollout-0"));
    cr_assert(eq(str, m->envelope->instance, (char *)"A1"));
    cr_assert(eq(u32, m->envelope->segment->turn, 7));
    cr_assert(eq(sz, m->n_frames, 4));
    for (size_t i = 0; i < 4; i++) {
        cr_assert(eq(sz, m->frames[i].len, frames[i].len));
        cr_assert(eq(sz, (uintptr_t)m->frames[i].data % 8, 0), "frame %zu", i);
        cr_assert(memcmp(m->frames[i].data, text, frames[i].len) == 0);
    }
    cr_assert(eq(u64, channel_worker_acked(w), 0));
    cr_assert(channel_worker_pending(w) > 52);
    cr_assert(eq(int, channel_intake_ack(in, m, &e), 0));
    wait_acked(w, 1);
    cr_assert(eq(sz, channel_worker_pending(w), 0));
    Envelope down = segment(8);
    cr_assert(eq(int, channel_intake_send(in, "rollout-0", &down, frames, 2, &e), 0), "%s",
              e.message);
    lh_auto(channel_message) back = channel_worker_recv(w, 5000, &e);
    cr_assert(back != NULL, "%s", e.message);
    cr_assert(eq(u32, back->envelope->segment->turn, 8));
    cr_assert(eq(sz, back->n_frames, 2));
    cr_assert(channel_worker_recv(w, 50, &e) == NULL, "acknowledgements are not for the owner");
    cr_assert(channel_intake_silence_ms(in, "rollout-0") < 5000);
    cr_assert(eq(i64, channel_intake_silence_ms(in, "rollout-1"), INT64_MAX));
}

Test(channel, window_holds_the_sender_back)
{
    lh_auto(channel_intake) in = intake();
    lh_auto(channel_worker) w = worker("rollout-0", "A1", 40000);
    struct lh_error e = {0};

    for (uint32_t i = 1; i <= 3; i++)
        cr_assert(eq(int, send_turn(w, i, 10000, true, 1000, &e), 0), "%s", e.message);
    int64_t start = lh_now_ms();
    cr_assert(eq(int, send_turn(w, 4, 10000, true, 200, &e), LH_RESOURCE_EXHAUSTED));
    cr_assert(ge(i64, lh_now_ms() - start, 200));
    cr_assert(eq(int, send_turn(w, 99, 10000, false, 0, &e), 0), "no window for what is sent once");
    for (int i = 1; i <= 3; i++)
        cr_assert(eq(int, next_turn(in, 5000, i == 3), i), "cumulative");
    cr_assert(eq(int, send_turn(w, 4, 90000, true, 5000, &e), 0), "alone it may exceed the window");
    wait_acked(w, 3);
    cr_assert(eq(int, next_turn(in, 5000, false), 99));
    cr_assert(eq(int, next_turn(in, 5000, true), 4));
    wait_acked(w, 4);
}

Test(channel, unacknowledged_messages_are_handed_on_once)
{
    lh_auto(channel_intake) in = intake();
    lh_auto(channel_worker) w = worker("rollout-0", "A1", 0);
    struct lh_error e = {0};

    for (uint32_t i = 1; i <= 5; i++)
        send_turn(w, i, 100, true, 1000, &e);
    for (int i = 1; i <= 5; i++)
        cr_assert(eq(int, next_turn(in, 5000, false), i));
    cr_assert(eq(int, next_turn(in, 400, false), -1), "resent several times meanwhile");
    cr_assert(gt(sz, channel_worker_pending(w), 0));
}

Test(channel, worker_waits_for_an_intake_that_comes_later_and_again)
{
    lh_auto(channel_worker) w = worker("rollout-0", "A1", 0);
    struct lh_error e = {0};

    cr_assert(eq(int, send_turn(w, 50, 10, false, 0, &e), 0));
    for (uint32_t i = 1; i <= 3; i++)
        cr_assert(eq(int, send_turn(w, i, 100, true, 1000, &e), 0));
    struct channel_intake *in = intake();
    cr_assert(eq(int, next_turn(in, 5000, false), 50), "in the order of sending");
    cr_assert(eq(int, next_turn(in, 5000, true), 1));
    cr_assert(eq(int, next_turn(in, 5000, false), 2), "handed on, but not acknowledged");
    wait_acked(w, 1);
    channel_intake_destroy(in);
    cr_assert(access(channel_path, F_OK) < 0);
    in = intake();
    cr_assert(eq(int, next_turn(in, 5000, true), 2), "so it comes again to the next one");
    cr_assert(eq(int, next_turn(in, 5000, true), 3));
    wait_acked(w, 3);
    channel_intake_destroy(in);
    for (uint32_t i = 0; i < 256; i++)
        cr_assert(eq(int, send_turn(w, i, 1, false, 0, &e), 0), "%u", i);
    cr_assert(eq(int, send_turn(w, 1, 1, false, 0, &e), LH_UNAVAILABLE), "bounded");
}

Test(channel, two_instances_of_one_worker)
{
    lh_auto(channel_intake) in = intake();
    lh_auto(channel_worker) old = worker("rollout-0", "A1", 0);
    struct lh_error e = {0};

    send_turn(old, 1, 10, true, 1000, &e);
    cr_assert(eq(int, next_turn(in, 5000, true), 1));
    wait_acked(old, 1);
    lh_auto(channel_worker) new = worker("rollout-0", "B2", 0);
    for (uint32_t i = 11; i <= 12; i++)
        send_turn(new, i, 10, true, 1000, &e);
    cr_assert(eq(int, next_turn(in, 5000, true), 11));
    send_turn(old, 2, 10, true, 1000, &e);
    int a = next_turn(in, 5000, true), b = next_turn(in, 5000, true);
    cr_assert(a + b == 14 && (a == 2 || a == 12), "%d, %d", a, b);
    wait_acked(new, 2);
    wait_acked(old, 2);
    Envelope down = segment(9);
    cr_assert(eq(int, channel_intake_send(in, "rollout-0", &down, NULL, 0, &e), 0));
    lh_auto(channel_message) m = channel_worker_recv(new, 5000, &e);
    cr_assert(m != NULL, "the newest instance is the worker");
    cr_assert(channel_worker_recv(old, 100, &e) == NULL);
}

Test(channel, sending_to_nobody)
{
    lh_auto(channel_intake) in = intake();
    Envelope down = segment(1);
    struct lh_error e = {0};
    int r = 0;

    cr_assert(eq(int, channel_intake_send(in, "rollout-0", &down, NULL, 0, &e), LH_UNAVAILABLE));
    struct channel_worker *w = worker("rollout-0", "A1", 0);
    send_turn(w, 1, 1, true, 1000, &e);
    cr_assert(eq(int, next_turn(in, 5000, true), 1));
    channel_worker_destroy(w);
    for (int i = 0; i < 500 && !r; i++) {
        r = channel_intake_send(in, "rollout-0", &down, NULL, 0, &e);
        usleep(10000);
    }
    cr_assert(eq(int, r, LH_UNAVAILABLE), "it has gone: %s", e.message);
}

Test(channel, endpoints_and_names)
{
    static const char *const bad[] = {"tcp://0.0.0.0:5555", "tcp://*:1",  "ipc://relative",
                                      "ipc://@abstract",    "inproc://x", "",
                                      "udp://127.0.0.1:1"};
    struct channel_worker_options o = {channel_endpoint, "Rollout/0", "A1", 0, 0, 0};
    struct lh_error e = {0};
    struct stat st;

    for (size_t i = 0; i < LH_ARRAY_SIZE(bad); i++) {
        cr_assert(channel_intake_create(bad[i], 0, &e) == NULL, "%s", bad[i]);
        cr_assert(eq(int, e.code, LH_INVALID_ARGUMENT), "%s: %s", bad[i], e.message);
    }
    cr_assert(channel_worker_create(&o, &e) == NULL);
    cr_assert(eq(int, e.code, LH_INVALID_ARGUMENT), "%s", e.message);
    lh_auto(channel_intake) in = intake();
    cr_assert(stat(channel_path, &st) == 0 && (st.st_mode & 07777) == 0600);
    cr_assert(channel_intake_create(channel_endpoint, 0, &e) == NULL);
    cr_assert(eq(int, e.code, LH_ALREADY_EXISTS), "%s", e.message);
}

static void *send_many(void *arg)
{
    for (uint32_t i = 1; i <= 500; i++)
        send_turn(arg, i, i, true, 20000, NULL);
    return NULL;
}

Test(channel, many_threads_send_on_one_worker)
{
    lh_auto(channel_intake) in = intake();
    lh_auto(channel_worker) w = worker("rollout-0", "A1", 64 << 10);
    pthread_t t[4];
    int sum = 0;

    for (size_t i = 0; i < LH_ARRAY_SIZE(t); i++)
        cr_assert(eq(int, pthread_create(&t[i], NULL, send_many, w), 0));
    for (int i = 0; i < 4 * 500; i++)
        sum += next_turn(in, 10000, true);
    cr_assert(eq(int, sum, 4 * 500 * 501 / 2));
    for (size_t i = 0; i < LH_ARRAY_SIZE(t); i++)
        pthread_join(t[i], NULL);
    wait_acked(w, 2000);
}
