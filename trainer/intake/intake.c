#include "trainer/intake/intake.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "longhaul/sandbox/v1/sandbox.pb-c.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/parse.h"
#include "proto/wait.h"
#include "trainer/intake/intake_private.h"

LH_LOG_COMPONENT("intake");

enum {
    POLL_MS = 50,
    AGENTENV_MS = 30000,
    SILENCE_MS = 20000,
    LOST_MS = 10000,
    REPEAT_MS = 1000,
};

/* ---- the thread ---- */

/* One message, waiting for it, and what has arrived besides. */
static size_t collect(struct intake *in, struct channel_message **m)
{
    struct lh_error err = {0};
    size_t n = 0;

    while (n < INTAKE_MESSAGES) {
        m[n] = channel_intake_recv(in->channel, n ? 0 : POLL_MS, &err);
        if (!m[n])
            break;
        n++;
    }
    if (n == 0 && err.code != LH_DEADLINE_EXCEEDED)
        lh_warn("receive", "%s", err.message);
    return n;
}

static void hear_janitor(struct intake *in)
{
    char id[LH_ID_SIZE];

    if (!in->janitor)
        return;
    while (janitor_take(in->janitor, id)) {
        struct trajectory *t = intake_find_trajectory(in, id);
        if (t)
            t->cleaning = false;
    }
    janitor_take_quarantine(in->janitor, &in->quarantine);
}

static int turn(struct intake *in, struct lh_error *err)
{
    struct channel_message *m[INTAKE_MESSAGES];
    size_t n = collect(in, m);
    int r;

    {
        LH_LOCKED(&in->lock);
        hear_janitor(in);
        r = intake_receive(in, m, n, err);
        if (r == 0)
            r = intake_dispatch(in, err);
    }
    for (size_t i = 0; i < n; i++)
        channel_message_free(m[i]);
    return r;
}

static void *serve(void *arg)
{
    struct intake *in = arg;
    struct lh_error err = {0};

    while (!atomic_load(&in->stop) && turn(in, &err) == 0)
        ;
    if (err.code) {
        lh_err("intake", "%s", err.message);
        LH_LOCKED(&in->lock);
        in->failed = err;
        pthread_cond_broadcast(&in->changed);
    }
    return NULL;
}

/* ---- what an earlier run left ---- */

struct keep_list {
    const char *job_id;
    Longhaul__Sandbox__V1__SnapshotOwner **owners;
    size_t n;
};

static int keep_snapshot(void *ctx, const char *trajectory, const char *snapshot,
                         struct lh_error *err)
{
    struct keep_list *k = ctx;
    Longhaul__Sandbox__V1__SnapshotOwner *o = malloc(sizeof *o);
    Longhaul__Sandbox__V1__SnapshotOwner **bigger =
        realloc(k->owners, (k->n + 1) * sizeof(Longhaul__Sandbox__V1__SnapshotOwner *));

    if (bigger)
        k->owners = bigger;
    if (!o || !bigger) {
        free(o);
        return lh_fail_errno(err, ENOMEM, "listing snapshots to keep");
    }
    longhaul__sandbox__v1__snapshot_owner__init(o);
    o->snapshot = strdup(snapshot);
    o->owner = janitor_owner(k->job_id, trajectory);
    k->owners[k->n++] = o;
    return o->snapshot && o->owner ? 0 : lh_fail_errno(err, ENOMEM, "listing snapshots to keep");
}

static void free_keep_list(struct keep_list *k)
{
    for (size_t i = 0; i < k->n; i++) {
        free(k->owners[i]->snapshot);
        free(k->owners[i]->owner);
        free(k->owners[i]);
    }
    free(k->owners);
}

static int forget_missing(struct intake *in, const Longhaul__Sandbox__V1__ReconcileReply *reply,
                          struct lh_error *err)
{
    int r = 0;

    for (size_t i = 0; i < reply->n_missing && r == 0; i++) {
        lh_warn("snapshot-gone", "snapshot=%s owner=%s", reply->missing[i]->snapshot,
                reply->missing[i]->owner);
        r = ledger_forget_snapshot(in->ledger, reply->missing[i]->snapshot, err);
    }
    return r;
}

/* Owners keep exactly what open trajectories can resume from. */
static int reconcile_snapshots(struct intake *in, struct lh_error *err)
{
    Longhaul__Sandbox__V1__ReconcileRequest request =
        LONGHAUL__SANDBOX__V1__RECONCILE_REQUEST__INIT;
    struct keep_list keep = {.job_id = in->job_id};
    lh_autofree char *prefix = janitor_owner(in->job_id, "");
    ProtobufCMessage *reply = NULL;
    int r = prefix ? ledger_each_snapshot(in->ledger, keep_snapshot, &keep, err)
                   : lh_fail_errno(err, ENOMEM, "reconciling");

    if (r == 0) {
        request.owner_prefix = prefix;
        request.keep = keep.owners;
        request.n_keep = keep.n;
        r = rpc_unary(in->options.agentenv, "/longhaul.sandbox.v1.Sandboxes/Reconcile",
                      &request.base, &longhaul__sandbox__v1__reconcile_reply__descriptor,
                      AGENTENV_MS, &reply, err);
    }
    if (r == 0)
        r = forget_missing(in, (Longhaul__Sandbox__V1__ReconcileReply *)reply, err);
    lh_message_free(reply);
    free_keep_list(&keep);
    return r;
}

