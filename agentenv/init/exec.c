/* The table of execs.  Each is a command with its pipes, its journal and, while a daemon listens,
 * its channel.  Whatever happens to the daemon, the pipes are emptied, deadlines are kept and the
 * journal stays until the result was taken. */
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "agentenv/init/init.h"

enum { OUT, ERR, REPORT, PIPES };

struct exec {
    bool used, ended, told; /* told: the last event was sent */
    char id[WIRE_ID_SIZE];
    pid_t pid;
    int status, pipe[PIPES], kill_fd, channel;
    bool blocked; /* the channel is full */
    int64_t started_ms, deadline_ms;
    uint32_t wall_ms;
    bool timed_out;
    struct wire_report failure; /* kind 0 = it was started */
    struct journal journal;
    size_t sent; /* cursor in the journal */
};

static struct exec table[WIRE_MAX_EXECS];
static char buffer[WIRE_CHUNK];

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void forget(struct exec *e)
{
    for (int i = 0; i < PIPES; i++)
        close_fd(&e->pipe[i]);
    close_fd(&e->kill_fd);
    close_fd(&e->channel);
    journal_finish(&e->journal);
    e->used = false;
}

static struct exec *find(const char *id)
{
    for (size_t i = 0; i < WIRE_MAX_EXECS; i++)
        if (table[i].used && strcmp(table[i].id, id) == 0)
            return &table[i];
    return NULL;
}

/* A free place, or that of the oldest result which nobody came for. */
static struct exec *place(void)
{
    struct exec *oldest = NULL;

    for (size_t i = 0; i < WIRE_MAX_EXECS; i++) {
        struct exec *e = &table[i];
        if (!e->used)
            return e;
        if (e->ended && e->channel < 0 && (!oldest || e->started_ms < oldest->started_ms))
            oldest = e;
    }
    if (oldest)
        forget(oldest);
    return oldest;
}

/* The daemon says one thing on a channel: that it has the result. */
static void hear(struct exec *e)
{
    char c;
    ssize_t n = recv(e->channel, &c, 1, MSG_DONTWAIT);

    if (n > 0 && e->told)
        forget(e);
    else if (n == 0 || (n < 0 && errno != EAGAIN))
        close_fd(&e->channel);
}

/* A daemon may use an id again, or ask for an exec, right after it took the result. */
static void hear_all(void)
{
    for (size_t i = 0; i < WIRE_MAX_EXECS; i++)
        if (table[i].used && table[i].told && table[i].channel >= 0)
            hear(&table[i]);
}

