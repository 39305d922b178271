#include "kvstore/tier/remote_link.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "proto/cleanup.h"
#include "proto/clock.h"

enum { LENGTH_TEXT = 32, PIECE = 65536 };

void kv_link_redis_close(struct kv_link_redis *l)
{
    if (l->context)
        redisFree(l->context);
    l->context = NULL;
}

static int wait_for(const struct kv_link_redis *l, short events, int64_t deadline_ms,
                    struct lh_error *err)
{
    struct pollfd p[] = {{.fd = l->context->fd, .events = events},
                         {.fd = l->stop_fd, .events = POLLIN}};
    int r = poll(p, 2, lh_ms_left(deadline_ms));

    if (r < 0 && errno != EINTR)
        return lh_fail_errno(err, errno, "poll");
    if (p[1].revents)
        return lh_fail(err, LH_CANCELLED, "kvstored ends");
    return r || lh_ms_left(deadline_ms) ? 0
                                        : lh_fail(err, LH_DEADLINE_EXCEEDED, "no answer in time");
}

/* ---- sending ---- */

struct kv_link_arg kv_link_text(const char *text)
{
    return (struct kv_link_arg){.parts = {{(char *)text, strlen(text)}}};
}

struct message {
    struct iovec iov[2 + 3 * KV_LINK_ARGS];
    int n, first; /* first: not sent yet */
    char lengths[KV_LINK_ARGS][LENGTH_TEXT];
};

static void add(struct message *m, const void *data, size_t len)
{
    if (len)
        m->iov[m->n++] = (struct iovec){(void *)data, len};
}

/* RESP: *COUNT, then $LENGTH and the bytes of every argument. */
static void compose(struct message *m, const struct kv_link_arg *args, int n)
{
    m->n = m->first = 0;
    for (int i = 0; i < n; i++) {
        size_t len = args[i].parts[0].iov_len + args[i].parts[1].iov_len;
        if (i == 0)
            snprintf(m->lengths[i], LENGTH_TEXT, "*%d\r\n$%zu\r\n", n, len);
        else
            snprintf(m->lengths[i], LENGTH_TEXT, "\r\n$%zu\r\n", len);
        add(m, m->lengths[i], strlen(m->lengths[i]));
        add(m, args[i].parts[0].iov_base, args[i].parts[0].iov_len);
        add(m, args[i].parts[1].iov_base, args[i].parts[1].iov_len);
    }
    add(m, "\r\n", 2);
}

static void advance(struct message *m, size_t sent)
{
    while (m->first < m->n && sent >= m->iov[m->first].iov_len)
        sent -= m->iov[m->first++].iov_len;
    if (m->first == m->n)
        return;
    m->iov[m->first].iov_base = (char *)m->iov[m->first].iov_base + sent;
    m->iov[m->first].iov_len -= sent;
}

static int send_all(struct kv_link_redis *l, struct message *m, int64_t deadline_ms,
                    struct lh_error *err)
{
    while (m->first < m->n) {
        struct msghdr h = {.msg_iov = m->iov + m->first, .msg_iovlen = (size_t)(m->n - m->first)};
        ssize_t sent = sendmsg(l->context->fd, &h, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0)
            advance(m, (size_t)sent);
        else if (errno != EAGAIN && errno != EINTR)
            return lh_fail(err, LH_UNAVAILABLE, "sending: %s", strerror(errno));
        else if (wait_for(l, POLLOUT, deadline_ms, err) < 0)
            return err->code;
    }
    return 0;
}

/* ---- receiving ---- */

/* hiredis reserves what an array says it has. */
static void *create_small_array(const redisReadTask *task, int elements)
{
    const struct kv_link_redis *l = task->privdata;

    return elements <= KV_LINK_ELEMENTS ? l->create_array(task, elements) : NULL;
}

void kv_link_redis_adopt(struct kv_link_redis *l, redisContext *context)
{
    redisReader *reader = context->reader;

    l->context = context;
    l->functions = *reader->fn;
    l->create_array = l->functions.createArray;
    l->functions.createArray = create_small_array;
    reader->fn = &l->functions;
    reader->privdata = l;
}

