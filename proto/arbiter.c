/* Client of arbiterd: one socket, one background thread that owns reading it.
 *
 * A caller sends its request and sleeps until the thread has filled in the answer; events (grants,
 * revocations, phase starts) are handled by the thread itself.  So a leader can wait for a switch
 * while its own regions are being revoked.  One call at a time per client: `calling` serialises
 * them. */
#include "proto/arbiter.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "proto/arbiter_region.h"
#include "proto/clock.h"
#include "proto/ipc.h"
#include "proto/log.h"
#include "proto/parse.h"
#include "proto/wait.h"

LH_LOG_COMPONENT("arbiter");

enum { CALL_MS = 10000, CONNECT_MS = 10000, POLL_MS = 200, MARGIN_MS = 2000 };

struct arbiter {
    int fd;
    char client[64];
    int (*on_revoke)(void *ctx, enum arbiter_phase next, int64_t deadline_ms);
    void (*on_phase)(void *ctx, enum arbiter_phase phase, uint64_t epoch);
    void *ctx;
    pthread_t thread;
    pthread_mutex_t lock, calling;
    pthread_cond_t changed;
    struct arbiter_region *regions; /* under lock */
    struct arbiter_imports imports; /* likewise */
    enum arbiter_phase phase;       /* 0 while a switch runs */
    uint64_t epoch;
    bool lost, stop;
    uint64_t call, answered;
    Longhaul__Arbiter__V1__ServerMessage *answer; /* of `answered` */
    struct arbiter_region *declaring;             /* its grant is on the way */
};

static int send_message(struct arbiter *a, Longhaul__Arbiter__V1__ClientMessage *m,
                        struct lh_error *err)
{
    return ipc_send(a->fd, &m->base, NULL, 0, CALL_MS, err);
}

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
    return send_message(a, &m, err);
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

static void *listen_loop(void *arg)
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

/* Waits under the lock; false when the deadline has passed. */
static bool wait_changed(struct arbiter *a, int64_t deadline_ms)
{
    return lh_wait_until(&a->changed, &a->lock, deadline_ms);
}

/* Sends a request and returns arbiterd's answer, or NULL with the failure. */
static Longhaul__Arbiter__V1__ServerMessage *call(struct arbiter *a,
                                                  Longhaul__Arbiter__V1__ClientMessage *m,
                                                  int timeout_ms, struct lh_error *err)
{
    int64_t deadline = lh_now_ms() + timeout_ms;

    pthread_mutex_lock(&a->lock);
    m->call = ++a->call;
    pthread_mutex_unlock(&a->lock);
    if (send_message(a, m, err) < 0)
        return NULL;
    LH_LOCKED(&a->lock);
    while (a->answered != m->call && !a->lost)
        if (!wait_changed(a, deadline))
            return lh_fail(err, LH_UNAVAILABLE, "arbiterd did not answer within %d ms", timeout_ms),
                   NULL;
    if (a->answered != m->call)
        return lh_fail(err, LH_UNAVAILABLE, "arbiterd is gone"), NULL;
    Longhaul__Arbiter__V1__ServerMessage *answer = lh_steal(&a->answer);
    if (answer->body_case != LONGHAUL__ARBITER__V1__SERVER_MESSAGE__BODY_FAILURE)
        return answer;
    lh_fail(err, answer->failure->code, "%s", answer->failure->message);
    lh_message_free(&answer->base);
    return NULL;
}

static int say_hello(struct arbiter *a, bool leader, struct lh_error *err)
{
    Longhaul__Arbiter__V1__ClientMessage m = LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__INIT;
    Longhaul__Arbiter__V1__HelloRequest h = LONGHAUL__ARBITER__V1__HELLO_REQUEST__INIT;

    h.protocol = 1;
    h.client = a->client;
    h.leader = leader;
    m.body_case = LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__BODY_HELLO;
    m.hello = &h;
    lh_automsg(Longhaul__Arbiter__V1__ServerMessage) answer = call(a, &m, CALL_MS, err);
    if (!answer)
        return err ? err->code : LH_UNAVAILABLE;
    if (answer->body_case != LONGHAUL__ARBITER__V1__SERVER_MESSAGE__BODY_HELLO)
        return lh_fail(err, LH_INTERNAL, "arbiterd answered something else than HELLO");
    LH_LOCKED(&a->lock);
    if (!a->epoch) { /* else an event has overtaken the answer */
        a->phase = (enum arbiter_phase)answer->hello->phase;
        a->epoch = answer->hello->epoch;
    }
    return 0;
}

static int start_thread(struct arbiter *a, struct lh_error *err)
{
    pthread_cond_init(&a->changed, NULL);
    pthread_mutex_init(&a->lock, NULL);
    pthread_mutex_init(&a->calling, NULL);
    int r = pthread_create(&a->thread, NULL, listen_loop, a);
    return r ? lh_fail_errno(err, r, "thread for arbiterd") : 0;
}

