#include "trainer/arbiter/node.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/cuda_driver.h"
#include "proto/file.h"
#include "proto/ipc.h"
#include "proto/log.h"
#include "proto/parse.h"
#include "trainer/arbiter/holders.h"

LH_LOG_COMPONENT("arbiterd");

enum { SEND_MS = 2000, DEATH_MS = 5000 };

struct pool *node_pool(struct node *n, const struct region *r)
{
    return r->on_device ? &n->device : &n->pool;
}

int node_init(struct node *n, const char *state_path, size_t chunk_bytes, size_t device_chunk_bytes,
              struct lh_error *err)
{
    unsigned long long epoch = 0;

    memset(n, 0, sizeof *n);
    for (size_t i = 0; i < NODE_CLIENTS; i++)
        n->clients[i].fd = n->clients[i].pidfd = -1;
    pool_init(&n->pool, chunk_bytes, false);
    pool_init(&n->device, device_chunk_bytes, true);
    n->phase = LONGHAUL__ARBITER__V1__PHASE__PHASE_SYNC;
    n->state_path = strdup(state_path);
    if (!n->state_path)
        return lh_fail_errno(err, ENOMEM, "starting");
    lh_autofclose FILE *f = fopen(state_path, "re");
    if (f && fscanf(f, "phase=%*d next=%*d epoch=%llu", &epoch) == 1)
        n->epoch = epoch + 1;
    return node_record(n, err);
}

void node_finish(struct node *n)
{
    for (size_t i = 0; i < NODE_CLIENTS; i++) {
        struct client *c = &n->clients[i];
        if (c->fd < 0)
            continue;
        for (size_t k = 0; k < c->n_regions; k++)
            node_end_region(n, &c->regions[k]);
        close(c->fd);
        if (c->pidfd >= 0)
            close(c->pidfd);
    }
    for (size_t i = 0; i < n->n_shared; i++)
        close(n->shared[i].fd);
    pool_finish(&n->pool);
    pool_finish(&n->device);
    free(n->state_path);
}

int node_send(struct client *c, Longhaul__Arbiter__V1__ServerMessage *m, const int *fds,
              size_t n_fds, struct lh_error *err)
{
    int r = ipc_send(c->fd, &m->base, fds, n_fds, SEND_MS, err);

    return r < 0 ? lh_wrap(err, "to %s", *c->name ? c->name : "a new client") : 0;
}

int node_add_client(struct node *n, int fd, pid_t pid, struct lh_error *err)
{
    for (size_t i = 0; i < NODE_CLIENTS; i++) {
        struct client *c = &n->clients[i];
        if (c->fd >= 0)
            continue;
        *c = (struct client){.fd = fd, .pid = pid};
        c->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
        c->acked = true; /* it holds nothing yet */
        return 0;
    }
    close(fd);
    return lh_fail(err, LH_RESOURCE_EXHAUSTED, "more than %d clients", NODE_CLIENTS);
}

static bool any_chunk(const void *ctx, ino_t inode)
{
    const struct node *n = ctx;

    for (size_t i = 0; i < n->pool.n; i++)
        if (n->pool.chunks[i].inode == inode)
            return true;
    return false;
}

/* A clean client has unmapped before it closed; one that died has no memory any more. */
static void make_it_let_go(const struct node *n, const struct client *c)
{
    struct pollfd p = {c->pidfd, POLLIN, 0};

    if (c->pidfd < 0 || !(c->on_device || c->n_regions) ||
        !(c->on_device || holders_mapped_bytes(c->pid, any_chunk, n)))
        return;
    lh_warn("kill", "client=%s pid=%d keeps memory it must give back", c->name, (int)c->pid);
    syscall(SYS_pidfd_send_signal, c->pidfd, SIGKILL, NULL, 0);
    if (poll(&p, 1, DEATH_MS) <= 0)
        lh_err("kill", "client=%s pid=%d does not die", c->name, (int)c->pid);
}

