/* From a sandbox to a verdict.
 *
 * Isolation.  The verifier runs in a new sandbox over a fork of the files: no process of the agent
 * lives in it, so nothing changes under its hands.  Its shell comes from a layer above the agent's
 * (layer.c), so nothing the agent replaced is run unless the task's author runs it by path.  The
 * file it writes the reward to has a name made up after the fork.
 *
 * Three outcomes.  SCORED: the verifier came to a result.  TIMEOUT: it did not within its time, and
 * the task says that this is the agent's failure.  INVALID: something that is not the agent's doing
 * went wrong; the code says what, the caller tries again, and no number is given.
 *
 * Who broke it.  A verifier that crashes, or does not find a program, may be at fault itself, or
 * have met what the agent did to the files (an interpreter removed).  So it is tried twice on the
 * agent's files and then on untouched ones: broken twice there and well here is the agent's
 * failure, reward 0; anything else is INVALID. */
#include "agentenv/task/verify.h"

#include <stdio.h>
#include <string.h>

#include "agentenv/task/judge.h"
#include "agentenv/task/layer.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/parse.h"

LH_LOG_COMPONENT("task");

enum { SANDBOX_MS = 30000, CARRY_MAX = 64 << 20 };

#define INVALID LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_INVALID

/* ---- the sandboxes it runs in ---- */

static void discard(struct daemon *d, const char *box)
{
    struct lh_error err = {0};

    if (*box && daemon_remove(d, box, UINT32_MAX, &err) < 0 && err.code != LH_NOT_FOUND)
        lh_warn("verifier's sandbox stays until the daemon restarts", "sandbox=%s error=%s", box,
                err.message);
}

static void fill_request(const struct verify_subject *s, char key[LH_ID_SIZE],
                         Longhaul__Sandbox__V1__CreateRequest *req)
{
    lh_id_new_text(key);
    longhaul__sandbox__v1__create_request__init(req);
    req->idempotency_key = key;
    req->owner = (char *)"verifier";
    req->limits = s->task->environment->limits;
    req->network = s->task->environment->verify_network;
    if (!req->network)
        req->network = LONGHAUL__TASK__V1__NETWORK__NETWORK_NONE;
}

static int fork_of(const struct verify_subject *s, const struct daemon_create_options *o,
                   char box[LH_ID_SIZE], struct lh_error *err)
{
    Longhaul__Sandbox__V1__CreateRequest req;
    char key[LH_ID_SIZE];

    fill_request(s, key, &req);
    return daemon_fork_files(s->d, s->sandbox, s->attempt, &req, o, lh_now_ms() + SANDBOX_MS, box,
                             err);
}

static int untouched(const struct verify_subject *s, const struct daemon_create_options *o,
                     char box[LH_ID_SIZE], struct lh_error *err)
{
    Longhaul__Sandbox__V1__CreateRequest req;
    char key[LH_ID_SIZE];
    int64_t deadline = lh_now_ms() + SANDBOX_MS + task_timeout(s->task, TASK_SETUP).ms +
                       task_timeout(s->task, TASK_BOOT).ms;

    fill_request(s, key, &req);
    req.source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_TASK;
    req.task = (char *)s->task_name;
    return daemon_create(s->d, &req, o, deadline, box, err);
}

/* ---- isolation FRESH: files carried over by a tar ---- */

#define CARRY_TAR TASK_VERIFIER_DIR "/carry.tar"

struct archive {
    char *data;
    size_t len;
};

static int append(void *ctx, int stream, const void *data, size_t len, struct lh_error *err)
{
    struct archive *a = ctx;

    if (stream != 1)
        return 0;
    if (a->len + len > CARRY_MAX)
        return lh_fail(err, LH_OUT_OF_RANGE, "what is carried over has more than %d bytes",
                       CARRY_MAX);
    char *more = realloc(a->data, a->len + len);
    if (!more)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for what is carried over");
    a->data = more;
    memcpy(a->data + a->len, data, len);
    a->len += len;
    return 0;
}

