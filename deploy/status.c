/* status and stop: looking at a job, and ending it, from outside. */
#include <argp.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "deploy/job.h"
#include "deploy/jobdir.h"
#include "deploy/metrics.h"
#include "deploy/supervise.h"
#include "deploy/verbs.h"
#include "proto/cleanup.h"
#include "proto/clock.h"

enum { KEY_AUDIT = 1000, STOP_MS = 60000 };

struct arguments {
    const char *dir, *output;
    bool audit;
};

static struct supervisor supervisor;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct arguments *a = state->input;

    switch (key) {
    case KEY_AUDIT:
        a->audit = true;
        return 0;
    case 'o':
        if (strcmp(arg, "json") && strcmp(arg, "table"))
            argp_error(state, "--output: '%s' is neither json nor table", arg);
        a->output = arg;
        return 0;
    default:
        return jobdir_argument(key, arg, state, &a->dir);
    }
}

static int audit(const char *dir, struct lh_error *err)
{
    lh_autofree char *path = program_path("longhaul-audit", err);

    if (path)
        execl(path, path, dir, (char *)NULL);
    return lh_fail(err, LH_NOT_FOUND, "cannot run longhaul-audit");
}

static void last_line(void *ctx, json_t *line)
{
    json_t **last = ctx;

    json_decref(*last);
    *last = json_incref(line);
}

static json_t *describe(const char *dir, const Longhaul__Job__V1__Job *job)
{
    json_t *last = NULL, *live = metrics_status(dir);
    pid_t pid = jobdir_supervisor(dir);
    long offset = 0;

    metrics_read(dir, &offset, last_line, &last);
    json_t *o = json_pack("{s:s, s:s, s:s, s:b, s:i}", "job", job->name, "id", job->id, "directory",
                          dir, "running", pid != 0, "supervisor", (int)pid);
    if (o && live)
        json_object_update_missing(o, live);
    if (o && last)
        json_object_set(o, "last_event", last);
    json_decref(live);
    json_decref(last);
    return o;
}

static void print_table(json_t *o)
{
    const char *key;
    json_t *value;

    json_object_foreach(o, key, value)
    {
        printf("%-16s ", key);
        if (json_is_string(value))
            puts(json_string_value(value));
        else {
            json_dumpf(value, stdout, JSON_ENCODE_ANY | JSON_REAL_PRECISION(6));
            putchar('\n');
        }
    }
}

static int show(const struct arguments *a, struct lh_error *err)
{
    lh_autofree char *dir = jobdir_resolve(a->dir, err);
    Longhaul__Job__V1__Job *job = dir ? job_read(dir, err) : NULL;

    if (!job)
        return err->code;
    if (a->audit) {
        job_destroy(job);
        return audit(dir, err);
    }
    json_t *o = describe(dir, job);
    bool json = a->output ? !strcmp(a->output, "json") : !isatty(STDOUT_FILENO);
    if (o && json) {
        json_dumpf(o, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
        putchar('\n');
    } else if (o)
        print_table(o);
    json_decref(o);
    job_destroy(job);
    return 0;
}

int verb_status(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"audit", KEY_AUDIT, NULL, 0, "prove from ledger and checkpoints that nothing was lost", 0},
        {"output", 'o', "json|table", 0, "table on a terminal, JSON in a pipe", 0},
        {0}};
    static const struct argp argp = {options, parse, "JOBDIR", "Says what a job is doing.",
                                     NULL,    NULL,  NULL};
    struct arguments a = {0};
    struct lh_error err = {0};

    argp_parse(&argp, argc, argv, 0, NULL, &a);
    if (show(&a, &err) == 0)
        return 0;
    fprintf(stderr, "longhaul status: %s\n", err.message);
    return 1;
}

/* ---- stop ---- */

static int stop_running(const char *dir, pid_t pid, struct lh_error *err)
{
    int64_t deadline = lh_now_ms() + STOP_MS;

    if (kill(pid, SIGTERM) < 0)
        return lh_fail(err, LH_PERMISSION_DENIED, "cannot signal the supervisor, process %d",
                       (int)pid);
    while (jobdir_supervisor(dir) == pid) {
        if (lh_now_ms() > deadline)
            return lh_fail(err, LH_DEADLINE_EXCEEDED, "process %d has not ended after %d s",
                           (int)pid, STOP_MS / 1000);
        usleep(50000);
    }
    printf("stopped; `longhaul resume %s` goes on\n", dir);
    return 0;
}

/* Nobody supervises it, but its sandboxes may live on: find and remove them. */
static int clean_up(const char *dir, struct lh_error *err)
{
    lh_autoclose int lock = jobdir_lock(dir, err);

    if (lock < 0 || supervisor_init(&supervisor, dir, err) < 0)
        return err->code;
    int r = supervisor_start_daemons(&supervisor, err);
    supervisor_stop(&supervisor);
    supervisor_finish(&supervisor);
    if (r == 0)
        printf("was not running; what was left of it is removed\n");
    return r;
}

static int stop(const char *given, struct lh_error *err)
{
    lh_autofree char *dir = jobdir_resolve(given, err);
    Longhaul__Job__V1__Job *job = dir ? job_read(dir, err) : NULL;

    if (!job)
        return err->code;
    job_destroy(job);
    pid_t pid = jobdir_supervisor(dir);
    return pid ? stop_running(dir, pid, err) : clean_up(dir, err);
}

int verb_stop(int argc, char **argv)
{
    static const struct argp argp = {
        NULL, parse, "JOBDIR", "Ends a job and removes its sandboxes; resume goes on with it.",
        NULL, NULL,  NULL};
    struct arguments a = {0};
    struct lh_error err = {0};

    argp_parse(&argp, argc, argv, 0, NULL, &a);
    if (stop(a.dir, &err) == 0)
        return 0;
    fprintf(stderr, "longhaul stop: %s\n", err.message);
    return 1;
}
