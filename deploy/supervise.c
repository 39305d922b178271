#include "deploy/supervise_private.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "deploy/jobdir.h"
#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/process.h"

LH_LOG_COMPONENT("longhaul");

enum {
    READY_TICK_MS = 10,
    READY_MS = 20000,  /* a daemon's socket after its start */
    START_TRIES = 7,   /* six seconds of them: a predecessor of ours may still be ending */
    GRACE_MS = 6000,   /* from SIGTERM to SIGKILL; processes promise 5 s */
    STABLE_MS = 60000, /* a life that clears the count of restarts */
    MAX_RESTARTS = 30,
    BACKOFF_MS = 50,
    MAX_BACKOFF_MS = 3000,
};

extern char **environ;

int supervisor_init(struct supervisor *s, const char *dir, struct lh_error *err)
{
    sigset_t set;

    *s = (struct supervisor){.dir = dir};
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_BLOCK, &set, NULL);
    char pid[16];
    snprintf(pid, sizeof pid, "%d", getpid());
    setenv(LH_SUPERVISED, pid, 1);
    s->signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return s->signals < 0 ? lh_fail_errno(err, errno, "signalfd") : 0;
}

void supervisor_finish(struct supervisor *s)
{
    for (size_t i = 0; i < s->n; i++)
        for (size_t k = 0; k < SUPERVISE_ARGS; k++)
            free(s->processes[i].argv[k]);
    if (s->signals >= 0)
        close(s->signals);
}

/* ---- one process ---- */

static int spawn_setup(const struct supervisor *s, const char *name,
                       posix_spawn_file_actions_t *actions, posix_spawnattr_t *attr)
{
    lh_autofree char *log = lh_format("%s/logs/%s.log", s->dir, name);
    sigset_t none;

    if (!log)
        return ENOMEM;
    sigemptyset(&none);
    posix_spawnattr_setsigmask(attr, &none);
    posix_spawnattr_setflags(attr, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
    posix_spawnattr_setpgroup(attr, 0); /* Ctrl-C is for us: we end the others in order */
    posix_spawn_file_actions_addopen(actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(actions, 1, log, O_WRONLY | O_CREAT | O_APPEND, 0644);
    return posix_spawn_file_actions_adddup2(actions, 1, 2);
}

int supervisor_spawn(const struct supervisor *s, const char *name, char *const argv[], pid_t *pid,
                     struct lh_error *err)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attr;

    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attr);
    int e = spawn_setup(s, name, &actions, &attr);
    if (!e)
        e = posix_spawn(pid, argv[0], &actions, &attr, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attr);
    return e ? lh_fail_errno(err, e, "starting %s", name) : 0;
}

static int start(struct supervisor *s, struct process *p, struct lh_error *err)
{
    int r = supervisor_spawn(s, p->name, p->argv, &p->pid, err);

    if (r < 0)
        return r;
    p->started_ms = lh_now_ms();
    for (struct process *w = p + 1; p == s->trainer && w < s->processes + s->n; w++)
        w->done = false; /* a new life of the trainer has work for them */
    lh_debug("start", "process=%s pid=%d", p->name, (int)p->pid);
    return 0;
}

static struct process *add(struct supervisor *s, const char *name, const char *program,
                           const char *const *args, struct lh_error *err)
{
    struct process *p = &s->processes[s->n];
    size_t n = 1;

    if (s->n == SUPERVISE_MAX)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "more than %d processes", SUPERVISE_MAX), NULL;
    *p = (struct process){0};
    snprintf(p->name, sizeof p->name, "%s", name);
    p->argv[0] = program_path(program, err);
    if (!p->argv[0])
        return NULL;
    s->n++;
    for (; args && *args && n < SUPERVISE_ARGS - 1; args++)
        if (!(p->argv[n++] = strdup(*args)))
            return lh_fail_errno(err, ENOMEM, "starting %s", name), NULL;
    return p;
}

static int add_and_start(struct supervisor *s, const char *name, const char *program,
                         const char *const *args, struct lh_error *err)
{
    struct process *p = add(s, name, program, args, err);

    return p ? start(s, p, err) : err->code;
}

int supervisor_log_tail(const struct supervisor *s, const char *name, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/logs/%s.log", s->dir, name);
    lh_autofclose FILE *f = path ? fopen(path, "re") : NULL;
    char line[512], last[512] = "(its log is empty)";

    while (f && fgets(line, sizeof line, f))
        memcpy(last, line, sizeof last);
    last[strcspn(last, "\n")] = 0;
    return lh_fail(err, LH_INTERNAL, "%s failed: %s (more in %s)", name, last, path ? path : "");
}

