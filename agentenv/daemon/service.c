/* The sandbox service: which method is served by what, and the handlers too short for a file of
 * their own.  A handler checks what it was asked for, calls the inside, and answers with the
 * sandbox as it is then; nothing here holds state. */
#include "agentenv/daemon/service.h"

#include <errno.h>
#include <string.h>

#include "agentenv/daemon/access.h"
#include "agentenv/daemon/internal.h"
#include "agentenv/daemon/metrics.h"
#include "agentenv/snapshot/snapshot.h"
#include "longhaul/task/v1/service.pb-c.h"
#include "proto/clock.h"
#include "proto/parse.h"

enum { THREADS = 128 };

int64_t call_deadline_ms(const struct rpc_call *call)
{
    int64_t theirs = rpc_deadline_ms(call), ours = lh_now_ms() + WAIT_DEFAULT_MS;

    return theirs == INT64_MAX ? ours : theirs;
}

static V1(Sandbox) * describe(struct daemon *d, const char *id, bool usage, struct lh_error *err)
{
    struct sandbox *s;

    if (sandbox_find(d, id, &s, err) < 0)
        return NULL;
    V1(Sandbox) *m = sandbox_message(d, s, usage, err);
    sandbox_unref(d, s);
    return m;
}

V1(Sandbox) * daemon_show(struct daemon *d, const char *id, struct lh_error *err)
{
    return describe(d, id, true, err);
}

/* The answer to an operation.  What the sandbox uses is for those who ask (Show, List): to find out
 * takes longer than to freeze it. */
static int reply_sandbox(struct daemon *d, const char *id, ProtobufCMessage **reply,
                         struct lh_error *err)
{
    V1(Sandbox) *s = describe(d, id, false, err);

    *reply = s ? &s->base : NULL;
    return s ? 0 : err->code;
}

static int service_create(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                          ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(CreateRequest) *req = (const void *)request;
    char id[LH_ID_SIZE];
    int r = sandbox_check_key(req->idempotency_key, err);

    if (r == 0)
        r = daemon_create(ctx, req, NULL, call_deadline_ms(call), id, err);
    return r < 0 ? r : reply_sandbox(ctx, id, reply, err);
}

static int service_show(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                        ProtobufCMessage **reply, struct lh_error *err)
{
    V1(Sandbox) *s = daemon_show(ctx, ((const V1(SandboxId) *)request)->id, err);

    (void)call;
    *reply = s ? &s->base : NULL;
    return s ? 0 : err->code;
}

static int service_list(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                        ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(ListSandboxesRequest) *req = (const void *)request;
    struct daemon *d = ctx;
    struct sandbox **list;
    int r = 0;

    (void)call;
    NEW_REPLY(ListSandboxesReply, longhaul__sandbox__v1__list_sandboxes_reply__init, out);
    size_t n = sandbox_list(d, req->owner_prefix, req->all, &list, err);
    out->sandboxes = calloc(n + 1, sizeof *out->sandboxes);
    if (!out->sandboxes)
        r = lh_fail_errno(err, ENOMEM, "listing sandboxes");
    for (size_t i = 0; i < n; i++) {
        if (r == 0 && !(out->sandboxes[i] = sandbox_message(d, list[i], true, err)))
            r = LH_RESOURCE_EXHAUSTED;
        out->n_sandboxes += r == 0;
        sandbox_unref(d, list[i]);
    }
    free(list);
    return r;
}

static int remove_owned(struct daemon *d, const char *prefix, uint32_t attempt, uint32_t *removed,
                        struct lh_error *err)
{
    struct sandbox **list;
    size_t n = sandbox_list(d, prefix, true, &list, err);
    int first = 0;

    for (size_t i = 0; i < n; i++) {
        struct lh_error why = {0};
        int r = daemon_remove(d, list[i]->id, attempt, &why);
        *removed += r == 0;
        if (r < 0 && r != LH_NOT_FOUND && first == 0) /* the others first */
            first = lh_fail(err, r, "%s", why.message);
        sandbox_unref(d, list[i]);
    }
    free(list);
    return first;
}

static int service_remove(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                          ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(RemoveRequest) *req = (const void *)request;

    (void)call;
    NEW_REPLY(RemoveReply, longhaul__sandbox__v1__remove_reply__init, out);
    if (!req->id[0] == !req->owner_prefix[0])
        return lh_fail(err, LH_INVALID_ARGUMENT, "give either id or owner_prefix");
    if (!req->id[0])
        return remove_owned(ctx, req->owner_prefix, req->attempt, &out->removed, err);
    int r = daemon_remove(ctx, req->id, req->attempt, err);
    out->removed = r == 0;
    return r;
}

int set_frozen_held(struct daemon *d, struct sandbox *s, bool frozen, struct lh_error *err)
{
    int to = frozen ? SB_FROZEN : SB_RUNNING;

    if (s->state == to)
        return 0;
    int r = frozen ? box_freeze(s->box, err) : box_thaw(s->box, err);
    if (r == 0)
        r = registry_set_state(d, s->id, to, 0, err);
    if (r == 0)
        sandbox_set_state(d, s, to, 0);
    return r;
}

