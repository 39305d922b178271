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

enum {
    CHILDREN_MAX = 64,
    WORKERS = 4,
    ALIVE = SB_IN(SB_RUNNING) | SB_IN(SB_FROZEN) | SB_IN(SB_HIBERNATED),
};

/* What children are made of.  Made for the fork, and dropped after it, or borrowed: the snapshot
 * that the caller named, or the checkpoint of a sandbox that is put away. */
struct source {
    char snapshot[LH_ID_SIZE];
    bool borrowed;
};

/* With processes, unless the caller wants none, nobody can, or there are none but init. */
static int choose_engine(struct daemon *d, const struct sandbox *s, const char *engine,
                         int64_t deadline_ms, bool *processes, struct lh_error *err)
{
    struct box_usage usage = {0};

    *processes = !strcmp(engine, "criu");
    if (*processes)
        return engines_need_criu(d, deadline_ms, err);
    if (engine[0])
        return strcmp(engine, "fsonly") ? lh_fail(err, LH_INVALID_ARGUMENT,
                                                  "there is no engine \"%s\"; see Engines", engine)
                                        : 0;
    *processes = engines_have_criu(d) && s->state != SB_DEAD &&
                 box_usage(s->box, &usage, NULL) == 0 && usage.processes > 1;
    return 0;
}

static int find_source(struct daemon *d, struct sandbox *s, const char *key, const char *engine,
                       int64_t deadline_ms, struct source *out, struct lh_error *err)
{
    struct snapshot_options o = {.key_kind = "fork",
                                 .key = key,
                                 .owner = "fork",
                                 .state = s->state == SB_DEAD ? SB_DEAD : SB_FORKING};
    int r = 0;

    if (s->state == SB_HIBERNATED) {
        out->borrowed = true;
        return checkpoint_of(d, s->id, out->snapshot, err);
    }
    if (key)
        r = registry_find_key(d, "fork", key, out->snapshot, err);
    if (r < 0 || out->snapshot[0])
        return r;
    r = choose_engine(d, s, engine, deadline_ms, &o.processes, err);
    return r < 0 ? r : snapshot_take(d, s, &o, out->snapshot, err);
}

static int take_source(struct daemon *d, const char *id, uint32_t attempt, unsigned states,
                       const char *key, const char *engine, int64_t deadline_ms, struct source *out,
                       struct lh_error *err)
{
    struct sandbox *s;
    int r = sandbox_begin(d, id, attempt, states, HOLD_ALONE, deadline_ms, &s, err);

    *out = (struct source){0};
    if (r < 0)
        return r;
    r = find_source(d, s, key, engine, deadline_ms, out, err);
    sandbox_end(d, s, HOLD_ALONE);
    return r;
}

/* Its files stay as they are while it is held alone. */
static bool stands_still(struct daemon *d, struct sandbox *s)
{
    pthread_mutex_lock(&d->lock);
    bool quiet = s->box && s->execs == 0 &&
                 s->state != SB_HIBERNATED; /* one might be about to start its command */
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
    pthread_mutex_lock(&d->lock);
    s->lent = true;
    pthread_mutex_unlock(&d->lock);
    s->before = s->state;
    if (s->state != SB_DEAD)
        sandbox_set_state(d, s, SB_FORKING, 0);
    r = daemon_create(d, create, &options, deadline_ms, child, err);
    if (r < 0)
        sandbox_end_over(d, s);
    return r < 0 ? r : 1;
}

static int drop_source(struct daemon *d, const struct source *source, bool key_too,
                       struct lh_error *err)
{
    return source->borrowed ? 0 : snapshot_drop(d, source->snapshot, key_too, err);
}