struct arbiter *arbiter_connect(const struct arbiter_options *o, struct lh_error *err)
{
    struct arbiter *a = calloc(1, sizeof *a);
    struct lh_error local = {0};

    if (!a)
        return lh_fail_errno(err, ENOMEM, "connecting to arbiterd"), NULL;
    err = err ? err : &local;
    snprintf(a->client, sizeof a->client, "%s", o->client);
    a->on_revoke = o->on_revoke;
    a->on_phase = o->on_phase;
    a->ctx = o->ctx;
    a->fd = ipc_connect(o->path, CONNECT_MS, err);
    if (a->fd < 0 || start_thread(a, err) < 0) {
        lh_wrap(err, "connecting to arbiterd at %s", o->path);
        if (a->fd >= 0)
            close(a->fd);
        free(a);
        return NULL;
    }
    if (say_hello(a, o->leader, err) < 0) {
        arbiter_destroy(a);
        return NULL;
    }
    return a;
}

/* Mappings on the GPU show in no file of /proc: without this word arbiterd ends the process. */
static void say_goodbye(struct arbiter *a)
{
    Longhaul__Arbiter__V1__ClientMessage m = LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__INIT;
    Longhaul__Arbiter__V1__RevokeAck ack = LONGHAUL__ARBITER__V1__REVOKE_ACK__INIT;
    struct lh_error err;

    ack.leaving = true;
    m.body_case = LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__BODY_REVOKE_ACK;
    m.revoke_ack = &ack;
    if (send_message(a, &m, &err) < 0)
        lh_warn("goodbye", "%s", err.message);
}

void arbiter_destroy(struct arbiter *a)
{
    if (!a)
        return;
    pthread_mutex_lock(&a->lock);
    a->stop = true;
    pthread_mutex_unlock(&a->lock);
    shutdown(a->fd, SHUT_RD); /* wakes the thread; the socket itself closes after the unmapping */
    pthread_join(a->thread, NULL);
    while (a->regions) {
        struct arbiter_region *r = a->regions;
        a->regions = r->next;
        arbiter_region_destroy(r);
    }
    if (a->imports.n)
        say_goodbye(a);
    arbiter_imports_finish(&a->imports);
    close(a->fd);
    lh_message_free(a->answer ? &a->answer->base : NULL);
    pthread_cond_destroy(&a->changed);
    pthread_mutex_destroy(&a->lock);
    pthread_mutex_destroy(&a->calling);
    free(a);
}

/* Declares or attaches: the grant maps into `declaring`, which joins the list when the call is
 * done. */
static struct arbiter_region *acquire(struct arbiter *a, struct arbiter_region *r,
                                      Longhaul__Arbiter__V1__ClientMessage *m, struct lh_error *err)
{
    LH_LOCKED(&a->calling);
    pthread_mutex_lock(&a->lock);
    a->declaring = r;
    pthread_mutex_unlock(&a->lock);
    lh_automsg(Longhaul__Arbiter__V1__ServerMessage) answer = call(a, m, CALL_MS, err);
    LH_LOCKED(&a->lock);
    a->declaring = NULL;
    if (!answer) {
        arbiter_region_destroy(r);
        return NULL;
    }
    r->next = a->regions;
    a->regions = r;
    return r;
}

static struct arbiter_region *declare(struct arbiter *a, const char *name,
                                      Longhaul__Arbiter__V1__Class class, size_t bytes,
                                      unsigned phases, Longhaul__Arbiter__V1__Park park,
                                      bool on_device, struct lh_error *err)
{
    Longhaul__Arbiter__V1__ClientMessage m = LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__INIT;
    Longhaul__Arbiter__V1__DeclareRequest d = LONGHAUL__ARBITER__V1__DECLARE_REQUEST__INIT;
    Longhaul__Arbiter__V1__Region region = LONGHAUL__ARBITER__V1__REGION__INIT;
    struct arbiter_region *r = arbiter_region_create(name, phases, park, on_device, err);

    if (!r)
        return NULL;
    region.name = r->name;
    region.class_ = class;
    region.bytes = bytes;
    region.phases = r->phases;
    region.park = park;
    region.device = on_device;
    d.region = &region;
    m.body_case = LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__BODY_DECLARE;
    m.declare = &d;
    r = acquire(a, r, &m, err);
    if (!r)
        lh_wrap(err, "region %s", name);
    return r;
}

int arbiter_declare(struct arbiter *a, const char *name, Longhaul__Arbiter__V1__Class class,
                    size_t bytes, unsigned phases, Longhaul__Arbiter__V1__Park park, void **addr,
                    struct lh_error *err)
{
    struct lh_error local;

