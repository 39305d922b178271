/* Both ends in one process, raw ZeroMQ sockets as hostile or broken peers, and processes killed. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zmq.h>

#include "proto/channel.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/id.h"
#include "proto/parse.h"

typedef Longhaul__Experience__V1__Envelope Envelope;

static char dir[] = "/tmp/lh-channel-XXXXXX", *path, *endpoint;

static void enter(void)
{
    cr_assert(mkdtemp(dir) != NULL);
    path = lh_format("%s/s", dir);
    endpoint = lh_format("ipc://%s", path);
}

static void leave(void)
{
    lh_remove_tree(dir, NULL);
    free(endpoint);
    free(path);
}

TestSuite(channel, .init = enter, .fini = leave, .timeout = 120);

static struct channel_intake *intake(void)
{
    struct lh_error e = {0};
    struct channel_intake *in = channel_intake_create(endpoint, 0, &e);

    cr_assert(in != NULL, "%s", e.message);
    return in;
}

static struct channel_worker *worker(const char *name, const char *instance, size_t window)
{
    struct lh_error e = {0};
    struct channel_worker_options o = {endpoint, name, instance, window, 50};
    struct channel_worker *w = channel_worker_create(&o, &e);

    cr_assert(w != NULL, "%s", e.message);
    return w;
}

static Envelope segment(uint32_t turn)
{
    static _Thread_local Longhaul__Experience__V1__Segment s;
    Envelope e = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;

    longhaul__experience__v1__segment__init(&s);
    s.turn = turn;
    e.body_case = LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_SEGMENT;
    e.segment = &s;
    return e;
}

static int send_turn(struct channel_worker *w, uint32_t turn, size_t bytes, bool reliable,
                     int timeout_ms, struct lh_error *err)
{
    lh_autofree char *data = calloc(1, bytes + 1);
    struct channel_frame f = {data, bytes};
    Envelope e = segment(turn);

    return channel_worker_send(w, &e, &f, 1, reliable, timeout_ms, err);
}

/* Turn of the next message, acknowledged when `ack`; -1 when none comes. */
static int next_turn(struct channel_intake *in, int timeout_ms, bool ack)
{
    struct lh_error e = {0};
    lh_auto(channel_message) m = channel_intake_recv(in, timeout_ms, &e);

    if (!m)
        return -1;
    if (ack)
        cr_assert(eq(int, channel_intake_ack(in, m, &e), 0), "%s", e.message);
    return (int)m->envelope->segment->turn;
}

static void wait_acked(struct channel_worker *w, uint64_t seq)
{
    for (int i = 0; i < 500 && channel_worker_acked(w) < seq; i++)
        usleep(10000);
    cr_assert(eq(u64, channel_worker_acked(w), seq));
}

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
    cr_assert(access(path, F_OK) < 0);
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

/* ---- peers that are not ours ---- */

static void *raw_peer(void *context, const char *id)
{
    void *s = zmq_socket(context, ZMQ_DEALER);
    int linger = 1000;

    zmq_setsockopt(s, ZMQ_LINGER, &linger, sizeof linger);
    if (id)
        zmq_setsockopt(s, ZMQ_ROUTING_ID, id, strlen(id));
    cr_assert(eq(int, zmq_connect(s, endpoint), 0));
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

Test(channel, reordered_and_repeated_messages)
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

Test(channel, garbage_is_dropped_and_counted)
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

Test(channel, endpoints_and_names)
{
    static const char *const bad[] = {"tcp://0.0.0.0:5555", "tcp://*:1",  "ipc://relative",
                                      "ipc://@abstract",    "inproc://x", "",
                                      "udp://127.0.0.1:1"};
    struct channel_worker_options o = {endpoint, "Rollout/0", "A1", 0, 0};
    struct lh_error e = {0};
    struct stat st;

    for (size_t i = 0; i < LH_ARRAY_SIZE(bad); i++) {
        cr_assert(channel_intake_create(bad[i], 0, &e) == NULL, "%s", bad[i]);
        cr_assert(eq(int, e.code, LH_INVALID_ARGUMENT), "%s: %s", bad[i], e.message);
    }
    cr_assert(channel_worker_create(&o, &e) == NULL);
    cr_assert(eq(int, e.code, LH_INVALID_ARGUMENT), "%s", e.message);
    lh_auto(channel_intake) in = intake();
    cr_assert(stat(path, &st) == 0 && (st.st_mode & 07777) == 0600);
    cr_assert(channel_intake_create(endpoint, 0, &e) == NULL);
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

/* ---- processes ---- */

enum { TOTAL = 4000 };

static char *ledger;

static pid_t start(bool as_worker)
{
    const char *program = getenv("CHANNEL_PEER");
    char instance[LH_ID_SIZE];
    char total[16];
    pid_t pid = 0;

    cr_assert(program != NULL, "CHANNEL_PEER is not set: run me through meson");
    lh_id_new_text(instance);
    snprintf(total, sizeof total, "%d", TOTAL);
    char *worker_argv[] = {
        (char *)program, (char *)"worker", endpoint, instance, ledger, total, NULL};
    char *intake_argv[] = {(char *)program, (char *)"intake", endpoint, ledger, total, NULL};
    cr_assert(eq(
        int, posix_spawn(&pid, program, NULL, NULL, as_worker ? worker_argv : intake_argv, environ),
        0));
    return pid;
}

static int recorded(void)
{
    lh_autofclose FILE *f = fopen(ledger, "r");
    int n = 0, line = 0;

    while (f && fscanf(f, "%d", &line) == 1)
        cr_assert(eq(int, line, ++n), "neither lost nor twice");
    return n;
}

/* Kills one side at random moments of its progress, the other one never notices. */
static void kill_and_restart(bool kill_worker)
{
    ledger = lh_format("%s/ledger", dir);
    pid_t in = start(false), w = start(true);
    pid_t *victim = kill_worker ? &w : &in;
    int status;

    for (int round = 0; round < 8; round++) {
        int until = recorded() + 50 + (int)(lh_now_us() % 300);
        for (int i = 0; i < 3000 && recorded() < until; i++)
            usleep(2000);
        cr_assert(ge(int, recorded(), until), "no progress in round %d", round);
        kill(*victim, SIGKILL);
        waitpid(*victim, NULL, 0);
        *victim = start(kill_worker);
    }
    waitpid(w, &status, 0);
    cr_assert(eq(int, status, 0));
    waitpid(in, &status, 0);
    cr_assert(eq(int, status, 0));
    cr_assert(eq(int, recorded(), TOTAL));
    free(ledger);
}

/* I1 and I2 up to the ledger. */
Test(channel, nothing_lost_or_twice_when_the_intake_is_killed)
{
    kill_and_restart(false);
}

Test(channel, nothing_lost_or_twice_when_the_worker_is_killed)
{
    kill_and_restart(true);
}
