#include <errno.h>
#include <locale.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "agentenv/cli/verbs.h"
#include "agentenv/sandbox/places.h"
#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/process.h"

const char *argp_program_version = "agentenv " LONGHAUL_VERSION;

const struct cli_verb *const cli_tables[] = {sandbox_verbs,  file_verbs,   shell_verbs,
                                             snapshot_verbs, task_verbs,   token_verbs,
                                             top_verbs,      manual_verbs, NULL};

enum { OPT_SOCKET = 'S', OPT_OUTPUT = 'o', OPT_ADDRESS = 1024, OPT_TOKEN, OPT_CA };

static const struct argp_option common_options[] = {
    {"socket", OPT_SOCKET, "PATH", 0,
     "Socket of agentenvd; default: $AGENTENV_SOCKET, or where an ordinary user's daemon has it",
     -2},
    {"address", OPT_ADDRESS, "HOST:PORT", 0,
     "Of an agentenvd elsewhere, asked by TLS; default: $AGENTENV_ADDRESS", -2},
    {"token-file", OPT_TOKEN, "FILE", 0,
     "With what agentenv token create printed; default: $AGENTENV_TOKEN_FILE", -2},
    {"ca", OPT_CA, "FILE", 0,
     "PEM: who vouches for its certificate; default: $AGENTENV_CA, or the machine's own", -2},
    {"output", OPT_OUTPUT, "FORMAT", 0, "table or json; default: table on a terminal", -2},
    {0},
};

static struct cli program; /* argp's parsers share it; one command, one thread */

static error_t parse_common(int key, char *arg, struct argp_state *state)
{
    switch (key) {
    case OPT_SOCKET:
        program.socket = arg;
        program.address = NULL; /* that of the environment */
        return 0;
    case OPT_ADDRESS:
        program.address = arg;
        return 0;
    case OPT_TOKEN:
        program.token_file = arg;
        return 0;
    case OPT_CA:
        program.ca_file = arg;
        return 0;
    case OPT_OUTPUT:
        program.json = program.json_asked = !strcmp(arg, "json");
        if (!program.json && strcmp(arg, "table"))
            argp_error(state, "--output is table or json, not \"%s\"", arg);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp common_argp = {common_options, parse_common, NULL, NULL, NULL, NULL, NULL};

int cli_parse(const struct argp *argp, int argc, char **argv, void *input)
{
    struct argp_child children[] = {{0}, {&common_argp, 0, "Common options:", -1}, {0}};
    struct argp with_common = *argp;

    if (argp->children) /* one, whose input is child_inputs[0] */
        children[0] = argp->children[0];
    with_common.children = children + !argp->children;
    return argp_parse(&with_common, argc, argv, ARGP_IN_ORDER, NULL, input);
}

/* ---- the daemon ---- */

static int connect_by_tls(struct cli *cli, struct lh_error *err)
{
    enum { TOKEN_MAX = 4096, CA_MAX = 4 << 20 };
    size_t len;

    if (!cli->token_file)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "%s wants a token: give --token-file FILE or set AGENTENV_TOKEN_FILE",
                       cli->address);
    lh_autofree char *token = lh_read_file(cli->token_file, TOKEN_MAX, &len, err);
    lh_autofree char *ca =
        token && cli->ca_file ? lh_read_file(cli->ca_file, CA_MAX, &len, err) : NULL;
    if (!token || (cli->ca_file && !ca))
        return err->code;
    token[strcspn(token, " \t\r\n")] = 0;
    cli->channel = rpc_channel_create_tls(cli->address, ca, token, err);
    return cli->channel ? 0 : err->code;
}

static int connect_daemon(struct cli *cli, struct lh_error *err)
{
    if (cli->channel)
        return 0;
    if (cli->address)
        return connect_by_tls(cli, err);
    if (!cli->socket)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "which agentenvd? give --socket PATH or set AGENTENV_SOCKET");
    cli->channel = rpc_channel_create(cli->socket, err);
    return cli->channel ? 0 : lh_wrap(err, "%s", cli->socket);
}