static int run_tar(const struct verify_subject *s, const char *box, char **argv, size_t n,
                   struct archive *to, struct lh_error *err)
{
    Longhaul__Sandbox__V1__ExecRequest req = LONGHAUL__SANDBOX__V1__EXEC_REQUEST__INIT;
    Longhaul__Sandbox__V1__ExecExit exit = LONGHAUL__SANDBOX__V1__EXEC_EXIT__INIT;

    req.id = (char *)box;
    req.n_argv = n;
    req.argv = argv;
    req.cwd = (char *)"/";
    req.timeout_ms = task_timeout(s->task, TASK_VERIFY).ms;
    req.output_bytes = CARRY_MAX + 1;
    int r = daemon_exec(s->d, &req, s->call, append, to, &exit, err);
    if (r == 0 && exit.timed_out)
        r = lh_fail(err, LH_DEADLINE_EXCEEDED, "carrying files over took longer than %u ms",
                    req.timeout_ms);
    return r;
}

/* A path that the agent did not make is left out by tar, which says so by its exit status. */
static int pack_carried(const struct verify_subject *s, const char *box, struct archive *to,
                        struct lh_error *err)
{
    const Longhaul__Task__V1__Verifier *v = s->task->verifier;
    const char *const fixed[] = {VERIFIER_BIN "/tar", "-C", "/", "-cf", "-", "--"};
    size_t n = LH_ARRAY_SIZE(fixed);
    lh_autofree char **argv = calloc(n + v->n_carry + 1, sizeof *argv);

    if (!argv)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for %zu paths", v->n_carry);
    memcpy(argv, fixed, sizeof fixed);
    for (size_t i = 0; i < v->n_carry; i++)
        argv[n + i] = v->carry[i] + 1; /* relative to / */
    return run_tar(s, box, argv, n + v->n_carry, to, err);
}

static int unpack_carried(const struct verify_subject *s, const char *box, const struct archive *a,
                          struct lh_error *err)
{
    char *const argv[] = {(char *)VERIFIER_BIN "/tar", (char *)"-C", (char *)"/", (char *)"-xf",
                          (char *)CARRY_TAR};
    struct archive messages = {0};
    int r = daemon_put_file(s->d, box, CARRY_TAR, a->data, a->len, 0600, err);

    if (r == 0)
        r = run_tar(s, box, (char **)argv, LH_ARRAY_SIZE(argv), &messages, err);
    free(messages.data);
    return r;
}

static int carry_over(const struct verify_subject *s, const struct daemon_create_options *o,
                      char box[LH_ID_SIZE], struct lh_error *err)
{
    struct archive carried = {0};
    char fork[LH_ID_SIZE] = "";
    int r = fork_of(s, o, fork, err);

    if (r == 0)
        r = pack_carried(s, fork, &carried, err);
    discard(s->d, fork);
    if (r == 0)
        r = untouched(s, o, box, err);
    if (r == 0)
        r = unpack_carried(s, box, &carried, err);
    free(carried.data);
    return r;
}

/* ---- who broke it ---- */

typedef int make_box(const struct verify_subject *s, const struct daemon_create_options *o,
                     char box[LH_ID_SIZE], struct lh_error *err);

/* Whether the caller is gone, or asked for what cannot be: then there is nothing to conclude. */
static bool is_callers(int status)
{
    return status == LH_NOT_FOUND || status == LH_ABORTED || status == LH_CANCELLED ||
           status == LH_INVALID_ARGUMENT;
}

