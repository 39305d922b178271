/* One end of a channel as a process of its own, to be killed at any moment.
 *
 *   channel-peer worker ENDPOINT INSTANCE LEDGER TOTAL
 *       sends the numbers behind the ledger's last one up to TOTAL, then ends when all are
 * acknowledged channel-peer intake ENDPOINT LEDGER TOTAL appends each number to the ledger, syncs
 * it, then acknowledges; ends behind TOTAL
 *
 * The ledger does what the real one does: what it holds already is acknowledged and not stored
 * again. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/channel.h"

enum { STEP_MS = 20000 };

static int complain(const char *what, const struct lh_error *e)
{
    fprintf(stderr, "channel-peer: %s: %s\n", what, e->message);
    return 1;
}

static long last_recorded(const char *ledger)
{
    lh_autofclose FILE *f = fopen(ledger, "r");
    long last = 0, n;

    while (f && fscanf(f, "%ld", &n) == 1)
        last = n;
    return last;
}

/* Of varying, mostly odd sizes; every byte tells the number. */
static size_t frame_size(long number, int i)
{
    return i == 2 ? (size_t)(number % 5) * 9001 : (size_t)(number * 7 + i * 13) % 200;
}

static int send_number(struct channel_worker *w, long number, struct lh_error *e)
{
    Longhaul__Experience__V1__Envelope envelope = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;
    Longhaul__Experience__V1__Segment segment = LONGHAUL__EXPERIENCE__V1__SEGMENT__INIT;
    struct channel_frame frames[3];
    static char bytes[64 << 10];

    memset(bytes, (int)(number & 0xff), sizeof bytes);
    for (int i = 0; i < 3; i++)
        frames[i] = (struct channel_frame){bytes, frame_size(number, i)};
    segment.turn = (uint32_t)number;
    envelope.body_case = LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_SEGMENT;
    envelope.segment = &segment;
    return channel_worker_send(w, &envelope, frames, 3, true, STEP_MS, e);
}

static int work(const char *endpoint, const char *instance, const char *ledger, long total)
{
    struct lh_error e = {0};
    struct channel_worker_options o = {endpoint, "worker-0", instance, 100 << 10, 100};
    lh_auto(channel_worker) w = channel_worker_create(&o, &e);

    if (!w)
        return complain("worker", &e);
    for (long n = last_recorded(ledger) + 1; n <= total; n++)
        if (send_number(w, n, &e))
            return complain("send", &e);
    for (int i = 0; i < STEP_MS && channel_worker_pending(w); i++)
        usleep(1000);
    return channel_worker_pending(w) ? 1 : 0;
}

static bool intact(const struct channel_message *m, long number)
{
    for (size_t i = 0; i < m->n_frames; i++) {
        const unsigned char *p = m->frames[i].data;
        if (m->frames[i].len != frame_size(number, (int)i) || (uintptr_t)p % 8)
            return false;
        for (size_t k = 0; k < m->frames[i].len; k++)
            if (p[k] != (number & 0xff))
                return false;
    }
    return m->n_frames == 3;
}

static int record(int fd, long number)
{
    char line[24];
    int len = snprintf(line, sizeof line, "%ld\n", number);

    return write(fd, line, (size_t)len) == len && fdatasync(fd) == 0 ? 0 : 1;
}

static int take(const char *endpoint, const char *ledger, long total)
{
    struct lh_error e = {0};
    lh_auto(channel_intake) in = channel_intake_create(endpoint, 0, &e);
    lh_autoclose int fd = open(ledger, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    long last = last_recorded(ledger), seen = 0;

    if (!in || fd < 0)
        return complain("intake", &e);
    while (last < total || seen < total) {
        lh_auto(channel_message) m = channel_intake_recv(in, STEP_MS, &e);
        if (!m)
            return complain("recv", &e);
        seen = m->envelope->segment->turn;
        if (!intact(m, seen) || seen > last + 1)
            return complain("damaged or out of order", &e);
        if (seen > last && record(fd, last = seen))
            return complain("ledger", &e);
        if (channel_intake_ack(in, m, &e))
            return complain("ack", &e);
    }
    usleep(300000); /* the last acknowledgement leaves, or is asked for again */
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 6 && !strcmp(argv[1], "worker"))
        return work(argv[2], argv[3], argv[4], atol(argv[5]));
    if (argc == 5 && !strcmp(argv[1], "intake"))
        return take(argv[2], argv[3], atol(argv[4]));
    return 2;
}