static char *full_name(const char *method)
{
    return method[0] == '/' ? strdup(method)
                            : lh_format("/longhaul.sandbox.v1.Sandboxes/%s", method);
}

static bool somebody_listens(const char *path)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    lh_autoclose int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0 || strlen(path) >= sizeof a.sun_path)
        return true; /* what is wrong, the call itself says better */
    strcpy(a.sun_path, path);
    return connect(fd, (const struct sockaddr *)&a, sizeof a) == 0 || errno != ECONNREFUSED;
}

/* The server is waited for by rpc_unary(), as long as the call may take; a command at a prompt
 * should not wait for one that was never started, nor longer than a restart for one that was killed
 * and left its socket. */
static int check_socket(struct cli *cli, struct lh_error *err)
{
    enum { RESTART_MS = 5000, LOOK_MS = 100 };
    int64_t deadline_ms = lh_now_ms() + RESTART_MS;
    struct stat st;

    if (cli->address)
        return 0;
    if (stat(cli->socket, &st) < 0)
        return lh_fail(err, LH_UNAVAILABLE, "no agentenvd at %s", cli->socket);
    if (!S_ISSOCK(st.st_mode))
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s is not a socket", cli->socket);
    while (!somebody_listens(cli->socket)) {
        if (lh_ms_left(deadline_ms) == 0)
            return lh_fail(err, LH_UNAVAILABLE, "no agentenvd at %s: nobody answers there",
                           cli->socket);
        usleep(LOOK_MS * 1000);
    }
    return 0;
}

int cli_call(struct cli *cli, const char *method, const ProtobufCMessage *request,
             const ProtobufCMessageDescriptor *reply_type, int timeout_ms, ProtobufCMessage **reply,
             struct lh_error *err)
{
    lh_autofree char *name = full_name(method);
    int r = connect_daemon(cli, err);

    if (r < 0 || (r = check_socket(cli, err)) < 0)
        return r;
    if (!name)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory");
    return rpc_unary(cli->channel, name, request, reply_type, timeout_ms, reply, err);
}

int cli_stream(struct cli *cli, const char *method, const ProtobufCMessage *request,
               const ProtobufCMessageDescriptor *reply_type, int timeout_ms, rpc_each_fn *each,
               void *ctx, struct lh_error *err)
{
    lh_autofree char *name = full_name(method);
    int r = connect_daemon(cli, err);

    if (r < 0 || (r = check_socket(cli, err)) < 0)
        return r;
    if (!name)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory");
    return rpc_stream(cli->channel, name, request, reply_type, timeout_ms, each, ctx, err);
}

struct rpc_upload *cli_upload(struct cli *cli, const char *method, int timeout_ms,
                              struct lh_error *err)
{
    lh_autofree char *name = full_name(method);

    if (connect_daemon(cli, err) < 0 || check_socket(cli, err) < 0)
        return NULL;
    if (!name)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory"), NULL;
    return rpc_upload_begin(cli->channel, name, timeout_ms, err);
}

/* ---- verbs ---- */

/* Words of the verb that argv begins with; 0 = another verb. */
static int verb_words(const struct cli_verb *v, int argc, char **argv)
{
    size_t first = strcspn(v->name, " ");

    if (argc < 1 || strncmp(argv[0], v->name, first) || argv[0][first])
        return 0;
    if (!v->name[first])
        return 1;
    return argc > 1 && !strcmp(argv[1], v->name + first + 1) ? 2 : 0;
}

static const struct cli_verb *find_verb(int argc, char **argv, int *words)
{
    const struct cli_verb *best = NULL;

    *words = 0;
    for (size_t t = 0; cli_tables[t]; t++)
        for (const struct cli_verb *v = cli_tables[t]; v->name; v++) {
            int n = verb_words(v, argc, argv);
            if (n > *words) {
                *words = n;
                best = v;
            }
        }
    return best;
}

