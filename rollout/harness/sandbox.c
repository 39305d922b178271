#include "rollout/harness/sandbox.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/parse.h"

LH_LOG_COMPONENT("rollout");

enum {
    CLEAN_TIMEOUT_MS = 15000,
    RUN_GRACE_MS = 15000, /* beyond the action's own timeout, until agentenvd counts as gone */
    RETRY_EVERY_MS = 100,
    REST_MS = 200, /* all that a turn's beginning waits for agentenvd */
    REST_AFTER_MS = 1,
    REST_MEMORY_BYTES = 32 << 20,
    REBUILDS = 3,
};

#define SANDBOXES "/longhaul.sandbox.v1.Sandboxes/"
#define TASKS     "/longhaul.task.v1.Tasks/"

/* $1 is the action, run where the one before left off.  The trap also sees `exit`; an action that
 * execs something else keeps the state of before. */
static const char carry_shell[] =
    "if [ -r " SANDBOX_SHELL_STATE " ]; then . " SANDBOX_SHELL_STATE
    "; cd \"$PWD\"; fi 2>/dev/null\n"
    "export PWD\n"
    "trap '{ export -p >" SANDBOX_SHELL_STATE "; } 2>/dev/null' EXIT\n"
    "eval \"$1\"\n";

static void pause_ms(int ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};

    nanosleep(&t, NULL);
}

/* What says nothing about the request: it ended with the daemon, its whole time passed (the phases
 * of a task end earlier, by agentenvd's own clock), or the machine has no disk, memory or
 * descriptors left.  A task's own limits are not met by any of these. */
static int as_outage(int r, int64_t deadline_ms, struct lh_error *err)
{
    bool unanswered = r == LH_DEADLINE_EXCEEDED && !lh_ms_left(deadline_ms);

    if (r != LH_CANCELLED && r != LH_RESOURCE_EXHAUSTED && !unanswered)
        return r;
    if (err)
        err->code = LH_UNAVAILABLE;
    return LH_UNAVAILABLE;
}

/* rpc_unary, again while the daemon is away. */
static int call(struct rpc_channel *ch, const char *method, const ProtobufCMessage *request,
                const ProtobufCMessageDescriptor *type, int timeout_ms, ProtobufCMessage **reply,
                struct lh_error *err)
{
    int64_t deadline = lh_now_ms() + timeout_ms;

    for (;;) {
        int left = lh_ms_left(deadline);
        int r = rpc_unary(ch, method, request, type, left > 1 ? left : 1, reply, err);
        r = as_outage(r, deadline, err);
        if (r != LH_UNAVAILABLE || lh_ms_left(deadline) < RETRY_EVERY_MS)
            return r < 0 ? lh_wrap(err, "agentenvd %s", strrchr(method, '/') + 1) : 0;
        pause_ms(RETRY_EVERY_MS);
    }
}

static int call_empty(struct rpc_channel *ch, const char *method, const ProtobufCMessage *request,
                      const ProtobufCMessageDescriptor *type, int timeout_ms, struct lh_error *err)
{
    ProtobufCMessage *reply = NULL;
    int r = call(ch, method, request, type, timeout_ms, &reply, err);

    if (r == 0)
        lh_message_free(reply);
    return r;
}

int sandbox_init(struct sandbox *s, struct rpc_channel *agentenv, const char *owner,
                 const char *task, uint32_t attempt, const char *snapshot, struct lh_error *err)
{
    *s = (struct sandbox){.agentenv = agentenv, .task = task, .attempt = attempt};
    s->owner = strdup(owner);
    snprintf(s->snapshot, sizeof s->snapshot, "%s", snapshot);
    return s->owner ? 0 : lh_fail_errno(err, ENOMEM, "sandbox of %s", owner);
}

void sandbox_finish(struct sandbox *s)
{
    free(s->owner);
    *s = (struct sandbox){0};
}

