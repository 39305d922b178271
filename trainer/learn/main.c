/* longhaul-trainer JOBDIR: rank 0 of a job; hosts the intake and the ledger. */
#include <argp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/file.h"
#include "proto/log.h"
#include "proto/process.h"
#include "trainer/learn/trainer.h"

LH_LOG_COMPONENT("trainer");

enum { KEY_EVAL_ONLY = 1, KEY_EPISODES, KEY_BLANK, MAX_EPISODES = 1000000 };

struct arguments {
    const char *job_dir;
    bool eval_only, blank;
    long episodes; /* 0 = the job's */
};

static atomic_bool asked_to_stop;

static const struct argp_option options[] = {
    {"eval-only", KEY_EVAL_ONLY, NULL, 0, "evaluate the newest checkpoint and end", 0},
    {"episodes", KEY_EPISODES, "N", 0, "greedy episodes of it (the job's eval.episodes)", 0},
    {"blank-first-observation", KEY_BLANK, NULL, 0, "hide what the first command printed", 0},
    {0}};

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct arguments *a = state->input;
    char *end;

    switch (key) {
    case KEY_EVAL_ONLY:
        a->eval_only = true;
        return 0;
    case KEY_BLANK:
        a->blank = true;
        return 0;
    case KEY_EPISODES:
        a->episodes = strtol(arg, &end, 10);
        if (*end || a->episodes < 1 || a->episodes > MAX_EPISODES)
            argp_error(state, "--episodes must be 1 to %d, not %s", MAX_EPISODES, arg);
        return 0;
    case ARGP_KEY_ARG:
        if (a->job_dir)
            argp_usage(state);
        a->job_dir = arg;
        return 0;
    case ARGP_KEY_END:
        if (!a->job_dir)
            argp_usage(state);
        if (!a->eval_only && (a->episodes || a->blank))
            argp_error(state, "--episodes and --blank-first-observation go with --eval-only");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static void on_signal(int signal)
{
    (void)signal;
    atomic_store(&asked_to_stop, true);
}

static void set_signals(void)
{
    struct sigaction stop = {.sa_handler = on_signal}, ignore = {.sa_handler = SIG_IGN};

    sigaction(SIGTERM, &stop, NULL);
    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGPIPE, &ignore, NULL);
}

/* Under a name of its own: it must not stand in the report for what the job found. */
static int evaluate(struct trainer *t, const struct arguments *a, struct lh_error *err)
{
    char id[LH_ID_SIZE + 1] = "/";
    const struct eval e = {
        .name = a->blank ? "asked-blank" : "asked",
        .unique = id,
        .episodes = a->episodes ? a->episodes : t->job->eval->episodes,
        .blank = a->blank,
    };

    lh_id_new_text(id + 1);
    int r = trainer_eval(t, &e, NULL, err);
    intake_stop_workers(t->intake);
    return r;
}

static bool has_result(const char *job_dir)
{
    lh_autofree char *path = lh_format("%s/result.json", job_dir);

    return path && access(path, F_OK) == 0;
}

/* What the supervisor makes of it: try again when a peer is gone, give up when the job is at fault.
 */
static int exit_status(const struct trainer *t, int code)
{
    bool peer_gone = (t->arbiter && arbiter_lost(t->arbiter)) || code == LH_UNAVAILABLE;

    if (code == 0)
        return EXIT_SUCCESS;
    return peer_gone || code == LH_CANCELLED ? LH_EXIT_TRY_AGAIN : EXIT_FAILURE;
}

int main(int argc, char **argv)
{
    static const struct argp argp = {
        options, parse, "JOBDIR", "Trains the policy of a job and keeps its ledger.",
        NULL,    NULL,  NULL};
    struct arguments a = {0};
    struct trainer t;
    struct lh_error err = {0};

    argp_err_exit_status = LH_EXIT_USAGE;
    argp_parse(&argp, argc, argv, 0, NULL, &a);
    if (!lh_follow_supervisor(SIGKILL))
        return LH_EXIT_TRY_AGAIN;
    set_signals();
    if (!a.eval_only && has_result(a.job_dir)) {
        lh_info("done", "result.json is there already");
        return EXIT_SUCCESS;
    }
    int r = trainer_init(&t, a.job_dir, &asked_to_stop, &err);
    if (r == 0)
        r = a.eval_only ? evaluate(&t, &a, &err) : trainer_run(&t, &err);
    if (r < 0)
        lh_err("failed", "%s: %s", lh_status_name(err.code), err.message);
    int status = exit_status(&t, r < 0 ? err.code : 0);
    trainer_finish(&t);
    return status;
}
