#include <errno.h>
#include <string.h>

#include "agentenv/daemon/internal.h"
#include "agentenv/daemon/service.h"
#include "proto/clock.h"
#include "proto/parse.h"

enum { TIMEOUT_DEFAULT_MS = 30000, STDIN_MAX = 1 << 20, ARGS_MAX = 65536 };

struct running {
    struct rpc_call *call;
    bool from_outside; /* the task's defaults apply; who is inside has said everything */
    daemon_output_fn *output;
    void *ctx;
    int status; /* what `output` failed with */
    struct lh_error *err;
};

static int on_output(void *ctx, enum box_stream stream, const void *data, size_t len)
{
    struct running *r = ctx;

    if (r->status == 0 && r->output)
        r->status = r->output(r->ctx, stream == BOX_OUT ? 1 : 2, data, len, r->err);
    return r->status;
}

static bool on_cancelled(void *ctx)
{
    const struct running *r = ctx;

    return r->call && rpc_cancelled(r->call);
}

static int check_request(const V1(ExecRequest) * req, struct lh_error *err)
{
    if (req->n_argv < 1 || !req->argv[0][0])
        return lh_fail(err, LH_INVALID_ARGUMENT, "argv must name a command");
    if (req->n_argv > ARGS_MAX || req->n_env > ARGS_MAX)
        return lh_fail(err, LH_INVALID_ARGUMENT, "more than %d arguments or variables", ARGS_MAX);
    if (req->stdin.len > STDIN_MAX)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "stdin of %zu bytes: the limit is %d; upload a file", req->stdin.len,
                       STDIN_MAX);
    if (req->cwd[0] && req->cwd[0] != '/')
        return lh_fail(err, LH_INVALID_ARGUMENT, "cwd \"%s\" is not absolute", req->cwd);
    for (size_t i = 0; i < req->n_env; i++)
        if (!strchr(req->env[i], '=') || req->env[i][0] == '=')
            return lh_fail(err, LH_INVALID_ARGUMENT, "env \"%.64s\" is not NAME=value",
                           req->env[i]);
    return 0;
}

/* Pointers only; the strings stay the owners'.  Later ones win. */
static char **null_terminated(char *const *before, size_t n_before, char *const *list, size_t n)
{
    char **out = calloc(n_before + n + 1, sizeof *out);

    if (out && n_before)
        memcpy(out, before, n_before * sizeof *out);
    if (out && n)
        memcpy(out + n_before, list, n * sizeof *out);
    return out;
}

static void defaults_finish(struct daemon_exec_defaults *defaults)
{
    for (size_t i = 0; i < defaults->n_env; i++)
        free(defaults->env[i]);
    free(defaults->env);
    lh_message_free(defaults->owned);
}

static void fill_exit(V1(ExecExit) * to, const struct box_exec_result *from)
{
    longhaul__sandbox__v1__exec_exit__init(to);
    to->status = from->status;
    to->signal = from->signal;
    to->timed_out = from->timed_out;
    to->oom_killed = from->oom_killed;
    to->truncated = from->truncated;
    to->output_bytes = from->output_bytes;
    to->wall_ms = from->wall_ms;
}

static int run(struct daemon *d, struct sandbox *s, const V1(ExecRequest) * req,
               struct running *running, V1(ExecExit) * exit, struct lh_error *err)
{
    __attribute__((cleanup(defaults_finish))) struct daemon_exec_defaults defaults = {0};
    int r = running->from_outside && s->task[0]
                ? d->hooks->task_exec_defaults(d, s->task, &defaults, err)
                : 0;
    if (r < 0)
        return lh_wrap(err, "exec in sandbox %s", s->id);
    lh_autofree char **argv = null_terminated(NULL, 0, req->argv, req->n_argv);
    lh_autofree char **env = null_terminated(defaults.env, defaults.n_env, req->env, req->n_env);
    struct box_exec_result result = {0};
    char exec_id[LH_ID_SIZE];

    if (!argv || !env)
        return lh_fail_errno(err, ENOMEM, "exec in sandbox %s", s->id);
    lh_id_new_text(exec_id);
    struct box_exec_spec spec = {
        .exec_id = exec_id,
        .argv = (const char *const *)argv,
        .env = (const char *const *)env,
        .cwd = *req->cwd || !defaults.cwd ? req->cwd : defaults.cwd,
        .user = *req->user || !defaults.user ? req->user : defaults.user,
        .stdin_data = req->stdin.data,
        .stdin_len = req->stdin.len,
        .timeout_ms = req->timeout_ms ? req->timeout_ms : TIMEOUT_DEFAULT_MS,
        .output_bytes = req->output_bytes,
        .output = on_output,
        .cancelled = on_cancelled,
        .ctx = running,
    };
    r = box_exec(s->box, &spec, &result, err);
    if (r == 0 && running->status < 0)
        return running->status;
    if (r == 0 && result.cancelled)
        return lh_fail(err, LH_CANCELLED, "exec in sandbox %s was cancelled", s->id);
    if (r == 0)
        fill_exit(exit, &result);
    return r < 0 ? lh_wrap(err, "exec in sandbox %s", s->id) : 0;
}

static int exec_in(struct daemon *d, const V1(ExecRequest) * req, unsigned states,
                   struct running *running, V1(ExecExit) * exit, struct lh_error *err)
{
    int64_t deadline_ms = running->call ? rpc_deadline_ms(running->call) : INT64_MAX;
    struct sandbox *s;
    int r = check_request(req, err);

    if (deadline_ms > lh_now_ms() + WAIT_DEFAULT_MS)
        deadline_ms = lh_now_ms() + WAIT_DEFAULT_MS; /* for its turn, not for the command */
    if (r == 0)
        r = sandbox_begin(d, req->id, running->from_outside ? req->attempt : ANY_ATTEMPT, states,
                          HOLD_EXEC, deadline_ms, &s, err);
    if (r < 0)
        return r;
    running->err = err;
    r = run(d, s, req, running, exit, err);
    sandbox_end(d, s, HOLD_EXEC);
    return r;
}

int daemon_exec(struct daemon *d, const V1(ExecRequest) * req, struct rpc_call *call,
                daemon_output_fn *output, void *ctx, V1(ExecExit) * exit, struct lh_error *err)
{
    struct running running = {.call = call, .output = output, .ctx = ctx};

    return exec_in(d, req, SB_IN(SB_CREATING) | SB_IN(SB_RUNNING), &running, exit, err);
}

static int send_output(void *ctx, int stream, const void *data, size_t len, struct lh_error *err)
{
    V1(ExecEvent) event = LONGHAUL__SANDBOX__V1__EXEC_EVENT__INIT;
    ProtobufCBinaryData piece = {.data = (uint8_t *)data, .len = len};

    if (stream == 1) {
        event.event_case = LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_OUT;
        event.out = piece;
    } else {
        event.event_case = LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_ERR;
        event.err = piece;
    }
    return rpc_send(ctx, &event.base, err);
}

int service_exec(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                 struct lh_error *err)
{
    V1(ExecEvent) last = LONGHAUL__SANDBOX__V1__EXEC_EVENT__INIT;
    V1(ExecExit) exit;
    struct running running = {
        .call = call, .from_outside = true, .output = send_output, .ctx = call};
    int r = exec_in(ctx, (const V1(ExecRequest) *)request, SB_IN(SB_RUNNING), &running, &exit, err);

    if (r < 0)
        return r;
    last.event_case = LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_EXIT;
    last.exit = &exit;
    return rpc_send(call, &last.base, err);
}