static int clean_agentenv(struct intake *in, struct lh_error *err)
{
    lh_autofree char *prefix = janitor_owner(in->job_id, "");

    if (!prefix)
        return lh_fail_errno(err, ENOMEM, "cleaning up");
    int r = janitor_remove_sandboxes(in->options.agentenv, prefix, UINT32_MAX, AGENTENV_MS, err);
    if (r == 0)
        r = reconcile_snapshots(in, err);
    return r < 0 ? r : quarantine_ask(in->options.agentenv, AGENTENV_MS, &in->quarantine, err);
}

/* Sandboxes of the old attempts go, then nothing of those attempts is accepted any more. */
static int take_over(struct intake *in, struct lh_error *err)
{
    int r = ledger_begin(in->ledger, err);

    if (r < 0)
        return r;
    if (in->options.agentenv)
        r = clean_agentenv(in, err);
    if (r == 0)
        r = ledger_next_attempt_of_all(in->ledger, err);
    if (r == 0)
        return ledger_commit(in->ledger, err);
    ledger_rollback(in->ledger);
    return r;
}

/* ---- life ---- */

static int default_to(int value, int otherwise)
{
    return value ? value : otherwise;
}

static int start(struct intake *in, struct lh_error *err)
{
    if (in->options.agentenv) {
        in->janitor = janitor_create(in->options.agentenv, in->job_id, err);
        if (!in->janitor)
            return LH_RESOURCE_EXHAUSTED;
    }
    int r = take_over(in, err);
    if (r < 0)
        return lh_wrap(err, "taking over from an earlier run");
    in->channel = channel_intake_create(in->options.endpoint, in->options.max_message, err);
    if (!in->channel)
        return LH_UNAVAILABLE;
    r = pthread_create(&in->thread, NULL, serve, in);
    if (r != 0)
        return lh_fail_errno(err, r, "starting the intake's thread");
    in->thread_runs = true;
    return 0;
}

struct intake *intake_create(const struct intake_options *o, struct lh_error *err)
{
    lh_auto(intake) in = calloc(1, sizeof *in);

    if (!in)
        return lh_fail_errno(err, ENOMEM, "creating the intake"), NULL;
    in->options = *o;
    in->options.silence_ms = default_to(o->silence_ms, SILENCE_MS);
    in->options.lost_ms = default_to(o->lost_ms, LOST_MS);
    in->options.repeat_ms = default_to(o->repeat_ms, REPEAT_MS);
    in->ledger = o->ledger;
    pthread_mutex_init(&in->lock, NULL);
    pthread_cond_init(&in->changed, NULL);
    in->job_id = strdup(o->job_id);
    if (!in->job_id)
        return lh_fail_errno(err, ENOMEM, "creating the intake"), NULL;
    return start(in, err) < 0 ? NULL : lh_steal(&in);
}

void intake_destroy(struct intake *in)
{
    if (!in)
        return;
    atomic_store(&in->stop, true);
    if (in->thread_runs)
        pthread_join(in->thread, NULL);
    janitor_destroy(in->janitor);
    quarantine_finish(&in->quarantine);
    channel_intake_destroy(in->channel);
    for (size_t i = 0; i < in->n_rounds; i++)
        intake_free_round(in->rounds[i]);
    for (size_t i = 0; i < in->n_workers; i++)
        free(in->workers[i]);
    pthread_cond_destroy(&in->changed);
    pthread_mutex_destroy(&in->lock);
    free(in->job_id);
    free(in);
}

/* ---- asked by the trainer ---- */

void intake_set_version(struct intake *in, uint64_t step, const uint8_t id[16])
{
    LH_LOCKED(&in->lock);
    in->version_step = step;
    memcpy(in->version_id, id, sizeof in->version_id);
}

int intake_raise(struct intake *in, const char *name, int64_t groups, struct lh_error *err)
{
    LH_LOCKED(&in->lock);
    struct round *r = intake_find_round(in, name);

    if (!r)
        return lh_fail(err, LH_NOT_FOUND, "round %s is not open", name);
    if (groups > r->limit)
        r->limit = groups; /* the thread opens them */
    return 0;
}

/* Copies the thread's failure, if any. */
static int check_failed(const struct intake *in, struct lh_error *err)
{
    return in->failed.code ? lh_fail(err, in->failed.code, "%s", in->failed.message) : 0;
}

int intake_wait(struct intake *in, const char *name, int64_t ready, int timeout_ms,
                struct lh_error *err)
{
    int64_t deadline = lh_now_ms() + timeout_ms;
    bool in_time = true;

    LH_LOCKED(&in->lock);
    for (;;) {
        const struct round *r = intake_find_round(in, name);
        if (check_failed(in, err) < 0)
            return in->failed.code;
        if (!r)
            return lh_fail(err, LH_NOT_FOUND, "round %s is not open", name);
        if (r->ready >= ready)
            return (int)r->ready;
        if (!in_time)
            return lh_fail(err, LH_DEADLINE_EXCEEDED, "%lld of %lld groups of round %s are ready",
                           (long long)r->ready, (long long)ready, name);
        in_time = lh_wait_until(&in->changed, &in->lock, deadline);
    }
}

int intake_with_ledger(struct intake *in, intake_ledger_fn *fn, void *ctx, struct lh_error *err)
{
    LH_LOCKED(&in->lock);
    int r = check_failed(in, err);

    if (r == 0)
        r = ledger_begin(in->ledger, err);
    if (r == 0 && (r = fn(ctx, in->ledger, err)) == 0)
        return ledger_commit(in->ledger, err);
    ledger_rollback(in->ledger);
    return r;
}