static int build(struct sandbox *s, int timeout_ms, struct lh_error *err)
{
    Longhaul__Sandbox__V1__CreateRequest req = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__INIT;
    lh_automsg(Longhaul__Sandbox__V1__Sandbox) made = NULL;
    lh_autofree char *key = lh_format("%s/%u/%u", s->owner, s->attempt, s->builds);

    if (!key)
        return lh_fail_errno(err, ENOMEM, "sandbox of %s", s->owner);
    req.idempotency_key = key;
    req.attempt = s->attempt;
    req.owner = s->owner;
    req.source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_TASK;
    req.task = (char *)s->task;
    if (*s->snapshot) {
        req.source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_SNAPSHOT;
        req.snapshot = s->snapshot;
        req.task_of_snapshot = (char *)s->task;
    }
    int r = call(s->agentenv, SANDBOXES "Create", &req.base,
                 &longhaul__sandbox__v1__sandbox__descriptor, timeout_ms,
                 (ProtobufCMessage **)&made, err);
    if (r < 0)
        return r;
    s->builds++;
    s->resting = false;
    snprintf(s->id, sizeof s->id, "%s", made->id);
    return 0;
}

int sandbox_start(struct sandbox *s, int timeout_ms, struct lh_error *err)
{
    if (s->attempt > 1) {
        int r = sandbox_clear(s->agentenv, s->owner, s->attempt, s->snapshot, err);
        if (r < 0)
            return r;
    }
    return build(s, timeout_ms, err);
}

void sandbox_remove(struct sandbox *s)
{
    Longhaul__Sandbox__V1__RemoveRequest req = LONGHAUL__SANDBOX__V1__REMOVE_REQUEST__INIT;
    struct lh_error err = {0};

    if (!*s->id)
        return;
    req.id = s->id;
    req.attempt = s->attempt;
    if (call_empty(s->agentenv, SANDBOXES "Remove", &req.base,
                   &longhaul__sandbox__v1__remove_reply__descriptor, CLEAN_TIMEOUT_MS, &err) < 0 &&
        err.code != LH_NOT_FOUND)
        lh_warn("sandbox_left", "sandbox=%s owner=%s error=%s", s->id, s->owner, err.message);
    *s->id = 0;
}

/* ---- resting ---- */

typedef int call_fn(struct rpc_channel *ch, const char *method, const ProtobufCMessage *request,
                    const ProtobufCMessageDescriptor *type, int timeout_ms,
                    ProtobufCMessage **reply, struct lh_error *err);

/* 0 = never again by itself. */
static int set_rest(struct sandbox *s, uint32_t after_ms, call_fn *by, int timeout_ms,
                    struct lh_error *err)
{
    ProtobufCMessage *reply = NULL;
    Longhaul__Sandbox__V1__SetPolicyRequest req = LONGHAUL__SANDBOX__V1__SET_POLICY_REQUEST__INIT;
    Longhaul__Sandbox__V1__Policy policy = LONGHAUL__SANDBOX__V1__POLICY__INIT;

    policy.hibernate_after_ms = after_ms;
    req.id = s->id;
    req.attempt = s->attempt;
    req.policy = &policy;
    int r = by(s->agentenv, SANDBOXES "SetPolicy", &req.base,
               &longhaul__sandbox__v1__sandbox__descriptor, timeout_ms, &reply, err);
    if (r == 0)
        lh_message_free(reply);
    return r;
}

static int ms_of(int64_t deadline_ms)
{
    int left = lh_ms_left(deadline_ms);

    return left > 1 ? left : 1;
}

/* More than init: what an action has left running, or memory that is charged to it. */
static bool holds_something(struct sandbox *s, int64_t deadline_ms)
{
    Longhaul__Sandbox__V1__SandboxId id = LONGHAUL__SANDBOX__V1__SANDBOX_ID__INIT;
    lh_automsg(Longhaul__Sandbox__V1__Sandbox) now = NULL;

    id.id = s->id;
    return rpc_unary(s->agentenv, SANDBOXES "Show", &id.base,
                     &longhaul__sandbox__v1__sandbox__descriptor, ms_of(deadline_ms),
                     (ProtobufCMessage **)&now, NULL) == 0 &&
           (now->processes > 1 || now->memory_bytes >= REST_MEMORY_BYTES);
}

static bool should_rest(struct sandbox *s, int64_t deadline_ms)
{
    enum rest_answer answer = s->rest && *s->id ? rest_judge(s->rest, deadline_ms) : REST_NO;

    if (answer != REST_IF_IT_HOLDS)
        return answer == REST_YES;
    if (holds_something(s, deadline_ms))
        return true;
    rest_count(s->rest, REST_KEPT);
    return false;
}

