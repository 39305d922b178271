#include "agentenv/network/gate.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agentenv/network/carry.h"
#include "agentenv/network/inside.h"
#include "proto/clock.h"
#include "proto/log.h"

LH_LOG_COMPONENT("gate");

enum {
    STACK_BYTES = 512 << 10,
    DIAL_MS = 10000,
    END_MS = 15000, /* for connections that are being dialled when the gate is destroyed */
    OUT_OF_FDS_MS = 100,
    LISTENERS = NET_MAX_ALLOW + GATE_MAX_PORTS,
};

static const uint32_t LOOPBACK = 0x7f000001;

struct listener {
    struct gate_opening *opening;
    int fd;
    uint16_t inside; /* of a published port; 0 = egress */
};

struct gate {
    int epoll, stop;
    pthread_t thread;
    pthread_mutex_t lock; /* openings against the accepting thread; held for accept() only */
    atomic_uint connections;
    atomic_ullong accepted, refused;
    struct carry_counts carried;
};

struct gate_opening {
    struct gate *gate;
    int netns;
    struct net_rules rules;
    struct listener listeners[LISTENERS];
    size_t n;
    pthread_mutex_t lock;
    bool closing;
    unsigned refs;                /* one for each connection, and that of whoever opened it */
    int fds[GATE_CONNECTIONS][2]; /* of each: shut down to end it; -1 = none */
};

/* ---- one connection ---- */

struct connection {
    struct gate_opening *opening;
    unsigned slot;
    int fd;          /* accepted */
    uint16_t inside; /* of a published port; 0 = egress */
    struct net_allow allow;
    uint32_t address; /* where the sandbox connected to */
};

/* False when the opening is being closed: then the descriptor is the caller's still. */
static bool register_fd(struct connection *c, int which, int fd)
{
    struct gate_opening *o = c->opening;

    LH_LOCKED(&o->lock);
    if (!o->closing)
        o->fds[c->slot][which] = fd;
    return !o->closing;
}

static int connect_inside(void *ctx, struct lh_error *err)
{
    const struct connection *c = ctx;

    return net_connect(LOOPBACK, c->inside, lh_now_ms() + DIAL_MS, err);
}

static int dial(struct connection *c, struct lh_error *err)
{
    if (c->inside)
        return net_inside(c->opening->netns, connect_inside, c, err);
    return carry_dial(c->allow.name, c->address, c->allow.port, lh_now_ms() + DIAL_MS, err);
}

static void unref(struct gate_opening *o)
{
    pthread_mutex_lock(&o->lock);
    bool last = --o->refs == 0;
    pthread_mutex_unlock(&o->lock);
    if (!last)
        return;
    if (o->netns >= 0)
        close(o->netns);
    pthread_mutex_destroy(&o->lock);
    free(o);
}

static void leave(struct connection *c)
{
    struct gate_opening *o = c->opening;

    pthread_mutex_lock(&o->lock);
    o->fds[c->slot][0] = o->fds[c->slot][1] = -1;
    pthread_mutex_unlock(&o->lock);
    o->gate->connections--;
    unref(o);
}

/* The peer sees a refusal, not an end of data. */
static void reset(int fd)
{
    struct linger now = {.l_onoff = 1};

    setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
}

static void *serve(void *arg)
{
    struct connection *c = arg;
    struct gate *g = c->opening->gate;
    struct lh_error err = {0};
    int out = dial(c, &err);

    if (out < 0) {
        g->refused++;
        lh_debug("not connected", "name=%s port=%u why=%s", c->allow.name,
                 c->inside ? c->inside : c->allow.port, err.message);
        reset(c->fd);
    } else if (register_fd(c, 1, out)) {
        carry_both(c->inside ? out : c->fd, c->inside ? c->fd : out, &g->carried);
    }
    leave(c); /* before the descriptors are closed: nobody shuts down another's */
    if (out >= 0)
        close(out);
    close(c->fd);
    free(c);
    return NULL;
}

/* ---- accepting ---- */