/* Freeze and thaw are one operation with two directions; asking for the state it has is fine. */
int daemon_set_frozen(struct daemon *d, const V1(SandboxAttempt) * req, bool frozen,
                      int64_t deadline_ms, struct lh_error *err)
{
    struct sandbox *s;
    int r = sandbox_begin(d, req->id, req->attempt, SB_IN(SB_RUNNING) | SB_IN(SB_FROZEN),
                          HOLD_ALONE, deadline_ms, &s, err);

    if (r < 0)
        return r;
    r = set_frozen_held(d, s, frozen, err);
    sandbox_end(d, s, HOLD_ALONE);
    return r;
}

static int service_freeze(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                          ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(SandboxAttempt) *req = (const void *)request;
    int r = daemon_set_frozen(ctx, req, true, call_deadline_ms(call), err);

    return r < 0 ? r : reply_sandbox(ctx, req->id, reply, err);
}

static int service_thaw(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                        ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(SandboxAttempt) *req = (const void *)request;
    int r = daemon_set_frozen(ctx, req, false, call_deadline_ms(call), err);

    return r < 0 ? r : reply_sandbox(ctx, req->id, reply, err);
}

static int service_hibernate(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                             ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(SandboxAttempt) *req = (const void *)request;
    int r = daemon_hibernate(ctx, req->id, req->attempt, call_deadline_ms(call), err);

    return r < 0 ? r : reply_sandbox(ctx, req->id, reply, err);
}

static int service_resume(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                          ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(SandboxAttempt) *req = (const void *)request;
    int r = daemon_resume(ctx, req->id, req->attempt, call_deadline_ms(call), err);

    return r < 0 ? r : reply_sandbox(ctx, req->id, reply, err);
}

static int service_rollback(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                            ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(RollbackRequest) *req = (const void *)request;
    int r = daemon_rollback(ctx, req, call_deadline_ms(call), err);

    return r < 0 ? r : reply_sandbox(ctx, req->id, reply, err);
}

static int service_set_policy(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                              ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(SetPolicyRequest) *req = (const void *)request;
    int r = policy_set(ctx, req, call_deadline_ms(call), err);

    return r < 0 ? r : reply_sandbox(ctx, req->id, reply, err);
}

static int service_audit(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                         ProtobufCMessage **reply, struct lh_error *err)
{
    (void)call;
    NEW_REPLY(AuditReply, longhaul__sandbox__v1__audit_reply__init, out);
    return daemon_audit(ctx, ((const V1(AuditRequest) *)request)->content, out, err);
}

static int service_engines(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                           ProtobufCMessage **reply, struct lh_error *err)
{
    (void)call;
    (void)request;
    NEW_REPLY(EnginesReply, longhaul__sandbox__v1__engines_reply__init, out);
    return engines_reply(ctx, out, err);
}

/* ---- the table ---- */

/* Made at the start and not constant: some methods are the hooks'. */
static void list_methods(struct daemon *d)
{
    const struct daemon_hooks *h = d->hooks;
    const struct rpc_method sandboxes[] = {
        {"Create", service_create, NULL},
        {"Show", service_show, NULL},
        {"List", service_list, NULL},
        {"Remove", service_remove, NULL},
        {"Exec", NULL, service_exec},
        {"ExecInput", service_exec_input, NULL},
        {"Freeze", service_freeze, NULL},
        {"Thaw", service_thaw, NULL},
        {"Hibernate", service_hibernate, NULL},
        {"Resume", service_resume, NULL},
        {"Rollback", service_rollback, NULL},
        {"SetPolicy", service_set_policy, NULL},
        {"Fork", service_fork, NULL},
        {"Verify", h->verify, NULL},
        {"Watch", NULL, service_watch},
        {"Upload", NULL, service_upload},
        {"Download", NULL, service_download},
        {"ListFiles", service_list_files, NULL},
        {"StatFile", service_stat_file, NULL},
        {"WatchFiles", NULL, service_watch_files},
        {"TakeSnapshot", service_take_snapshot, NULL},
        {"ListSnapshots", service_list_snapshots, NULL},
        {"Retain", service_retain, NULL},
        {"Release", service_release, NULL},
        {"Reconcile", service_reconcile, NULL},
        {"ExportSnapshot", service_export_snapshot, NULL},
        {"ImportSnapshot", service_import_snapshot, NULL},
        {"ImportImage", h->import_image, NULL},
        {"BuildImage", h->build_image, NULL},
        {"ListImages", h->list_images, NULL},
        {"RemoveImage", h->remove_image, NULL},
        {"CreateToken", service_create_token, NULL},
        {"ListTokens", service_list_tokens, NULL},
        {"RevokeToken", service_revoke_token, NULL},
        {"Gc", service_gc, NULL},
        {"Audit", service_audit, NULL},
        {"Engines", service_engines, NULL},
        {"Metrics", service_metrics, NULL},
        {0},
    };
    memcpy(d->methods, sandboxes, sizeof sandboxes);
}

struct rpc_server *service_start(struct daemon *d, const struct service_options *options,
                                 struct lh_error *err)
{
    const struct rpc_service services[] = {
        {&longhaul__sandbox__v1__sandboxes__descriptor, d->methods, d},
        {&longhaul__task__v1__tasks__descriptor, d->hooks->tasks, d},
    };
    const struct rpc_server_options o = {.path = options->socket,
                                         .threads = THREADS,
                                         .services = services,
                                         .n_services = LH_ARRAY_SIZE(services),
                                         .guard = access_guard(options->access),
                                         .tls_address = options->tls_address,
                                         .tls_cert = options->tls_cert,
                                         .tls_key = options->tls_key};

    list_methods(d);
    return rpc_server_create(&o, err);
}