void node_drop_client(struct node *n, struct client *c, const char *why)
{
    bool other = false; /* several clients in one process: its mappings are not this one's alone */

    lh_info("drop", "client=%s pid=%d: %s", c->name, (int)c->pid, why);
    for (size_t i = 0; i < NODE_CLIENTS; i++)
        other |= &n->clients[i] != c && n->clients[i].fd >= 0 && n->clients[i].pid == c->pid;
    if (!other)
        make_it_let_go(n, c);
    if (n->sw.running && *c->name && n->sw.n_dropped < NODE_CLIENTS)
        memcpy(n->sw.dropped[n->sw.n_dropped++], c->name, NODE_NAME);
    if (n->sw.leader == c)
        n->sw.leader = NULL;
    for (size_t i = 0; i < c->n_regions; i++)
        node_end_region(n, &c->regions[i]);
    close(c->fd);
    if (c->pidfd >= 0)
        close(c->pidfd);
    c->fd = c->pidfd = -1;
}

static bool name_taken(const struct node *n, const struct client *self, const char *name,
                       bool leader)
{
    for (size_t i = 0; i < NODE_CLIENTS; i++) {
        const struct client *c = &n->clients[i];
        if (c != self && c->fd >= 0 && (!strcmp(c->name, name) || (leader && c->leader)))
            return true;
    }
    return false;
}

static int hello(struct node *n, struct client *c, uint64_t call,
                 const Longhaul__Arbiter__V1__HelloRequest *q, struct lh_error *err)
{
    Longhaul__Arbiter__V1__ServerMessage m = LONGHAUL__ARBITER__V1__SERVER_MESSAGE__INIT;
    Longhaul__Arbiter__V1__HelloReply h = LONGHAUL__ARBITER__V1__HELLO_REPLY__INIT;

    if (q->protocol != NODE_PROTOCOL)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "client speaks protocol %u, this arbiterd %d: use one version of Longhaul",
                       q->protocol, NODE_PROTOCOL);
    if (!*q->client || strlen(q->client) >= NODE_NAME)
        return lh_fail(err, LH_INVALID_ARGUMENT, "a client needs a name of 1..%d bytes",
                       NODE_NAME - 1);
    if (name_taken(n, c, q->client, q->leader))
        return lh_fail(err, LH_ALREADY_EXISTS, "there is a client %s, or a leader, already",
                       q->client);
    snprintf(c->name, sizeof c->name, "%s", q->client);
    c->leader = q->leader;
    h.protocol = NODE_PROTOCOL;
    h.phase = n->phase;
    h.epoch = n->epoch;
    h.chunk_bytes = n->pool.chunk_bytes;
    h.device_chunk_bytes = cuda_driver(NULL) ? n->device.chunk_bytes : 0;
    h.backend = (char *)(h.device_chunk_bytes ? "cuda" : "host");
    m.call = call;
    m.body_case = LONGHAUL__ARBITER__V1__SERVER_MESSAGE__BODY_HELLO;
    m.hello = &h;
    return node_send(c, &m, NULL, 0, err);
}

static uint64_t lent_to(const struct client *c)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < c->n_regions; i++)
        sum += c->regions[i].chunks ? c->regions[i].bytes : node_file_bytes(&c->regions[i]);
    return sum;
}

static uint64_t file_bytes(const struct client *c)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < c->n_regions; i++)
        sum += node_file_bytes(&c->regions[i]);
    return sum;
}

