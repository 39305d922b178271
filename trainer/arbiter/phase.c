/* A phase switch: revoke, wait for every ack, look at what is really still mapped, grant.
 *
 * Memory is granted to the next holder only after the kernel says that the last one has unmapped
 * it.  A holder past its deadline is therefore not merely forgotten: it is killed, and waited for,
 * because its mappings end with it.  Its work is reassigned by whoever gave it (docs/DESIGN.md
 * section 1). */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "trainer/arbiter/holders.h"
#include "trainer/arbiter/node.h"

LH_LOG_COMPONENT("arbiterd");

enum { DEFAULT_DEADLINE_MS = 10000 };

/* Read by node_init() after a restart, so that no epoch is used twice.  Process death is what it
 * must survive, not the host's: hence no fsync. */
int node_record(const struct node *n, struct lh_error *err)
{
    lh_autofree char *tmp = lh_format("%s.new", n->state_path);

    if (!tmp)
        return lh_fail_errno(err, ENOMEM, "recording the phase");
    lh_autofclose FILE *f = fopen(tmp, "we");
    if (!f)
        return lh_fail_errno(err, errno, "cannot record the phase in %s", tmp);
    fprintf(f, "phase=%d next=%d epoch=%llu\n", (int)n->phase,
            (int)(n->sw.running ? n->sw.next : n->phase), (unsigned long long)n->epoch);
    if (fflush(f) || rename(tmp, n->state_path) < 0)
        return lh_fail_errno(err, errno, "cannot record the phase in %s", n->state_path);
    return 0;
}

int node_switch_timeout(const struct node *n)
{
    return n->sw.running ? lh_ms_left(n->sw.deadline_ms) : -1;
}

static void send_revoke(struct node *n, struct client *c)
{
    Longhaul__Arbiter__V1__ServerMessage m = LONGHAUL__ARBITER__V1__SERVER_MESSAGE__INIT;
    Longhaul__Arbiter__V1__Revoke r = LONGHAUL__ARBITER__V1__REVOKE__INIT;
    struct lh_error err;

    r.next = n->sw.next;
    r.epoch = n->epoch;
    r.deadline_ms = (uint32_t)lh_ms_left(n->sw.deadline_ms);
    m.body_case = LONGHAUL__ARBITER__V1__SERVER_MESSAGE__BODY_REVOKE;
    m.revoke = &r;
    c->acked = false;
    if (node_send(c, &m, NULL, 0, &err) < 0)
        node_drop_client(n, c, err.message);
}

int node_switch_begin(struct node *n, struct client *leader, uint64_t call,
                      const Longhaul__Arbiter__V1__SwitchRequest *q, struct lh_error *err)
{
    if (!leader->leader)
        return lh_fail(err, LH_PERMISSION_DENIED, "%s is not the leader", leader->name);
    if (n->sw.running)
        return lh_fail(err, LH_FAILED_PRECONDITION, "a phase switch is in progress");
    if (q->phase < 1 || q->phase > LONGHAUL__ARBITER__V1__PHASE__PHASE_SYNC)
        return lh_fail(err, LH_INVALID_ARGUMENT, "there is no phase %d", (int)q->phase);
    n->sw = (struct node_switch){.running = true, .leader = leader, .call = call, .next = q->phase};
    n->sw.started_us = lh_now_us();
    n->sw.deadline_ms = lh_now_ms() + (q->deadline_ms ? q->deadline_ms : DEFAULT_DEADLINE_MS);
    n->epoch++;
    int r = node_record(n, err);
    if (r < 0) {
        n->sw.running = false;
        return r;
    }
    for (size_t i = 0; i < NODE_CLIENTS; i++)
        if (n->clients[i].fd >= 0 && *n->clients[i].name)
            send_revoke(n, &n->clients[i]);
    return 0;
}

void node_revoke_acked(struct node *n, struct client *c,
                       const Longhaul__Arbiter__V1__RevokeAck *ack)
{
    if (ack->leaving)
        c->on_device = false;
    if (n->sw.running && ack->epoch == n->epoch) {
        c->acked = true;
        c->kept = c->on_device ? ack->mapped_bytes : 0;
    }
}

static void take_back_everything(struct node *n)
{
    for (size_t i = 0; i < NODE_CLIENTS; i++) {
        struct client *c = &n->clients[i];
        for (size_t k = 0; c->fd >= 0 && k < c->n_regions; k++)
            if (!(c->regions[k].phases >> n->sw.next & 1))
                node_take_back(n, &c->regions[k]);
    }
}

/* Whoever still maps what it said it had unmapped loses everything, its life included: the bytes
 * are about to be somebody else's.  Returns what is mapped even so. */
