#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

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
