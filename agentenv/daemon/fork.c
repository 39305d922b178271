/* Fork: one snapshot, N creates that share it.
 *
 * The children's keys are "KEY/0" … "KEY/N-1", so a fork that is asked for again, or was cut off
 * half-way, finds the children it has made and makes the rest.  The snapshot belongs to the fork:
 * it need not survive the host, since the children do not either, and is dropped once the children
 * hold its layers. */
#include <errno.h>
#include <string.h>

#include "agentenv/daemon/internal.h"
#include "agentenv/daemon/service.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/parse.h"

LH_LOG_COMPONENT("agentenvd");

enum { CHILDREN_MAX = 64, ALIVE = SB_IN(SB_RUNNING) | SB_IN(SB_FROZEN) };

static int take_fork_snapshot(struct daemon *d, const char *id, uint32_t attempt, unsigned states,
                              const char *key, int64_t deadline_ms, char snapshot[LH_ID_SIZE],
                              struct lh_error *err)
{
    struct snapshot_options o = {
        .key_kind = "fork", .key = key, .owner = "fork", .state = SB_FORKING};
    struct sandbox *s;
    int r = sandbox_begin(d, id, attempt, states, HOLD_ALONE, deadline_ms, &s, err);

    if (r < 0)
        return r;
    if (s->state == SB_DEAD)
        o.state = SB_DEAD;
    if (key)
        r = registry_find_key(d, "fork", key, snapshot, err);
    if (r == 0 && (!key || !snapshot[0]))
        r = snapshot_take(d, s, &o, snapshot, err);
    sandbox_end(d, s, HOLD_ALONE);
    return r;
}

/* Its files stay as they are while it is held alone. */
static bool stands_still(struct daemon *d, struct sandbox *s)
{
    pthread_mutex_lock(&d->lock);
    bool quiet = s->box && s->execs == 0; /* one might be about to start its command */
    pthread_mutex_unlock(&d->lock);
    return quiet && box_stands_still(s->box);
}

/* The child lies over the parent's files themselves.  A snapshot would cost as much as the child:
 * a layer, another overlay under the parent, and their removal.  1 = done, 0 = it does not stand
 * still. */
static int fork_over(struct daemon *d, const char *id, uint32_t attempt,
                     const V1(CreateRequest) * create, const struct daemon_create_options *o,
                     int64_t deadline_ms, char child[LH_ID_SIZE], struct lh_error *err)
{
    struct daemon_create_options options = *o;
    struct sandbox *s;
    int r = sandbox_begin(d, id, attempt, ALIVE | SB_IN(SB_DEAD), HOLD_ALONE, deadline_ms, &s, err);

    if (r < 0)
        return r;
    if (!stands_still(d, s)) {
        sandbox_end(d, s, HOLD_ALONE);
        return 0;
    }
    options.over = s;
    s->before = s->state;
    if (s->state != SB_DEAD)
        sandbox_set_state(d, s, SB_FORKING, 0);
    r = daemon_create(d, create, &options, deadline_ms, child, err);
    if (r < 0)
        sandbox_end_over(d, s);
    return r < 0 ? r : 1;
}

int daemon_fork_files(struct daemon *d, const char *id, uint32_t attempt,
                      const V1(CreateRequest) * req, const struct daemon_create_options *o,
                      int64_t deadline_ms, char child[LH_ID_SIZE], struct lh_error *err)
{
    V1(CreateRequest) create = *req;
    struct daemon_create_options options = o ? *o : (struct daemon_create_options){0};
    char snapshot[LH_ID_SIZE];

    create.idempotency_key = (char *)"";
    create.name = (char *)"";
    options.transient = true;
    int r = fork_over(d, id, attempt, &create, &options, deadline_ms, child, err);
    if (r != 0)
        return r < 0 ? r : 0;
    r = take_fork_snapshot(d, id, attempt, ALIVE | SB_IN(SB_DEAD), NULL, deadline_ms, snapshot,
                           err);
    if (r < 0)
        return r;
    create.source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_SNAPSHOT;
    create.snapshot = snapshot;
    r = daemon_create(d, &create, &options, deadline_ms, child, err);
    struct lh_error undo = {0};
    if (snapshot_drop(d, snapshot, true, &undo) < 0)
        lh_warn("snapshot of a fork not removed", "snapshot=%s why=%s", snapshot, undo.message);
    return r;
}

