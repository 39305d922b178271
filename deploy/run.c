/* run, resume and eval: the three ways to have a job's processes running under a supervisor. */
#include <argp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/job.h"
#include "deploy/jobdir.h"
#include "deploy/progress.h"
#include "deploy/supervise.h"
#include "deploy/verbs.h"
#include "proto/cleanup.h"
#include "proto/file.h"

enum { PREPARE_MS = 600000 };
enum { KEY_DRY_RUN = 1000, KEY_FIELDS, KEY_EPISODES, KEY_BLANK, KEY_CONTROL };

struct arguments {
    const char *path, *dir, *control;
    const char *trainer[SUPERVISE_ARGS];
    size_t n_trainer;
    bool dry_run, fields;
};

static struct supervisor supervisor; /* too large for a stack */

/* ---- preparing ---- */

/* Both are idempotent: what is there already is not made again. */
static int prepare(const Longhaul__Job__V1__Job *job, struct lh_error *err)
{
    const char *image[] = {"agentenv",        "image", "import", job->tasks->image_name,
                           job->tasks->image, NULL};
    const char *tasks[] = {"agentenv", "task", "register", job->tasks->file, NULL};
    int r = 0;

    if (*job->tasks->image) {
        printf("importing image %s\n", job->tasks->image_name);
        r = supervisor_command(&supervisor, "prepare", image, PREPARE_MS, err);
    }
    if (r == 0 && *job->tasks->file) {
        printf("registering tasks of %s\n", job->tasks->file);
        fflush(stdout);
        r = supervisor_command(&supervisor, "prepare", tasks, PREPARE_MS, err);
    }
    return r;
}

static int supervise(const char *dir, const Longhaul__Job__V1__Job *job,
                     const char *const *trainer_args, struct lh_error *err)
{
    struct progress progress;
    int r = supervisor_start_daemons(&supervisor, err);

    if (r == 0)
        r = prepare(job, err);
    if (r == 0)
        r = supervisor_start_job(&supervisor, job, trainer_args, err);
    progress_init(&progress, dir);
    if (r == 0) {
        r = supervisor_run(&supervisor, progress_tick, &progress, err);
        progress_finish(&progress);
    }
    supervisor_stop(&supervisor);
    return r;
}

/* Everything from the lock on: the directory is a job's and it is ours. */
static int go(const char *given_dir, const char *const *trainer_args, struct lh_error *err)
{
    lh_autofree char *dir = jobdir_resolve(given_dir, err);
    lh_autoclose int lock = dir ? jobdir_lock(dir, err) : -1;
    Longhaul__Job__V1__Job *job = lock >= 0 ? job_read(dir, err) : NULL;

    if (!job)
        return err->code;
    int r = supervisor_init(&supervisor, dir, err);
    if (r == 0)
        r = supervise(dir, job, trainer_args, err);
    supervisor_finish(&supervisor);
    if (r == 0)
        report_print(dir);
    job_destroy(job);
    return r;
}

static int report(const char *verb, int r, const struct lh_error *err)
{
    if (r == 0)
        return 0;
    fprintf(stderr, "longhaul %s: %s\n", verb, err->message);
    return 1;
}

/* ---- run ---- */

static int start_new(struct arguments *a, struct lh_error *err)
{
    Longhaul__Job__V1__Job *job = job_load(a->path, err);

    if (!job)
        return err->code;
    if (a->control)
        job->control = LONGHAUL__JOB__V1__CONTROL__CONTROL_SHUFFLE_REWARDS;
    if (a->dry_run) {
        job_print(job, stdout);
        job_destroy(job);
        return 0;
    }
    lh_autofree char *dir = a->dir ? strdup(a->dir) : lh_format("runs/%s", job->name);
    int r = dir ? jobdir_create(dir, a->path, job, err) : LH_RESOURCE_EXHAUSTED;
    if (r == 0)
        printf("job %s in %s\n", job->name, dir);
    job_destroy(job);
    return r < 0 ? r : go(dir, NULL, err);
}

static error_t parse_run(int key, char *arg, struct argp_state *state)
{
    struct arguments *a = state->input;

    switch (key) {
    case 'd':
        a->dir = arg;
        return 0;
    case KEY_DRY_RUN:
        a->dry_run = true;
        return 0;
    case KEY_FIELDS:
        a->fields = true;
        return 0;
    case KEY_CONTROL:
        if (strcmp(arg, "shuffle-rewards"))
            argp_error(state, "--control: '%s' is not shuffle-rewards", arg);
        a->control = arg;
        return 0;
    case ARGP_KEY_ARG:
        if (a->path)
            argp_usage(state);
        a->path = arg;
        return 0;
    case ARGP_KEY_END:
        if (!a->path && !a->fields)
            argp_usage(state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int verb_run(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"dir", 'd', "DIR", 0, "job directory, absent or empty (runs/NAME)", 0},
        {"dry-run", KEY_DRY_RUN, NULL, 0, "check the job file and print it resolved", 0},
        {"fields", KEY_FIELDS, NULL, 0, "list every field of a job file", 0},
        {"control", KEY_CONTROL, "shuffle-rewards", 0, "a control experiment: must not learn", 0},
        {0}};
    static const struct argp argp = {options, parse_run, "JOB.yaml", "Starts a job and watches it.",
                                     NULL,    NULL,      NULL};
    struct arguments a = {0};
    struct lh_error err = {0};

    argp_parse(&argp, argc, argv, 0, NULL, &a);
    if (a.fields) {
        job_print_fields(stdout);
        return 0;
    }
    return report("run", start_new(&a, &err), &err);
}

/* ---- resume and eval ---- */

/* Passed on; an option that comes again and again finds no room at last. */
static void add_trainer_argument(struct arguments *a, const char *arg, struct argp_state *state)
{
    if (a->n_trainer + 1 >= LH_ARRAY_SIZE(a->trainer))
        argp_error(state, "too many options");
    a->trainer[a->n_trainer++] = arg;
}

static error_t parse_dir(int key, char *arg, struct argp_state *state)
{
    struct arguments *a = state->input;

    switch (key) {
    case KEY_EPISODES:
        add_trainer_argument(a, "--episodes", state);
        add_trainer_argument(a, arg, state);
        return 0;
    case KEY_BLANK:
        add_trainer_argument(a, "--blank-first-observation", state);
        return 0;
    default:
        return jobdir_argument(key, arg, state, &a->dir);
    }
}

int verb_resume(int argc, char **argv)
{
    static const struct argp argp = {
        NULL, parse_dir, "JOBDIR", "Goes on with a job from its last checkpoint and its ledger.",
        NULL, NULL,      NULL};
    struct arguments a = {0};
    struct lh_error err = {0};

    argp_parse(&argp, argc, argv, 0, NULL, &a);
    return report("resume", go(a.dir, NULL, &err), &err);
}

int verb_eval(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"episodes", KEY_EPISODES, "N", 0, "greedy episodes (the job's eval.episodes)", 0},
        {"blank-first-observation", KEY_BLANK, NULL, 0, "hide what the first command printed", 0},
        {0}};
    static const struct argp argp = {
        options, parse_dir, "JOBDIR", "Evaluates the newest checkpoint on held-out tasks.",
        NULL,    NULL,      NULL};
    struct arguments a = {.trainer = {"--eval-only"}, .n_trainer = 1};
    struct lh_error err = {0};

    argp_parse(&argp, argc, argv, 0, NULL, &a);
    return report("eval", go(a.dir, a.trainer, &err), &err);
}
