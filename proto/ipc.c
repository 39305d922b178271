/* SOCK_SEQPACKET keeps message boundaries and order, reports the end of the peer, and needs no
 * framing code; SOCK_STREAM would need a length prefix and care about which byte carries the fds,
 * SOCK_DGRAM has no connections.  The price is the socket's send buffer, which must hold a whole
 * message: see raise_send_buffer(). */
#include "proto/ipc.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/parse.h"
#include "proto/unix_socket.h"

enum { RETRY_MS = 10 };

union fd_control {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(IPC_MAX_FDS * sizeof(int))];
};

static int open_socket(struct lh_error *err)
{
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    return fd < 0 ? lh_fail_errno(err, errno, "unix socket") : fd;
}

/* A packet must fit the send buffer whole.  Root may pass net.core.wmem_max; others get at most
 * that, and a message beyond it fails with a hint. */
static void raise_send_buffer(int fd)
{
    int bytes = IPC_MAX + (64 << 10);

    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &bytes, sizeof bytes) < 0)
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

static void nap(int64_t deadline)
{
    int ms = lh_ms_left(deadline);

    poll(NULL, 0, ms < RETRY_MS ? ms : RETRY_MS);
}

int ipc_connect(const char *path, int timeout_ms, struct lh_error *err)
{
    struct sockaddr_un address;
    int64_t deadline = lh_now_ms() + timeout_ms;
    int r = lh_unix_address(path, &address, err);

    if (r < 0)
        return r;
    lh_autoclose int fd = open_socket(err);
    if (fd < 0)
        return fd;
    raise_send_buffer(fd);
    while (connect(fd, (struct sockaddr *)&address, sizeof address) < 0) {
        bool absent = errno == ENOENT || errno == ECONNREFUSED || errno == EAGAIN;
        if (!absent && errno != EINTR)
            return lh_fail_errno(err, errno, "cannot connect to %s", path);
        if (!lh_ms_left(deadline) && timeout_ms > 0)
            return lh_fail(err, LH_UNAVAILABLE, "nobody serves %s after %d ms", path, timeout_ms);
        if (timeout_ms <= 0)
            return lh_fail(err, LH_UNAVAILABLE, "nobody serves %s", path);
        nap(deadline);
    }
    return lh_steal_fd(&fd);
}

int ipc_listen(const char *path, struct lh_error *err)
{
    return lh_unix_listen(path, SOCK_SEQPACKET, NULL, err);
}

int ipc_accept(int listen_fd, pid_t *pid, struct lh_error *err)
{
    struct lh_error e = {0};
    struct ucred peer;
    int fd;

    do
        fd = lh_unix_accept(listen_fd, &peer, &e);
    while (fd == LH_PERMISSION_DENIED);
    if (fd < 0)
        return lh_fail(err, fd, "%s", e.message);
    raise_send_buffer(fd);
    if (pid)
        *pid = peer.pid;
    return fd;
}

static int rest_left(const struct ipc_listener *l)
{
    return l->rest_until_ms ? lh_ms_left(l->rest_until_ms) : 0;
}

struct pollfd ipc_listener_poll(const struct ipc_listener *l)
{
    return (struct pollfd){rest_left(l) ? -1 : l->fd, POLLIN, 0}; /* poll passes over -1 */
}

int ipc_listener_timeout(const struct ipc_listener *l, int timeout_ms)
{
    int rest = rest_left(l);

    return rest && (timeout_ms < 0 || rest < timeout_ms) ? rest : timeout_ms;
}

int ipc_listener_accept(struct ipc_listener *l, pid_t *pid, struct lh_error *err)
{
    int fd = ipc_accept(l->fd, pid, err);

    l->rest_until_ms = fd == LH_RESOURCE_EXHAUSTED ? lh_now_ms() + IPC_REST_MS : 0;
    return fd;
}

static int wait_for(int fd, short events, int64_t deadline, struct lh_error *err)
{
    struct pollfd p = {.fd = fd, .events = events};

    for (;;) {
        int n = poll(&p, 1, lh_ms_left(deadline));
        if (n > 0)
            return 0;
        if (n < 0 && errno != EINTR)
            return lh_fail_errno(err, errno, "poll");
        if (!lh_ms_left(deadline))
            return lh_fail(err, LH_DEADLINE_EXCEEDED, "the peer did not %s in time",
                           events == POLLIN ? "answer" : "read");
    }
}

static void attach_fds(struct msghdr *h, union fd_control *control, const int *fds, size_t n)
{
    memset(control, 0, sizeof *control);
    h->msg_control = control->bytes;
    h->msg_controllen = CMSG_SPACE(n * sizeof(int));
    struct cmsghdr *c = CMSG_FIRSTHDR(h);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(n * sizeof(int));
    memcpy(CMSG_DATA(c), fds, n * sizeof(int));
}

