/* Tasks.Add: a set of tasks, each validated, proven and stored by one of a few threads.  The thread
 * of the call alone sends: results come to it through a list. */
#include "agentenv/task/register.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "longhaul/task/v1/service.pb-c.h"
#include "proto/clock.h"
#include "proto/log.h"
#include "proto/wait.h"

LH_LOG_COMPONENT("task");

enum { WORKERS_DEFAULT = 4, WORKERS_MAX = 64, LOOK_MS = 1000 };

struct outcome {
    bool accepted, unchanged, duplicate;
    struct lh_error err;
};

struct registration {
    struct daemon *d;
    struct rpc_call *call;
    const Longhaul__Task__V1__RegisterRequest *req;
    size_t n;
    atomic_size_t next; /* task to take */

    pthread_mutex_t lock;
    pthread_cond_t finished;
    struct outcome *outcomes;
    size_t *order; /* indices in the order they finished */
    size_t n_finished;
};

/* ---- one task ---- */

static int register_one(struct registration *g, size_t i, struct outcome *o)
{
    const Task *task = g->req->set->tasks[i];
    bool prove = !g->req->no_verify;
    uint8_t digest[TASK_DIGEST];

    if (o->duplicate)
        return lh_fail(&o->err, LH_INVALID_ARGUMENT, "task %s is in the set twice", task->name);
    int r = task_validate(task, &o->err);
    if (r == 0)
        r = task_digest(task, digest, &o->err);
    if (r < 0)
        return r;
    o->unchanged = task_is_registered(g->d, task, digest, prove);
    if (o->unchanged)
        return 0;
    if (prove)
        r = task_prove(g->d, task, g->call, &o->err);
    if (r == 0)
        r = task_store(g->d, task, digest, prove, &o->err);
    return r < 0 ? lh_wrap(&o->err, "task %s", task->name) : 0;
}

static void *work(void *arg)
{
    struct registration *g = arg;
    size_t i;

    while ((i = atomic_fetch_add(&g->next, 1)) < g->n && !rpc_cancelled(g->call)) {
        struct outcome *o = &g->outcomes[i];

        o->accepted = register_one(g, i, o) == 0;
        LH_LOCKED(&g->lock);
        g->order[g->n_finished++] = i;
        pthread_cond_signal(&g->finished);
    }
    return NULL;
}

/* ---- the stream ---- */

static int send_outcome(struct registration *g, size_t i, size_t done, struct lh_error *err)
{
    const struct outcome *o = &g->outcomes[i];
    Longhaul__Task__V1__RegisterReply reply = LONGHAUL__TASK__V1__REGISTER_REPLY__INIT;

    reply.name = g->req->set->tasks[i]->name;
    reply.accepted = o->accepted;
    reply.unchanged = o->unchanged;
    reply.error = (char *)o->err.message;
    reply.done = (uint32_t)done;
    reply.total = (uint32_t)g->n;
    return rpc_send(g->call, &reply.base, err);
}

/* Index of the k-th task to finish; -1 when the client went away first. */
static int64_t wait_for(struct registration *g, size_t k)
{
    LH_LOCKED(&g->lock);
    while (g->n_finished <= k) {
        if (rpc_cancelled(g->call))
            return -1;
        lh_wait_until(&g->finished, &g->lock, lh_now_ms() + LOOK_MS);
    }
    return (int64_t)g->order[k];
}

static int send_all(struct registration *g, struct lh_error *err)
{
    for (size_t k = 0; k < g->n; k++) {
        int64_t i = wait_for(g, k);

        if (i < 0)
            return lh_fail(err, LH_CANCELLED, "the client went away after %zu of %zu tasks", k,
                           g->n);
        int r = send_outcome(g, (size_t)i, k + 1, err);
        if (r < 0)
            return r;
    }
    return 0;
}

static int run(struct registration *g, unsigned workers, struct lh_error *err)
{
    pthread_t threads[WORKERS_MAX];
    unsigned started = 0;

    while (started < workers && pthread_create(&threads[started], NULL, work, g) == 0)
        started++;
    int r = started ? send_all(g, err) : lh_fail(err, LH_RESOURCE_EXHAUSTED, "no thread to verify");
    if (r < 0)
        atomic_store(&g->next, g->n); /* no further task is begun */
    for (unsigned i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    if (r == 0)
        r = db_flush(daemon_db(g->d), err);
    return r;
}

/* ---- the call ---- */

struct named {
    const char *name;
    size_t at;
};

static int by_name(const void *a, const void *b)
{
    const struct named *x = a, *y = b;
    int c = strcmp(x->name, y->name);

    return c ? c : x->at < y->at ? -1 : 1;
}

/* Every further occurrence of a name; the first one stands. */
static int mark_duplicates(struct registration *g, struct lh_error *err)
{
    lh_autofree struct named *sorted = calloc(g->n, sizeof *sorted);

    if (!sorted)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for %zu names", g->n);
    for (size_t i = 0; i < g->n; i++)
        sorted[i] = (struct named){g->req->set->tasks[i]->name, i};
    qsort(sorted, g->n, sizeof *sorted, by_name);
    for (size_t i = 1; i < g->n; i++)
        g->outcomes[sorted[i].at].duplicate = !strcmp(sorted[i].name, sorted[i - 1].name);
    return 0;
}

static int register_set(struct registration *g, struct lh_error *err)
{
    lh_autofree struct outcome *outcomes = calloc(g->n, sizeof *outcomes);
    lh_autofree size_t *order = calloc(g->n, sizeof *order);
    unsigned workers = g->req->parallel ? g->req->parallel : WORKERS_DEFAULT;

    if (!outcomes || !order)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory to register %zu tasks", g->n);
    g->outcomes = outcomes;
    g->order = order;
    int r = mark_duplicates(g, err);
    return r < 0 ? r : run(g, workers < WORKERS_MAX ? workers : WORKERS_MAX, err);
}

int task_add_rpc(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                 struct lh_error *err)
{
    const Longhaul__Task__V1__RegisterRequest *req = (const void *)request;
    struct registration g = {.d = ctx, .call = call, .req = req};

    g.n = req->set ? req->set->n_tasks : 0;
    if (!g.n || g.n > TASK_SET_MAX)
        return lh_fail(err, LH_INVALID_ARGUMENT, "a set has 1 to %d tasks, this one %zu",
                       TASK_SET_MAX, g.n);
    pthread_mutex_init(&g.lock, NULL);
    pthread_cond_init(&g.finished, NULL);
    int r = register_set(&g, err);
    pthread_cond_destroy(&g.finished);
    pthread_mutex_destroy(&g.lock);
    lh_info("registered", "tasks=%zu status=%s", g.n, lh_status_name(r));
    return r;
}
