/* Client of arbiterd: what a process asks it for, over one socket.
 *
 * A caller sends its request and sleeps until the thread of arbiter_listen.c has filled in the
 * answer.  One call at a time per client: `calling` serialises them. */
#include "proto/arbiter.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/arbiter_client.h"
#include "proto/clock.h"
#include "proto/ipc.h"
#include "proto/log.h"
#include "proto/parse.h"
#include "proto/wait.h"

LH_LOG_COMPONENT("arbiter");

enum { CONNECT_MS = 10000, MARGIN_MS = 2000 };

int arbiter_send(struct arbiter *a, Longhaul__Arbiter__V1__ClientMessage *m, struct lh_error *err)
{
    return ipc_send(a->fd, &m->base, NULL, 0, ARBITER_CALL_MS, err);
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
    if (arbiter_send(a, m, err) < 0)
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
    lh_automsg(Longhaul__Arbiter__V1__ServerMessage) answer = call(a, &m, ARBITER_CALL_MS, err);
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
    int r = pthread_create(&a->thread, NULL, arbiter_listen, a);
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
    if (arbiter_send(a, &m, &err) < 0)
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
    lh_automsg(Longhaul__Arbiter__V1__ServerMessage) answer = call(a, m, ARBITER_CALL_MS, err);
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

/* Takes over `r`, which says where and how; NULL when arbiterd refuses it, or r is NULL. */
static struct arbiter_region *declare(struct arbiter *a, struct arbiter_region *r,
                                      Longhaul__Arbiter__V1__Class class, size_t bytes,
                                      struct lh_error *err)
{
    Longhaul__Arbiter__V1__ClientMessage m = LONGHAUL__ARBITER__V1__CLIENT_MESSAGE__INIT;
    Longhaul__Arbiter__V1__DeclareRequest d = LONGHAUL__ARBITER__V1__DECLARE_REQUEST__INIT;
    Longhaul__Arbiter__V1__Region region = LONGHAUL__ARBITER__V1__REGION__INIT;
    char name[sizeof r->name];

    if (!r)
        return NULL;
    memcpy(name, r->name, sizeof name);
    region.name = name;
    region.class_ = class;
    region.bytes = bytes;
    region.phases = r->phases;
    region.park = r->park;
    region.device = r->on_device;
    region.own_file = r->own_file;
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
    struct arbiter_region *r =
        declare(a, arbiter_region_create(name, phases, park, false, err), class, bytes, err);
    if (!r)
        return err->code;
    *addr = r->addr;
    return 0;
}

int arbiter_declare_file(struct arbiter *a, const char *name, Longhaul__Arbiter__V1__Class class,
                         size_t bytes, unsigned phases, int *fd, struct lh_error *err)
{
    struct lh_error local;

    err = err ? err : &local;
    struct arbiter_region *r =
        arbiter_region_create(name, phases, LONGHAUL__ARBITER__V1__PARK__PARK_DISCARD, false, err);
    if (r)
        r->own_file = true;
    r = declare(a, r, class, bytes, err);
    if (!r)
        return err->code;
    *fd = lh_steal_fd(&r->file_fd);
    return 0;
}

int arbiter_declare_device(struct arbiter *a, const char *name, Longhaul__Arbiter__V1__Class class,
                           size_t bytes, unsigned phases, Longhaul__Arbiter__V1__Park park,
                           uint64_t *addr, struct lh_error *err)
{
    struct lh_error local;

    err = err ? err : &local;
    struct arbiter_region *r =
        declare(a, arbiter_region_create(name, phases, park, true, err), class, bytes, err);
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
        call(a, &m, deadline_ms + ARBITER_CALL_MS + MARGIN_MS, err);
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
