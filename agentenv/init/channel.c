/* The channel of one exec: events to the daemon, input and acknowledgement from it.
 *
 * Nothing here waits.  A full channel is tried again when poll says so; a closed one leaves the
 * exec to itself, and another may be attached. */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "agentenv/init/exec.h"

static char nothing[WIRE_INPUT_MAX]; /* input for a command that takes none */

static ssize_t send_pair(int channel, struct wire_event *ev, const char *data, size_t len)
{
    struct iovec v[2] = {{ev, sizeof *ev}, {(void *)data, len}};
    struct msghdr m = {.msg_iov = v, .msg_iovlen = 2};

    return sendmsg(channel, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void channel_refuse(int channel, int errnum, const char *why)
{
    struct wire_event ev = {.kind = WIRE_NO_START, .value = errnum};

    send_pair(channel, &ev, why, strlen(why));
    close(channel);
}

static bool send_event(struct exec *e, struct wire_event *ev, const char *data, size_t len)
{
    if (send_pair(e->channel, ev, data, len) >= 0)
        return true;
    if (errno == EAGAIN || errno == ENOBUFS)
        e->blocked = true;
    else
        close_fd(&e->channel);
    return false;
}

void channel_attach(struct exec *e, int channel, uint64_t offset)
{
    struct wire_event moved = {.kind = WIRE_MOVED};
    struct wire_event hello = {.kind = WIRE_ATTACHED, .stdin_bytes = e->input.taken};

    if (e->channel >= 0)
        send_event(e, &moved, NULL, 0);
    close_fd(&e->channel);
    e->channel = channel;
    e->sent = journal_seek(&e->journal, offset);
    e->gap = e->sent.offset > offset;
    e->told = e->blocked = false;
    send_event(e, &hello, NULL, 0); /* the first message of a new pair finds room */
}

/* Output stays within cap of what was said before. */
static bool cut(const struct exec *e)
{
    return e->gap || (!e->journal.tail && e->journal.produced > e->journal.kept);
}

static void send_last(struct exec *e)
{
    struct wire_event ev = {.kind = WIRE_EXIT,
                            .value = e->status,
                            .wall_ms = e->wall_ms,
                            .timed_out = e->timed_out,
                            .truncated = cut(e),
                            .output_bytes = e->journal.produced};
    const char *step = "";

    if (e->failure.kind) {
        ev.kind = WIRE_NO_START;
        ev.value = e->failure.value;
        step = e->failure.step;
    }
    e->told = send_event(e, &ev, step, strlen(step));
}

static void send_output(struct exec *e)
{
    struct journal_cursor next = e->sent;
    struct journal_piece p;

    while (e->channel >= 0 && !e->blocked && journal_next(&e->journal, &next, &p)) {
        struct wire_event ev = {
            .kind = p.stream, .offset = p.offset, .output_bytes = e->journal.produced};
        if (!send_event(e, &ev, p.data, p.len))
            return;
        e->sent = next;
    }
    if (e->ended && !e->told && e->channel >= 0 && !e->blocked)
        send_last(e);
}

/* The size of what follows the header; negative: nothing, or the end (*closed). */
static ssize_t receive(struct exec *e, struct wire_input *m, bool *closed)
{
    char *data = e->input.data ? e->input.data : nothing;
    struct iovec v[2] = {{m, sizeof *m}, {data, WIRE_INPUT_MAX}};
    struct msghdr h = {.msg_iov = v, .msg_iovlen = 2};
    ssize_t n = recvmsg(e->channel, &h, MSG_DONTWAIT);

    *closed = n == 0 || (n < 0 && errno != EAGAIN);
    return n - (ssize_t)sizeof *m;
}

void channel_hear(struct exec *e)
{
    struct wire_input m;
    bool closed;

    while (e->channel >= 0 && !input_pending(&e->input)) {
        ssize_t len = receive(e, &m, &closed);
        if (closed)
            close_fd(&e->channel);
        if (len < 0)
            return;
        if (m.kind == WIRE_INPUT)
            input_accept(&e->input, m.offset, (size_t)len);
        else if (m.kind == WIRE_INPUT_END)
            input_end(&e->input);
        else if (e->told && !(e->flags & WIRE_KEPT))
            exec_forget(e);
        input_flush(&e->input);
    }
}

void channel_step(struct exec *e)
{
    input_flush(&e->input);
    e->blocked = false;
    channel_hear(e);
    if (!e->used)
        return;
    send_output(e);
    journal_trim(&e->journal, e->channel >= 0 ? &e->sent : NULL);
}