static redisReply *receive(struct kv_link_redis *l, size_t max, int64_t deadline_ms,
                           struct lh_error *err)
{
    lh_autofree char *piece = malloc(PIECE);
    size_t received = 0;
    void *reply = NULL;

    if (!piece)
        return lh_fail_errno(err, ENOMEM, "a reply"), NULL;
    for (;;) {
        ssize_t n = recv(l->context->fd, piece, PIECE, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
            if (wait_for(l, POLLIN, deadline_ms, err) < 0)
                return NULL;
            continue;
        }
        if (n <= 0)
            return lh_fail(err, LH_UNAVAILABLE, "%s", n ? strerror(errno) : "it hung up"), NULL;
        received += (size_t)n;
        if (received > max)
            return lh_fail(err, LH_OUT_OF_RANGE, "a reply of more than %zu bytes", max), NULL;
        if (redisReaderFeed(l->context->reader, piece, (size_t)n) != REDIS_OK ||
            redisReaderGetReply(l->context->reader, &reply) != REDIS_OK)
            return lh_fail(err, LH_INTERNAL, "no RESP: %s", l->context->reader->errstr), NULL;
        if (reply)
            return reply;
    }
}

redisReply *kv_link_redis_call(struct kv_link_redis *l, const struct kv_link_arg *args, int n,
                               size_t max, int64_t deadline_ms, struct lh_error *err)
{
    struct message m;

    compose(&m, args, n);
    redisReply *r =
        send_all(l, &m, deadline_ms, err) == 0 ? receive(l, max, deadline_ms, err) : NULL;
    if (!r)
        kv_link_redis_close(l);
    return r;
}

/* ---- connecting ---- */

static int finish_connect(struct kv_link_redis *l, int64_t deadline_ms, struct lh_error *err)
{
    int fd = l->context->fd, e = 0, on = 1;
    socklen_t len = sizeof e;
    int r = wait_for(l, POLLOUT, deadline_ms, err);

    if (r < 0)
        return r;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &len) < 0 || e)
        return lh_fail(err, LH_UNAVAILABLE, "%s", strerror(e ? e : errno));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return 0;
}

static int authenticate(struct kv_link_redis *l, const struct kv_secrets *s, int64_t deadline_ms,
                        struct lh_error *err)
{
    const char *user = s->value[KV_REDIS_USER], *password = s->value[KV_REDIS_PASSWORD];
    struct kv_link_arg args[3] = {kv_link_text("AUTH")};
    int n = 1;

    if (!password)
        return 0;
    if (user)
        args[n++] = kv_link_text(user);
    args[n++] = kv_link_text(password);
    redisReply *r = kv_link_redis_call(l, args, n, KV_LINK_REPLY, deadline_ms, err);
    if (!r)
        return err->code;
    bool right = r->type == REDIS_REPLY_STATUS;
    freeReplyObject(r);
    return right ? 0
                 : lh_fail(err, LH_PERMISSION_DENIED,
                           "it refuses the password of kvstore.remote_credentials");
}

int kv_link_redis_open(struct kv_link_redis *l, const char *host, int port,
                       const struct kv_secrets *secrets, int64_t deadline_ms, struct lh_error *err)
{
    redisContext *c = redisConnectNonBlock(host, port);
    if (!c)
        return lh_fail_errno(err, ENOMEM, "%s:%d", host, port);
    kv_link_redis_adopt(l, c);
    int r = c->err ? lh_fail(err, LH_UNAVAILABLE, "%s", c->errstr) : 0;
    if (r == 0)
        r = finish_connect(l, deadline_ms, err);
    if (r == 0)
        r = authenticate(l, secrets, deadline_ms, err);
    if (r < 0) {
        kv_link_redis_close(l);
        return lh_wrap(err, "%s:%d", host, port);
    }
    return 0;
}
