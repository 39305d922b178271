/* The listening half of the client: one thread owns reading the socket.  It maps what is granted,
 * gives back what is revoked, tells of phases, and leaves answers for whoever waits in arbiter.c.
 *
 * Revocations are served here and not in the caller's thread, so that a leader can wait for a
 * switch while its own regions are taken from it.  Callbacks run here, without the lock. */
#include <string.h>
#include <unistd.h>

#include "proto/arbiter_client.h"
#include "proto/clock.h"
#include "proto/ipc.h"
#include "proto/log.h"
#include "proto/parse.h"

LH_LOG_COMPONENT("arbiter");

enum { POLL_MS = 200 };

static struct arbiter_region *find_region(struct arbiter *a, const char *name)
{
    if (a->declaring && !strcmp(a->declaring->name, name))
        return a->declaring;
    for (struct arbiter_region *r = a->regions; r; r = r->next)
        if (!strcmp(r->name, name))
            return r;
    return NULL;
}

static int take_grant(struct arbiter *a, const Longhaul__Arbiter__V1__Grant *g, const int *fds,
                      size_t n_fds, struct lh_error *err)
{
    LH_LOCKED(&a->lock);
    struct arbiter_region *r = g->region ? find_region(a, g->region->name) : NULL;

    if (!r || g->n_bytes != n_fds)
        return lh_fail(err, LH_INTERNAL, "arbiterd granted what was not asked for");
    if (r->own_file)
        return n_fds == 1 ? arbiter_region_take_file(r, fds[0], err)
                          : lh_fail(err, LH_INTERNAL, "arbiterd granted no file");
    if (!r->on_device)
        return arbiter_region_map(r, g->region->bytes, g->bytes, fds, n_fds, g->writable, err);
    if (g->n_ids != n_fds)
        return lh_fail(err, LH_INTERNAL, "arbiterd granted device chunks without their numbers");
    int rc = arbiter_device_map(&r->device, &a->imports, g->region->bytes, g->bytes, g->ids, fds,
                                n_fds, err);
    return rc ? lh_wrap(err, "region %s", r->name) : 0;
}

/* Everything the next phase does not grant is parked and unmapped.  Returns the bytes still mapped
 * of what had to go. */
static uint64_t give_back(struct arbiter *a, unsigned next)
{
    struct lh_error err;
    uint64_t kept = 0;

    LH_LOCKED(&a->lock);
    a->phase = 0;
    for (struct arbiter_region *r = a->regions; r; r = r->next) {
        if (r->phases >> next & 1 || !(r->mapped || r->device.mapped))
            continue;
        int rc = r->on_device
                     ? arbiter_device_unmap(&r->device,
                                            r->park == LONGHAUL__ARBITER__V1__PARK__PARK_HOST, &err)
                     : arbiter_region_unmap(r, &err);
        if (rc < 0) {
            lh_err("unmap", "%s: %s", r->name, err.message);
            kept += r->mapped + r->device.mapped;
        }
    }
    return kept;
}

static int handle_revoke(struct arbiter *a, const Longhaul__Arbiter__V1__Revoke *r,
                         struct lh_error *err)
{
    Longhaul__Arbiter__V1__ClientMessage m = LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__INIT;
    Longhaul__Arbiter__V1__RevokeAck ack = LONGHAUL__ARBITER__V1__REVOKE_ACK__INIT;
    enum arbiter_phase next = (enum arbiter_phase)r->next;

    if (next < ARBITER_ROLLOUT || next > ARBITER_SYNC)
        return lh_fail(err, LH_INVALID_ARGUMENT, "arbiterd revokes for a phase %d", (int)next);
    if (a->on_revoke && a->on_revoke(a->ctx, next, lh_now_ms() + r->deadline_ms) < 0)
        return lh_fail(err, LH_DEADLINE_EXCEEDED, "%s could not stop for the next phase",
                       a->client);
    ack.mapped_bytes = give_back(a, next);
    ack.epoch = r->epoch;
    m.body_case = LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__BODY_REVOKE_ACK;
    m.revoke_ack = &ack;
    return arbiter_send(a, &m, err);
}

static void handle_started(struct arbiter *a, const Longhaul__Arbiter__V1__PhaseStarted *s)
{
    pthread_mutex_lock(&a->lock);
    a->phase = (enum arbiter_phase)s->phase;
    a->epoch = s->epoch;
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->lock);
    if (a->on_phase)
        a->on_phase(a->ctx, (enum arbiter_phase)s->phase, s->epoch);
}

/* Takes the message when it answers a call. */
static bool keep_answer(struct arbiter *a, Longhaul__Arbiter__V1__ServerMessage *m)
{
    LH_LOCKED(&a->lock);
    if (!m->call || m->call != a->call)
        return false;
    lh_message_free(a->answer ? &a->answer->base : NULL);
    a->answer = m;
    a->answered = m->call;
    pthread_cond_broadcast(&a->changed);
    return true;
}

static int handle(struct arbiter *a, Longhaul__Arbiter__V1__ServerMessage *m, const int *fds,
                  size_t n_fds, struct lh_error *err)
{
    switch (m->body_case) {
    case LONGHAUL__ARBITER__V1__SERVER_MESSAGE__BODY_GRANT:
        return take_grant(a, m->grant, fds, n_fds, err);
    case LONGHAUL__ARBITER__V1__SERVER_MESSAGE__BODY_REVOKE:
        return handle_revoke(a, m->revoke, err);
    case LONGHAUL__ARBITER__V1__SERVER_MESSAGE__BODY_STARTED:
        handle_started(a, m->started);
        return 0;
    default:
        return 0; /* the answer to a call */
    }
}

static int receive_one(struct arbiter *a, struct lh_error *err)
{
    int fds[IPC_MAX_FDS];
    size_t n_fds = IPC_MAX_FDS;
    Longhaul__Arbiter__V1__ServerMessage *m = (void *)ipc_recv(
        a->fd, &longhaul__arbiter__v1__server_message__descriptor, fds, &n_fds, POLL_MS, err);

    if (!m)
        return err->code == LH_DEADLINE_EXCEEDED ? 0 : err->code;
    int r = handle(a, m, fds, n_fds, err);
    for (size_t i = 0; i < n_fds; i++)
        close(fds[i]);
    if (!keep_answer(a, m))
        lh_message_free(&m->base);
    return r;
}

void *arbiter_listen(void *arg)
{
    struct arbiter *a = arg;
    struct lh_error err = {0};
    bool stop = false;

    while (!stop && receive_one(a, &err) == 0) {
        LH_LOCKED(&a->lock);
        stop = a->stop;
    }
    pthread_mutex_lock(&a->lock);
    if (!stop && !a->stop)
        lh_err("lost", "%s: %s", a->client, err.message);
    a->lost = !a->stop;
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->lock);
    return NULL;
}
