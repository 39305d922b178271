/* shell, attach, kill: commands that people talk to. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "agentenv/cli/session.h"
#include "proto/file.h"
#include "proto/id.h"
#include "proto/parse.h"

/* What the image has; both start as for a person, the terminal tells them. */
static const char *const default_shell[] = {
    "/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh", NULL};

struct shell {
    struct session session;
    const char *name, *user, *cwd;
    char **argv;
    size_t argc;
};

static const struct argp_option shell_options[] = {
    {"name", 'n', "NAME", 0, "Of the session: goes on with it if there is one", 0},
    {"cwd", 'C', "DIR", 0, "Working directory; default /", 0},
    {"user", 'u', "USER", 0, "name, uid or uid:gid; default root of the sandbox", 0},
    {0},
};

static error_t parse_shell(int key, char *arg, struct argp_state *state)
{
    struct shell *x = state->input;

    switch (key) {
    case 'n':
        x->name = arg;
        return 0;
    case 'C':
        x->cwd = arg;
        return 0;
    case 'u':
        x->user = arg;
        return 0;
    case ARGP_KEY_ARG:
        if (state->arg_num == 0) {
            x->session.req.id = arg;
            return 0;
        }
        x->argv = state->argv + state->next - 1;
        x->argc = (size_t)(state->argc - state->next + 1);
        state->next = state->argc;
        return 0;
    case ARGP_KEY_END:
        if (!x->session.req.id[0])
            argp_error(state, "which sandbox?");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* Every key becomes a byte; put back also when a signal ends us. */
static struct termios as_it_was;
static bool is_raw;

static void put_back(void)
{
    if (is_raw)
        tcsetattr(STDIN_FILENO, TCSANOW, &as_it_was);
    is_raw = false;
}

static void on_signal(int sig)
{
    put_back();
    signal(sig, SIG_DFL);
    raise(sig);
}

static int make_raw(struct lh_error *err)
{
    struct termios raw;

    if (tcgetattr(STDIN_FILENO, &as_it_was) < 0)
        return lh_fail_errno(err, errno, "the terminal");
    raw = as_it_was;
    cfmakeraw(&raw);
    signal(SIGTERM, on_signal);
    signal(SIGHUP, on_signal);
    if (tcsetattr(STDIN_FILENO, TCSANOW, &raw) < 0)
        return lh_fail_errno(err, errno, "the terminal");
    is_raw = true;
    return 0;
}

static int follow_raw(struct session *s, struct lh_error *err)
{
    struct winsize w = {0};
    V1(Terminal) size = LONGHAUL__SANDBOX__V1__TERMINAL__INIT;

    ioctl(STDIN_FILENO, TIOCGWINSZ, &w);
    size.rows = w.ws_row;
    size.cols = w.ws_col;
    s->req.terminal = &size;
    s->pass_input = s->at_terminal = true;
    int r = make_raw(err);
    if (r == 0)
        r = session_run(s, err);
    put_back();
    if (r == 0 && s->left)
        printf("\nleft; agentenv attach %s %s goes on with it\n", s->req.id, s->req.exec_id);
    return r < 0 || s->left ? r : s->exit.status;
}

static int shell(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    const struct argp argp = {
        shell_options,
        parse_shell,
        "ID [COMMAND [ARGUMENT...]]",
        "A shell, or COMMAND, at this terminal.  Ctrl-] three times leaves it "
        "running; attach, or shell with its --name, goes on with it.  It "
        "outlives the daemon.",
        NULL,
        NULL,
        NULL};
    struct shell x = {.session.cli = cli};
    const char *term = getenv("TERM");
    lh_autofree char *env = lh_format("TERM=%s", term ? term : "dumb");
    char id[LH_ID_SIZE];

    longhaul__sandbox__v1__exec_request__init(&x.session.req);
    cli_parse(&argp, argc, argv, &x);
    if (!isatty(STDIN_FILENO) || !isatty(STDOUT_FILENO))
        return lh_fail(err, LH_INVALID_ARGUMENT, "this is no terminal: use agentenv exec");
    if (!env)
        return lh_fail_errno(err, ENOMEM, "shell");
    lh_id_new_text(id);
    V1(ExecRequest) *req = &x.session.req;
    req->exec_id = x.name ? (char *)x.name : id;
    req->user = x.user ? (char *)x.user : req->user;
    req->cwd = x.cwd ? (char *)x.cwd : req->cwd;
    req->argv = x.argc ? x.argv : (char **)default_shell;
    req->n_argv = x.argc ? x.argc : LH_ARRAY_SIZE(default_shell) - 1;
    req->env = &env;
    req->n_env = 1;
    req->timeout_ms = INT32_MAX;
    req->attempt = CURRENT_ATTEMPT;
    return follow_raw(&x.session, err);
}

static int attach(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    const struct argp argp = {NULL,
                              cli_parse_words,
                              "ID NAME",
                              "Goes on with a shell, or with what exec --detach or --name began: "
                              "all output that is still kept, then what comes.",
                              NULL,
                              NULL,
                              NULL};
    char *arg[2];
    struct cli_words w = {.min = 2, .max = 2, .argv = arg};
    struct session s = {.cli = cli};

    longhaul__sandbox__v1__exec_request__init(&s.req);
    cli_parse(&argp, argc, argv, &w);
    s.req.id = arg[0];
    s.req.exec_id = arg[1];
    s.req.timeout_ms = INT32_MAX;
    s.req.attempt = CURRENT_ATTEMPT;
    if (isatty(STDIN_FILENO) && isatty(STDOUT_FILENO))
        return follow_raw(&s, err);
    int r = session_run(&s, err);
    return r < 0 ? r : s.exit.status;
}

/* ---- kill ---- */

struct kill_args {
    char *arg[2];
    int n;
    int signal;
};

static int signal_number(const char *text)
{
    char *end;
    long n = strtol(text, &end, 10);

    if (*text && !*end)
        return n > 0 && n <= SIGRTMAX ? (int)n : -1;
    if (!strncasecmp(text, "SIG", 3))
        text += 3;
    for (int i = 1; i <= SIGRTMAX; i++) {
        const char *name = sigabbrev_np(i);
        if (name && !strcasecmp(name, text))
            return i;
    }
    return -1;
}

static error_t parse_kill(int key, char *arg, struct argp_state *state)
{
    struct kill_args *k = state->input;

    if (key == 's')
        k->signal = signal_number(arg);
    else if (key == ARGP_KEY_ARG && k->n < 2)
        k->arg[k->n++] = arg;
    else if (key == ARGP_KEY_ARG || (key == ARGP_KEY_END && k->n < 2))
        argp_error(state, "a sandbox and the name of a command in it");
    else if (key != ARGP_KEY_END)
        return ARGP_ERR_UNKNOWN;
    if (k->signal < 0)
        argp_error(state, "\"%s\" is no signal", arg);
    return 0;
}

static int kill_verb(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_option options[] = {
        {"signal", 's', "SIGNAL", 0, "To the command's group; default KILL, to its whole tree", 0},
        {0},
    };
    const struct argp argp = {
        options, parse_kill, "ID NAME", "Sends a signal to a command that has a name.",
        NULL,    NULL,       NULL};
    V1(ExecInputRequest) req = LONGHAUL__SANDBOX__V1__EXEC_INPUT_REQUEST__INIT;
    struct kill_args k = {.signal = SIGKILL};
    ProtobufCMessage *reply = NULL;

    cli_parse(&argp, argc, argv, &k);
    req.id = k.arg[0];
    req.exec_id = k.arg[1];
    req.attempt = CURRENT_ATTEMPT;
    req.signal = k.signal;
    int r = cli_call(cli, "ExecInput", &req.base, &longhaul__sandbox__v1__empty__descriptor,
                     CALL_MS, &reply, err);
    lh_message_free(reply);
    return r;
}

const struct cli_verb shell_verbs[] = {
    {"shell", "ID [COMMAND...]", "a shell in a sandbox at this terminal", shell},
    {"attach", "ID NAME", "go on with a command that has a name", attach},
    {"kill", "ID NAME", "send a signal to such a command", kill_verb},
    {0},
};
