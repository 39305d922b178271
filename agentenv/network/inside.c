
#include "agentenv/network/inside.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/clock.h"

struct visit {
    int netns, result;
    int (*fn)(void *ctx, struct lh_error *err);
    void *ctx;
    struct lh_error err;
};

/* A thread of its own, which ends there: no thread that goes on can be left in the wrong place. */
static void *visit(void *arg)
{
    struct visit *v = arg;

    if (setns(v->netns, CLONE_NEWNET) < 0)
        v->result = lh_fail_errno(&v->err, errno, "entering the network of a sandbox");
    else
        v->result = v->fn(v->ctx, &v->err);
    return NULL;
}

int net_inside(int netns, int (*fn)(void *ctx, struct lh_error *err), void *ctx,
               struct lh_error *err)
{
    struct visit v = {.netns = netns, .fn = fn, .ctx = ctx};
    pthread_t thread;
    int e = pthread_create(&thread, NULL, visit, &v);

    if (e)
        return lh_fail_errno(err, e, "a thread for the network of a sandbox");
    pthread_join(thread, NULL);
    return v.result < 0 ? lh_fail(err, v.result, "%s", v.err.message) : v.result;
}

struct route_request {
    struct nlmsghdr h;
    struct rtmsg r;
    char attributes[64];
};

static void add_u32(struct route_request *q, unsigned short type, uint32_t value)
{
    struct rtattr *a = (void *)((char *)q + NLMSG_ALIGN(q->h.nlmsg_len));

    a->rta_type = type;
    a->rta_len = RTA_LENGTH(sizeof value);
    memcpy(RTA_DATA(a), &value, sizeof value);
    q->h.nlmsg_len = NLMSG_ALIGN(q->h.nlmsg_len) + RTA_ALIGN(a->rta_len);
}

static int acknowledged(int fd)
{
    struct {
        struct nlmsghdr h;
        struct nlmsgerr e;
        char rest[512];
    } reply;
    ssize_t n = recv(fd, &reply, sizeof reply, 0);

    if (n < (ssize_t)(sizeof reply.h + sizeof reply.e) || reply.h.nlmsg_type != NLMSG_ERROR)
        return EPROTO;
    return -reply.e.error;
}

/* What `ip route add local NET dev lo` does. */
int net_take_addresses(uint32_t address, uint32_t mask, struct lh_error *err)
{
    struct route_request q = {
        .h = {.nlmsg_len = NLMSG_LENGTH(sizeof q.r),
              .nlmsg_type = RTM_NEWROUTE,
              .nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE},
        .r = {.rtm_family = AF_INET,
              .rtm_dst_len = (unsigned char)__builtin_popcount(mask),
              .rtm_table = RT_TABLE_LOCAL,
              .rtm_protocol = RTPROT_STATIC,
              .rtm_scope = RT_SCOPE_HOST,
              .rtm_type = RTN_LOCAL}};
    lh_autoclose int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);

    if (fd < 0)
        return lh_fail_errno(err, errno, "rtnetlink");
    add_u32(&q, RTA_DST, htonl(address));
    add_u32(&q, RTA_OIF, if_nametoindex("lo"));
    int e = send(fd, &q, q.h.nlmsg_len, 0) < 0 ? errno : acknowledged(fd);
    return e ? lh_fail_errno(err, e, "a route in the sandbox") : 0;
}

static struct sockaddr_in socket_address(uint32_t address, uint16_t port)
{
    return (struct sockaddr_in){
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(address), .sin_port = htons(port)};
}

/* SO_REUSEPORT shares with sockets of our own user only, and no process of a sandbox has that. */
int net_listen(uint32_t address, uint16_t port, bool shared, struct lh_error *err)
{
    struct sockaddr_in a = socket_address(address, port);
    lh_autoclose int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int on = 1;

    if (fd < 0)
        return lh_fail_errno(err, errno, "a socket");
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (shared)
        setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on);
    if (bind(fd, (void *)&a, sizeof a) < 0 || listen(fd, 64) < 0)
        return lh_fail_errno(err, errno, "listening on port %u", port);
    return lh_steal_fd(&fd);
}

int net_connect(uint32_t address, uint16_t port, int64_t deadline_ms, struct lh_error *err)
{
    struct sockaddr_in a = socket_address(address, port);
    lh_autoclose int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct pollfd p = {fd, POLLOUT, 0};
    int e = 0;
    socklen_t len = sizeof e;

    if (fd < 0)
        return lh_fail_errno(err, errno, "a socket");
    if (connect(fd, (void *)&a, sizeof a) < 0 && errno != EINPROGRESS)
        return lh_fail_errno(err, errno, "connecting to port %u", port);
    if (poll(&p, 1, lh_ms_left(deadline_ms)) <= 0)
        return lh_fail(err, LH_DEADLINE_EXCEEDED, "port %u does not answer", port);
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &len) < 0 || e)
        return lh_fail_errno(err, e ? e : errno, "connecting to port %u", port);
    return lh_steal_fd(&fd);
}