static bool take_slot(struct connection *c)
{
    struct gate_opening *o = c->opening;

    LH_LOCKED(&o->lock);
    for (c->slot = 0; c->slot < GATE_CONNECTIONS; c->slot++)
        if (o->fds[c->slot][0] < 0 && !o->closing) {
            o->fds[c->slot][0] = c->fd;
            o->refs++;
            o->gate->connections++;
            return true;
        }
    return false;
}

static bool allowed(struct connection *c)
{
    struct sockaddr_in to;
    socklen_t len = sizeof to;

    if (c->inside)
        return true;
    if (getsockname(c->fd, (void *)&to, &len) < 0)
        return false;
    c->address = ntohl(to.sin_addr.s_addr);
    const struct net_allow *a = net_rules_find(&c->opening->rules, c->address, ntohs(to.sin_port));
    if (a)
        c->allow = *a;
    return a != NULL;
}

static bool start(struct connection *c)
{
    pthread_attr_t attr;
    pthread_t thread;

    if (!allowed(c) || !take_slot(c))
        return false;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    int e = pthread_create(&thread, &attr, serve, c);
    pthread_attr_destroy(&attr);
    if (e)
        leave(c);
    return e == 0;
}

static void accept_one(struct gate *g, const struct listener *l)
{
    int fd = accept4(l->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    struct connection *c = fd < 0 ? NULL : calloc(1, sizeof *c);

    if (fd < 0) {
        if (errno == EMFILE || errno == ENFILE) /* the event stays: no hurry */
            poll(NULL, 0, OUT_OF_FDS_MS);
        return;
    }
    if (c)
        *c = (struct connection){.opening = l->opening, .fd = fd, .inside = l->inside};
    g->accepted++;
    if (c && start(c))
        return;
    g->refused++;
    reset(fd);
    close(fd);
    free(c);
}

/* The lock makes sure that the listener of an event is not one that was closed meanwhile: closing
 * takes it out of the set first, and events are asked for one at a time. */
static void *accept_all(void *arg)
{
    struct gate *g = arg;
    struct epoll_event e, none;

    for (;;) {
        if (epoll_wait(g->epoll, &none, 1, -1) < 0 && errno != EINTR)
            return NULL;
        LH_LOCKED(&g->lock);
        if (epoll_wait(g->epoll, &e, 1, 0) != 1)
            continue;
        if (!e.data.ptr)
            return NULL;
        accept_one(g, e.data.ptr);
    }
}

/* ---- openings ---- */

static int add_listener(struct gate_opening *o, int fd, uint16_t inside, struct lh_error *err)
{
    struct listener *l = &o->listeners[o->n];
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = l};

    *l = (struct listener){o, fd, inside};
    if (epoll_ctl(o->gate->epoll, EPOLL_CTL_ADD, fd, &e) < 0) {
        close(fd);
        return lh_fail_errno(err, errno, "epoll");
    }
    o->n++;
    return 0;
}

/* A name at its address; networks share a listener on all addresses, which are only the allowed
 * ones and 127.0.0.0/8. */
static int listen_for(struct gate_opening *o, size_t i, struct lh_error *err)
{
    const struct net_allow *a = &o->rules.allow[i];
    uint32_t address = a->name[0] ? a->address : 0;
    int r = a->name[0] ? 0 : net_take_addresses(a->address, a->mask, err);

    if (r < 0)
        return r;
    for (size_t k = 0; k < i; k++) {
        const struct net_allow *b = &o->rules.allow[k];
        if (b->port == a->port && (b->name[0] ? b->address : 0) == address)
            return 0;
    }
    int fd = net_listen(address, a->port, true, err);
    return fd < 0 ? fd : add_listener(o, fd, 0, err);
}

static int listen_inside(void *ctx, struct lh_error *err)
{
    struct gate_opening *o = ctx;
    int r = 0;

    for (size_t i = 0; i < o->rules.n && r == 0; i++)
        r = listen_for(o, i, err);
    return r;
}

static int publish(struct gate_opening *o, struct gate_port *p, struct lh_error *err)
{
    struct sockaddr_in a;
    socklen_t len = sizeof a;
    int fd = net_listen(LOOPBACK, p->outside, false, err);

    if (fd < 0)
        return lh_wrap(err, "publishing port %u", p->inside);
    if (getsockname(fd, (void *)&a, &len) == 0)
        p->outside = ntohs(a.sin_port);
    return add_listener(o, fd, p->inside, err);
}

