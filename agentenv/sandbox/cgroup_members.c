/* Who is in a cgroup: execs below a sandbox's, processes in one. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "agentenv/sandbox/cgroup_private.h"

int cgroup_each_exec(int box_fd, int (*each)(void *ctx, const char *exec_id), void *ctx)
{
    lh_autoclosedir DIR *d = fdopendir(cgroup_open_dir(box_fd, "."));
    int r = 0;

    if (!d)
        return -errno;
    for (const struct dirent *e; r == 0 && (e = readdir(d));)
        if (e->d_type == DT_DIR && strncmp(e->d_name, "x-", 2) == 0)
            r = each(ctx, e->d_name + 2);
    return r;
}

int cgroup_exec_open(int box_fd, const char *exec_id)
{
    char name[80];

    snprintf(name, sizeof name, "x-%s", exec_id);
    return cgroup_open_dir(box_fd, name);
}

int cgroup_each_pid(int fd, int (*each)(void *ctx, pid_t pid), void *ctx)
{
    int procs = openat(fd, "cgroup.procs", O_RDONLY | O_CLOEXEC);
    lh_autofclose FILE *f = procs < 0 ? NULL : fdopen(procs, "r");
    int r = 0, pid;

    if (!f)
        return -errno;
    while (r == 0 && fscanf(f, "%d", &pid) == 1)
        r = each(ctx, pid);
    return r;
}

int cgroup_move(int fd, pid_t pid)
{
    char text[16];

    snprintf(text, sizeof text, "%d", pid);
    return cgroup_write_at(fd, "cgroup.procs", text);
}