static uint64_t enforce_residual(struct node *n)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < NODE_CLIENTS; i++) {
        struct client *c = &n->clients[i];
        if (c->fd < 0 || !*c->name)
            continue;
        if (!c->outside_first)
            c->outside_first = holders_outside_bytes(c->pid);
        if (!node_residual(n, c) && !c->kept)
            continue;
        struct client gone = *c;
        node_drop_client(n, c, "it still maps memory after its ack");
        gone.n_regions = 0;
        sum += node_residual(n, &gone);
    }
    return sum;
}

/* What is in files that should be empty now, whoever wrote it.  They are emptied once more first:
 * who was still copying has lost it. */
static uint64_t residual_in_files(struct node *n)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < NODE_CLIENTS; i++) {
        struct client *c = &n->clients[i];
        for (size_t k = 0; c->fd >= 0 && k < c->n_regions; k++) {
            if (c->regions[k].phases >> n->sw.next & 1)
                continue;
            node_take_back(n, &c->regions[k]);
            sum += node_file_bytes(&c->regions[k]);
        }
    }
    return sum;
}

static void grant_to(struct node *n, struct client *c)
{
    Longhaul__Arbiter__V1__ServerMessage m = LONGHAUL__ARBITER__V1__SERVER_MESSAGE__INIT;
    Longhaul__Arbiter__V1__PhaseStarted s = LONGHAUL__ARBITER__V1__PHASE_STARTED__INIT;
    struct lh_error err;
    int r = 0;

    for (size_t i = 0; r == 0 && i < c->n_regions; i++)
        r = node_lend(n, c, &c->regions[i], 0, &err);
    s.phase = n->phase;
    s.epoch = n->epoch;
    m.body_case = LONGHAUL__ARBITER__V1__SERVER_MESSAGE__BODY_STARTED;
    m.started = &s;
    if (r < 0 || node_send(c, &m, NULL, 0, &err) < 0)
        node_drop_client(n, c, err.message);
}

static void answer_leader(struct node *n, double revoke_ms, double grant_ms)
{
    Longhaul__Arbiter__V1__ServerMessage m = LONGHAUL__ARBITER__V1__SERVER_MESSAGE__INIT;
    Longhaul__Arbiter__V1__SwitchReply s = LONGHAUL__ARBITER__V1__SWITCH_REPLY__INIT;
    char *names[NODE_CLIENTS];
    struct lh_error err;

    if (!n->sw.leader)
        return;
    for (size_t i = 0; i < n->sw.n_dropped; i++)
        names[i] = n->sw.dropped[i];
    s.phase = n->phase;
    s.epoch = n->epoch;
    s.residual_bytes = n->last_residual;
    s.revoke_ms = revoke_ms;
    s.grant_ms = grant_ms;
    s.n_disconnected = n->sw.n_dropped;
    s.disconnected = names;
    m.call = n->sw.call;
    m.body_case = LONGHAUL__ARBITER__V1__SERVER_MESSAGE__BODY_SWITCHED;
    m.switched = &s;
    if (node_send(n->sw.leader, &m, NULL, 0, &err) < 0)
        node_drop_client(n, n->sw.leader, err.message);
}

static void finish(struct node *n)
{
    struct lh_error err;
    int64_t revoked = lh_now_us();

    take_back_everything(n);
    n->last_residual = enforce_residual(n) + residual_in_files(n);
    n->phase = n->sw.next;
    n->sw.running = false;
    if (node_record(n, &err) < 0)
        lh_warn("record", "%s", err.message);
    for (size_t i = 0; i < NODE_CLIENTS; i++)
        if (n->clients[i].fd >= 0 && *n->clients[i].name)
            grant_to(n, &n->clients[i]);
    n->last_switch_ms = (double)(lh_now_us() - n->sw.started_us) / 1e3;
    answer_leader(n, (double)(revoked - n->sw.started_us) / 1e3,
                  (double)(lh_now_us() - revoked) / 1e3);
    lh_debug("phase", "now=%d epoch=%llu ms=%.2f residual=%llu", (int)n->phase,
             (unsigned long long)n->epoch, n->last_switch_ms, (unsigned long long)n->last_residual);
}

void node_switch_step(struct node *n)
{
    bool late = n->sw.running && lh_ms_left(n->sw.deadline_ms) == 0, waiting = false;

    for (size_t i = 0; n->sw.running && i < NODE_CLIENTS; i++) {
        struct client *c = &n->clients[i];
        if (c->fd < 0 || !*c->name || c->acked)
            continue;
        if (late)
            node_drop_client(n, c, "it did not give its memory back in time");
        else
            waiting = true;
    }
    if (n->sw.running && !waiting)
        finish(n);
}
