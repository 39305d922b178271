/* exec and cp: bytes in and out of a sandbox. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "agentenv/cli/copy.h"
#include "agentenv/cli/session.h"
#include "proto/id.h"

enum { EXEC_DEFAULT_MS = 30000 };

struct exec {
    struct session session;
    char **env;
    bool detach;
};

static const struct argp_option exec_options[] = {
    {"timeout", 't', "TIME", 0, "Then its whole process tree is killed; default 30s", 0},
    {"cwd", 'C', "DIR", 0, "Working directory; default /", 0},
    {"env", 'e', "NAME=VALUE", 0, "May be given many times", 0},
    {"user", 'u', "USER", 0, "name, uid or uid:gid; default root of the sandbox", 0},
    {"interactive", 'i', 0, 0, "Pass standard input on", 0},
    {"name", 'n', "NAME", 0,
     "Of this command in its sandbox: it outlives this process, and the same again joins it", 0},
    {"detach", 'd', 0, 0, "Leave it running, print its name for attach and kill", 0},
    {"keep", 'k', "SIZE", 0, "Of more output the end is kept, for attach", 0},
    {0},
};

static error_t parse_words(struct exec *x, char *arg, struct argp_state *state)
{
    V1(ExecRequest) *req = &x->session.req;

    if (state->arg_num == 0) {
        req->id = arg;
        return 0;
    }
    req->argv = state->argv + state->next - 1; /* options of the command are its own */
    req->n_argv = (size_t)(state->argc - state->next + 1);
    state->next = state->argc;
    return 0;
}

static error_t parse_exec(int key, char *arg, struct argp_state *state)
{
    struct exec *x = state->input;
    V1(ExecRequest) *req = &x->session.req;

    switch (key) {
    case 't':
        req->timeout_ms = cli_duration(state, "--timeout", arg);
        return 0;
    case 'C':
        req->cwd = arg;
        return 0;
    case 'u':
        req->user = arg;
        return 0;
    case 'i':
        x->session.pass_input = true;
        return 0;
    case 'n':
        req->exec_id = arg;
        return 0;
    case 'd':
        x->detach = true;
        return 0;
    case 'k':
        req->output_bytes = cli_size(state, "--keep", arg);
        req->keep_tail = true;
        return 0;
    case 'e':
        x->env[req->n_env++] = arg;
        return 0;
    case ARGP_KEY_ARG:
        return parse_words(x, arg, state);
    case ARGP_KEY_END:
        if (!req->n_argv)
            argp_error(state, "an id and a command");
        if (x->detach && x->session.pass_input)
            argp_error(state, "a command that is left running gets no input");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static int report_exit(const V1(ExecExit) * e)
{
    if (e->truncated)
        fprintf(stderr, "agentenv exec: output was cut, %llu bytes were produced\n",
                (unsigned long long)e->output_bytes);
    if (e->oom_killed)
        fputs("agentenv exec: killed by the memory limit\n", stderr);
    if (e->timed_out)
        fprintf(stderr, "agentenv exec: killed after %u ms (--timeout)\n", e->wall_ms);
    return e->timed_out ? CLI_TIMEOUT : e->status;
}

/* Input goes to a name, so one without gets one, but does not outlive us by that. */
static void name_it(struct exec *x, char id[LH_ID_SIZE])
{
    V1(ExecRequest) *req = &x->session.req;

    req->stdin_open = x->session.pass_input;
    x->session.only_begin = x->detach;
    if (req->exec_id[0] || (!x->detach && !req->stdin_open))
        return;
    lh_id_new_text(id);
    req->exec_id = id;
    req->ends_with_stream = !x->detach;
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
    lh_autofree char **env = calloc((size_t)argc, sizeof *env);
    struct exec x = {.session.cli = cli, .env = env};
    V1(ExecRequest) *req = &x.session.req;
    char id[LH_ID_SIZE];

    if (!env)
        return lh_fail_errno(err, ENOMEM, "exec");
    longhaul__sandbox__v1__exec_request__init(req);
    req->timeout_ms = EXEC_DEFAULT_MS;
    cli_parse(&argp, argc, argv, &x);
    req->env = env;
    req->attempt = CURRENT_ATTEMPT;
    name_it(&x, id);
    int r = session_run(&x.session, err);
    if (r < 0)
        return r;
    return x.session.left ? cli_new_id_print(cli, req->exec_id, err) : report_exit(&x.session.exit);
}

/* ---- cp ---- */

struct copy_args {
    char *argv[2];
    int n;
    char *id, *path; /* of the one that is in a sandbox */
    bool out;
};

static void split_remote(struct copy_args *c, struct argp_state *state)
{
    c->out = cli_remote_path(c->argv[0], &c->id, &c->path);
    char *id, *path;
    bool in = cli_remote_path(c->argv[1], &id, &path);

    if (in == c->out)
        argp_error(state, "one of source and destination must be ID:/PATH");
    if (in) {
        c->id = id;
        c->path = path;
    }
}

static error_t parse_copy(int key, char *arg, struct argp_state *state)
{
    struct copy_args *c = state->input;

    if (key == ARGP_KEY_ARG && c->n < 2)
        c->argv[c->n++] = arg;
    else if (key == ARGP_KEY_ARG || (key == ARGP_KEY_END && c->n < 2))
        argp_error(state, "a source and a destination");
    else if (key == ARGP_KEY_END)
        split_remote(c, state);
    else
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

    cli_parse(&argp, argc, argv, &c);
    return c.out ? copy_out(cli, c.id, c.path, c.argv[1], err)
                 : copy_in(cli, c.argv[0], c.id, c.path, err);
}

const struct cli_verb file_verbs[] = {
    {"exec", "ID COMMAND...", "run a command in a sandbox", exec_verb},
    {"cp", "SOURCE DESTINATION", "copy files in (to ID:/PATH) or out", cp},
    {0},
};