void sandbox_rest(struct sandbox *s)
{
    int64_t deadline_ms = lh_now_ms() + REST_MS;
    struct lh_error err = {0};

    if (!should_rest(s, deadline_ms))
        return;
    s->resting = true; /* also when nobody knows whether it was heard */
    int r = set_rest(s, REST_AFTER_MS, rpc_unary, ms_of(deadline_ms), &err);
    rest_count(s->rest, r == 0 ? REST_PUT_AWAY : REST_FAILED);
    if (r < 0)
        lh_warn("not_put_away", "sandbox=%s error=%s", s->id, err.message);
}

/* Before an action.  First the policy, so that it is not put away again. */
static int wake(struct sandbox *s, int timeout_ms, struct lh_error *err)
{
    Longhaul__Sandbox__V1__SandboxAttempt req = LONGHAUL__SANDBOX__V1__SANDBOX_ATTEMPT__INIT;

    if (!s->resting)
        return 0;
    int r = set_rest(s, 0, call, timeout_ms, err);
    if (r < 0)
        return r;
    req.id = s->id;
    req.attempt = s->attempt;
    r = call_empty(s->agentenv, SANDBOXES "Resume", &req.base,
                   &longhaul__sandbox__v1__sandbox__descriptor, timeout_ms, err);
    rest_count(s->rest, r == 0 ? REST_RESUMED : REST_FAILED);
    s->resting = r < 0;
    return r;
}

/* ---- actions ---- */

struct gather {
    struct sandbox_result *out;
    size_t max;
    bool ended;
};

static void keep_output(struct gather *g, const ProtobufCBinaryData *piece)
{
    size_t room = g->max - g->out->len, n = piece->len < room ? piece->len : room;

    memcpy(g->out->output + g->out->len, piece->data, n);
    g->out->len += n;
    g->out->produced += piece->len;
}

static int on_event(void *ctx, const ProtobufCMessage *message, struct lh_error *err)
{
    const Longhaul__Sandbox__V1__ExecEvent *e = (const Longhaul__Sandbox__V1__ExecEvent *)message;
    struct gather *g = ctx;

    switch (e->event_case) {
    case LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_OUT:
        keep_output(g, &e->out);
        return 0;
    case LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_ERR:
        keep_output(g, &e->err);
        return 0;
    case LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_JOINED:
        return 0;
    case LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_EXIT:
        g->ended = true;
        g->out->status = e->exit->status;
        g->out->timed_out = e->exit->timed_out;
        if (e->exit->output_bytes > g->out->produced)
            g->out->produced = e->exit->output_bytes;
        return 0;
    default:
        return lh_fail(err, LH_INTERNAL, "exec event %d is unknown", (int)e->event_case);
    }
}

/* The exec has a name, so the same call begins it, or joins it where the last one was cut off. */
static int run_once(struct sandbox *s, const char *action, uint32_t timeout_ms, struct gather *g,
                    struct lh_error *err)
{
    const char *argv[] = {"/bin/sh", "-c", carry_shell, "sh", action};
    Longhaul__Sandbox__V1__ExecRequest req = LONGHAUL__SANDBOX__V1__EXEC_REQUEST__INIT;
    int64_t deadline = lh_now_ms() + timeout_ms + RUN_GRACE_MS;
    char exec_id[32];

    snprintf(exec_id, sizeof exec_id, "action-%u", ++s->actions);
    g->out->len = g->out->produced = 0;
    g->ended = false;
    req.exec_id = exec_id;
    req.id = s->id;
    req.attempt = s->attempt;
    req.argv = (char **)argv;
    req.n_argv = LH_ARRAY_SIZE(argv);
    req.timeout_ms = timeout_ms;
    for (;;) {
        req.offset = g->out->produced;
        int r = rpc_stream(s->agentenv, SANDBOXES "Exec", &req.base,
                           &longhaul__sandbox__v1__exec_event__descriptor, lh_ms_left(deadline),
                           on_event, g, err);
        if (r == 0 && !g->ended)
            r = lh_fail(err, LH_UNAVAILABLE, "agentenvd Exec ended without an exit status");
        r = as_outage(r, deadline, err);
        if (r != LH_UNAVAILABLE || lh_ms_left(deadline) < RETRY_EVERY_MS)
            return r;
        pause_ms(RETRY_EVERY_MS);
    }
}

