/* The tasks of the job: what the registry lists at its first start, remembered in the ledger. */
#include <string.h>

#include "longhaul/task/v1/service.pb-c.h"
#include "proto/log.h"
#include "proto/parse.h"
#include "trainer/learn/trainer.h"

LH_LOG_COMPONENT("trainer");

enum { PAGE = 2000, CALL_MS = 60000 };

/* One page behind `after`; the number of tasks in it. */
static int list_page(struct trainer *t, Longhaul__Task__V1__Split split, const char *prefix,
                     const char *after, struct plan_split *to, struct lh_error *err)
{
    Longhaul__Task__V1__ListTasksRequest q = LONGHAUL__TASK__V1__LIST_TASKS_REQUEST__INIT;
    ProtobufCMessage *answer = NULL;
    int r;

    q.split = split;
    q.name_prefix = (char *)prefix;
    q.limit = PAGE;
    q.after = (char *)after;
    r = rpc_unary(t->agentenv, "/longhaul.task.v1.Tasks/List", &q.base,
                  &longhaul__task__v1__list_tasks_reply__descriptor, CALL_MS, &answer, err);
    if (r < 0)
        return r;
    const Longhaul__Task__V1__ListTasksReply *reply = (void *)answer;
    for (size_t i = 0; i < reply->n_tasks && r >= 0; i++) {
        const Longhaul__Task__V1__TaskSummary *s = reply->tasks[i];
        r = plan_add(to, s->name, s->family, s->digest.data, s->digest.len, err);
    }
    r = r < 0 ? r : (int)reply->n_tasks;
    lh_message_free(answer);
    return r;
}

static int list(struct trainer *t, Longhaul__Task__V1__Split split, const char *prefix,
                struct plan_split *to, struct lh_error *err)
{
    int r = PAGE;

    while (r == PAGE)
        r = list_page(t, split, prefix, to->n_tasks ? to->tasks[to->n_tasks - 1].name : "", to,
                      err);
    return r < 0 ? lh_wrap(err, "listing the tasks of agentenvd") : 0;
}

static int list_and_store(struct trainer *t, Longhaul__Task__V1__Split split, const char *prefix,
                          struct plan_split *to, struct lh_error *err)
{
    int r = list(t, split, prefix, to, err);

    if (r == 0)
        r = plan_sort(to, err);
    if (r == 0)
        r = ledger_begin(t->ledger, err);
    if (r == 0 && (r = plan_store(to, t->ledger, (int)split, err)) == 0)
        return ledger_commit(t->ledger, err);
    ledger_rollback(t->ledger);
    return r;
}

static int load_split(struct trainer *t, Longhaul__Task__V1__Split split, const char *prefix,
                      struct plan_split *to, struct lh_error *err)
{
    int r = plan_load(to, t->ledger, (int)split, err);

    if (r == 0 && !to->n_tasks)
        r = list_and_store(t, split, prefix, to, err);
    if (r == 0)
        lh_info("tasks", "prefix=%s tasks=%zu families=%zu", prefix, to->n_tasks, to->n_families);
    return r;
}

int trainer_load_tasks(struct trainer *t, struct lh_error *err)
{
    const Longhaul__Job__V1__Tasks *k = t->job->tasks;
    int r = load_split(t, LONGHAUL__TASK__V1__SPLIT__SPLIT_TRAIN, k->train_prefix, &t->train_tasks,
                       err);

    if (r == 0)
        r = load_split(t, LONGHAUL__TASK__V1__SPLIT__SPLIT_EVAL, k->eval_prefix, &t->eval_tasks,
                       err);
    if (r < 0)
        return r;
    if (!t->train_tasks.n_tasks)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "no registered task of the train split begins with \"%s\"; agentenv task ls "
                       "shows what there is",
                       k->train_prefix);
    if (!t->eval_tasks.n_tasks && t->job->eval->episodes)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "no registered task of the eval split begins with \"%s\", but eval.episodes "
                       "is %u",
                       k->eval_prefix, t->job->eval->episodes);
    return 0;
}