/* The parent's own words about itself, for its children. */
static int inherit(struct daemon *d, const char *id, V1(CreateRequest) * create,
                   Longhaul__Task__V1__Limits *limits, char **owner, struct lh_error *err)
{
    struct sandbox *s;
    int r = sandbox_begin(d, id, ANY_ATTEMPT, SB_ANY, HOLD_EXEC, lh_now_ms() + WAIT_DEFAULT_MS, &s,
                          err);

    if (r < 0)
        return r;
    *limits = s->limits;
    create->network = s->network;
    create->attempt = s->attempt;
    *owner = strdup(s->owner);
    create->rules = s->rules ? network_rules_for_child(s, err) : NULL;
    sandbox_end(d, s, HOLD_EXEC);
    create->limits = limits;
    create->owner = *owner;
    return *owner ? 0 : lh_fail_errno(err, ENOMEM, "fork of %s", id);
}

static int make_child(struct daemon *d, const V1(ForkRequest) * req, V1(CreateRequest) * create,
                      unsigned i, int64_t deadline_ms, V1(Sandbox) * *child, struct lh_error *err)
{
    const struct daemon_create_options o = {.fork_child = true};
    lh_autofree char *key = lh_format("%s/%u", req->idempotency_key, i);
    char id[LH_ID_SIZE];

    if (!key)
        return lh_fail_errno(err, ENOMEM, "fork of %s", req->id);
    create->idempotency_key = key;
    int r = daemon_create(d, create, &o, deadline_ms, id, err);
    if (r < 0)
        return lh_wrap(err, "child %u", i);
    *child = daemon_show(d, id, err);
    return *child ? 0 : LH_INTERNAL;
}

static int make_children(struct daemon *d, const V1(ForkRequest) * req, const char *snapshot,
                         int64_t deadline_ms, V1(ForkReply) * reply, struct lh_error *err)
{
    V1(CreateRequest) create = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__INIT;
    Longhaul__Task__V1__Limits limits;
    lh_autofree char *owner = NULL;
    int r = inherit(d, req->id, &create, &limits, &owner, err);

    create.source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_SNAPSHOT;
    create.snapshot = (char *)snapshot;
    reply->children = calloc(req->count, sizeof *reply->children);
    if (r == 0 && !reply->children)
        r = lh_fail_errno(err, ENOMEM, "fork of %s", req->id);
    lh_automsg(V1(NetworkRules)) rules = create.rules;
    for (unsigned i = 0; r == 0 && i < req->count; i++) {
        r = make_child(d, req, &create, i, deadline_ms, &reply->children[i], err);
        reply->n_children += r == 0;
    }
    return r;
}

int service_fork(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                 ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(ForkRequest) *req = (const void *)request;
    struct daemon *d = ctx;
    int64_t deadline_ms = call_deadline_ms(call);
    V1(ForkReply) *out = calloc(1, sizeof *out);
    char snapshot[LH_ID_SIZE] = "";
    int r = sandbox_check_key(req->idempotency_key, err);

    if (!out)
        return lh_fail_errno(err, ENOMEM, "fork");
    longhaul__sandbox__v1__fork_reply__init(out);
    *reply = &out->base;
    if (r == 0 && (req->count < 1 || req->count > CHILDREN_MAX))
        r = lh_fail(err, LH_INVALID_ARGUMENT, "count must be 1 to %d, not %u", CHILDREN_MAX,
                    req->count);
    if (r == 0 && req->engine[0] && strcmp(req->engine, "fsonly"))
        r = lh_fail(err, LH_INVALID_ARGUMENT, "engine \"%s\" is not offered here; see Engines",
                    req->engine);
    if (r == 0)
        r = take_fork_snapshot(d, req->id, req->attempt, ALIVE, req->idempotency_key, deadline_ms,
                               snapshot, err);
    if (r == 0)
        r = make_children(d, req, snapshot, deadline_ms, out, err);
    if (r == 0)
        r = snapshot_drop(d, snapshot, false, err);
    return r < 0 ? lh_wrap(err, "fork of %s", req->id) : 0;
}
