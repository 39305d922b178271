#include "agentenv/network/carry.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/clock.h"

enum { IDLE_MS = 3600000, PIECE = 64 << 10 };

/* ---- where to ---- */

static bool same_address(const struct sockaddr *a, const struct sockaddr *b)
{
    if (!b || a->sa_family != b->sa_family)
        return false;
    if (a->sa_family == AF_INET)
        return ((const struct sockaddr_in *)a)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)b)->sin_addr.s_addr;
    return !memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr,
                   &((const struct sockaddr_in6 *)b)->sin6_addr, sizeof(struct in6_addr));
}

static bool belongs_here(const struct sockaddr *a)
{
    struct ifaddrs *list;
    bool found = false;

    if (getifaddrs(&list) < 0)
        return true; /* not known to be foreign */
    for (const struct ifaddrs *i = list; i && !found; i = i->ifa_next)
        found = same_address(a, i->ifa_addr);
    freeifaddrs(list);
    return found;
}

static bool is_special4(uint32_t a)
{
    static const struct {
        uint32_t net, mask;
    } special[] = {
        {0x00000000, 0xff000000}, /* this network */
        {0x7f000000, 0xff000000}, /* loopback */
        {0xa9fe0000, 0xffff0000}, /* link-local: the metadata services of clouds */
        {0xe0000000, 0xe0000000}, /* multicast and above */
    };

    for (size_t i = 0; i < LH_ARRAY_SIZE(special); i++)
        if ((a & special[i].mask) == special[i].net)
            return true;
    return false;
}

static bool is_special(const struct sockaddr *sa)
{
    if (sa->sa_family == AF_INET)
        return is_special4(ntohl(((const struct sockaddr_in *)sa)->sin_addr.s_addr));
    if (sa->sa_family != AF_INET6)
        return true;
    const struct in6_addr *a = &((const struct sockaddr_in6 *)sa)->sin6_addr;
    return IN6_IS_ADDR_UNSPECIFIED(a) || IN6_IS_ADDR_LOOPBACK(a) || IN6_IS_ADDR_LINKLOCAL(a) ||
           IN6_IS_ADDR_MULTICAST(a) || IN6_IS_ADDR_V4MAPPED(a) || IN6_IS_ADDR_V4COMPAT(a);
}

static int connect_to(const struct addrinfo *a, int64_t deadline_ms, struct lh_error *err)
{
    lh_autoclose int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct pollfd p = {fd, POLLOUT, 0};
    int e = 0;
    socklen_t len = sizeof e;

    if (is_special(a->ai_addr) || belongs_here(a->ai_addr))
        return lh_fail(err, LH_PERMISSION_DENIED, "it is an address of this machine, or special");
    if (fd < 0)
        return lh_fail_errno(err, errno, "a socket");
    if (connect(fd, a->ai_addr, a->ai_addrlen) < 0 && errno != EINPROGRESS)
        return lh_fail_errno(err, errno, "connecting");
    if (poll(&p, 1, lh_ms_left(deadline_ms)) <= 0)
        return lh_fail(err, LH_DEADLINE_EXCEEDED, "no answer");
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &len) < 0 || e)
        return lh_fail_errno(err, e ? e : errno, "connecting");
    return lh_steal_fd(&fd);
}

int carry_dial(const char *name, uint32_t address, uint16_t port, int64_t deadline_ms,
               struct lh_error *err)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV}, *list = NULL;
    struct in_addr in = {htonl(address)};
    char text[INET_ADDRSTRLEN], service[8];

    snprintf(service, sizeof service, "%u", port);
    inet_ntop(AF_INET, &in, text, sizeof text);
    int e = getaddrinfo(*name ? name : text, service, &hints, &list);
    if (e)
        return lh_fail(err, LH_UNAVAILABLE, "%s: %s", *name ? name : text, gai_strerror(e));
    int fd = LH_UNAVAILABLE;
    for (const struct addrinfo *a = list; a && fd < 0; a = a->ai_next)
        fd = connect_to(a, deadline_ms, err);
    freeaddrinfo(list);
    return fd < 0 ? lh_wrap(err, "%s", *name ? name : text) : fd;
}

/* ---- what is between ---- */

struct half {
    int from, to;
    size_t at, len;
    bool ended, passed_on; /* no more comes; and the other side knows */
    atomic_ullong *count;
    char data[PIECE];
};

/* False when the connection is broken. */
static bool step(struct half *h)
{
    if (h->at == h->len && !h->ended) {
        ssize_t n = recv(h->from, h->data, sizeof h->data, MSG_DONTWAIT);
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            return false;
        h->ended = n == 0;
        h->at = 0;
        h->len = n > 0 ? (size_t)n : 0;
    }
    if (h->at < h->len) {
        ssize_t n = send(h->to, h->data + h->at, h->len - h->at, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            return false;
        h->at += n > 0 ? (size_t)n : 0;
        *h->count += n > 0 ? (unsigned long long)n : 0;
    }
    if (h->ended && h->at == h->len && !h->passed_on) {
        shutdown(h->to, SHUT_WR);
        h->passed_on = true;
    }
    return true;
}

static short wanted(const struct half *reads, const struct half *writes)
{
    bool read = !reads->ended && reads->at == reads->len;

    return (short)((read ? POLLIN : 0) | (writes->at < writes->len ? POLLOUT : 0));
}

void carry_both(int first, int second, struct carry_counts *counts)
{
    lh_autofree struct half *h = calloc(2, sizeof *h);

    if (!h)
        return;
    h[0] = (struct half){.from = first, .to = second, .count = &counts->out};
    h[1] = (struct half){.from = second, .to = first, .count = &counts->in};
    while (step(&h[0]) && step(&h[1]) && !(h[0].passed_on && h[1].passed_on)) {
        struct pollfd p[2] = {{first, wanted(&h[0], &h[1]), 0}, {second, wanted(&h[1], &h[0]), 0}};
        for (int i = 0; i < 2; i++)
            if (!p[i].events) /* its hang-up would be reported for ever */
                p[i].fd = -1;
        if (poll(p, 2, IDLE_MS) <= 0)
            return;
    }
}
