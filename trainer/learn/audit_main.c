/* longhaul-audit JOBDIR: a table of what was checked; exit 0 when all of it holds. */
#include <argp.h>
#include <stdlib.h>

#include "proto/log.h"
#include "proto/process.h"
#include "trainer/learn/audit.h"

LH_LOG_COMPONENT("audit");

static error_t parse(int key, char *arg, struct argp_state *state)
{
    const char **job_dir = state->input;

    if (key == ARGP_KEY_ARG && !*job_dir)
        *job_dir = arg;
    else if (key == ARGP_KEY_ARG || key == ARGP_KEY_NO_ARGS)
        argp_usage(state);
    else
        return ARGP_ERR_UNKNOWN;
    return 0;
}

int main(int argc, char **argv)
{
    static const struct argp argp = {.parser = parse,
                                     .args_doc = "JOBDIR",
                                     .doc = "Proves from ledger and checkpoints that nothing "
                                            "acknowledged was lost and no group was "
                                            "trained on twice."};
    const char *job_dir = NULL;
    struct lh_error err = {0};

    argp_err_exit_status = LH_EXIT_USAGE;
    argp_parse(&argp, argc, argv, 0, NULL, &job_dir);
    int wrong = audit_job(job_dir, stdout, stderr, &err);
    if (wrong < 0)
        lh_err("failed", "%s", err.message);
    return wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
