/* What a running exec can be told.  Input goes by the channel of whoever follows the exec, so that
 * one that does not read holds up nobody else; size and signal go by the control socket, past input
 * that waits. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "agentenv/sandbox/box_private.h"
#include "proto/clock.h"

/* A descriptor of our own: the follower may close its one at any time. */
static int channel_of(struct box *b, const char *exec_id, struct lh_error *err)
{
    int fd = -1;

    LH_LOCKED(&b->execs_lock);
    for (const struct attached *a = b->attached; a && fd < 0; a = a->next)
        if (!strcmp(a->exec_id, exec_id))
            fd = fcntl(a->channel, F_DUPFD_CLOEXEC, 0);
    return fd >= 0 ? fd
                   : lh_fail(err, LH_FAILED_PRECONDITION,
                             "nobody is attached to exec %s of sandbox %s: attach, then send input",
                             exec_id, b->id);
}

static int send_message(int channel, struct wire_input *m, const char *data, size_t len,
                        int64_t deadline_ms, struct lh_error *err)
{
    struct iovec v[2] = {{m, sizeof *m}, {(void *)data, len}};
    struct msghdr h = {.msg_iov = v, .msg_iovlen = len ? 2 : 1};
    struct pollfd p = {channel, POLLOUT, 0};

    while (sendmsg(channel, &h, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
        if (errno != EAGAIN)
            return lh_fail(err, LH_FAILED_PRECONDITION, "the exec has ended or was left");
        if (poll(&p, 1, lh_ms_left(deadline_ms)) <= 0)
            return lh_fail(err, LH_DEADLINE_EXCEEDED, "the command does not read its input");
    }
    return 0;
}

static int send_input(struct box *b, const char *exec_id, const struct box_exec_input *in,
                      int64_t deadline_ms, struct lh_error *err)
{
    lh_autoclose int channel = channel_of(b, exec_id, err);
    struct wire_input end = {.kind = WIRE_INPUT_END};
    int r = channel < 0 ? channel : 0;

    for (size_t at = 0; r == 0 && at < in->len; at += WIRE_INPUT_MAX) {
        struct wire_input m = {.kind = WIRE_INPUT, .offset = in->offset + at};
        size_t left = in->len - at, len = left < WIRE_INPUT_MAX ? left : WIRE_INPUT_MAX;
        r = send_message(channel, &m, (const char *)in->data + at, len, deadline_ms, err);
    }
    if (r == 0 && in->end)
        r = send_message(channel, &end, NULL, 0, deadline_ms, err);
    return r;
}

static int tell(struct box *b, const char *exec_id, struct wire_request req, struct lh_error *err)
{
    memcpy(req.exec_id, exec_id, strlen(exec_id));
    return box_send_request(b, &req, NULL, 0, err);
}

int box_exec_input(struct box *b, const char *exec_id, const struct box_exec_input *in,
                   int64_t deadline_ms, struct lh_error *err)
{
    struct lh_error local = {0};
    int r = 0;

    err = err ? err : &local;
    if (!box_name_valid(exec_id))
        return lh_fail(err, LH_INVALID_ARGUMENT, "exec id \"%s\"", exec_id);
    if (in->rows && in->cols)
        r = tell(b, exec_id,
                 (struct wire_request){.op = WIRE_RESIZE, .rows = in->rows, .cols = in->cols}, err);
    if (r == 0 && in->signal)
        r = tell(b, exec_id, (struct wire_request){.op = WIRE_SIGNAL, .signal = in->signal}, err);
    if (r == 0 && (in->len || in->end))
        r = send_input(b, exec_id, in, deadline_ms, err);
    return r < 0 ? lh_wrap(err, "input of exec %s", exec_id) : 0;
}
