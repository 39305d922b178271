/* exec and cp: bytes in and out of a sandbox. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "agentenv/cli/copy.h"
#include "agentenv/cli/verbs.h"
#include "proto/file.h"
#include "proto/parse.h"

enum { STDIN_MAX = 1 << 20, EXEC_DEFAULT_MS = 30000 };

struct exec {
    V1(ExecRequest) req;
    const char *timeout;
    bool with_stdin;
    char **env;
    size_t n_env;
    V1(ExecExit) exit;
    bool done;
};

static const struct argp_option exec_options[] = {
    {"timeout", 't', "TIME", 0, "Then its whole process tree is killed; default 30s", 0},
    {"cwd", 'C', "DIR", 0, "Working directory; default /", 0},
    {"env", 'e', "NAME=VALUE", 0, "May be given many times", 0},
    {"user", 'u', "USER", 0, "name, uid or uid:gid; default root of the sandbox", 0},
    {"interactive", 'i', 0, 0, "Pass standard input on (at most 1 MiB)", 0},
    {0},
};

static error_t parse_exec(int key, char *arg, struct argp_state *state)
{
    struct exec *x = state->input;

    switch (key) {
    case 't':
        x->timeout = arg;
        return 0;
    case 'C':
        x->req.cwd = arg;
        return 0;
    case 'u':
        x->req.user = arg;
        return 0;
    case 'i':
        x->with_stdin = true;
        return 0;
    case 'e':
        x->env[x->n_env++] = arg;
        return 0;
    case ARGP_KEY_ARG:
        if (state->arg_num == 0) {
            x->req.id = arg;
            return 0;
        }
        x->req.argv = state->argv + state->next - 1; /* options of the command are its own */
        x->req.n_argv = (size_t)(state->argc - state->next + 1);
        state->next = state->argc;
        return 0;
    case ARGP_KEY_END:
        if (!x->req.n_argv)
            argp_error(state, "an id and a command");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static int read_stdin(V1(ExecRequest) * req, char **owned, struct lh_error *err)
{
    size_t len = 0;

    *owned = malloc(STDIN_MAX + 1);
    if (!*owned)
        return lh_fail_errno(err, ENOMEM, "standard input");
    while (len <= STDIN_MAX) {
        ssize_t n = read(STDIN_FILENO, *owned + len, STDIN_MAX + 1 - len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return lh_fail_errno(err, errno, "standard input");
        if (n == 0)
            break;
        len += (size_t)n;
    }
    if (len > STDIN_MAX)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "standard input is longer than 1 MiB: copy it in with agentenv cp");
    req->stdin.data = (uint8_t *)*owned;
    req->stdin.len = len;
    return 0;
}

static int on_event(void *ctx, const ProtobufCMessage *message, struct lh_error *err)
{
    const V1(ExecEvent) *e = (const void *)message;
    struct exec *x = ctx;

    switch (e->event_case) {
    case LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_OUT:
        return lh_write_all(STDOUT_FILENO, e->out.data, e->out.len, err);
    case LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_ERR:
        return lh_write_all(STDERR_FILENO, e->err.data, e->err.len, err);
    case LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_EXIT:
        x->exit = *e->exit; /* numbers only */
        x->done = true;
        return 0;
    default:
        return 0;
    }
}

static int report_exit(const struct exec *x, struct lh_error *err)
{
    const V1(ExecExit) *e = &x->exit;

    if (!x->done)
        return lh_fail(err, LH_UNAVAILABLE, "the daemon ended the stream without a result");
    if (e->truncated)
        fprintf(stderr, "agentenv exec: output was cut, %llu bytes were produced\n",
                (unsigned long long)e->output_bytes);
    if (e->oom_killed)
        fputs("agentenv exec: killed by the memory limit\n", stderr);
    if (e->timed_out)
        fprintf(stderr, "agentenv exec: killed after %u ms (--timeout)\n", e->wall_ms);
    return e->timed_out ? CLI_TIMEOUT : e->status;
}

static int exec_verb(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    const struct argp argp = {exec_options,
                              parse_exec,
                              "ID COMMAND [ARGUMENT...]",
                              "Runs a command in a sandbox; its exit status is ours.",
                              NULL,
                              NULL,
                              NULL};
    lh_autofree char **env = calloc((size_t)argc, sizeof *env), *input = NULL;
    struct exec x = {.env = env};
    int r;

    if (!env)
        return lh_fail_errno(err, ENOMEM, "exec");
    longhaul__sandbox__v1__exec_request__init(&x.req);
    cli_parse(&argp, argc, argv, &x);
    x.req.env = env;
    x.req.n_env = x.n_env;
    x.req.timeout_ms = EXEC_DEFAULT_MS;
    if ((x.timeout && (r = cli_duration(x.timeout, &x.req.timeout_ms, err)) < 0) ||
        (x.with_stdin && (r = read_stdin(&x.req, &input, err)) < 0))
        return r;
    x.req.attempt = CURRENT_ATTEMPT;
    uint64_t wait_ms = (uint64_t)x.req.timeout_ms + CALL_MS;
    r = cli_stream(cli, "Exec", &x.req.base, &longhaul__sandbox__v1__exec_event__descriptor,
                   wait_ms > INT32_MAX ? INT32_MAX : (int)wait_ms, on_event, &x, err);
    return r < 0 ? r : report_exit(&x, err);
}

/* ---- cp ---- */

struct copy_args {
    char *argv[2];
    int n;
};

static error_t parse_copy(int key, char *arg, struct argp_state *state)
{
    struct copy_args *c = state->input;

    if (key == ARGP_KEY_ARG && c->n < 2)
        c->argv[c->n++] = arg;
    else if (key == ARGP_KEY_ARG || (key == ARGP_KEY_END && c->n < 2))
        argp_error(state, "a source and a destination");
    else if (key != ARGP_KEY_END)
        return ARGP_ERR_UNKNOWN;
    return 0;
}

static int cp(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    const struct argp argp = {
        NULL,
        parse_copy,
        "SOURCE DESTINATION",
        "Copies a file or a directory into or out of a sandbox; one of the two "
        "is ID:/PATH.  Modes and symbolic links are kept.",
        NULL,
        NULL,
        NULL};
    struct copy_args c = {0};
    char *id, *path;

    cli_parse(&argp, argc, argv, &c);
    bool out = cli_remote_path(c.argv[0], &id, &path);
    char *id2, *path2;
    bool in = cli_remote_path(c.argv[1], &id2, &path2);
    if (in == out)
        return lh_fail(err, LH_INVALID_ARGUMENT, "one of source and destination must be ID:/PATH");
    return out ? copy_out(cli, id, path, c.argv[1], err) : copy_in(cli, c.argv[0], id2, path2, err);
}

const struct cli_verb file_verbs[] = {
    {"exec", "ID COMMAND...", "run a command in a sandbox", exec_verb},
    {"cp", "SOURCE DESTINATION", "copy files in (to ID:/PATH) or out", cp},
    {0},
};