static int stat_reply(struct node *n, struct client *to, uint64_t call, struct lh_error *err)
{
    Longhaul__Arbiter__V1__ServerMessage m = LONGHAUL__ARBITER__V1__SERVER_MESSAGE__INIT;
    Longhaul__Arbiter__V1__StatReply s = LONGHAUL__ARBITER__V1__STAT_REPLY__INIT;
    Longhaul__Arbiter__V1__Holder holders[NODE_CLIENTS], *list[NODE_CLIENTS];
    uint64_t files = 0;

    for (size_t i = 0; i < NODE_CLIENTS; i++) {
        struct client *c = &n->clients[i];
        if (c->fd < 0 || !*c->name)
            continue;
        Longhaul__Arbiter__V1__Holder *h = list[s.n_holders] = &holders[s.n_holders];
        longhaul__arbiter__v1__holder__init(h);
        h->client = c->name;
        h->pid = c->pid;
        h->mapped_bytes = lent_to(c);
        files += file_bytes(c);
        h->outside_bytes = holders_outside_bytes(c->pid);
        h->outside_first_bytes = c->outside_first;
        s.n_holders++;
    }
    s.holders = list;
    s.phase = n->phase;
    s.epoch = n->epoch;
    s.total_bytes = n->pool.n * n->pool.chunk_bytes + files;
    s.lent_bytes = n->pool.lent * n->pool.chunk_bytes + files;
    s.device_bytes = n->device.n * n->device.chunk_bytes + n->device_shared;
    s.device_lent_bytes = n->device.lent * n->device.chunk_bytes;
    if (cuda_driver_used_bytes() > s.device_bytes)
        s.device_outside_bytes = cuda_driver_used_bytes() - s.device_bytes;
    s.last_residual_bytes = n->last_residual;
    s.last_switch_ms = n->last_switch_ms;
    m.call = call;
    m.body_case = LONGHAUL__ARBITER__V1__SERVER_MESSAGE__BODY_STAT;
    m.stat = &s;
    return node_send(to, &m, NULL, 0, err);
}

static int dispatch(struct node *n, struct client *c, const Longhaul__Arbiter__V1__ClientMessage *m,
                    struct lh_error *err)
{
    if (!*c->name && m->body_case != LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__BODY_HELLO)
        return lh_fail(err, LH_FAILED_PRECONDITION, "say HELLO first");
    switch (m->body_case) {
    case LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__BODY_HELLO:
        return hello(n, c, m->call, m->hello, err);
    case LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__BODY_DECLARE:
        return node_declare(n, c, m->call, m->declare->region, err);
    case LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__BODY_ATTACH:
        return node_attach(n, c, m->call, m->attach->name, err);
    case LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__BODY_SWITCH_PHASE:
        return node_switch_begin(n, c, m->call, m->switch_phase, err);
    case LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__BODY_REVOKE_ACK:
        node_revoke_acked(n, c, m->revoke_ack);
        return 0;
    case LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__BODY_STAT:
        return stat_reply(n, c, m->call, err);
    default:
        return lh_fail(err, LH_UNIMPLEMENTED, "unknown request %d", (int)m->body_case);
    }
}

/* A refused request is answered; only a broken connection costs the client its leases. */
int node_receive(struct node *n, struct client *c, struct lh_error *err)
{
    size_t n_fds = 0;
    lh_automsg(ProtobufCMessage) raw =
        ipc_recv(c->fd, &longhaul__arbiter__v1__client_message__descriptor, NULL, &n_fds, 0, err);

    if (!raw)
        return err->code;
    const Longhaul__Arbiter__V1__ClientMessage *q = (const void *)raw;
    Longhaul__Arbiter__V1__ServerMessage m = LONGHAUL__ARBITER__V1__SERVER_MESSAGE__INIT;
    Longhaul__Arbiter__V1__Failure f = LONGHAUL__ARBITER__V1__FAILURE__INIT;
    struct lh_error refused = {0};
    if (dispatch(n, c, q, &refused) == 0)
        return 0;
    lh_warn("refuse", "client=%s: %s", c->name, refused.message);
    f.code = refused.code;
    f.message = refused.message;
    m.call = q->call;
    m.body_case = LONGHAUL__ARBITER__V1__SERVER_MESSAGE__BODY_FAILURE;
    m.failure = &f;
    return node_send(c, &m, NULL, 0, err);
}
