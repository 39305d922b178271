/* Sandboxes without cgroups.
 *
 * A directory of the state stands for a sandbox's cgroup, with one below it for each exec, so that
 * names are found, listed and removed by the same code.  In it the spawner writes the file `init`,
 * the pid and start time of PID 1, before it lets that go on: whatever runs is found again.
 *
 * PID 1 takes its whole pid namespace with it, so killing needs no more than that; an exec's tree
 * is init's to kill (init/leader.c).  Processes and their memory are counted in the sandbox's own
 * /proc.  Nothing can be frozen: stopping by signal was rejected, since it shows inside, any
 * process there may undo it, and a process that forks meanwhile is missed. */
#include <dirent.h>
#include <linux/magic.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "agentenv/sandbox/box_private.h"
#include "agentenv/sandbox/cgroup_private.h"
#include "agentenv/sandbox/facts.h"
#include "proto/clock.h"

static pid_t read_record(int fd, uint64_t *ticks)
{
    char text[64];
    unsigned long long t;
    int pid;

    if (cgroup_read_at(fd, CGROUP_PLAIN_RECORD, text, sizeof text) < 0 ||
        sscanf(text, "%d %llu", &pid, &t) != 2)
        return -1;
    *ticks = t;
    return pid;
}

/* The pidfd is opened first: what has the same start time after it is the same process. */
static int open_init(int fd, pid_t *pid)
{
    uint64_t ticks, now;

    *pid = read_record(fd, &ticks);
    lh_autoclose int pidfd = *pid > 0 ? (int)syscall(SYS_pidfd_open, *pid, 0) : -1;
    if (pidfd < 0 || cgroup_start_ticks(*pid, &now) < 0 || now != ticks)
        return -1;
    return lh_steal_fd(&pidfd);
}

pid_t plain_init(int fd)
{
    pid_t pid;
    lh_autoclose int pidfd = open_init(fd, &pid);

    return pidfd < 0 ? -1 : pid;
}

int plain_kill(int fd, int64_t deadline_ms, struct lh_error *err)
{
    pid_t pid;
    lh_autoclose int pidfd = open_init(fd, &pid);
    struct pollfd dead = {pidfd, POLLIN, 0};

    if (pidfd < 0)
        return 0;
    if (syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, NULL, 0) < 0 && errno != ESRCH)
        return lh_fail_errno(err, errno, "killing init %d", pid);
    return poll(&dead, 1, lh_ms_left(deadline_ms)) == 1
               ? 0
               : lh_fail(err, LH_DEADLINE_EXCEEDED, "init %d does not end", pid);
}

/* Resident bytes; 0 of a process that has ended. */
static uint64_t resident(int proc, const char *pid)
{
    char path[40], text[64];
    unsigned long size, pages = 0;

    snprintf(path, sizeof path, "%.20s/statm", pid);
    cgroup_read_at(proc, path, text, sizeof text);
    return sscanf(text, "%lu %lu", &size, &pages) == 2
               ? (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE)
               : 0;
}

int plain_count(pid_t init, struct cgroup_counts *out, struct lh_error *err)
{
    char path[64];
    struct statfs fs;

    *out = (struct cgroup_counts){0};
    snprintf(path, sizeof path, "/proc/%d/root/proc", init);
    lh_autoclosedir DIR *d = init > 0 ? opendir(path) : NULL;
    if (init <= 0) /* nothing runs */
        return 0;
    if (!d || fstatfs(dirfd(d), &fs) < 0 || fs.f_type != PROC_SUPER_MAGIC)
        return lh_fail(err, LH_UNAVAILABLE, "the sandbox has died");
    for (const struct dirent *e; (e = readdir(d));)
        if (e->d_name[0] >= '1' && e->d_name[0] <= '9') {
            out->processes++;
            out->memory_bytes += resident(dirfd(d), e->d_name);
        }
    return 0;
}

void plain_remove(int root_fd, const char *id)
{
    lh_autoclose int fd = cgroup_open_dir(root_fd, id);

    if (fd >= 0)
        unlinkat(fd, CGROUP_PLAIN_RECORD, 0);
}

int cgroup_no_freezer(struct lh_error *err)
{
    return lh_fail(err, LH_FAILED_PRECONDITION,
                   "processes cannot be stopped, %s: start agentenvd in a delegated cgroup "
                   "(systemd-run --user --scope -p Delegate=yes agentenvd ...), or as root",
                   box_facts()->no_cgroups);
}

int plain_nothing(void)
{
    return open("/dev/null", O_RDWR | O_CLOEXEC);
}