int daemon_fork_files(struct daemon *d, const char *id, uint32_t attempt,
                      const V1(CreateRequest) * req, const struct daemon_create_options *o,
                      int64_t deadline_ms, char child[LH_ID_SIZE], struct lh_error *err)
{
    V1(CreateRequest) create = *req;
    struct daemon_create_options options = o ? *o : (struct daemon_create_options){0};
    struct source source;

    create.idempotency_key = (char *)"";
    create.name = (char *)"";
    options.transient = true;
    int r = fork_over(d, id, attempt, &create, &options, deadline_ms, child, err);
    if (r != 0)
        return r < 0 ? r : 0;
    r = take_source(d, id, attempt, ALIVE | SB_IN(SB_DEAD), NULL, "fsonly", deadline_ms, &source,
                    err);
    if (r < 0)
        return r;
    create.source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_SNAPSHOT;
    create.snapshot = source.snapshot;
    create.files_only = true;
    r = daemon_create(d, &create, &options, deadline_ms, child, err);
    struct lh_error undo = {0};
    if (drop_source(d, &source, true, &undo) < 0)
        lh_warn("snapshot of a fork not removed", "snapshot=%s why=%s", source.snapshot,
                undo.message);
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

/* Children are made side by side: most of a restore is waiting for the kernel. */
struct brood {
    struct daemon *d;
    const V1(ForkRequest) * req;
    const V1(CreateRequest) * create;
    int64_t deadline_ms;
    V1(Sandbox) * *children;
    atomic_uint next;
    pthread_mutex_t lock;
    int status; /* of the first that failed; with lock */
    struct lh_error *err;
};

static int make_child(const struct brood *b, unsigned i, struct lh_error *err)
{
    const struct daemon_create_options o = {.fork_child = true};
    V1(CreateRequest) create = *b->create;
    lh_autofree char *key = lh_format("%s/%u", b->req->idempotency_key, i);
    char id[LH_ID_SIZE];

    if (!key)
        return lh_fail_errno(err, ENOMEM, "a child");
    create.idempotency_key = key;
    int r = daemon_create(b->d, &create, &o, b->deadline_ms, id, err);
    if (r < 0)
        return lh_wrap(err, "child %u", i);
    b->children[i] = daemon_show(b->d, id, err);
    return b->children[i] ? 0 : LH_INTERNAL;
}

static void *make_some(void *arg)
{
    struct brood *b = arg;

    for (unsigned i; (i = atomic_fetch_add(&b->next, 1)) < b->req->count;) {
        struct lh_error err = {0};
        int r = make_child(b, i, &err);
        LH_LOCKED(&b->lock);
        if (r < 0 && b->status == 0)
            b->status = lh_fail(b->err, r, "%s", err.message);
        if (b->status < 0) /* the others will be asked for again */
            return NULL;
    }
    return NULL;
}

static int make_all(struct brood *b)
{
    pthread_t threads[WORKERS];
    unsigned n = 0;

    while (n + 1 < WORKERS && n + 1 < b->req->count &&
           pthread_create(&threads[n], NULL, make_some, b) == 0)
        n++;
    make_some(b); /* also when no thread could be had */
    while (n > 0)
        pthread_join(threads[--n], NULL);
    return b->status;
}

static int make_children(struct daemon *d, const V1(ForkRequest) * req, const char *snapshot,
                         int64_t deadline_ms, V1(ForkReply) * reply, struct lh_error *err)
{
    V1(CreateRequest) create = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__INIT;
    Longhaul__Task__V1__Limits limits;
    lh_autofree char *owner = NULL;
    int r = req->id[0] ? inherit(d, req->id, &create, &limits, &owner, err) : 0;

    create.source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_SNAPSHOT;
    create.snapshot = (char *)snapshot;
    create.files_only = !strcmp(req->engine, "fsonly");
    reply->children = calloc(req->count, sizeof *reply->children);
    if (r == 0 && !reply->children)
        r = lh_fail_errno(err, ENOMEM, "children");
    lh_automsg(V1(NetworkRules)) rules = create.rules;
    if (r < 0)
        return r;
    struct brood b = {.d = d,
                      .req = req,
                      .create = &create,
                      .deadline_ms = deadline_ms,
                      .children = reply->children,
                      .lock = PTHREAD_MUTEX_INITIALIZER,
                      .err = err};
    r = make_all(&b);
    for (unsigned i = 0; i < req->count; i++) /* those there are, in front */
        if (b.children[i])
            reply->children[reply->n_children++] = b.children[i];
    return r;
}

static int check_request(const V1(ForkRequest) * req, struct lh_error *err)
{
    int r = sandbox_check_key(req->idempotency_key, err);

    if (r == 0 && (req->count < 1 || req->count > CHILDREN_MAX))
        r = lh_fail(err, LH_INVALID_ARGUMENT, "count must be 1 to %d, not %u", CHILDREN_MAX,
                    req->count);
    if (r == 0 && !req->id[0] == !req->snapshot[0])
        r = lh_fail(err, LH_INVALID_ARGUMENT, "give either id or snapshot");
    return r;
}

int service_fork(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                 ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(ForkRequest) *req = (const void *)request;
    struct daemon *d = ctx;
    int64_t deadline_ms = call_deadline_ms(call);
    V1(ForkReply) *out = calloc(1, sizeof *out);
    struct source source = {.borrowed = true};
    int r = check_request(req, err);

    if (!out)
        return lh_fail_errno(err, ENOMEM, "fork");
    longhaul__sandbox__v1__fork_reply__init(out);
    *reply = &out->base;
    if (r == 0 && req->snapshot[0])
        snprintf(source.snapshot, sizeof source.snapshot, "%s", req->snapshot);
    else if (r == 0)
        r = take_source(d, req->id, req->attempt, ALIVE, req->idempotency_key, req->engine,
                        deadline_ms, &source, err);
    if (r == 0)
        r = make_children(d, req, source.snapshot, deadline_ms, out, err);
    if (r == 0)
        r = drop_source(d, &source, false, err);
    return r < 0 ? lh_wrap(err, "fork of %s", req->id[0] ? req->id : req->snapshot) : 0;
}