static int judge_in(const struct verify_subject *s, make_box *make, struct judgement *j,
                    bool *broken, struct lh_error *err)
{
    lh_autofree char *layer = verifier_layer_path(s->d, err);
    struct daemon_create_options o = {.top_layer = layer, .transient = true};
    struct lh_error why = {0};
    char box[LH_ID_SIZE] = "";

    *broken = false;
    if (!layer)
        return err ? err->code : LH_RESOURCE_EXHAUSTED;
    int r = make(s, &o, box, &why);
    if (r == 0)
        judge_run(s, box, j, broken);
    else if (!is_callers(r)) {
        judge_conclude(j, INVALID, "verify_sandbox", "%s", why.message);
        j->verdict.outage = r == LH_UNAVAILABLE || r == LH_DATA_LOSS || r == LH_RESOURCE_EXHAUSTED;
    }
    discard(s->d, box);
    if (s->call && rpc_cancelled(s->call))
        return lh_fail(err, LH_CANCELLED, "the caller is gone");
    return r < 0 && is_callers(r) ? lh_fail(err, r, "%s", why.message) : 0;
}

static int blame(const struct verify_subject *s, struct judgement *j, struct lh_error *err)
{
    struct judgement control = {0};
    bool broken;
    int r = judge_in(s, untouched, &control, &broken, err);

    if (r < 0 || broken || control.verdict.kind == INVALID)
        return r;
    lh_autofree char *message =
        lh_format("the verifier works on untouched files and broke twice on these: %s", j->message);
    judge_score(j, s->task, 0, message ? message : "");
    return 0;
}

int verify_untouched(const struct verify_subject *s, struct judgement *j, struct lh_error *err)
{
    bool broken;

    return judge_in(s, untouched, j, &broken, err);
}

int verify(const struct verify_subject *s, struct judgement *j, struct lh_error *err)
{
    bool fresh = s->task->verifier->isolation == LONGHAUL__TASK__V1__ISOLATION__ISOLATION_FRESH;
    make_box *make = fresh ? carry_over : fork_of;
    bool broken;
    int r = judge_in(s, make, j, &broken, err);

    if (r == 0 && broken)
        r = judge_in(s, make, j, &broken, err);
    return r == 0 && broken ? blame(s, j, err) : r;
}

/* ---- the rpc ---- */

static int reply_with(const Verdict *verdict, ProtobufCMessage **reply, struct lh_error *err)
{
    size_t len;
    lh_autofree uint8_t *bytes = lh_pack(&verdict->base, &len, err);

    if (!bytes)
        return err ? err->code : LH_RESOURCE_EXHAUSTED;
    *reply = lh_parse(verdict->base.descriptor, bytes, len, (struct lh_parse_limits){0}, err);
    return *reply ? 0 : err ? err->code : LH_INTERNAL;
}

/* The task to judge by: the one asked for, or the sandbox's own. */
static RegisteredTask *task_of(struct daemon *d, const Longhaul__Sandbox__V1__VerifyRequest *req,
                               struct lh_error *err)
{
    if (*req->task)
        return task_fetch(d, req->task, err);
    lh_automsg(Longhaul__Sandbox__V1__Sandbox) box = daemon_show(d, req->id, err);
    if (!box)
        return NULL;
    if (*box->task)
        return task_fetch(d, box->task, err);
    lh_fail(err, LH_FAILED_PRECONDITION, "sandbox %s belongs to no task; name one", req->id);
    return NULL;
}

int verify_rpc(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
               ProtobufCMessage **reply, struct lh_error *err)
{
    const Longhaul__Sandbox__V1__VerifyRequest *req = (const void *)request;
    struct daemon *d = ctx;
    lh_automsg(RegisteredTask) task = task_of(d, req, err);
    struct judgement j = {0};

    if (!task)
        return err ? err->code : LH_NOT_FOUND;
    struct verify_subject s = {.d = d,
                               .task = task->task,
                               .task_name = task->task->name,
                               .sandbox = req->id,
                               .attempt = req->attempt,
                               .call = call};
    int r = verify(&s, &j, err);
    if (r < 0)
        return lh_wrap(err, "verifying %s", req->id);
    bool infra = j.verdict.kind == INVALID;
    if (infra)
        lh_warn("verdict is invalid", "task=%s sandbox=%s code=%s message=%s", task->task->name,
                req->id, j.code, j.message);
    r = j.verdict.outage ? 0 : task_note_verdict(d, task, infra, err);
    return r < 0 ? r : reply_with(&j.verdict, reply, err);
}
