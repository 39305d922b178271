#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "agentenv/sandbox/cgroup_private.h"

int cgroup_open(const struct cgroup_root *r, const char *id)
{
    return cgroup_open_dir(r->v2, id);
}

/* A thread that moves itself cannot end or execute meanwhile, so this is the one way in for which
 * the kernel does not first stop all forks and exits on the machine: an RCU grace period, 8 ms on a
 * machine that was idle and more on a busy one, unless somebody did the same just before. */
int cgroup_enter(const struct cgroup_root *r, const char *id)
{
    char file[128];

    snprintf(file, sizeof file, "%s/tasks", id);
    for (int i = 0; i < CGROUP_CONTROLLERS; i++) {
        int e = r->v1[i] < 0 ? 0 : cgroup_write_at(r->v1[i], file, "0");
        if (e < 0)
            return e;
    }
    return 0;
}

int cgroup_start_ticks(pid_t pid, uint64_t *ticks)
{
    char path[64], text[1024];

    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    lh_autoclose int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    text[n > 0 ? n : 0] = 0;
    const char *p = strrchr(text, ')'); /* the name may hold anything else */
    for (int field = 2; p && field < 22; field++)
        p = strchr(p + 1, ' ');
    return p && sscanf(p, "%llu", (unsigned long long *)ticks) == 1 ? 0 : -1;
}

int cgroup_record(int fd, pid_t pid)
{
    uint64_t ticks;
    char text[64];

    if (cgroup_start_ticks(pid, &ticks) < 0)
        return -ESRCH;
    int n = snprintf(text, sizeof text, "%d %llu\n", pid, (unsigned long long)ticks);
    lh_autoclose int file =
        openat(fd, CGROUP_PLAIN_RECORD, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    return file < 0 || write(file, text, (size_t)n) != n ? -errno : 0;
}
