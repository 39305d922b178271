#include <errno.h>
#include <signal.h>
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
    void (*joined)(void *ctx, uint64_t stdin_bytes);
    void *ctx;
    uint64_t offset; /* of the piece that `output` is called with */
    int status;      /* what `output` failed with */
    struct lh_error *err;
};

static int on_output(void *ctx, enum box_stream stream, uint64_t offset, const void *data,
                     size_t len)
{
    struct running *r = ctx;

    r->offset = offset;
    if (r->status == 0 && r->output)
        r->status = r->output(r->ctx, stream == BOX_OUT ? 1 : 2, data, len, r->err);
    return r->status;
}

static void on_attached(void *ctx, uint64_t stdin_bytes)
{
    struct running *r = ctx;

    if (r->joined)
        r->joined(r->ctx, stdin_bytes);
}

static bool on_cancelled(void *ctx)
{
    const struct running *r = ctx;

    return r->call && rpc_cancelled(r->call);
}

static int check_terminal(const V1(Terminal) * t, struct lh_error *err)
{
    if (t && (t->rows > UINT16_MAX || t->cols > UINT16_MAX))
        return lh_fail(err, LH_INVALID_ARGUMENT, "a terminal of %u x %u: the limit is %d", t->rows,
                       t->cols, UINT16_MAX);
    return 0;
}

static int check_streams(const V1(ExecRequest) * req, struct lh_error *err)
{
    bool open = req->stdin_open || req->terminal;

    if (open && !req->exec_id[0])
        return lh_fail(err, LH_INVALID_ARGUMENT, "stdin_open and terminal need an exec_id");
    if (open && req->stdin.len)
        return lh_fail(err, LH_INVALID_ARGUMENT, "stdin: open input comes by ExecInput");
    if (req->offset && !req->exec_id[0])
        return lh_fail(err, LH_INVALID_ARGUMENT, "offset needs an exec_id");
    return check_terminal(req->terminal, err);
}

static int check_request(const V1(ExecRequest) * req, struct lh_error *err)
{
    if (req->n_argv < 1 ? !req->exec_id[0] : !req->argv[0][0])
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
    return check_streams(req, err);
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

static struct box_exec_limits limits_of(const V1(ExecLimits) * l)
{
    struct box_exec_limits none = {0};

    return l ? (struct box_exec_limits){l->open_files, l->cpu_seconds, l->memory_bytes,
                                        l->file_bytes}
             : none;
}

static void fill_spec(struct box_exec_spec *spec, const V1(ExecRequest) * req,
                      const struct daemon_exec_defaults *defaults)
{
    spec->cwd = *req->cwd || !defaults->cwd ? req->cwd : defaults->cwd;
    spec->user = *req->user || !defaults->user ? req->user : defaults->user;
    spec->stdin_data = req->stdin.data;
    spec->stdin_len = req->stdin.len;
    spec->stdin_open = req->stdin_open;
    spec->terminal = req->terminal != NULL;
    spec->rows = req->terminal ? (uint16_t)req->terminal->rows : 0;
    spec->cols = req->terminal ? (uint16_t)req->terminal->cols : 0;
    spec->timeout_ms = req->timeout_ms ? req->timeout_ms : TIMEOUT_DEFAULT_MS;
    spec->output_bytes = req->output_bytes;
    spec->keep_tail = req->keep_tail || req->terminal;
    spec->outlives = req->exec_id[0] && !req->ends_with_stream;
    spec->limits = limits_of(req->limits);
    spec->offset = req->offset;
}

/* A named command is begun once and joined from then on.  A join that finds nothing shows that the
 * cgroup which stood for it was left by a daemon that died in between; the join has removed it. */
static int begin_or_join(struct box *box, const struct box_exec_spec *spec,
                         struct box_exec_result *result, struct lh_error *err)
{
    enum { TRIES = 3 };

    if (!spec->argv[0])
        return box_exec_attach(box, spec, result, err);
    for (int tries = 1;; tries++) {
        struct lh_error why = {0};
        int r = box_exec(box, spec, result, &why);
        if (r == LH_ALREADY_EXISTS)
            r = box_exec_attach(box, spec, result, &why);
        if (r != LH_NOT_FOUND || !spec->outlives || tries == TRIES)
            return r < 0 ? lh_fail(err, r, "%s", why.message) : r;
    }
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
        .exec_id = *req->exec_id ? req->exec_id : exec_id,
        .argv = (const char *const *)argv,
        .env = (const char *const *)env,
        .output = on_output,
        .attached = on_attached,
        .cancelled = on_cancelled,
        .ctx = running,
    };
    fill_spec(&spec, req, &defaults);
    r = begin_or_join(s->box, &spec, &result, err);
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
        r = running->from_outside
                ? policy_begin_exec(d, req->id, req->attempt, states, deadline_ms, &s, err)
                : sandbox_begin(d, req->id, ANY_ATTEMPT, states, HOLD_EXEC, deadline_ms, &s, err);
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
    const struct running *r = ctx;

    event.offset = r->offset;
    if (stream == 1) {
        event.event_case = LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_OUT;
        event.out = piece;
    } else {
        event.event_case = LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_ERR;
        event.err = piece;
    }
    return rpc_send(r->call, &event.base, err);
}

