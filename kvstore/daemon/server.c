#include "kvstore/daemon/server.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include "kvstore/daemon/metrics.h"
#include "proto/clock.h"
#include "proto/ipc.h"
#include "proto/log.h"
#include "proto/metrics.h"
#include "proto/parse.h"

LH_LOG_COMPONENT("kvstored");

enum {
    STOP,
    LISTEN,
    DISK,
    REMOTE,
    ARBITER,
    METRICS,
    FIRST_CLIENT,
    IDLE_MS = 1000,
    EXPIRE_MS = 100
};

struct client {
    int fd;
    struct kv_peer peer;
    Longhaul__Kv__V1__Request *waiting; /* for a tier; no other is taken until it is answered */
};

struct server {
    struct kv_service *service;
    struct client *clients[KV_MAX_CLIENTS];
    struct pollfd polls[FIRST_CLIENT + KV_MAX_CLIENTS];
    unsigned n;
    struct ipc_listener listener;
    struct metrics_http *metrics; /* NULL = none */
    int64_t expire_at_ms;
    struct kv_lent *lent;  /* NULL = the memory is nobody else's */
    int64_t give_up_at_us; /* once the memory is to go */
};

static void remove_client(struct server *s, unsigned i)
{
    struct client *c = s->clients[i];

    lh_info("client-gone", "client=%s pid=%d grants=%u", c->peer.name, c->peer.pid,
            c->peer.n_grants);
    kv_service_forget(s->service, &c->peer);
    lh_message_free(c->waiting ? &c->waiting->base : NULL);
    close(c->fd);
    free(c);
    s->clients[i] = s->clients[--s->n];
    s->service->clients = s->n;
}

static void add_client(struct server *s, int fd, pid_t pid)
{
    struct client *c = s->n < KV_MAX_CLIENTS ? calloc(1, sizeof *c) : NULL;

    if (!c) {
        lh_warn("refused", "pid=%d: %u clients are connected", pid, s->n);
        close(fd);
        return;
    }
    c->fd = fd;
    c->peer.pid = pid;
    s->clients[s->n++] = c;
    s->service->clients = s->n;
}

static void accept_clients(struct server *s)
{
    struct lh_error err;
    pid_t pid;

    for (;;) {
        int fd = ipc_listener_accept(&s->listener, &pid, &err);
        if (fd >= 0) {
            add_client(s, fd, pid);
            continue;
        }
        if (err.code != LH_UNAVAILABLE)
            lh_warn("accept", "%s", err.message);
        return;
    }
}

/* A request that waits is kept, and is answered when it comes through here again. */
static int answer(struct server *s, struct client *c, Longhaul__Kv__V1__Request *request,
                  struct lh_error *err)
{
    struct kv_reply reply;
    bool ready = c->peer.ready;

    c->waiting = request;
    if (!kv_service_handle(s->service, &c->peer, request, &reply))
        return 0;
    int r =
        ipc_send(c->fd, &reply.message.base, &s->service->segment.fd, reply.with_segment, 0, err);
    kv_reply_finish(&reply);
    c->waiting = NULL;
    lh_message_free(&request->base);
    if (c->peer.ready && !ready)
        lh_info("client", "client=%s pid=%d", c->peer.name, c->peer.pid);
    return r;
}

/* A client leaves at most some small replies unread (kvstore/client/link.c), so the next one always
 * finds room; a client whose reply does not is broken and goes. */
static int serve(struct server *s, struct client *c, struct lh_error *err)
{
    if (c->waiting) /* only its end can have been polled */
        return lh_fail(err, LH_UNAVAILABLE, "the client is gone");
    Longhaul__Kv__V1__Request *request =
        (void *)ipc_recv(c->fd, &longhaul__kv__v1__request__descriptor, NULL, NULL, 0, err);
    if (!request)
        return err->code == LH_DEADLINE_EXCEEDED ? 0 : err->code;
    return answer(s, c, request, err);
}

/* Backwards, because the last client takes a removed one's place. */
static void serve_clients(struct server *s, unsigned polled)
{
    struct lh_error err;

    for (unsigned i = polled; i-- > 0;) {
        if (!s->polls[FIRST_CLIENT + i].revents || serve(s, s->clients[i], &err) == 0)
            continue;
        if (err.code != LH_UNAVAILABLE)
            lh_warn("client-dropped", "pid=%d: %s", s->clients[i]->peer.pid, err.message);
        remove_client(s, i);
    }
}

/* After a tier has got on, or time has. */
static void serve_waiting(struct server *s)
{
    struct lh_error err;

    for (unsigned i = s->n; i-- > 0;)
        if (s->clients[i]->waiting && answer(s, s->clients[i], s->clients[i]->waiting, &err) < 0)
            remove_client(s, i);
}

static void expire(struct server *s)
{
    int64_t now_us = lh_now_us();

    if (now_us / 1000 < s->expire_at_ms)
        return;
    for (unsigned i = 0; i < s->n; i++)
        kv_service_expire(s->service, &s->clients[i]->peer, now_us);
    s->expire_at_ms = now_us / 1000 + EXPIRE_MS;
}

/* Ends what still holds on to the memory, and lets it go. */
static void give_up(struct server *s)
{
    for (unsigned i = 0; i < s->n; i++)
        kv_service_forget(s->service, &s->clients[i]->peer);
    kv_service_give_up(s->service);
    kv_lent_gave(s->lent);
}