static int send_packet(int fd, const struct msghdr *h, int64_t deadline, struct lh_error *err)
{
    for (;;) {
        if (sendmsg(fd, h, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
            return 0;
        if (errno == EMSGSIZE)
            return lh_fail(err, LH_RESOURCE_EXHAUSTED,
                           "a message of %zu bytes exceeds the socket buffer; raise "
                           "net.core.wmem_max to %d",
                           h->msg_iov->iov_len, IPC_MAX);
        if (errno != EAGAIN && errno != EINTR)
            return lh_fail_errno(err, errno, "send");
        int r = wait_for(fd, POLLOUT, deadline, err);
        if (r < 0)
            return r;
    }
}

int ipc_send(int fd, const ProtobufCMessage *m, const int *fds, size_t n_fds, int timeout_ms,
             struct lh_error *err)
{
    int64_t deadline = lh_now_ms() + timeout_ms;
    size_t len;

    if (timeout_ms < 0 || n_fds > IPC_MAX_FDS)
        return lh_fail(err, LH_INVALID_ARGUMENT, "send: timeout %d ms, %zu fds (0 to %d)",
                       timeout_ms, n_fds, IPC_MAX_FDS);
    lh_autofree uint8_t *data = lh_pack(m, &len, err);
    if (!data)
        return lh_wrap(err, "packing %s", m->descriptor->name);
    if (!len || len > IPC_MAX)
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s has %zu bytes, a packet holds 1 to %d",
                       m->descriptor->name, len, IPC_MAX);
    struct iovec v = {.iov_base = data, .iov_len = len};
    struct msghdr h = {.msg_iov = &v, .msg_iovlen = 1};
    union fd_control control;
    if (n_fds)
        attach_fds(&h, &control, fds, n_fds);
    int r = send_packet(fd, &h, deadline, err);
    return r < 0 ? lh_wrap(err, "sending %s", m->descriptor->name) : 0;
}

/* Size of the next packet without taking it. */
static ssize_t next_size(int fd, int64_t deadline, struct lh_error *err)
{
    for (;;) {
        ssize_t n = recv(fd, NULL, 0, MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT);
        if (n > IPC_MAX)
            return lh_fail(err, LH_INVALID_ARGUMENT, "a packet of %zd bytes, the limit is %d", n,
                           IPC_MAX);
        if (n > 0)
            return n;
        if (n == 0)
            return lh_fail(err, LH_UNAVAILABLE, "the peer has closed the connection");
        if (errno != EAGAIN && errno != EINTR)
            return lh_fail_errno(err, errno, "receive");
        int r = wait_for(fd, POLLIN, deadline, err);
        if (r < 0)
            return r;
    }
}

/* Moves received fds to the caller as far as there is room; closes the rest. */
static bool take_fds(struct msghdr *h, int *fds, size_t room, size_t *count)
{
    bool fit = !(h->msg_flags & MSG_CTRUNC);

    *count = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(h); c; c = CMSG_NXTHDR(h, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (*count < room)
                fds[(*count)++] = fd;
            else
                close(fd), fit = false;
        }
    }
    return fit;
}

static void close_fds(int *fds, size_t *count)
{
    while (*count)
        close(fds[--*count]);
}

static int recv_packet(int fd, void *data, size_t size, int *fds, size_t room, size_t *count,
                       struct lh_error *err)
{
    union fd_control control;
    struct iovec v = {.iov_base = data, .iov_len = size};
    struct msghdr h = {.msg_iov = &v,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    ssize_t n;

    do
        n = recvmsg(fd, &h, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return lh_fail_errno(err, errno, "receive");
    if (!take_fds(&h, fds, room, count) || (size_t)n != size) {
        close_fds(fds, count);
        return lh_fail(err, LH_INVALID_ARGUMENT, "a packet with more than %zu fds", room);
    }
    return 0;
}

ProtobufCMessage *ipc_recv(int fd, const ProtobufCMessageDescriptor *type, int *fds, size_t *n_fds,
                           int timeout_ms, struct lh_error *err)
{
    int64_t deadline = lh_now_ms() + timeout_ms;
    size_t room = n_fds ? *n_fds : 0, count = 0;

    if (timeout_ms < 0)
        return lh_fail(err, LH_INVALID_ARGUMENT, "receive: a deadline is needed"), NULL;
    ssize_t size = next_size(fd, deadline, err);
    if (size < 0)
        return NULL;
    lh_autofree void *data = malloc((size_t)size);
    if (!data)
        return lh_fail_errno(err, ENOMEM, "receiving %s", type->name), NULL;
    if (recv_packet(fd, data, (size_t)size, fds, room, &count, err) < 0)
        return NULL;
    ProtobufCMessage *m = lh_parse(type, data, (size_t)size, (struct lh_parse_limits){0}, err);
    if (!m)
        close_fds(fds, &count);
    if (n_fds)
        *n_fds = m ? count : room;
    return m;
}
