/* longhaul-rollout JOBDIR INDEX: runs trajectories for the trainer of a job. */
#include <argp.h>
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/file.h"
#include "proto/log.h"
#include "proto/parse.h"
#include "proto/process.h"
#include "rollout/worker/worker.h"

LH_LOG_COMPONENT("rollout");

enum { JOB_FORMAT = 1, JOB_MAX_BYTES = 1 << 20, MAX_INDEX = 255 };

static volatile sig_atomic_t stop;

static struct {
    const char *job_dir;
    unsigned index;
} args;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    char *end;

    if (key == ARGP_KEY_ARG && state->arg_num == 0) {
        args.job_dir = arg;
    } else if (key == ARGP_KEY_ARG && state->arg_num == 1) {
        unsigned long i = strtoul(arg, &end, 10);
        if (*end || end == arg || i > MAX_INDEX)
            argp_error(state, "INDEX must be 0..%d, not %s", MAX_INDEX, arg);
        args.index = (unsigned)i;
    } else if (key == ARGP_KEY_END && state->arg_num != 2) {
        argp_usage(state);
    } else {
        return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

static const struct argp argp = {
    .parser = parse,
    .args_doc = "JOBDIR INDEX",
    .doc = "Runs trajectories for the trainer of a job.",
};

static Longhaul__Job__V1__Job *read_job(struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/job.pb", args.job_dir);
    size_t len;
    lh_autofree char *bytes = path ? lh_read_file(path, JOB_MAX_BYTES, &len, err) : NULL;
    lh_automsg(Longhaul__Job__V1__Job) job = NULL;

    if (!bytes)
        return lh_wrap(err, "reading the job"), NULL;
    job = (Longhaul__Job__V1__Job *)lh_parse(&longhaul__job__v1__job__descriptor, bytes, len,
                                             (struct lh_parse_limits){0}, err);
    if (!job)
        return lh_wrap(err, "%s", path), NULL;
    if (job->format != JOB_FORMAT || !job->rollout || !job->model || !job->kvstore) {
        lh_fail(err, LH_FAILED_PRECONDITION, "%s is a job of format %u; this program reads %d",
                path, job->format, JOB_FORMAT);
        return NULL;
    }
    return lh_steal(&job);
}

static void on_signal(int number)
{
    (void)number;
    stop = 1;
}

static void set_signals(void)
{
    struct sigaction a = {.sa_handler = on_signal};

    sigaction(SIGTERM, &a, NULL);
    sigaction(SIGINT, &a, NULL);
    signal(SIGPIPE, SIG_IGN);
}

/* *clean false: threads are still inside calls that use the worker, so nothing was freed. */
static int run(bool *clean, struct lh_error *err)
{
    lh_automsg(Longhaul__Job__V1__Job) job = read_job(err);
    struct worker_options o = {args.job_dir, job, args.index, &stop};
    lh_auto(worker) w = job ? worker_create(&o, err) : NULL;

    if (!w)
        return err->code;
    int r = worker_run(w, err);
    if (r == 0 && stop)
        r = lh_fail(err, LH_UNAVAILABLE, "ended by a signal: the job is not done");
    *clean = worker_shut_down(w);
    if (!*clean)
        (void)lh_steal(&w);
    return r;
}

int main(int argc, char **argv)
{
    struct lh_error err = {0};
    bool clean = true;

    argp_err_exit_status = LH_EXIT_USAGE;
    argp_parse(&argp, argc, argv, 0, NULL, NULL);
    if (!lh_follow_supervisor(SIGKILL))
        return LH_EXIT_TRY_AGAIN;
    set_signals();
    /* The batch is the parallelism; one BLAS thread keeps results equal to the trainer's. */
    setenv("OPENBLAS_NUM_THREADS", "1", 1);
    int r = run(&clean, &err);
    if (r < 0)
        lh_err("failed", "%s", err.message);
    int code = r == 0 ? EXIT_SUCCESS : r == LH_UNAVAILABLE ? LH_EXIT_TRY_AGAIN : EXIT_FAILURE;
    if (!clean)
        _exit(code); /* destructors would pull libraries from under those threads */
    return code;
}