/* ---- keeping them running ---- */

static void ended(struct process *p, int status)
{
    int64_t now = lh_now_ms(), delay = BACKOFF_MS;

    p->status = status;
    p->pid = 0;
    p->restarts = now - p->started_ms > STABLE_MS ? 0 : p->restarts + 1;
    for (int i = 1; i < p->restarts && delay < MAX_BACKOFF_MS; i++)
        delay *= 2;
    p->start_at_ms = now + (delay < MAX_BACKOFF_MS ? delay : MAX_BACKOFF_MS);
}

static void reap(struct supervisor *s)
{
    int status;
    pid_t pid;

    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (s->command.pid == pid)
            ended(&s->command, status);
        for (size_t i = 0; i < s->n; i++) {
            struct process *p = &s->processes[i];
            if (p->pid != pid)
                continue;
            ended(p, status);
            p->done = s->trainer && p > s->trainer &&
                      process_exited_with(p, 0); /* told to by the trainer */
        }
    }
}

/* A daemon that never came up fails for a reason; once up, only its command line can be wrong. */
static bool hopeless(const struct process *p)
{
    return process_exited_with(p, LH_EXIT_USAGE) || (!p->ready && process_exited_with(p, 1)) ||
           p->restarts > (p->ready ? MAX_RESTARTS : START_TRIES);
}

static size_t n_daemons(const struct supervisor *s)
{
    return s->trainer ? (size_t)(s->trainer - s->processes) : s->n;
}

/* Restarts what is due.  An end that a restart cannot mend is the job's end. */
static int restart_due(struct supervisor *s, struct lh_error *err)
{
    size_t n = s->ending ? n_daemons(s) : s->n;

    for (size_t i = 0; i < n; i++) {
        struct process *p = &s->processes[i];
        if (p->pid || p->done || lh_now_ms() < p->start_at_ms)
            continue;
        if (hopeless(p))
            return supervisor_log_tail(s, p->name, err);
        lh_warn("restart", "process=%s status=0x%x restarts=%d", p->name, p->status, p->restarts);
        int r = start(s, p, err);
        if (r < 0)
            return r;
    }
    return 0;
}

static bool asked_to_stop(struct supervisor *s)
{
    struct signalfd_siginfo info;
    bool stop = false;

    while (read(s->signals, &info, sizeof info) == (ssize_t)sizeof info)
        stop |= info.ssi_signo != SIGCHLD;
    return stop;
}

int supervisor_look_after(struct supervisor *s, int ms, struct lh_error *err)
{
    struct pollfd p = {s->signals, POLLIN, 0};

    poll(&p, 1, ms);
    bool stop = asked_to_stop(s);
    reap(s);
    if (stop && !s->ending)
        return lh_fail(err, LH_CANCELLED, "stopped; `longhaul resume %s` goes on", s->dir);
    return restart_due(s, err);
}

/* ---- readiness ---- */

/* Is it this process, and not a predecessor that is still ending? */
static bool served_by(const char *path, pid_t pid)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    static const int types[] = {SOCK_STREAM, SOCK_SEQPACKET};

    snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
    for (size_t i = 0; i < LH_ARRAY_SIZE(types); i++) {
        lh_autoclose int fd = socket(AF_UNIX, types[i] | SOCK_CLOEXEC, 0);
        struct ucred peer = {0};
        socklen_t len = sizeof peer;
        if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a) == 0 &&
            getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) == 0)
            return peer.pid == pid;
    }
    return false;
}

static int wait_ready(struct supervisor *s, struct process *p, const char *socket,
                      struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/run/%s", s->dir, socket);
    int64_t deadline = lh_now_ms() + READY_MS;

    if (!path)
        return lh_fail_errno(err, ENOMEM, "starting %s", p->name);
    while (!p->pid || !served_by(path, p->pid)) {
        int r = supervisor_look_after(s, READY_TICK_MS, err);
        if (r < 0)
            return r;
        if (lh_now_ms() > deadline)
            return lh_fail(err, LH_DEADLINE_EXCEEDED, "%s is not ready after %d s; see its log",
                           p->name, READY_MS / 1000);
    }
    p->ready = true;
    return 0;
}

/* ---- starting ---- */

