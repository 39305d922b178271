/* Snapshots as clients ask for them: taken, listed, kept, given up, swept.  A request that is
 * repeated under its idempotency key gets the snapshot of the first time, even when the sandbox has
 * gone since; the key is looked up once before the sandbox is waited for and once more when it is
 * held, since the first request may have been the one waited for. */
#include "agentenv/daemon/service.h"

#include <string.h>

#include "agentenv/daemon/internal.h"
#include "agentenv/snapshot/snapshot.h"

enum { GC_GRACE_DEFAULT_MS = 600000 };

static int reply_snapshot(struct daemon *d, const char *id, ProtobufCMessage **reply,
                          struct lh_error *err)
{
    V1(Snapshot) *s = snapshot_show(d, id, err);

    *reply = s ? &s->base : NULL;
    return s ? 0 : err->code;
}

static int take_snapshot(struct daemon *d, const V1(SnapshotRequest) * req, int64_t deadline_ms,
                         char id[LH_ID_SIZE], struct lh_error *err)
{
    unsigned states = SB_IN(SB_RUNNING) | SB_IN(SB_FROZEN) |
                      (req->even_dead && strcmp(req->engine, "criu") ? SB_IN(SB_DEAD) : 0);
    struct snapshot_options o = {.key_kind = "snapshot",
                                 .key = req->idempotency_key,
                                 .owner = req->retain_owner,
                                 .durable = true,
                                 .state = SB_SNAPSHOTTING,
                                 .processes = !strcmp(req->engine, "criu")};
    struct sandbox *s;
    int r = registry_find_key(d, "snapshot", req->idempotency_key, id, err);

    if (r == 0 && !o.processes && req->engine[0] && strcmp(req->engine, "fsonly"))
        r = lh_fail(err, LH_INVALID_ARGUMENT, "there is no engine \"%s\"; see Engines",
                    req->engine);
    if (r == 0 && o.processes)
        r = engines_need_criu(d, deadline_ms, err);

    /* Done before: the sandbox need not be there any more. */
    if (r == 0 && id[0] && snapshot_is_ready(d, id))
        return 0;
    if (r == 0)
        r = sandbox_begin(d, req->id, req->attempt, states, HOLD_ALONE, deadline_ms, &s, err);
    if (r < 0)
        return r;
    if (s->state == SB_DEAD)
        o.state = SB_DEAD;
    r = registry_find_key(d, "snapshot", req->idempotency_key, id, err);
    if (r == 0 && !id[0])
        r = snapshot_take(d, s, &o, id, err);
    sandbox_end(d, s, HOLD_ALONE);
    return r;
}

int service_take_snapshot(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                          ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(SnapshotRequest) *req = (const void *)request;
    char id[LH_ID_SIZE];
    int r = sandbox_check_key(req->idempotency_key, err);

    if (r == 0 && req->retain_owner[0])
        r = snapshot_check_owner(req->retain_owner, err);
    if (r == 0)
        r = take_snapshot(ctx, req, call_deadline_ms(call), id, err);
    return r < 0 ? r : reply_snapshot(ctx, id, reply, err);
}

int service_list_snapshots(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                           ProtobufCMessage **reply, struct lh_error *err)
{
    V1(ListSnapshotsReply) *out =
        snapshot_list(ctx, ((const V1(ListSnapshotsRequest) *)request)->owner_prefix, err);

    (void)call;
    *reply = out ? &out->base : NULL;
    return out ? 0 : err->code;
}

int service_retain(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                   ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(SnapshotOwner) *req = (const void *)request;

    (void)call;
    NEW_REPLY(Empty, longhaul__sandbox__v1__empty__init, out);
    return snapshot_retain(ctx, req->snapshot, req->owner, err);
}

int service_release(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                    ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(SnapshotOwner) *req = (const void *)request;

    (void)call;
    NEW_REPLY(Empty, longhaul__sandbox__v1__empty__init, out);
    return snapshot_release(ctx, req->snapshot, req->owner, err);
}

int service_reconcile(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                      ProtobufCMessage **reply, struct lh_error *err)
{
    (void)call;
    NEW_REPLY(ReconcileReply, longhaul__sandbox__v1__reconcile_reply__init, out);
    return snapshot_reconcile(ctx, (const V1(ReconcileRequest) *)request, out, err);
}

int service_gc(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
               ProtobufCMessage **reply, struct lh_error *err)
{
    uint32_t grace_ms = ((const V1(GcRequest) *)request)->grace_ms;
    struct gc_result done = {0};

    (void)call;
    NEW_REPLY(GcReply, longhaul__sandbox__v1__gc_reply__init, out);
    int r = snapshot_gc(ctx, grace_ms ? grace_ms : GC_GRACE_DEFAULT_MS, &done, err);
    if (r == 0)
        r = checkpoints_flush(ctx, err); /* what is not durable is not shared */
    if (r == 0)
        r = sharing_round(ctx, &(struct sharing_scope){.checkpoints = true}, &done.bytes, err);
    out->snapshots = done.snapshots;
    out->layers = done.layers;
    out->bytes = done.bytes;
    return r;
}
