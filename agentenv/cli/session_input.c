/* Input of a session: bytes, their end, keys, the size of the window.
 *
 * A call that fails is made again until it is through, with the same position: what had arrived is
 * skipped at the other end.  So keys typed while the daemon is restarted arrive once, in order. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "agentenv/cli/session.h"
#include "proto/clock.h"
#include "proto/parse.h"

enum { PIECE = 32768, CALL_EACH_MS = 2000, RETRY_MS = 100, ESCAPES = 3, ESCAPE_MS = 1000 };

static const char ESCAPE = 0x1d; /* Ctrl-], three times within a second */

static bool wait_or_over(struct session *s)
{
    struct pollfd p = {s->wake_fd, POLLIN, 0};

    return poll(&p, 1, RETRY_MS) > 0 || s->over;
}

/* False when the command is over. */
static bool send_input(struct session *s, V1(ExecInputRequest) * req)
{
    req->id = s->req.id;
    req->attempt = CURRENT_ATTEMPT;
    req->exec_id = s->req.exec_id;
    while (!s->over) {
        ProtobufCMessage *reply = NULL;
        if (cli_call(s->cli, "ExecInput", &req->base, &longhaul__sandbox__v1__empty__descriptor,
                     CALL_EACH_MS, &reply, NULL) == 0) {
            lh_message_free(reply);
            return true;
        }
        if (wait_or_over(s))
            return false;
    }
    return false;
}

static bool send_size(struct session *s)
{
    V1(ExecInputRequest) req = LONGHAUL__SANDBOX__V1__EXEC_INPUT_REQUEST__INIT;
    V1(Terminal) size = LONGHAUL__SANDBOX__V1__TERMINAL__INIT;
    struct signalfd_siginfo info;
    struct winsize w;

    while (read(s->winch_fd, &info, sizeof info) == sizeof info)
        ;
    if (ioctl(STDIN_FILENO, TIOCGWINSZ, &w) < 0 || !w.ws_row || !w.ws_col)
        return true;
    size.rows = w.ws_row;
    size.cols = w.ws_col;
    req.resize = &size;
    return send_input(s, &req);
}

struct keys {
    int escapes;
    int64_t first_ms;
};

/* True when the last of `n` keys completes the escape. */
static bool escaped(struct keys *k, const char *data, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int64_t now = lh_now_ms();
        if (data[i] != ESCAPE) {
            k->escapes = 0;
            continue;
        }
        if (k->escapes == 0 || now - k->first_ms > ESCAPE_MS) {
            k->escapes = 0;
            k->first_ms = now;
        }
        if (++k->escapes == ESCAPES)
            return true;
    }
    return false;
}

static void leave(struct session *s)
{
    s->left = true;
    rpc_channel_interrupt(s->cli->channel);
}

/* One piece of our standard input; false at its end. */
static bool pass_on(struct session *s, struct keys *keys, uint64_t *at)
{
    V1(ExecInputRequest) req = LONGHAUL__SANDBOX__V1__EXEC_INPUT_REQUEST__INIT;
    char data[PIECE];
    ssize_t n = read(STDIN_FILENO, data, sizeof data);

    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return true;
    if (n > 0 && s->at_terminal && escaped(keys, data, (size_t)n)) {
        leave(s);
        return false;
    }
    req.stdin.data = (uint8_t *)data;
    req.stdin.len = n > 0 ? (size_t)n : 0;
    req.stdin_offset = *at;
    req.stdin_end = n <= 0;
    *at += req.stdin.len;
    return send_input(s, &req) && n > 0;
}

static void *pass_input(void *arg)
{
    struct session *s = arg;
    struct pollfd p[] = {
        {STDIN_FILENO, POLLIN, 0}, {s->wake_fd, POLLIN, 0}, {s->winch_fd, POLLIN, 0}};
    struct keys keys = {0};
    uint64_t at = 0;

    while (!s->joined) /* whoever takes up an old session begins behind what it was told */
        if (wait_or_over(s))
            return NULL;
    at = s->stdin_at;
    if (s->at_terminal && !send_size(s))
        return NULL;
    while (!s->over && poll(p, LH_ARRAY_SIZE(p), -1) > 0 && !p[1].revents) {
        if (p[2].revents && !send_size(s))
            return NULL;
        if (p[0].revents && !pass_on(s, &keys, &at))
            p[0].fd = -1;
    }
    return NULL;
}

int session_input_start(struct session *s, struct lh_error *err)
{
    sigset_t winch;

    sigemptyset(&winch);
    sigaddset(&winch, SIGWINCH);
    pthread_sigmask(SIG_BLOCK, &winch, NULL); /* gRPC's threads are not there yet */
    s->wake_fd = eventfd(0, EFD_CLOEXEC);
    s->winch_fd = signalfd(-1, &winch, SFD_CLOEXEC | SFD_NONBLOCK);
    int e =
        s->wake_fd < 0 || s->winch_fd < 0 ? errno : pthread_create(&s->input, NULL, pass_input, s);
    return e ? lh_fail_errno(err, e, "passing standard input on") : 0;
}

void session_input_stop(struct session *s)
{
    eventfd_write(s->wake_fd, 1);
    pthread_join(s->input, NULL);
    close(s->wake_fd);
    close(s->winch_fd);
}
