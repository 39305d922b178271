/* Commands that a job runs to their end, while its daemons are looked after. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "deploy/jobdir.h"
#include "deploy/supervise_private.h"
#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/log.h"
#include "proto/process.h"

LH_LOG_COMPONENT("longhaul");

enum { AGAIN_MS = 200, REMOVE_MS = 20000 };

static int run_command(struct supervisor *s, char *const argv[], const char *name, int64_t deadline,
                       struct lh_error *err)
{
    struct process *c = &s->command;
    int r = supervisor_spawn(s, name, argv, &c->pid, err);

    while (r == 0 && c->pid) {
        r = supervisor_look_after(s, SUPERVISE_TICK_MS, err);
        if (r == 0 && lh_now_ms() > deadline)
            r = lh_fail(err, LH_DEADLINE_EXCEEDED, "%s took too long; see its log", name);
    }
    if (r < 0 && c->pid) {
        kill(c->pid, SIGKILL);
        waitpid(c->pid, &c->status, 0);
        c->pid = 0;
    }
    if (r < 0 || process_exited_with(c, 0))
        return r;
    supervisor_log_tail(s, name, err);
    return err->code = process_exited_with(c, LH_EXIT_TRY_AGAIN) ? LH_UNAVAILABLE : LH_INTERNAL;
}

/* Again when the daemon that it talks to went away meanwhile. */
int supervisor_command(struct supervisor *s, const char *name, const char *const *args,
                       int timeout_ms, struct lh_error *err)
{
    lh_autofree char *path = program_path(args[0], err);
    char *argv[SUPERVISE_ARGS] = {path};
    int64_t deadline = lh_now_ms() + timeout_ms;

    if (!path)
        return err->code;
    for (size_t i = 1; args[i] && i < SUPERVISE_ARGS - 1; i++)
        argv[i] = (char *)args[i];
    for (;;) {
        int r = run_command(s, argv, name, deadline, err);
        if (r != LH_UNAVAILABLE || lh_now_ms() > deadline)
            return r;
        lh_warn("again", "command=%s error=%s", name, err->message);
        r = supervisor_look_after(s, AGAIN_MS, err);
        if (r < 0)
            return r;
    }
}

int supervisor_remove_sandboxes(struct supervisor *s, struct lh_error *err)
{
    static const char *const args[] = {"agentenv", "rm", "--all", NULL};

    return supervisor_command(s, "remove", args, REMOVE_MS, err);
}
