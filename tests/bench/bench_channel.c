/* The experience channel beside a bare DEALER and ROUTER over ipc: the same messages, copied once
 * by the sender in both cases.  What the channel adds: numbers, a parsed header, acknowledgements,
 * a second thread on either side.  The best of three rounds, taken in turns. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

#include "bench.h"
#include "proto/channel.h"
#include "proto/clock.h"
#include "proto/file.h"

enum { ROUNDS = 3, WAIT_MS = 20000 };

struct load {
    size_t bytes;
    unsigned messages;
    char endpoint[64];
};

static int complain(const char *what, const struct lh_error *e)
{
    fprintf(stderr, "bench_channel: %s: %s\n", what, e->message);
    return 0;
}

/* ---- ours ---- */

static void *take_all(void *arg)
{
    const struct load *l = arg;
    struct lh_error e = {0};
    lh_auto(channel_intake) in = channel_intake_create(l->endpoint, 0, &e);

    if (!in)
        return complain("intake", &e), NULL;
    for (unsigned i = 0; i < l->messages; i++) {
        lh_auto(channel_message) m = channel_intake_recv(in, WAIT_MS, &e);
        if (!m || channel_intake_ack(in, m, &e))
            return complain("recv", &e), NULL;
    }
    usleep(100000); /* for the last acknowledgement */
    return NULL;
}

static int send_all(struct channel_worker *w, const struct load *l, const void *data)
{
    Longhaul__Experience__V1__Segment segment = LONGHAUL__EXPERIENCE__V1__SEGMENT__INIT;
    Longhaul__Experience__V1__Envelope envelope = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;
    struct channel_frame frame = {data, l->bytes};
    struct lh_error e = {0};

    segment.trajectory = (char *)"01ARZ3NDEKTSV4RRFFQ69G5FAV";
    envelope.body_case = LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_SEGMENT;
    envelope.segment = &segment;
    for (unsigned i = 0; i < l->messages; i++) {
        segment.turn = i;
        if (channel_worker_send(w, &envelope, &frame, 1, true, WAIT_MS, &e))
            return complain("send", &e);
    }
    for (int i = 0; i < WAIT_MS * 5 && channel_worker_pending(w); i++)
        usleep(200);
    return channel_worker_pending(w) == 0;
}

/* Messages a second, the last acknowledgement included; 0 = failed. */
static double run_ours(struct load *l, const void *data)
{
    struct channel_worker_options o = {l->endpoint, "bench-0", "A1", 0, 5000};
    struct lh_error e = {0};
    pthread_t t;

    if (pthread_create(&t, NULL, take_all, l))
        return 0;
    lh_auto(channel_worker) w = channel_worker_create(&o, &e);
    usleep(100000); /* connected by then */
    int64_t start = lh_now_us();
    int ok = w ? send_all(w, l, data) : complain("worker", &e);
    double seconds = (double)(lh_now_us() - start) * 1e-6;
    pthread_join(t, NULL);
    return ok ? l->messages / seconds : 0;
}

/* ---- theirs ---- */

/* As many bytes under way as the channel's window allows. */
static void limit_queue(void *socket, int option, const struct load *l)
{
    int messages = (int)((16 << 20) / l->bytes);

    zmq_setsockopt(socket, option, &messages, sizeof messages);
}

static void *send_bare(void *arg)
{
    const struct load *l = arg;
    void *context = zmq_ctx_new(), *s = zmq_socket(context, ZMQ_DEALER);
    lh_autofree void *data = calloc(1, l->bytes);

    limit_queue(s, ZMQ_SNDHWM, l);
    zmq_connect(s, l->endpoint);
    for (unsigned i = 0; data && i < l->messages; i++) {
        zmq_send(s, "header", 6, ZMQ_SNDMORE);
        zmq_send(s, data, l->bytes, 0);
    }
    zmq_close(s);
    zmq_ctx_term(context);
    return NULL;
}

static bool recv_part(void *socket)
{
    zmq_msg_t part;

    zmq_msg_init(&part);
    bool ok = zmq_msg_recv(&part, socket, 0) >= 0;
    zmq_msg_close(&part);
    return ok;
}

static double run_bare(struct load *l)
{
    int64_t start = 0;
    int wait = WAIT_MS;
    bool ok = true;
    void *context = zmq_ctx_new(), *s = zmq_socket(context, ZMQ_ROUTER);
    pthread_t t;

    zmq_setsockopt(s, ZMQ_RCVTIMEO, &wait, sizeof wait);
    limit_queue(s, ZMQ_RCVHWM, l);
    if (zmq_bind(s, l->endpoint) < 0 || pthread_create(&t, NULL, send_bare, l))
        return 0;
    for (unsigned i = 0; ok && i < l->messages; i++) {
        ok = recv_part(s) && recv_part(s) && recv_part(s);
        start = start ? start : lh_now_us();
    }
    double seconds = (double)(lh_now_us() - start) * 1e-6;
    pthread_join(t, NULL);
    zmq_close(s);
    zmq_ctx_term(context);
    return ok ? l->messages / seconds : 0;
}

static int bench(const char *name, const char *dir, size_t bytes, unsigned messages)
{
    struct load l = {bytes, messages, ""};
    lh_autofree void *data = calloc(1, bytes);
    double ours = 0, bare = 0;

    snprintf(l.endpoint, sizeof l.endpoint, "ipc://%s/s", dir);
    for (int i = 0; data && i < ROUNDS; i++) {
        double a = run_ours(&l, data), b = run_bare(&l);
        ours = a > ours ? a : ours;
        bare = b > bare ? b : bare;
    }
    double scale = (double)bytes / (1 << 20);
    bool big = bytes >= 1 << 20;
    bench_row(name, big ? ours * scale : ours, big ? bare * scale : bare, 0,
              big ? "MiB/s" : "messages/s");
    return ours > 0 && bare > 0 ? 0 : 1;
}

int main(void)
{
    char dir[] = "/tmp/lh-bench-XXXXXX";

    if (!mkdtemp(dir))
        return 1;
    int r = bench("channel, 1 MiB, beside bare ZeroMQ", dir, 1 << 20, 600) |
            bench("channel, 4 KiB, beside bare ZeroMQ", dir, 4 << 10, 30000);
    lh_remove_tree(dir, NULL);
    return r;
}