struct gate_opening *gate_open(struct gate *g, int netns, const struct net_rules *rules,
                               struct gate_port *ports, size_t n_ports, struct lh_error *err)
{
    struct gate_opening *o = n_ports > GATE_MAX_PORTS ? NULL : calloc(1, sizeof *o);
    int r = 0;

    if (!o)
        return lh_fail(err, n_ports > GATE_MAX_PORTS ? LH_INVALID_ARGUMENT : LH_RESOURCE_EXHAUSTED,
                       "the network of a sandbox: at most %d ports are published", GATE_MAX_PORTS),
               NULL;
    o->gate = g;
    o->refs = 1;
    o->rules = *rules;
    memset(o->fds, -1, sizeof o->fds);
    pthread_mutex_init(&o->lock, NULL);
    o->netns = fcntl(netns, F_DUPFD_CLOEXEC, 0);
    if (o->netns < 0)
        r = lh_fail_errno(err, errno, "the network of a sandbox");
    if (r == 0 && rules->n)
        r = net_inside(netns, listen_inside, o, err);
    for (size_t i = 0; i < n_ports && r == 0; i++)
        r = publish(o, &ports[i], err);
    if (r == 0)
        return o;
    gate_close(o);
    return NULL;
}

static void stop_accepting(struct gate_opening *o)
{
    LH_LOCKED(&o->gate->lock);
    for (size_t i = 0; i < o->n; i++) {
        epoll_ctl(o->gate->epoll, EPOLL_CTL_DEL, o->listeners[i].fd, NULL);
        close(o->listeners[i].fd);
    }
}

void gate_close(struct gate_opening *o)
{
    if (!o)
        return;
    stop_accepting(o);
    pthread_mutex_lock(&o->lock);
    o->closing = true;
    for (size_t i = 0; i < GATE_CONNECTIONS; i++)
        for (int k = 0; k < 2; k++)
            if (o->fds[i][k] >= 0)
                shutdown(o->fds[i][k], SHUT_RDWR);
    pthread_mutex_unlock(&o->lock);
    unref(o);
}

/* ---- the gate ---- */

static int start_thread(struct gate *g, struct lh_error *err)
{
    struct epoll_event e = {.events = EPOLLIN};

    g->epoll = epoll_create1(EPOLL_CLOEXEC);
    g->stop = eventfd(0, EFD_CLOEXEC);
    if (g->epoll < 0 || g->stop < 0 || epoll_ctl(g->epoll, EPOLL_CTL_ADD, g->stop, &e) < 0)
        return lh_fail_errno(err, errno, "the gate of networks");
    int failed = pthread_create(&g->thread, NULL, accept_all, g);
    return failed ? lh_fail_errno(err, failed, "the gate of networks") : 0;
}

static void gate_free(struct gate *g)
{
    if (g->epoll >= 0)
        close(g->epoll);
    if (g->stop >= 0)
        close(g->stop);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

struct gate *gate_create(struct lh_error *err)
{
    struct gate *g = calloc(1, sizeof *g);

    if (!g)
        return lh_fail_errno(err, ENOMEM, "the gate of networks"), NULL;
    g->epoll = g->stop = -1;
    pthread_mutex_init(&g->lock, NULL);
    if (start_thread(g, err) == 0)
        return g;
    gate_free(g);
    return NULL;
}

void gate_destroy(struct gate *g)
{
    if (!g)
        return;
    eventfd_write(g->stop, 1);
    pthread_join(g->thread, NULL);
    for (int64_t until = lh_now_ms() + END_MS; g->connections && lh_ms_left(until);)
        poll(NULL, 0, 10);
    if (g->connections)
        lh_warn("connections left", "count=%u", g->connections);
    else
        gate_free(g);
}

struct gate_counts gate_counts(struct gate *g)
{
    return (struct gate_counts){g->accepted, g->refused, g->carried.out, g->carried.in};
}