static void send_joined(void *ctx, uint64_t stdin_bytes)
{
    V1(ExecEvent) event = LONGHAUL__SANDBOX__V1__EXEC_EVENT__INIT;
    V1(ExecJoined) joined = LONGHAUL__SANDBOX__V1__EXEC_JOINED__INIT;
    struct running *r = ctx;

    joined.stdin_bytes = stdin_bytes;
    event.event_case = LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_JOINED;
    event.joined = &joined;
    if (r->status == 0)
        r->status = rpc_send(r->call, &event.base, r->err);
}

int service_exec(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                 struct lh_error *err)
{
    V1(ExecEvent) last = LONGHAUL__SANDBOX__V1__EXEC_EVENT__INIT;
    V1(ExecExit) exit;
    struct running running = {
        .call = call, .from_outside = true, .output = send_output, .joined = send_joined};

    running.ctx = &running;
    int r = exec_in(ctx, (const V1(ExecRequest) *)request, SB_IN(SB_RUNNING), &running, &exit, err);
    if (r < 0)
        return r;
    last.event_case = LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_EXIT;
    last.exit = &exit;
    rpc_send_last(call, &last.base);
    return 0;
}

int service_exec_input(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                       ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(ExecInputRequest) *req = (const void *)request;
    V1(Empty) *out = calloc(1, sizeof *out);
    struct sandbox *s;

    if (!out)
        return lh_fail_errno(err, ENOMEM, "input");
    longhaul__sandbox__v1__empty__init(out);
    *reply = &out->base;
    struct box_exec_input in = {.data = req->stdin.data,
                                .len = req->stdin.len,
                                .offset = req->stdin_offset,
                                .end = req->stdin_end,
                                .signal = req->signal};
    int r = check_terminal(req->resize, err);
    if (r == 0 && (req->signal < 0 || req->signal > SIGRTMAX))
        r = lh_fail(err, LH_INVALID_ARGUMENT, "signal %d: there is none", req->signal);
    if (r == 0)
        r = sandbox_begin(ctx, req->id, req->attempt, SB_IN(SB_RUNNING), HOLD_EXEC,
                          call_deadline_ms(call), &s, err);
    if (r < 0)
        return r;
    if (req->resize) {
        in.rows = (uint16_t)req->resize->rows;
        in.cols = (uint16_t)req->resize->cols;
    }
    r = box_exec_input(s->box, req->exec_id, &in, call_deadline_ms(call), err);
    sandbox_end(ctx, s, HOLD_EXEC);
    return r;
}