static bool by_the_agent(const Longhaul__Sandbox__V1__Sandbox *s)
{
    return s->state == LONGHAUL__SANDBOX__V1__STATE__STATE_DEAD &&
           (s->cause == LONGHAUL__SANDBOX__V1__DEATH_CAUSE__DEATH_EXITED ||
            s->cause == LONGHAUL__SANDBOX__V1__DEATH_CAUSE__DEATH_OOM ||
            s->cause == LONGHAUL__SANDBOX__V1__DEATH_CAUSE__DEATH_KILLED);
}

/* Whether what the agent did ended its sandbox; then its files are still there to be judged. */
static bool died_of_action(struct sandbox *s)
{
    Longhaul__Sandbox__V1__SandboxId id = LONGHAUL__SANDBOX__V1__SANDBOX_ID__INIT;
    lh_automsg(Longhaul__Sandbox__V1__Sandbox) now = NULL;

    id.id = s->id;
    return call(s->agentenv, SANDBOXES "Show", &id.base,
                &longhaul__sandbox__v1__sandbox__descriptor, CLEAN_TIMEOUT_MS,
                (ProtobufCMessage **)&now, NULL) == 0 &&
           by_the_agent(now);
}

static int run_and_rebuild(struct sandbox *s, const char *action, uint32_t timeout_ms,
                           struct gather *g, struct lh_error *err)
{
    for (int tries = 0;; tries++) {
        int r = wake(s, RUN_GRACE_MS, err);
        if (r == 0)
            r = run_once(s, action, timeout_ms, g, err);
        if (r == 0 || r == LH_ABORTED || r == LH_INVALID_ARGUMENT)
            return r;
        if (died_of_action(s)) {
            g->out->dead = true;
            return 0;
        }
        if (tries == REBUILDS)
            return lh_wrap(err, "action after %d rebuilds", REBUILDS);
        lh_warn("sandbox_rebuilt", "owner=%s snapshot=%s error=%s", s->owner, s->snapshot,
                err->message);
        sandbox_remove(s);
        r = build(s, RUN_GRACE_MS, err);
        if (r < 0)
            return lh_wrap(err, "rebuilding the sandbox");
    }
}

int sandbox_run(struct sandbox *s, const char *action, uint32_t timeout_ms, size_t max_output,
                struct sandbox_result *out, struct lh_error *err)
{
    struct gather g = {.out = out, .max = max_output};

    *out = (struct sandbox_result){.output = malloc(max_output + 1)};
    if (!out->output)
        return lh_fail_errno(err, ENOMEM, "output of %zu bytes", max_output);
    return run_and_rebuild(s, action, timeout_ms, &g, err);
}

/* ---- commit points and verdicts ---- */

int sandbox_commit(struct sandbox *s, uint32_t turn, int timeout_ms, struct lh_error *err)
{
    Longhaul__Sandbox__V1__SnapshotRequest req = LONGHAUL__SANDBOX__V1__SNAPSHOT_REQUEST__INIT;
    lh_automsg(Longhaul__Sandbox__V1__Snapshot) snap = NULL;
    lh_autofree char *key = lh_format("%s/%u/turn-%u", s->owner, s->attempt, turn);

    if (!key)
        return lh_fail_errno(err, ENOMEM, "snapshot of %s", s->owner);
    req.id = s->id;
    req.attempt = s->attempt;
    req.idempotency_key = key;
    req.retain_owner = s->owner;
    int r = wake(s, timeout_ms, err);       /* an action that is nonsense has not */
    bool asleep = r < 0 && r != LH_ABORTED; /* as sandbox_run takes it: nothing about the agent */
    if (r == 0)
        r = call(s->agentenv, SANDBOXES "TakeSnapshot", &req.base,
                 &longhaul__sandbox__v1__snapshot__descriptor, timeout_ms,
                 (ProtobufCMessage **)&snap, err);
    if (r == LH_UNAVAILABLE)
        return r;
    if (r < 0 && died_of_action(s))
        return lh_fail(err, LH_FAILED_PRECONDITION, "the sandbox is dead");
    if (asleep || r == LH_FAILED_PRECONDITION ||
        r == LH_NOT_FOUND) { /* lost, and not by the agent */
        lh_wrap(err, "the sandbox is lost");
        return err->code = LH_UNAVAILABLE;
    }
    if (r < 0)
        return r;
    snprintf(s->snapshot, sizeof s->snapshot, "%s", snap->id);
    return 0;
}