    err = err ? err : &local;
    struct arbiter_region *r = declare(a, name, class, bytes, phases, park, false, err);
    if (!r)
        return err->code;
    *addr = r->addr;
    return 0;
}

int arbiter_declare_device(struct arbiter *a, const char *name, Longhaul__Arbiter__V1__Class class,
                           size_t bytes, unsigned phases, Longhaul__Arbiter__V1__Park park,
                           uint64_t *addr, struct lh_error *err)
{
    struct lh_error local;

    err = err ? err : &local;
    struct arbiter_region *r = declare(a, name, class, bytes, phases, park, true, err);
    if (!r)
        return err->code;
    *addr = r->device.addr;
    return 0;
}

static struct arbiter_region *attach(struct arbiter *a, const char *name, bool on_device,
                                     struct lh_error *err)
{
    Longhaul__Arbiter__V1__ClientMessage m = LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__INIT;
    Longhaul__Arbiter__V1__AttachRequest q = LONGHAUL__ARBITER__V1__ATTACH_REQUEST__INIT;
    struct arbiter_region *r = arbiter_region_create(
        name, ARBITER_ALL_PHASES, LONGHAUL__ARBITER__V1__PARK__PARK_KEEP, on_device, err);

    if (!r)
        return NULL;
    q.name = r->name;
    m.body_case = LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__BODY_ATTACH;
    m.attach = &q;
    return acquire(a, r, &m, err);
}

int arbiter_attach(struct arbiter *a, const char *name, const void **addr, size_t *bytes,
                   struct lh_error *err)
{
    struct lh_error local;

    err = err ? err : &local;
    struct arbiter_region *r = attach(a, name, false, err);
    if (!r)
        return err->code;
    *addr = r->addr;
    *bytes = r->bytes;
    return 0;
}

int arbiter_attach_device(struct arbiter *a, const char *name, uint64_t *addr, size_t *bytes,
                          struct lh_error *err)
{
    struct lh_error local;

    err = err ? err : &local;
    struct arbiter_region *r = attach(a, name, true, err);
    if (!r)
        return err->code;
    *addr = r->device.addr;
    *bytes = r->device.bytes;
    return 0;
}

enum arbiter_phase arbiter_phase_now(const struct arbiter *a)
{
    struct arbiter *m = (struct arbiter *)a; /* the lock is not part of the value */

    LH_LOCKED(&m->lock);
    return m->phase;
}

bool arbiter_lost(const struct arbiter *a)
{
    struct arbiter *m = (struct arbiter *)a;

    LH_LOCKED(&m->lock);
    return m->lost;
}

int arbiter_wait_phase(struct arbiter *a, enum arbiter_phase phase, int64_t deadline_ms,
                       struct lh_error *err)
{
    LH_LOCKED(&a->lock);
    while (a->phase != phase && !a->lost)
        if (!wait_changed(a, deadline_ms))
            return lh_fail(err, LH_DEADLINE_EXCEEDED, "phase %d has not come", (int)phase);
    return a->lost ? lh_fail(err, LH_UNAVAILABLE, "arbiterd is gone") : 0;
}

int arbiter_switch_phase(struct arbiter *a, enum arbiter_phase phase, int deadline_ms,
                         struct arbiter_switch *out, struct lh_error *err)
{
    Longhaul__Arbiter__V1__ClientMessage m = LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__INIT;
    Longhaul__Arbiter__V1__SwitchRequest q = LONGHAUL__ARBITER__V1__SWITCH_REQUEST__INIT;
    struct lh_error local;

    err = err ? err : &local;
    q.phase = (Longhaul__Arbiter__V1__Phase)phase;
    q.deadline_ms = (uint32_t)deadline_ms;
    m.body_case = LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__BODY_SWITCH_PHASE;
    m.switch_phase = &q;
    LH_LOCKED(&a->calling);
    lh_automsg(Longhaul__Arbiter__V1__ServerMessage) answer =
        call(a, &m, deadline_ms + CALL_MS + MARGIN_MS, err);
    if (!answer)
        return lh_wrap(err, "switching the phase");
    if (answer->body_case != LONGHAUL__ARBITER__V1__SERVER_MESSAGE__BODY_SWITCHED)
        return lh_fail(err, LH_INTERNAL, "arbiterd answered something else than a switch");
    const Longhaul__Arbiter__V1__SwitchReply *s = answer->switched;
    if (out)
        *out = (struct arbiter_switch){s->epoch, s->residual_bytes, s->revoke_ms, s->grant_ms};
    if (s->residual_bytes)
        return lh_fail(err, LH_FAILED_PRECONDITION, "%llu bytes are still mapped by non-holders",
                       (unsigned long long)s->residual_bytes);
    return 0;
}
