/* kvstore [--socket=PATH | JOBDIR] stat | ls [ROOT] | verify | drop ROOT |
 * explain [TRAJECTORY]: see docs/KVSTORE.md. */
#include <argp.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvstore/cli/cli.h"
#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/process.h"

enum { CONNECT_MS = 5000, MAX_ARGS = 3 };

const char *argp_program_version = "kvstore " LONGHAUL_VERSION;

static const struct {
    const char *name;
    cli_command *run;
    int max_args;
    bool offline; /* needs the job directory instead of kvstored */
} commands[] = {{"stat", cli_stat, 0, false},
                {"ls", cli_ls, 1, false},
                {"verify", cli_verify, 0, false},
                {"drop", cli_drop, 1, false},
                {"explain", cli_explain, 1, true}};

struct arguments {
    const char *socket, *words[MAX_ARGS];
    int n;
    bool json;
};

static const struct argp_option options[] = {
    {"socket", 's', "PATH", 0, "kvstored's socket, instead of a job directory", 0},
    {"output", 'o', "FORMAT", 0, "table (default on a terminal) or json (default in a pipe)", 0},
    {0}};

static error_t parse_option(int key, char *arg, struct argp_state *state)
{
    struct arguments *a = state->input;

    switch (key) {
    case 's':
        a->socket = arg;
        return 0;
    case 'o':
        if (strcmp(arg, "json") && strcmp(arg, "table"))
            argp_error(state, "-o takes json or table, not \"%s\"", arg);
        a->json = !strcmp(arg, "json");
        return 0;
    case ARGP_KEY_ARG:
        if (a->n == MAX_ARGS)
            argp_usage(state);
        a->words[a->n++] = arg;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static int find_command(const char *name)
{
    for (int i = 0; i < (int)LH_ARRAY_SIZE(commands); i++)
        if (!strcmp(commands[i].name, name))
            return i;
    return -1;
}

static int run(const char *path, int command, struct cli *c, struct lh_error *err)
{
    if (commands[command].offline)
        return commands[command].run(c, err);
    int r = kv_link_open(&c->link, path, "kvstore-cli", lh_now_ms() + CONNECT_MS, err);

    if (r == 0)
        r = commands[command].run(c, err);
    kv_link_close(&c->link);
    return r;
}

static int usage(const char *why, const char *what)
{
    fprintf(stderr, "kvstore: %s%s; try kvstore --help\n", why, what);
    return LH_EXIT_USAGE;
}

int main(int argc, char **argv)
{
    static const struct argp argp = {
        .options = options,
        .parser = parse_option,
        .args_doc = "JOBDIR COMMAND [ROOT | TRAJECTORY]\n--socket=PATH COMMAND [ROOT]",
        .doc = "Looks into the external KV store of a job.\v"
               "stat        capacity, hits, refusals, queues\n"
               "ls          the roots; with ROOT, its objects\n"
               "verify      reads everything and checks every checksum\n"
               "drop ROOT   makes a root's objects unmatchable; their space follows\n"
               "explain     what the throttle decided; with TRAJECTORY, about it"};
    struct arguments a = {.json = !isatty(STDOUT_FILENO)};
    struct lh_error err = {0};

    argp_err_exit_status = LH_EXIT_USAGE;
    argp_parse(&argp, argc, argv, 0, NULL, &a);
    int at = a.socket ? 0 : 1;
    if (a.n <= at)
        return usage("a job directory (or --socket) and a command are needed", "");
    int command = find_command(a.words[at]);
    if (command < 0)
        return usage("no such command: ", a.words[at]);
    if (a.n - at - 1 > commands[command].max_args)
        return usage("too many arguments for ", a.words[at]);
    if (a.socket && commands[command].offline)
        return usage("a job directory is needed for ", a.words[at]);
    lh_autofree char *path = a.socket ? strdup(a.socket) : lh_format("%s/run/kv.sock", a.words[0]);
    struct cli c = {
        .job_dir = a.words[0], .root = a.n - at > 1 ? a.words[at + 1] : NULL, .json = a.json};
    if ((path ? run(path, command, &c, &err) : lh_fail_errno(&err, ENOMEM, "starting")) == 0)
        return EXIT_SUCCESS;
    fprintf(stderr, "kvstore: %s\n", err.message);
    return err.code == LH_UNAVAILABLE ? LH_EXIT_TRY_AGAIN : EXIT_FAILURE;
}
