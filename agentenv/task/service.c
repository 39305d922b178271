/* The rpcs of longhaul.task.v1.Tasks, and everything agentenv/task plugs into the daemon. */
#include <stdio.h>
#include <string.h>

#include "agentenv/task/build.h"
#include "agentenv/task/exec.h"
#include "agentenv/task/image.h"
#include "agentenv/task/layer.h"
#include "agentenv/task/register.h"
#include "agentenv/task/setup.h"
#include "agentenv/task/verify.h"
#include "longhaul/task/v1/service.pb-c.h"
#include "proto/parse.h"

typedef Longhaul__Task__V1__ListTasksReply ListTasksReply;
typedef Longhaul__Task__V1__TaskSummary TaskSummary;

/* ---- List ---- */

static int fill_summary(TaskSummary *t, sqlite3_stmt *row, struct lh_error *err)
{
    size_t len = (size_t)sqlite3_column_bytes(row, 4);

    t->name = strdup(db_text(row, 0));
    t->revision = (uint32_t)sqlite3_column_int64(row, 1);
    t->split = sqlite3_column_int(row, 2);
    t->family = strdup(db_text(row, 3));
    t->digest.data = malloc(len + 1);
    if (!t->name || !t->family || !t->digest.data)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a list of tasks");
    memcpy(t->digest.data, sqlite3_column_blob(row, 4), len);
    t->digest.len = len;
    t->verified = sqlite3_column_int(row, 5);
    t->quarantined = sqlite3_column_int(row, 6);
    return 0;
}

struct listing {
    ListTasksReply *reply;
    size_t room;
};

static int add_summary(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    static const TaskSummary empty = LONGHAUL__TASK__V1__TASK_SUMMARY__INIT;
    struct listing *l = ctx;
    TaskSummary *t = malloc(sizeof *t);

    if (l->reply->n_tasks == l->room) {
        size_t room = l->room ? 2 * l->room : 256;
        void *more = reallocarray(l->reply->tasks, room, sizeof *l->reply->tasks);

        if (more) {
            l->reply->tasks = more;
            l->room = room;
        }
    }
    if (!t || l->reply->n_tasks == l->room) {
        free(t);
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a list of tasks");
    }
    *t = empty;
    l->reply->tasks[l->reply->n_tasks++] = t;
    return fill_summary(t, row, err);
}

static int list_rpc(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                    ProtobufCMessage **reply, struct lh_error *err)
{
    static const ListTasksReply empty = LONGHAUL__TASK__V1__LIST_TASKS_REPLY__INIT;
    const Longhaul__Task__V1__ListTasksRequest *req = (const void *)request;
    lh_automsg(ListTasksReply) list = malloc(sizeof *list);
    struct listing l = {.reply = list};

    if (!list)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a list of tasks");
    *list = empty;
    int r = db_each(daemon_db(ctx), err, add_summary, &l,
                    "SELECT name, revision, split, family, digest, verified, quarantined FROM tasks"
                    " WHERE name > ? AND substr(name, 1, length(?)) = ? AND (? = 0 OR split = ?)"
                    " AND quarantined >= ? ORDER BY name LIMIT ?",
                    "sssiiil", req->after, req->name_prefix, req->name_prefix, (int)req->split,
                    (int)req->split, (int)req->quarantined,
                    req->limit ? (int64_t)req->limit : INT64_MAX);
    if (r == 0)
        *reply = &lh_steal(&list)->base;
    return r;
}

/* ---- Show, Remove, Release ---- */

static int show_rpc(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                    ProtobufCMessage **reply, struct lh_error *err)
{
    RegisteredTask *t = task_fetch(ctx, ((const Longhaul__Task__V1__TaskName *)request)->name, err);

    if (!t)
        return err->code;
    *reply = &t->base;
    return 0;
}

static int remove_rpc(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                      ProtobufCMessage **reply, struct lh_error *err)
{
    static const Longhaul__Task__V1__RemoveTaskReply empty =
        LONGHAUL__TASK__V1__REMOVE_TASK_REPLY__INIT;
    int r = task_delete(ctx, ((const Longhaul__Task__V1__TaskName *)request)->name, err);
    if (r == 0)
        r = db_flush(daemon_db(ctx), err);
    if (r < 0)
        return r;
    Longhaul__Task__V1__RemoveTaskReply *done = malloc(sizeof *done);
    if (!done)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a reply");
    *done = empty;
    *reply = &done->base;
    return 0;
}

static int release_rpc(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                       ProtobufCMessage **reply, struct lh_error *err)
{
    static const Longhaul__Task__V1__ReleaseTaskReply empty =
        LONGHAUL__TASK__V1__RELEASE_TASK_REPLY__INIT;
    Longhaul__Task__V1__ReleaseTaskReply *done = malloc(sizeof *done);

    if (!done)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a reply");
    *done = empty;
    *reply = &done->base;
    return task_release(ctx, ((const Longhaul__Task__V1__TaskName *)request)->name, err);
}

/* ---- hooks ---- */

static int start(struct daemon *d, struct lh_error *err)
{
    int r = task_table_create(d, err);

    if (r == 0)
        r = image_start(d, err);
    if (r == 0)
        r = build_table_create(d, err);
    return r == 0 ? verifier_layer_make(d, err) : r;
}

static int find(struct daemon *d, const char *name, struct daemon_task *out, struct lh_error *err)
{
    RegisteredTask *t = task_fetch(d, name, err);

    if (!t)
        return err ? err->code : LH_NOT_FOUND;
    const Longhaul__Task__V1__Environment *e = t->task->environment;
    out->image = e->image;
    if (e->limits)
        out->limits = *e->limits;
    else
        longhaul__task__v1__limits__init(&out->limits);
    out->network = e->agent_network;
    out->owned = &t->base;
    return 0;
}

static int exec_defaults(struct daemon *d, const char *name, struct daemon_exec_defaults *out,
                         struct lh_error *err)
{
    RegisteredTask *t = task_fetch(d, name, err);

    if (!t)
        return err ? err->code : LH_NOT_FOUND;
    out->owned = &t->base;
    out->cwd = task_workdir(t->task);
    out->user = t->task->environment->user;
    return task_variables(t->task, &out->env, &out->n_env, err);
}

static const struct rpc_method methods[] = {
    {"Add", .stream = task_add_rpc}, {"List", .unary = list_rpc},       {"Show", .unary = show_rpc},
    {"Remove", .unary = remove_rpc}, {"Release", .unary = release_rpc}, {NULL},
};

const struct daemon_hooks task_hooks = {
    .start = start,
    .image_find = image_find,
    .image_by_digest = image_by_digest,
    .image_info = image_info,
    .image_digest = image_digest_of,
    .task_find = find,
    .task_exec_defaults = exec_defaults,
    .task_setup = task_setup,
    .audit = image_audit,
    .verify = verify_rpc,
    .import_image = image_import_rpc,
    .build_image = image_build_rpc,
    .list_images = image_list_rpc,
    .remove_image = image_remove_rpc,
    .tasks = methods,
};
