/* Execs without cgroups: who belongs to which is kept by a leader.
 *
 * A leader is a fork of init that adopts what its descendants abandon (PR_SET_CHILD_SUBREAPER), so
 * whatever an exec starts, double forks and new sessions included, stays below it in the tree of
 * processes until it ends; then the leader ends too.  It tells init the command's pid and its
 * status through a pipe.  A tree is killed by stopping what is below the leader until nothing
 * runs, which a fork bomb cannot outrun, and then killing it.
 *
 * The root of a sandbox may kill a leader (init it cannot): that ends the exec, and what hung on
 * the leader, now init's children, is killed with it.
 *
 * Rejected: marks in the environment, sessions or groups, all of which a process can shed. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agentenv/init/exec.h"

enum { LEADERS_MAX = 256, ROUNDS = 100, WORD_MS = 2000 };

static pid_t leaders[LEADERS_MAX];

static pid_t *find_leader(pid_t pid)
{
    for (size_t i = 0; i < LEADERS_MAX; i++)
        if (leaders[i] == pid)
            return &leaders[i];
    return NULL;
}

/* ---- the leader ---- */

/* pid with ended = 0: the command runs; with ended = 1: its status. */
struct word {
    int32_t pid, ended, status;
};

static void say(int to, pid_t pid, bool ended, int status)
{
    struct word w = {pid, ended, status};

    if (write(to, &w, sizeof w) < 0)
        return; /* init has forgotten the exec */
}

_Noreturn static void lead(int words, const struct launch *l)
{
    int status;

    prctl(PR_SET_NAME, "agentenv-lead");
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* it has no seccomp; the agent may have its id */
    pid_t command = fork();
    if (command == 0)
        launch_command(l);
    int failed = command < 0 ? errno : 0;
    for (int i = 1; i < NSIG; i++)
        if (i != SIGCHLD) /* ignored, it would leave no status */
            signal(i, SIG_IGN);
    dup2(words, 0);
    syscall(SYS_close_range, 1, ~0U, 0);
    say(0, failed ? -1 : command, failed, failed);
    for (pid_t pid; (pid = waitpid(-1, &status, 0)) > 0 || errno == EINTR;)
        if (pid == command)
            say(0, pid, true, status);
    _exit(0);
}

int leader_start(struct exec *e, const struct launch *l)
{
    pid_t *place = find_leader(0);
    int p[2];

    if (!place)
        return -EAGAIN;
    if (pipe2(p, O_CLOEXEC | O_NONBLOCK) < 0)
        return -errno;
    pid_t pid = fork();
    if (pid == 0)
        lead(p[1], l);
    close(p[1]);
    if (pid < 0) {
        int failed = errno;
        close(p[0]);
        return -failed;
    }
    *place = e->leader = pid;
    e->words = p[0];
    return 0;
}

static bool hear_word(struct exec *e)
{
    struct word w;

    if (e->words < 0 || e->heard_end || read(e->words, &w, sizeof w) != sizeof w)
        return false;
    if (w.pid < 0) /* the fork of the command failed */
        e->failure = (struct wire_report){.kind = WIRE_FAILED, .value = w.status, .step = "fork"};
    e->heard_end = w.ended;
    if (w.ended)
        e->status = w.status;
    else
        e->pid = w.pid;
    return true;
}

bool leader_heard(struct exec *e, int *status)
{
    while (hear_word(e))
        ;
    *status = e->status;
    return e->heard_end;
}

void leader_await_pid(struct exec *e)
{
    struct pollfd p = {e->words, POLLIN, 0};

    if (e->pid == 0 && !e->heard_end && poll(&p, 1, WORD_MS) > 0)
        hear_word(e);
}

/* ---- the tree of processes ---- */

struct process {
    pid_t pid, parent;
    char state;
};

struct processes {
    struct process *items;
    size_t n, room;
};

static bool read_process(const char *name, struct process *p)
{
    char path[64], text[512];

    snprintf(path, sizeof path, "/proc/%.20s/stat", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = 0;
    const char *end = strrchr(text, ')'); /* the name may hold anything else */
    p->pid = atoi(name);
    return end && sscanf(end + 1, " %c %d", &p->state, &p->parent) == 2;
}

/* In the order of their pids, as /proc lists them. */
static bool list_processes(struct processes *all)
{
    DIR *d = opendir("/proc");
    struct process p;

    all->n = 0;
    for (const struct dirent *e; d && (e = readdir(d));) {
        if (e->d_name[0] < '1' || e->d_name[0] > '9' || !read_process(e->d_name, &p))
            continue;
        if (all->n == all->room) {
            size_t room = all->room ? 2 * all->room : 64;
            struct process *more = realloc(all->items, room * sizeof *more);
            if (!more)
                break;
            all->items = more;
            all->room = room;
        }
        all->items[all->n++] = p;
    }
    if (d)
        closedir(d);
    return d;
}

static int by_pid(const void *a, const void *b)
{
    const struct process *x = a, *y = b;

    return (x->pid > y->pid) - (x->pid < y->pid);
}

/* Below `root` with no other leader between; a leader is not below init. */
static bool is_below(const struct processes *all, const struct process *p, pid_t root)
{
    for (size_t depth = 0; p && depth <= all->n; depth++) {
        struct process key = {.pid = p->parent};
        if (p->pid == root || find_leader(p->pid))
            return false;
        if (p->parent == root)
            return true;
        p = bsearch(&key, all->items, all->n, sizeof key, by_pid);
    }
    return false;
}

/* Returns how many were still running. */
static size_t signal_below(const struct processes *all, pid_t root, int signal)
{
    size_t running = 0;

    for (size_t i = 0; i < all->n; i++) {
        const struct process *p = &all->items[i];
        if (p->state == 'Z' || p->pid == 1 || !is_below(all, p, root))
            continue;
        running += p->state != 'T' && p->state != 't';
        kill(p->pid, signal);
    }
    return running;
}

static void kill_below(pid_t root)
{
    struct processes all = {0};

    for (int i = 0; i < ROUNDS && list_processes(&all) && signal_below(&all, root, SIGSTOP); i++)
        ;
    signal_below(&all, root, SIGKILL);
    free(all.items);
}

void leader_kill(const struct exec *e)
{
    if (!find_leader(e->leader))
        return;
    kill(e->leader, SIGCONT); /* the sandbox's root may have stopped it */
    kill_below(e->leader);
}

void leader_reaped(pid_t pid, int status)
{
    pid_t *place = find_leader(pid);

    if (!place)
        return;
    *place = 0;
    if (!WIFEXITED(status))
        kill_below(1);
}