static void refuse(int channel, int errnum, const char *why)
{
    struct wire_event ev = {.kind = WIRE_NO_START, .value = errnum};
    struct iovec v[2] = {{&ev, sizeof ev}, {(void *)why, strlen(why)}};
    struct msghdr m = {.msg_iov = v, .msg_iovlen = 2};

    sendmsg(channel, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
    close(channel);
}

static pid_t fork_into(int cgroup)
{
    struct clone_args a = {
        .flags = CLONE_INTO_CGROUP, .exit_signal = SIGCHLD, .cgroup = (unsigned)cgroup};

    return (pid_t)syscall(SYS_clone3, &a, sizeof a);
}

/* Ends of the pipes: read ones stay, write ones go to the command. */
static int start_command(struct exec *e, const int fds[WIRE_EXEC_FDS], uint32_t open_files)
{
    int w[PIPES];

    for (int i = 0; i < PIPES; i++) {
        int p[2];
        if (pipe2(p, O_CLOEXEC) < 0) {
            while (i-- > 0)
                close(w[i]);
            return -errno;
        }
        fcntl(p[0], F_SETFL, O_NONBLOCK);
        e->pipe[i] = p[0];
        w[i] = p[1];
    }
    struct launch_fds l = {fds[WIRE_FD_STRINGS], fds[WIRE_FD_STDIN], w[OUT], w[ERR], w[REPORT]};
    e->pid = fork_into(fds[WIRE_FD_CGROUP]);
    int saved = errno;
    if (e->pid == 0)
        launch_command(&l, open_files);
    for (int i = 0; i < PIPES; i++)
        close(w[i]);
    return e->pid < 0 ? -saved : 0;
}

void exec_start(const struct wire_request *req, const int fds[WIRE_EXEC_FDS])
{
    int channel = fds[WIRE_FD_CHANNEL], r;

    hear_all();
    struct exec *e = find(req->exec_id) ? NULL : place();
    if (!e) {
        refuse(channel, find(req->exec_id) ? EEXIST : EAGAIN, "the table of execs");
        close(fds[WIRE_FD_KILL]);
    } else {
        int64_t now = init_now_ms();
        *e = (struct exec){.used = true,
                           .channel = channel,
                           .kill_fd = fds[WIRE_FD_KILL],
                           .pipe = {-1, -1, -1},
                           .started_ms = now,
                           .deadline_ms = now + req->timeout_ms};
        memcpy(e->id, req->exec_id, sizeof e->id);
        journal_init(&e->journal, req->output_bytes);
        r = start_command(e, fds, req->open_files);
        if (r < 0) {
            e->channel = -1;
            refuse(channel, -r, "fork");
            forget(e);
        }
    }
    close(fds[WIRE_FD_STRINGS]);
    close(fds[WIRE_FD_STDIN]);
    close(fds[WIRE_FD_CGROUP]);
}

void exec_attach(const char *exec_id, int channel)
{
    hear_all();
    struct exec *e = find(exec_id);
    if (!e) {
        refuse(channel, ENOENT, "no such exec");
        return;
    }
    close_fd(&e->channel);
    e->channel = channel;
    e->sent = 0;
    e->told = e->blocked = false;
}

/* Reads one piece; closes the pipe at its end. False when there is nothing more now. */
static bool read_output(struct exec *e, int which)
{
    ssize_t n = e->pipe[which] < 0 ? 0 : read(e->pipe[which], buffer, sizeof buffer);

    if (n > 0) {
        journal_append(&e->journal, which == OUT ? WIRE_OUT : WIRE_ERR, buffer, (size_t)n);
        return true;
    }
    if (n == 0 || (errno != EAGAIN && errno != EINTR))
        close_fd(&e->pipe[which]);
    return false;
}

static void read_failure(struct exec *e)
{
    struct wire_report r;
    ssize_t n = e->pipe[REPORT] < 0 ? -1 : read(e->pipe[REPORT], &r, sizeof r);

    if (n == sizeof r)
        e->failure = r;
    if (n == 0 || n == sizeof r)
        close_fd(&e->pipe[REPORT]);
}

/* What was in the pipes when the command ended belongs to it: at most a pipe's capacity, so that a
 * chatty process in the background cannot hold up the result. */
static void end(struct exec *e, int status)
{
    enum { PIECES = 2 };

    e->ended = true;
    e->status = status;
    e->wall_ms = (uint32_t)(init_now_ms() - e->started_ms);
    read_failure(e);
    for (int which = OUT; which <= ERR; which++) {
        for (int i = 0; i < PIECES && read_output(e, which); i++)
            ;
        if (e->pipe[which] >= 0)
            drain_add(e->pipe[which]);
        e->pipe[which] = -1;
    }
    close_fd(&e->kill_fd);
}

void exec_reaped(pid_t pid, int status)
{
    for (size_t i = 0; i < WIRE_MAX_EXECS; i++)
        if (table[i].used && !table[i].ended && table[i].pid == pid)
            end(&table[i], status);
}

static bool send_event(struct exec *e, struct wire_event *ev, const char *data, size_t len)
{
    struct iovec v[2] = {{ev, sizeof *ev}, {(void *)data, len}};
    struct msghdr m = {.msg_iov = v, .msg_iovlen = 2};

    if (sendmsg(e->channel, &m, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0)
        return true;
    if (errno == EAGAIN || errno == ENOBUFS)
        e->blocked = true;
    else
        close_fd(&e->channel);
    return false;
}

static void send_last(struct exec *e)
{
    struct wire_event ev = {.kind = WIRE_EXIT,
                            .value = e->status,
                            .wall_ms = e->wall_ms,
                            .timed_out = e->timed_out,
                            .truncated = e->journal.produced > e->journal.kept,
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
    enum wire_event_kind stream;
    const char *data;
    size_t len, cursor = e->sent;

    while (e->channel >= 0 && !e->blocked &&
           journal_next(&e->journal, &cursor, &stream, &data, &len)) {
        struct wire_event ev = {.kind = stream, .output_bytes = e->journal.produced};
        if (!send_event(e, &ev, data, len))
            return;
        e->sent = cursor;
    }
    if (e->ended && !e->told && e->channel >= 0 && !e->blocked)
        send_last(e);
}

static void expire(struct exec *e)
{
    e->timed_out = true;
    if (write(e->kill_fd, "1", 1) != 1)
        kill(-e->pid, SIGKILL);
}

size_t exec_poll(struct pollfd *p, size_t max, int *timeout_ms)
{
    size_t n = 0;

    for (size_t i = 0; i < WIRE_MAX_EXECS && n + PIPES + 1 <= max; i++) {
        struct exec *e = &table[i];
        if (!e->used)
            continue;
        for (int k = 0; k < PIPES; k++)
            if (e->pipe[k] >= 0)
                p[n++] = (struct pollfd){e->pipe[k], POLLIN, 0};
        if (e->channel >= 0)
            p[n++] = (struct pollfd){e->channel, e->blocked ? POLLIN | POLLOUT : POLLIN, 0};
        int64_t left = e->deadline_ms - init_now_ms();
        if (!e->ended && !e->timed_out && (*timeout_ms < 0 || left < *timeout_ms))
            *timeout_ms = left < 0 ? 0 : (int)left;
    }
    return n;
}

static void step(struct exec *e)
{
    read_failure(e);
    read_output(e, OUT);
    read_output(e, ERR);
    e->blocked = false;
    if (e->channel >= 0)
        hear(e);
    if (e->used && !e->ended && !e->timed_out && init_now_ms() >= e->deadline_ms)
        expire(e);
    if (e->used)
        send_output(e);
}

void exec_step(void)
{
    for (size_t i = 0; i < WIRE_MAX_EXECS; i++)
        if (table[i].used)
            step(&table[i]);
}
