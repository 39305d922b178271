/* longhaul: runs reinforcement-learning jobs.  A verb that is not in the table belongs to another
 * room: `longhaul policy verify` runs the program longhaul-policy. */
#include <argp.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "deploy/jobdir.h"
#include "deploy/verbs.h"
#include "proto/cleanup.h"
#include "proto/file.h"

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *doc;
} verbs[] = {
    {"run", verb_run, "JOB.yaml            start a job and watch it"},
    {"resume", verb_resume, "JOBDIR           go on with a job that was stopped or killed"},
    {"status", verb_status, "JOBDIR           what a job is doing; --audit proves its ledger"},
    {"stop", verb_stop, "JOBDIR             end a job, keeping what resume needs"},
    {"eval", verb_eval, "JOBDIR             evaluate the newest checkpoint on held-out tasks"},
};

static void usage(FILE *to)
{
    fputs("usage: longhaul VERB [ARG...]\n\n", to);
    for (size_t i = 0; i < LH_ARRAY_SIZE(verbs); i++)
        fprintf(to, "  %s %s\n", verbs[i].name, verbs[i].doc);
    fputs("  policy VERB ...         verify, init, show: see `longhaul policy --help`\n\n"
          "`longhaul VERB --help` explains a verb, `longhaul run --fields` the job file.\n",
          to);
}

static int run_other(int argc, char **argv)
{
    struct lh_error err = {0};
    lh_autofree char *name = lh_format("longhaul-%s", argv[1]);
    lh_autofree char *path = name && !strchr(name, '/') ? program_path(name, &err) : NULL;

    if (path) {
        argv[1] = path;
        execv(path, argv + 1);
    }
    fprintf(stderr, "longhaul: there is no verb '%s'\n\n", argv[1]);
    usage(stderr);
    return 2;
}

/* "longhaul stop" is what argp calls the program in its messages. */
static int run_verb(size_t i, int argc, char **argv)
{
    lh_autofree char *name = lh_format("longhaul %s", verbs[i].name);

    argp_err_exit_status = 2;
    if (name)
        argv[0] = name;
    return verbs[i].run(argc, argv);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        usage(stderr);
        return 2;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        usage(stdout);
        return 0;
    }
    if (!strcmp(argv[1], "--version")) {
        puts("longhaul " LONGHAUL_VERSION);
        return 0;
    }
    for (size_t i = 0; i < LH_ARRAY_SIZE(verbs); i++)
        if (!strcmp(argv[1], verbs[i].name))
            return run_verb(i, argc - 1, argv + 1);
    return run_other(argc, argv);
}
