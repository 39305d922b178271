/* kvstore [--socket=PATH | JOBDIR] COMMAND [ARGUMENT]: see docs/KVSTORE.md. */
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

const struct cli_verb cli_verbs[] = {
    {"stat", "", "capacity, hits, refusals, queues, tenants", cli_stat, CLI_STORE},
    {"ls", "[ROOT]", "the roots; with ROOT, its objects", cli_ls, CLI_STORE},
    {"show", "KEY|TRAJECTORY", "what is stored of a root, a unit or a trajectory, and where",
     cli_show, CLI_STORE},
    {"verify", "", "reads everything and checks every checksum", cli_verify, CLI_STORE},
    {"drop", "ROOT", "makes a root's objects unmatchable; their space follows", cli_drop,
     CLI_STORE},
    {"explain", "[TRAJECTORY]", "what the throttle decided; with TRAJECTORY, about it", cli_explain,
     CLI_JOB},
    {"bench", "", "times puts, gets and lookups beside memcpy, and cleans up", cli_bench,
     CLI_STORE},
    {"metrics", "", "prints Prometheus' metrics", cli_metrics, CLI_STORE},
    {"man", "", "prints the manual page, for man -l", cli_man, CLI_NOTHING},
    {"completion", "", "prints completion for bash: eval \"$(kvstore completion)\"", cli_completion,
     CLI_NOTHING},
    {0}};

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

static const struct cli_verb *find_verb(const char *name)
{
    for (const struct cli_verb *v = cli_verbs; v->name; v++)
        if (!strcmp(v->name, name))
            return v;
    return NULL;
}

static int run(const struct cli_verb *v, struct cli *c, struct lh_error *err)
{
    if (v->needs != CLI_STORE)
        return v->run(c, err);
    int r = kv_link_open(&c->link, c->socket, "kvstore-cli", lh_now_ms() + CONNECT_MS, err);

    if (r == 0)
        r = v->run(c, err);
    kv_link_close(&c->link);
    return r;
}

static int usage(const char *why, const char *what)
{
    fprintf(stderr, "kvstore: %s%s; try kvstore --help\n", why, what);
    return LH_EXIT_USAGE;
}

/* 0, or the exit code of wrong use. */
static int choose(const struct arguments *a, const struct cli_verb **v, struct cli *c)
{
    *v = a->n == 1 && !a->socket ? find_verb(a->words[0]) : NULL;
    bool alone = *v && (*v)->needs == CLI_NOTHING;
    int at = a->socket || alone ? 0 : 1;

    if (a->n <= at)
        return usage("a job directory (or --socket) and a command are needed", "");
    *v = find_verb(a->words[at]);
    if (!*v)
        return usage("no such command: ", a->words[at]);
    if (a->n - at - 1 > (*(*v)->args != 0))
        return usage("too many arguments for ", a->words[at]);
    if (a->socket && (*v)->needs == CLI_JOB)
        return usage("a job directory is needed for ", a->words[at]);
    c->job_dir = a->words[0];
    c->argument = a->n - at > 1 ? a->words[at + 1] : NULL;
    c->json = a->json;
    return 0;
}

int main(int argc, char **argv)
{
    lh_autofree char *help = cli_help();
    const struct argp argp = {.options = options,
                              .parser = parse_option,
                              .args_doc = "JOBDIR COMMAND [ARGUMENT]\n"
                                          "--socket=PATH COMMAND [ARGUMENT]\nman|completion",
                              .doc = help};
    struct arguments a = {.json = !isatty(STDOUT_FILENO)};
    struct lh_error err = {0};
    struct cli c = {0};
    const struct cli_verb *verb;

    argp_err_exit_status = LH_EXIT_USAGE;
    argp_parse(&argp, argc, argv, 0, NULL, &a);
    int wrong = choose(&a, &verb, &c);
    if (wrong)
        return wrong;
    lh_autofree char *path = a.socket ? strdup(a.socket) : lh_format("%s/run/kv.sock", c.job_dir);
    c.socket = path;
    if ((path ? run(verb, &c, &err) : lh_fail_errno(&err, ENOMEM, "starting")) == 0)
        return EXIT_SUCCESS;
    fprintf(stderr, "kvstore: %s\n", err.message);
    return err.code == LH_UNAVAILABLE ? LH_EXIT_TRY_AGAIN : EXIT_FAILURE;
}
