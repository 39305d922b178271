/* From a fresh sandbox to the one that a task describes: working directory, files, setup commands,
 * healthcheck.  Run in every sandbox of the task; files are written from outside and cost little,
 * and commands are run again for each member of a group.  Rejected for now: a sealed layer a task,
 * which would need an owner in the snapshot store and pays only for slow setups. */
#include "agentenv/task/setup.h"

#include <string.h>
#include <time.h>

#include "agentenv/task/exec.h"
#include "agentenv/task/registry.h"
#include "proto/clock.h"
#include "proto/log.h"
#include "proto/parse.h"

LH_LOG_COMPONENT("task");

int task_put_files(struct daemon *d, const char *sandbox, Longhaul__Task__V1__File *const *files,
                   size_t n, struct lh_error *err)
{
    for (size_t i = 0; i < n; i++) {
        const Longhaul__Task__V1__File *f = files[i];
        int r = daemon_put_file(d, sandbox, f->path, f->content.data, f->content.len,
                                f->mode ? f->mode : 0644, err);

        if (r < 0)
            return lh_wrap(err, "file %s", f->path);
    }
    return 0;
}

static uint32_t time_left(int64_t deadline_ms)
{
    int left = lh_ms_left(deadline_ms);

    return left > 0 ? (uint32_t)left : 1;
}

static int run_shell(struct daemon *d, const Task *t, const char *sandbox, const char *command,
                     int64_t deadline_ms, struct task_result *result, struct lh_error *err)
{
    const char *const argv[] = {"/bin/sh", "-c", command, NULL};
    struct task_command c = {.argv = argv, .user = "", .timeout_ms = time_left(deadline_ms)};

    return task_exec(d, t, sandbox, &c, result, err);
}

static int run_setup(struct daemon *d, const Task *t, const char *sandbox, int64_t deadline_ms,
                     struct lh_error *err)
{
    for (size_t i = 0; i < t->environment->n_setup; i++) {
        const char *command = t->environment->setup[i];
        struct task_result result;
        char how[800];
        int r = run_shell(d, t, sandbox, command, deadline_ms, &result, err);

        if (r < 0)
            return lh_wrap(err, "setup[%zu] '%.100s'", i, command);
        if (result.exit.status == 0 && !result.exit.timed_out)
            continue;
        task_describe(&result, how, sizeof how);
        return lh_fail(err, result.exit.timed_out ? LH_DEADLINE_EXCEEDED : LH_FAILED_PRECONDITION,
                       "setup[%zu] '%.100s': %s", i, command, how);
    }
    return 0;
}

/* Asked again until it is content or the time to boot is over; then its last answer is reported,
 * not that the question after it was cut short. */
static int wait_healthy(struct daemon *d, const Task *t, const char *sandbox, int64_t deadline_ms,
                        struct lh_error *err)
{
    const char *command = t->environment->healthcheck;
    struct task_result result;
    char how[800] = "";

    if (!*command)
        return 0;
    do {
        int r = run_shell(d, t, sandbox, command, deadline_ms, &result, err);

        if (r < 0)
            return lh_wrap(err, "healthcheck");
        if (result.exit.status == 0 && !result.exit.timed_out)
            return 0;
        if (!*how || !result.exit.timed_out)
            task_describe(&result, how, sizeof how);
        nanosleep(&(struct timespec){.tv_nsec = 100 * 1000 * 1000}, NULL);
    } while (lh_ms_left(deadline_ms) > 0);
    return lh_fail(err, LH_DEADLINE_EXCEEDED, "healthcheck '%.100s': %s", command, how);
}

static int64_t earlier(int64_t deadline_ms, uint32_t ms)
{
    int64_t then = lh_now_ms() + ms;

    return then < deadline_ms ? then : deadline_ms;
}

static int set_up(struct daemon *d, const Task *t, const char *sandbox, int64_t deadline_ms,
                  struct lh_error *err)
{
    const Longhaul__Task__V1__Environment *e = t->environment;
    int r = daemon_make_dir(d, sandbox, task_workdir(t), err);

    if (r == 0)
        r = task_put_files(d, sandbox, e->files, e->n_files, err);
    if (r == 0)
        r = run_setup(d, t, sandbox, earlier(deadline_ms, task_timeout(t, TASK_SETUP).ms), err);
    if (r == 0)
        r = wait_healthy(d, t, sandbox, earlier(deadline_ms, task_timeout(t, TASK_BOOT).ms), err);
    return r;
}

/* A command said no, or took too long; anything else is the daemon's trouble.  A candidate is not
 * registered, and what is registered under its name did not fail. */
static void note_failure(struct daemon *d, const char *name, const RegisteredTask *t, int r)
{
    struct lh_error err = {0};

    if ((r != LH_FAILED_PRECONDITION && r != LH_DEADLINE_EXCEEDED) || strcmp(name, t->task->name))
        return;
    if (task_note_verdict(d, t, true, &err) < 0)
        lh_warn("failure not counted", "task=%s why=%s", name, err.message);
}

int task_setup(struct daemon *d, const char *name, const char *sandbox, int64_t deadline_ms,
               struct lh_error *err)
{
    lh_automsg(RegisteredTask) t = task_fetch(d, name, err);
    struct lh_error why = {0};

    if (!t)
        return err ? err->code : LH_NOT_FOUND;
    int r = set_up(d, t->task, sandbox, deadline_ms, &why);
    note_failure(d, name, t, r);
    if (r < 0)
        lh_fail(err, r, "%s", why.message);
    return r < 0 ? lh_wrap(err, "sandbox of task %s", t->task->name) : 0;
}

bool task_runs_nothing_before_the_agent(const Task *t)
{
    return !t->environment->n_setup && !*t->environment->healthcheck;
}