int supervisor_start_daemons(struct supervisor *s, struct lh_error *err)
{
    lh_autofree char *state = lh_format("%s/agentenv", s->dir);
    lh_autofree char *socket = lh_format("%s/run/agentenv.sock", s->dir);
    const char *job[] = {s->dir, NULL};
    const char *env[] = {"--state", state, "--socket", socket, NULL};
    const struct {
        const char *name, *const *args, *socket;
    } daemons[] = {{"arbiterd", job, "arbiter.sock"},
                   {"agentenvd", env, "agentenv.sock"},
                   {"kvstored", job, "kv.sock"}};

    if (!state || !socket)
        return lh_fail_errno(err, ENOMEM, "starting");
    setenv("AGENTENV_SOCKET", socket, 1);
    for (size_t i = 0; i < LH_ARRAY_SIZE(daemons); i++) {
        int r = add_and_start(s, daemons[i].name, daemons[i].name, daemons[i].args, err);
        if (r == 0 && i == 0) /* kvstored borrows its memory from it */
            r = wait_ready(s, &s->processes[i], daemons[i].socket, err);
        if (r < 0)
            return r;
    }
    for (size_t i = 1; i < LH_ARRAY_SIZE(daemons); i++) {
        int r = wait_ready(s, &s->processes[i], daemons[i].socket, err);
        if (r < 0)
            return r;
    }
    return 0;
}

int supervisor_start_job(struct supervisor *s, const Longhaul__Job__V1__Job *job,
                         const char *const *trainer_args, struct lh_error *err)
{
    const char *args[SUPERVISE_ARGS] = {s->dir};
    char name[32], index[12];

    for (size_t i = 0; trainer_args && trainer_args[i] && i < SUPERVISE_ARGS - 2; i++)
        args[i + 1] = trainer_args[i];
    s->trainer = add(s, "trainer", "longhaul-trainer", args, err);
    if (!s->trainer || start(s, s->trainer, err) < 0)
        return err->code;
    s->trainer->ready = true;
    for (uint32_t i = 0; i < job->rollout->workers; i++) {
        snprintf(name, sizeof name, "rollout-%u", i);
        snprintf(index, sizeof index, "%u", i);
        const char *worker[] = {s->dir, index, NULL};
        int r = add_and_start(s, name, "longhaul-rollout", worker, err);
        if (r < 0)
            return r;
        s->processes[s->n - 1].ready = true;
    }
    return 0;
}

/* ---- until the end ---- */

/* 1 = the trainer is done, 0 = go on, negative = it cannot be. */
static int trainer_outcome(struct supervisor *s, struct lh_error *err)
{
    const struct process *t = s->trainer;

    if (t->pid)
        return 0;
    if (process_exited_with(t, 0))
        return 1;
    return process_exited_with(t, 1) ? supervisor_log_tail(s, t->name, err) : 0;
}

int supervisor_run(struct supervisor *s, void (*tick)(void *ctx), void *ctx, struct lh_error *err)
{
    for (;;) {
        int r = trainer_outcome(s, err);
        if (r == 0)
            r = supervisor_look_after(s, SUPERVISE_TICK_MS, err);
        if (r)
            return r < 0 ? r : 0;
        tick(ctx);
    }
}

/* ---- the end ---- */

static void end_range(struct supervisor *s, size_t first, size_t last)
{
    int64_t deadline = lh_now_ms() + GRACE_MS;
    bool any = true;

    for (size_t i = first; i < last; i++)
        if (s->processes[i].pid)
            kill(s->processes[i].pid, SIGTERM);
    while (any) {
        any = false;
        reap(s);
        for (size_t i = first; i < last; i++) {
            any |= s->processes[i].pid != 0;
            if (s->processes[i].pid && lh_now_ms() > deadline)
                kill(s->processes[i].pid, SIGKILL);
        }
        usleep(any ? 5000 : 0);
    }
}

/* Those of daemons that were killed when nobody restarted them any more. */
static void remove_sockets(const struct supervisor *s)
{
    static const char *const names[] = {"arbiter", "agentenv", "kv", "experience"};

    for (size_t i = 0; i < LH_ARRAY_SIZE(names); i++) {
        lh_autofree char *path = lh_format("%s/run/%s.sock", s->dir, names[i]);
        if (path)
            unlink(path);
    }
}

void supervisor_stop(struct supervisor *s)
{
    size_t daemons = n_daemons(s);
    bool ready = daemons > 0;

    s->ending = true;
    for (size_t i = 0; i < daemons; i++)
        ready &= s->processes[i].ready;
    end_range(s, daemons, s->n);
    struct lh_error err;
    if (ready && supervisor_remove_sandboxes(s, &err) < 0)
        lh_warn("stop", "%s", err.message);
    end_range(s, 0, daemons);
    if (ready)
        remove_sockets(s);
}