/* Half of the time that arbiterd leaves is for writing what is to be written, and for what is being
 * copied: whoever copies on into memory that has gone fills it again.  It ends early when nothing
 * of either is left. */
static void follow_arbiter(struct server *s)
{
    int64_t now_us = lh_now_us(), deadline_us;

    if (!s->lent)
        return;
    if (kv_lent_returned(s->lent))
        kv_service_return(s->service);
    if (!kv_lent_wants(s->lent, &deadline_us))
        return;
    if (!s->service->away) {
        s->give_up_at_us = now_us + (deadline_us - now_us) / 2;
        kv_service_leave(s->service, s->lent->keeps_late);
    }
    if (kv_service_is_quiet(s->service) || now_us >= s->give_up_at_us)
        give_up(s);
}

static int timeout_of(const struct server *s, bool work)
{
    int64_t deadline_us;

    if (work)
        return 0;
    if (s->lent && kv_lent_wants(s->lent, &deadline_us)) {
        int left = lh_ms_left(s->give_up_at_us / 1000 + 1);
        return left < EXPIRE_MS ? left : EXPIRE_MS;
    }
    for (unsigned i = 0; i < s->n; i++)
        if (s->clients[i]->peer.n_grants || s->clients[i]->waiting)
            return EXPIRE_MS;
    if (s->service->disk.paced_us > lh_now_us()) /* something may wait for its turn */
        return EXPIRE_MS;
    return s->service->disk.n_stale ? KV_DISK_FLUSH_MS : IDLE_MS;
}

static int wait_for_requests(struct server *s, int timeout, struct lh_error *err)
{
    for (unsigned i = 0; i < s->n; i++)
        s->polls[FIRST_CLIENT + i] =
            (struct pollfd){.fd = s->clients[i]->fd, .events = s->clients[i]->waiting ? 0 : POLLIN};
    s->polls[LISTEN] = ipc_listener_poll(&s->listener);
    timeout = ipc_listener_timeout(&s->listener, timeout);
    if (poll(s->polls, FIRST_CLIENT + s->n, timeout) >= 0)
        return 0;
    for (unsigned i = 0; i < FIRST_CLIENT + s->n; i++)
        s->polls[i].revents = 0;
    return errno == EINTR ? 0 : lh_fail_errno(err, errno, "poll");
}

static void clear(int event_fd)
{
    uint64_t count;

    if (read(event_fd, &count, sizeof count) < 0 && errno != EAGAIN)
        lh_warn("event", "errno=%d", errno);
}

static int loop(struct server *s, struct lh_error *err)
{
    bool work = false;

    for (;;) {
        int r = wait_for_requests(s, timeout_of(s, work), err);
        if (r < 0)
            return r;
        if (s->polls[STOP].revents)
            return 0;
        serve_clients(s, s->n);
        if (s->polls[LISTEN].revents)
            accept_clients(s);
        expire(s);
        for (int other = DISK; other <= ARBITER; other++)
            if (s->polls[other].revents)
                clear(s->polls[other].fd);
        if (s->metrics)
            metrics_step(s->metrics);
        work = kv_service_work(s->service);
        follow_arbiter(s);
        if (s->lent && kv_lent_lost(s->lent))
            return lh_fail(err, LH_UNAVAILABLE, "arbiterd is gone, and the memory with it");
        serve_waiting(s);
    }
}

/* By a STAT of its own. */
static char *metrics_text(void *service)
{
    Longhaul__Kv__V1__StatRequest stat = LONGHAUL__KV__V1__STAT_REQUEST__INIT;
    Longhaul__Kv__V1__Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_peer self = {.ready = true};
    struct kv_reply reply;

    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_STAT;
    q.stat = &stat;
    kv_service_handle(service, &self, &q, &reply);
    bool ok = reply.message.body_case == LONGHAUL__KV__V1__REPLY__BODY_STAT;
    char *text = ok ? kv_metrics_text(&reply.body.stat, NULL) : NULL;
    kv_reply_finish(&reply);
    return text;
}

static int start_metrics(struct server *s, const char *address, struct lh_error *err)
{
    s->polls[METRICS] = (struct pollfd){.fd = -1};
    if (!*address)
        return 0;
    s->metrics = metrics_serve(address, METRICS_BY_OWNER, metrics_text, s->service, err);
    if (!s->metrics)
        return err->code;
    s->polls[METRICS] = (struct pollfd){.fd = metrics_fd(s->metrics), .events = POLLIN};
    return 0;
}

int kv_server_run(struct kv_service *service, const struct kv_server_options *o,
                  struct lh_error *err)
{
    struct server *s = calloc(1, sizeof *s);

    if (!s)
        return lh_fail_errno(err, ENOMEM, "server");
    s->service = service;
    s->polls[STOP] = (struct pollfd){.fd = o->stop_fd, .events = POLLIN};
    s->polls[DISK] = (struct pollfd){.fd = service->disk.event_fd, .events = POLLIN};
    s->polls[REMOTE] = (struct pollfd){.fd = service->remote.event_fd, .events = POLLIN};
    s->polls[ARBITER] = (struct pollfd){.fd = o->lent ? o->lent->bell_fd : -1, .events = POLLIN};
    s->lent = o->lent;
    s->listener.fd = o->listen_fd;
    int r = start_metrics(s, o->metrics, err);
    if (r == 0)
        r = loop(s, err);
    metrics_stop(s->metrics);
    while (s->n)
        remove_client(s, 0);
    free(s);
    return r;
}
