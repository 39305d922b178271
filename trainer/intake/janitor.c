#include "trainer/intake/janitor.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "longhaul/sandbox/v1/sandbox.pb-c.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/parse.h"
#include "proto/wait.h"

LH_LOG_COMPONENT("intake");

enum { CALL_MS = 4000, RETRY_MS = 500, ASK_MS = 2000 };

struct chore {
    struct chore *next;
    char trajectory[LH_ID_SIZE];
    char keep[LH_ID_SIZE];
    uint32_t attempt;
};

struct janitor {
    struct rpc_channel *agentenv;
    char *job_id;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct chore *todo, **todo_end, *done;
    struct quarantine answer;
    bool answered; /* and not taken */
    int64_t ask_at_ms;
    bool stop, thread_runs;
};

char *janitor_owner(const char *job_id, const char *trajectory)
{
    return lh_format("%s/%s", job_id, trajectory);
}

int janitor_remove_sandboxes(struct rpc_channel *agentenv, const char *owner_prefix,
                             uint32_t attempt, int timeout_ms, struct lh_error *err)
{
    Longhaul__Sandbox__V1__RemoveRequest request = LONGHAUL__SANDBOX__V1__REMOVE_REQUEST__INIT;
    ProtobufCMessage *reply = NULL;

    request.owner_prefix = (char *)owner_prefix;
    request.attempt = attempt;
    int r = rpc_unary(agentenv, "/longhaul.sandbox.v1.Sandboxes/Remove", &request.base,
                      &longhaul__sandbox__v1__remove_reply__descriptor, timeout_ms, &reply, err);
    lh_message_free(reply);
    return r < 0 ? lh_wrap(err, "removing sandboxes of %s", owner_prefix) : 0;
}

static int reconcile(struct janitor *j, const struct chore *c, const char *owner,
                     struct lh_error *err)
{
    Longhaul__Sandbox__V1__ReconcileRequest request =
        LONGHAUL__SANDBOX__V1__RECONCILE_REQUEST__INIT;
    Longhaul__Sandbox__V1__SnapshotOwner keep = LONGHAUL__SANDBOX__V1__SNAPSHOT_OWNER__INIT;
    Longhaul__Sandbox__V1__SnapshotOwner *keeps[] = {&keep};
    ProtobufCMessage *reply = NULL;

    keep.snapshot = (char *)c->keep;
    keep.owner = (char *)owner;
    request.owner_prefix = (char *)owner;
    request.keep = keeps;
    request.n_keep = c->keep[0] != 0;
    int r = rpc_unary(j->agentenv, "/longhaul.sandbox.v1.Sandboxes/Reconcile", &request.base,
                      &longhaul__sandbox__v1__reconcile_reply__descriptor, CALL_MS, &reply, err);
    lh_message_free(reply);
    return r < 0 ? lh_wrap(err, "reconciling snapshots of %s", owner) : 0;
}

static int clean(struct janitor *j, const struct chore *c, struct lh_error *err)
{
    lh_autofree char *owner = janitor_owner(j->job_id, c->trajectory);

    if (!owner)
        return lh_fail_errno(err, ENOMEM, "cleaning up after %s", c->trajectory);
    int r = janitor_remove_sandboxes(j->agentenv, owner, c->attempt, CALL_MS, err);
    return r < 0 ? r : reconcile(j, c, owner, err);
}

static void wait_for_work(struct janitor *j, int ms)
{
    lh_wait_until(&j->changed, &j->lock, lh_now_ms() + ms);
}

/* With the lock held, and without it during the call. */
static void ask(struct janitor *j)
{
    struct quarantine q;
    struct lh_error err = {0};

    pthread_mutex_unlock(&j->lock);
    int r = quarantine_ask(j->agentenv, CALL_MS, &q, &err);
    pthread_mutex_lock(&j->lock);
    j->ask_at_ms = lh_now_ms() + ASK_MS;
    if (r < 0) {
        lh_warn("quarantine", "%s", err.message);
        return;
    }
    quarantine_finish(&j->answer);
    j->answer = q;
    j->answered = true;
}

/* A chore is repeated until agentenvd does it: dispatching on top of a sandbox that still runs
 * would give one trajectory two worlds. */
static void *serve(void *arg)
{
    struct janitor *j = arg;

    pthread_mutex_lock(&j->lock);
    while (!j->stop) {
        if (lh_now_ms() >= j->ask_at_ms)
            ask(j);
        struct chore *c = j->todo;
        struct lh_error err = {0};
        if (!c) {
            wait_for_work(j, RETRY_MS);
            continue;
        }
        pthread_mutex_unlock(&j->lock);
        int r = clean(j, c, &err);
        pthread_mutex_lock(&j->lock);
        if (r < 0) {
            lh_warn("clean", "%s", err.message);
            wait_for_work(j, RETRY_MS);
            continue;
        }
        j->todo = c->next;
        if (!j->todo)
            j->todo_end = &j->todo;
        c->next = j->done;
        j->done = c;
    }
    pthread_mutex_unlock(&j->lock);
    return NULL;
}

struct janitor *janitor_create(struct rpc_channel *agentenv, const char *job_id,
                               struct lh_error *err)
{
    lh_auto(janitor) j = calloc(1, sizeof *j);

    if (!j || !(j->job_id = strdup(job_id)))
        return lh_fail_errno(err, ENOMEM, "starting the janitor"), NULL;
    j->agentenv = agentenv;
    j->todo_end = &j->todo;
    pthread_mutex_init(&j->lock, NULL);
    pthread_cond_init(&j->changed, NULL);
    int r = pthread_create(&j->thread, NULL, serve, j);
    if (r != 0)
        return lh_fail_errno(err, r, "starting the janitor"), NULL;
    j->thread_runs = true;
    return lh_steal(&j);
}

static void free_chores(struct chore *c)
{
    while (c) {
        struct chore *next = c->next;
        free(c);
        c = next;
    }
}

void janitor_destroy(struct janitor *j)
{
    if (!j)
        return;
    if (j->thread_runs) {
        pthread_mutex_lock(&j->lock);
        j->stop = true;
        pthread_cond_signal(&j->changed);
        pthread_mutex_unlock(&j->lock);
        pthread_join(j->thread, NULL);
    }
    free_chores(j->todo);
    free_chores(j->done);
    quarantine_finish(&j->answer);
    free(j->job_id);
    free(j);
}

int janitor_add(struct janitor *j, const char *trajectory, const char *keep, uint32_t attempt,
                struct lh_error *err)
{
    struct chore *c = calloc(1, sizeof *c);

    if (!c)
        return lh_fail_errno(err, ENOMEM, "cleaning up after %s", trajectory);
    strncpy(c->trajectory, trajectory, LH_ID_TEXT);
    strncpy(c->keep, keep, LH_ID_TEXT);
    c->attempt = attempt;
    LH_LOCKED(&j->lock);
    *j->todo_end = c;
    j->todo_end = &c->next;
    pthread_cond_signal(&j->changed);
    return 0;
}

bool janitor_take(struct janitor *j, char trajectory[LH_ID_SIZE])
{
    struct chore *c;

    {
        LH_LOCKED(&j->lock);
        c = j->done;
        if (c)
            j->done = c->next;
    }
    if (!c)
        return false;
    memcpy(trajectory, c->trajectory, LH_ID_SIZE);
    free(c);
    return true;
}

void janitor_take_quarantine(struct janitor *j, struct quarantine *q)
{
    LH_LOCKED(&j->lock);
    if (!j->answered)
        return;
    quarantine_finish(q);
    *q = j->answer;
    j->answer = (struct quarantine){0};
    j->answered = false;
}
