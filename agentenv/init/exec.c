/* The table of execs.  Each is a command with its pipes or terminal, its journal and, while a
 * daemon listens, its channel.  Whatever happens to the daemon, the pipes are emptied, deadlines
 * are kept and the journal stays until the result was taken. */
#include <errno.h>
#include <limits.h>
#include <linux/sched.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "agentenv/init/exec.h"

enum { KEPT_RESULTS = 8, KILL_AGAIN_MS = 50 };

static struct exec table[WIRE_MAX_EXECS];
static char buffer[WIRE_CHUNK];

void exec_forget(struct exec *e)
{
    for (int i = 0; i < EXEC_OUTPUTS; i++)
        close_fd(&e->pipe[i]);
    close_fd(&e->kill_fd);
    close_fd(&e->words);
    close_fd(&e->channel);
    input_finish(&e->input);
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

static bool abandoned(const struct exec *e)
{
    return e->used && e->ended && e->channel < 0;
}

/* The oldest result that nobody is attached to, and how many there are. */
static struct exec *oldest_result(size_t *n)
{
    struct exec *oldest = NULL;

    *n = 0;
    for (size_t i = 0; i < WIRE_MAX_EXECS; i++) {
        struct exec *e = &table[i];
        if (!abandoned(e))
            continue;
        ++*n;
        if (!oldest || e->started_ms < oldest->started_ms)
            oldest = e;
    }
    return oldest;
}

/* A free place; results take at most KEPT_RESULTS, since their output is memory of the sandbox. */
static struct exec *place(void)
{
    size_t n;
    struct exec *oldest = oldest_result(&n);

    if (n >= KEPT_RESULTS)
        exec_forget(oldest);
    for (size_t i = 0; i < WIRE_MAX_EXECS; i++)
        if (!table[i].used)
            return &table[i];
    oldest = oldest_result(&n);
    if (oldest)
        exec_forget(oldest);
    return oldest;
}

/* A daemon may use an id again, or ask for an exec, right after it took the result. */
static void hear_all(void)
{
    for (size_t i = 0; i < WIRE_MAX_EXECS; i++)
        if (table[i].used && table[i].told && table[i].channel >= 0)
            channel_hear(&table[i]);
}

static pid_t fork_into(int cgroup)
{
    struct clone_args a = {
        .flags = CLONE_INTO_CGROUP, .exit_signal = SIGCHLD, .cgroup = (unsigned)cgroup};

    return (pid_t)syscall(SYS_clone3, &a, sizeof a);
}

static int start_in_cgroup(struct exec *e, int cgroup, const struct launch *l)
{
    e->pid = fork_into(cgroup);
    if (e->pid == 0)
        launch_command(l);
    return e->pid < 0 ? -errno : 0;
}

/* Without input the daemon passes the host's /dev/null, a file from outside, with which the command
 * could not be checkpointed; init has opened the sandbox's. */
static int data_or_null(int fd)
{
    struct stat st;

    return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? fd : STDIN_FILENO;
}

static int start_command(struct exec *e, const struct wire_request *req,
                         const int fds[WIRE_EXEC_FDS])
{
    struct streams s;
    int r = streams_open(req, &s);

    if (r < 0)
        return r;
    memcpy(e->pipe, s.ours, sizeof e->pipe);
    if (s.ours[STREAM_IN] >= 0)
        r = input_open(&e->input, s.ours[STREAM_IN], req->flags & WIRE_PTY);
    struct launch l = {.strings = fds[WIRE_FD_STRINGS],
                       .in = s.theirs[STREAM_IN] < 0 ? data_or_null(fds[WIRE_FD_STDIN])
                                                     : s.theirs[STREAM_IN],
                       .out = s.theirs[STREAM_OUT],
                       .err = s.theirs[STREAM_ERR],
                       .report = s.theirs[STREAM_REPORT],
                       .terminal = req->flags & WIRE_PTY,
                       .limits = req->limits};
    if (r == 0 && (req->flags & WIRE_LED))
        r = leader_start(e, &l);
    else if (r == 0)
        r = start_in_cgroup(e, fds[WIRE_FD_CGROUP], &l);
    streams_close_theirs(&s);
    return r;
}

static void start_at(struct exec *e, const struct wire_request *req, const int fds[WIRE_EXEC_FDS])
{
    int64_t now = init_now_ms();

    *e = (struct exec){.used = true,
                       .flags = req->flags,
                       .channel = -1,
                       .kill_fd = fds[WIRE_FD_KILL],
                       .words = -1,
                       .pipe = {-1, -1, -1},
                       .input = {.fd = -1},
                       .started_ms = now,
                       .deadline_ms = now + req->timeout_ms};
    memcpy(e->id, req->exec_id, sizeof e->id);
    journal_init(&e->journal, req->output_bytes, req->flags & WIRE_TAIL);
    int r = start_command(e, req, fds);
    if (r < 0) {
        channel_refuse(fds[WIRE_FD_CHANNEL], -r, "fork");
        exec_forget(e);
    } else if (req->flags & (WIRE_STDIN | WIRE_PTY | WIRE_KEPT)) {
        channel_attach(e, fds[WIRE_FD_CHANNEL], 0);
    } else {
        e->channel = fds[WIRE_FD_CHANNEL];
    }
}

void exec_start(const struct wire_request *req, const int fds[WIRE_EXEC_FDS])
{
    hear_all();
    struct exec *known = find(req->exec_id), *e = known ? NULL : place();
    if (e) {
        start_at(e, req, fds);
    } else {
        channel_refuse(fds[WIRE_FD_CHANNEL], known ? EEXIST : EAGAIN, "the table of execs");
        close(fds[WIRE_FD_KILL]);
    }
    close(fds[WIRE_FD_STRINGS]);
    close(fds[WIRE_FD_STDIN]);
    close(fds[WIRE_FD_CGROUP]);
}

void exec_attach(const struct wire_request *req, int channel)
{
    hear_all();
    struct exec *e = find(req->exec_id);
    if (e)
        channel_attach(e, channel, req->offset);
    else
        channel_refuse(channel, ENOENT, "no such exec");
}

static void kill_tree(struct exec *e)
{
    e->killing = true;
    e->kill_ms = init_now_ms() + KILL_AGAIN_MS;
    if (e->flags & WIRE_LED)
        leader_kill(e);
    else if (write(e->kill_fd, "1", 1) != 1)
        kill(-e->pid, SIGKILL);
}

void exec_signal(const struct wire_request *req)
{
    struct exec *e = find(req->exec_id);

    if (!e || e->ended || req->signal <= 0 || req->signal > SIGRTMAX)
        return;
    if (e->flags & WIRE_LED)
        leader_await_pid(e);
    if (req->signal == SIGKILL)
        kill_tree(e);
    else if (e->pid <= 0) /* it has failed to start */
        return;
    else if (kill(-e->pid, req->signal) < 0) /* it has no group of its own yet */
        kill(e->pid, req->signal);
}

void exec_resize(const struct wire_request *req)
{
    struct exec *e = find(req->exec_id);

    if (e && e->input.fd >= 0 && e->input.terminal)
        streams_resize(e->input.fd, req->rows, req->cols);
}

/* Reads one piece; closes the pipe at its end.  False when there is nothing more now. */
static bool read_output(struct exec *e, int which)
{
    ssize_t n = e->pipe[which] < 0 ? 0 : read(e->pipe[which], buffer, sizeof buffer);

    if (n > 0) {
        journal_append(&e->journal, which == STREAM_OUT ? WIRE_OUT : WIRE_ERR, buffer, (size_t)n);
        return true;
    }
    if (n == 0 || (errno != EAGAIN && errno != EINTR))
        close_fd(&e->pipe[which]);
    return false;
}

static void read_failure(struct exec *e)
{
    int *report = &e->pipe[STREAM_REPORT];
    struct wire_report r;
    ssize_t n = *report < 0 ? -1 : read(*report, &r, sizeof r);

    if (n == sizeof r)
        e->failure = r;
    if (n == 0 || n == sizeof r)
        close_fd(report);
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
    for (int which = STREAM_OUT; which <= STREAM_ERR; which++) {
        for (int i = 0; i < PIECES && read_output(e, which); i++)
            ;
        if (e->pipe[which] >= 0)
            drain_add(e->pipe[which]);
        e->pipe[which] = -1;
    }
    input_finish(&e->input);
    close_fd(&e->kill_fd);
    close_fd(&e->words);
}

static void hear_leader(struct exec *e)
{
    int status;

    if (e->words >= 0 && leader_heard(e, &status))
        end(e, status);
}

void exec_reaped(pid_t pid, int status)
{
    for (size_t i = 0; i < WIRE_MAX_EXECS; i++) {
        struct exec *e = &table[i];
        if (!e->used || e->ended)
            continue;
        if (e->leader == pid)
            hear_leader(e);
        if (!e->ended && (e->leader == pid || (e->leader == 0 && e->pid == pid)))
            end(e, status);
    }
    leader_reaped(pid, status);
}

bool exec_settled(void)
{
    for (size_t i = 0; i < WIRE_MAX_EXECS; i++)
        if (table[i].used && table[i].pipe[STREAM_REPORT] >= 0)
            return false;
    return true;
}

void exec_detach(void)
{
    for (size_t i = 0; i < WIRE_MAX_EXECS; i++) {
        struct exec *e = &table[i];
        if (e->used && e->channel >= 0)
            channel_hear(e); /* input that has arrived, or that the result has */
        if (!e->used)
            continue;
        close_fd(&e->channel);
        close_fd(&e->kill_fd);
    }
}

void exec_arm(const char *exec_id, int kill_fd)
{
    struct exec *e = find(exec_id);

    if (e && !e->ended && e->kill_fd < 0)
        e->kill_fd = kill_fd;
    else
        close(kill_fd);
}

/* A deadline can be kept only by whoever can kill. */
static bool has_deadline(const struct exec *e)
{
    return !e->ended && !e->timed_out && e->kill_fd >= 0;
}

static void want(struct pollfd *p, size_t *n, int fd, int events)
{
    if (fd >= 0 && events)
        p[(*n)++] = (struct pollfd){fd, (short)events, 0};
}

/* A descriptor of which nothing is wanted is left out: its hang-up would be reported for ever. */
static void poll_exec(const struct exec *e, struct pollfd *p, size_t *n)
{
    bool pending = input_pending(&e->input), full = journal_full(&e->journal);

    want(p, n, e->pipe[STREAM_OUT], full ? 0 : POLLIN);
    want(p, n, e->pipe[STREAM_ERR], full ? 0 : POLLIN);
    want(p, n, e->pipe[STREAM_REPORT], POLLIN);
    want(p, n, e->input.fd, pending ? POLLOUT : 0);
    want(p, n, e->words, POLLIN);
    want(p, n, e->channel, (pending ? 0 : POLLIN) | (e->blocked ? POLLOUT : 0));
}

size_t exec_poll(struct pollfd *p, size_t max, int *timeout_ms)
{
    size_t n = 0;

    for (size_t i = 0; i < WIRE_MAX_EXECS && n + EXEC_OUTPUTS + 3 <= max; i++) {
        struct exec *e = &table[i];
        if (!e->used)
            continue;
        poll_exec(e, p, &n);
        int64_t left = e->deadline_ms - init_now_ms();
        left = left < 0 ? 0 : left < INT_MAX ? left : INT_MAX;
        if (e->leader && e->killing && !e->ended)
            *timeout_ms = KILL_AGAIN_MS;
        if (has_deadline(e) && (*timeout_ms < 0 || left < *timeout_ms))
            *timeout_ms = (int)left;
    }
    return n;
}

static void step(struct exec *e)
{
    read_failure(e);
    if (!journal_full(&e->journal)) {
        read_output(e, STREAM_OUT);
        read_output(e, STREAM_ERR);
    }
    hear_leader(e);
    if (has_deadline(e) && init_now_ms() >= e->deadline_ms) {
        e->timed_out = true;
        kill_tree(e);
    } else if (e->leader && e->killing && !e->ended && init_now_ms() >= e->kill_ms) {
        kill_tree(e);
    }
    channel_step(e);
}

void exec_step(void)
{
    for (size_t i = 0; i < WIRE_MAX_EXECS; i++)
        if (table[i].used)
            step(&table[i]);
}