Longhaul__Task__V1__Verdict *sandbox_invalid(const char *code, const char *message, bool outage)
{
    Longhaul__Task__V1__Verdict *v = malloc(sizeof *v);

    if (!v)
        return NULL;
    longhaul__task__v1__verdict__init(v);
    v->kind = LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_INVALID;
    v->code = strdup(code);
    v->message = strdup(message);
    v->outage = outage;
    if (v->message)
        lh_text_clean(v->message); /* it was cut somewhere, or quotes a command's output */
    return v;
}

Longhaul__Task__V1__Verdict *sandbox_verify(struct sandbox *s, int timeout_ms, struct lh_error *err)
{
    Longhaul__Sandbox__V1__VerifyRequest req = LONGHAUL__SANDBOX__V1__VERIFY_REQUEST__INIT;
    Longhaul__Task__V1__Verdict *verdict = NULL;

    req.id = s->id;
    req.attempt = s->attempt;
    req.task = (char *)s->task;
    if (call(s->agentenv, SANDBOXES "Verify", &req.base, &longhaul__task__v1__verdict__descriptor,
             timeout_ms, (ProtobufCMessage **)&verdict, err) == 0)
        return verdict;
    return sandbox_invalid("verify", err->message, err->code == LH_UNAVAILABLE);
}

/* ---- leaving nothing behind ---- */

int sandbox_release(struct rpc_channel *agentenv, const char *owner, const char *snapshot,
                    struct lh_error *err)
{
    Longhaul__Sandbox__V1__SnapshotOwner req = LONGHAUL__SANDBOX__V1__SNAPSHOT_OWNER__INIT;

    req.snapshot = (char *)snapshot;
    req.owner = (char *)owner;
    int r = call_empty(agentenv, SANDBOXES "Release", &req.base,
                       &longhaul__sandbox__v1__empty__descriptor, CLEAN_TIMEOUT_MS, err);
    return r == LH_NOT_FOUND ? 0 : r;
}

static int remove_of(struct rpc_channel *agentenv, const char *owner, uint32_t attempt,
                     struct lh_error *err)
{
    Longhaul__Sandbox__V1__RemoveRequest req = LONGHAUL__SANDBOX__V1__REMOVE_REQUEST__INIT;

    req.owner_prefix = (char *)owner;
    req.attempt = attempt;
    int r = call_empty(agentenv, SANDBOXES "Remove", &req.base,
                       &longhaul__sandbox__v1__remove_reply__descriptor, CLEAN_TIMEOUT_MS, err);
    return r == LH_NOT_FOUND ? 0 : r;
}

int sandbox_clear(struct rpc_channel *agentenv, const char *owner, uint32_t attempt,
                  const char *keep_snapshot, struct lh_error *err)
{
    Longhaul__Sandbox__V1__ReconcileRequest req = LONGHAUL__SANDBOX__V1__RECONCILE_REQUEST__INIT;
    Longhaul__Sandbox__V1__SnapshotOwner keep = LONGHAUL__SANDBOX__V1__SNAPSHOT_OWNER__INIT;
    Longhaul__Sandbox__V1__SnapshotOwner *list[] = {&keep};
    int r = remove_of(agentenv, owner, attempt, err);

    if (r < 0)
        return r;
    keep.snapshot = (char *)keep_snapshot;
    keep.owner = (char *)owner;
    req.owner_prefix = (char *)owner;
    req.keep = list;
    req.n_keep = *keep_snapshot ? 1 : 0;
    return call_empty(agentenv, SANDBOXES "Reconcile", &req.base,
                      &longhaul__sandbox__v1__reconcile_reply__descriptor, CLEAN_TIMEOUT_MS, err);
}

Longhaul__Task__V1__RegisteredTask *sandbox_task(struct rpc_channel *agentenv, const char *name,
                                                 int timeout_ms, struct lh_error *err)
{
    Longhaul__Task__V1__TaskName req = LONGHAUL__TASK__V1__TASK_NAME__INIT;
    Longhaul__Task__V1__RegisteredTask *task = NULL;

    req.name = (char *)name;
    call(agentenv, TASKS "Show", &req.base, &longhaul__task__v1__registered_task__descriptor,
         timeout_ms, (ProtobufCMessage **)&task, err);
    return task;
}
