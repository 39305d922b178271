#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

#include "agentenv/sandbox/cgroup_private.h"

int cgroup_open(const struct cgroup_root *r, const char *id)
{
    return cgroup_open_dir(r->v2, id);
}

int cgroup_attach(const struct cgroup_root *r, const char *id, pid_t pid)
{
    char file[128], text[16];

    snprintf(file, sizeof file, "%s/cgroup.procs", id);
    snprintf(text, sizeof text, "%d", pid);
    for (int i = 0; i < CGROUP_CONTROLLERS; i++) {
        int e = r->v1[i] < 0 ? 0 : cgroup_write_at(r->v1[i], file, text);
        if (e < 0)
            return e;
    }
    return 0;
}