/* "task" alone, or with a second word that it has not. */
static void print_no_verb(const char *word)
{
    size_t len = strlen(word);
    int n = 0;

    for (size_t t = 0; cli_tables[t]; t++)
        for (const struct cli_verb *v = cli_tables[t]; v->name; v++)
            if (!strncmp(v->name, word, len) && v->name[len] == ' ')
                fprintf(stderr, "%s%s", n++ ? ", " : "agentenv: which one? ", v->name);
    if (n)
        fputs("\n", stderr);
    else
        fprintf(stderr, "agentenv: no verb \"%s\"; agentenv --help lists them\n", word);
}

/* In 79 columns, where argp would break the line. */
static void print_verb(FILE *f, const struct cli_verb *v)
{
    enum { LEFT = 37 };
    int width = fprintf(f, "  %s %s", v->name, v->args);

    fprintf(f, "%*s%s\n", width < LEFT ? LEFT - width : 1, "", v->doc);
}

static char *list_verbs(int key, const char *text, void *input)
{
    char *out = NULL;
    size_t len;

    (void)input;
    if (key != ARGP_KEY_HELP_POST_DOC)
        return (char *)text;
    FILE *f = open_memstream(&out, &len);
    if (!f)
        return (char *)text;
    fputs("Verbs (agentenv VERB --help says more):\n", f);
    for (size_t t = 0; cli_tables[t]; t++)
        for (const struct cli_verb *v = cli_tables[t]; v->name; v++)
            print_verb(f, v);
    fclose(f); /* only now is `out` what it will be */
    return out;
}

struct words {
    int argc;
    char **argv;
};

static error_t take_verb(int key, char *arg, struct argp_state *state)
{
    struct words *w = state->input;

    (void)arg;
    switch (key) {
    case ARGP_KEY_ARG:
        w->argv = state->argv + state->next - 1;
        w->argc = state->argc - state->next + 1;
        state->next = state->argc; /* the verb's own parser has the rest */
        return 0;
    case ARGP_KEY_NO_ARGS:
        argp_error(state, "which verb?");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static int exit_status(const struct cli_verb *v, int r, const struct lh_error *err)
{
    if (r >= 0)
        return r;
    fprintf(stderr, "agentenv %s: %s\n", v->name, err->message);
    if (!strcmp(v->name, "exec"))
        return r == LH_UNAVAILABLE ? CLI_AGAIN : CLI_EXEC_FAILED;
    return r == LH_UNAVAILABLE ? CLI_AGAIN : CLI_FAILED;
}

int main(int argc, char **argv)
{
    const struct argp argp = {
        NULL, take_verb, "VERB [ARGUMENT...]", "Sandboxes of agentenvd.\v", NULL, list_verbs, NULL};
    struct words w = {0};
    struct lh_error err = {0};
    int words;

    if (!lh_follow_supervisor(SIGKILL)) /* of a job, where one runs us */
        return CLI_AGAIN;
    setlocale(LC_CTYPE, "C.UTF-8");
    argp_err_exit_status = CLI_USAGE;
    program.json = !isatty(STDOUT_FILENO);
    lh_autofree char *own = box_default_socket();
    program.socket = getenv("AGENTENV_SOCKET") ? getenv("AGENTENV_SOCKET") : own;
    program.address = getenv("AGENTENV_ADDRESS");
    program.token_file = getenv("AGENTENV_TOKEN_FILE");
    program.ca_file = getenv("AGENTENV_CA");
    cli_parse(&argp, argc, argv, &w);
    const struct cli_verb *v = find_verb(w.argc, w.argv, &words);
    if (!v) {
        print_no_verb(w.argv[0]);
        return CLI_USAGE;
    }
    lh_autofree char *name = lh_format("agentenv %s", v->name);
    if (name)
        w.argv[words - 1] = name;
    int r = v->run(&program, w.argc - words + 1, w.argv + words - 1, &err);
    rpc_channel_destroy(program.channel);
    return exit_status(v, r, &err);
}
