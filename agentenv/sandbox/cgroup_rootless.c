/* The cgroups of an ordinary user: below the daemon's own, if that was delegated, else none.
 *
 * Delegated means that the user may make directories there and move processes, as in a unit of
 * systemd with Delegate=yes.  Limits need more: the controllers must have been delegated too, and a
 * cgroup that has processes of its own can give none to its children.  So the daemon moves into a
 * child first.  What cannot be had is noted in facts.h and done without; the v1 hierarchies of a
 * hybrid host are root's. */
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agentenv/sandbox/cgroup_private.h"
#include "agentenv/sandbox/facts.h"
#include "proto/file.h"

/* Where the daemon is, or was before it moved into `leaf`. */
static int open_own(const char *leaf)
{
    lh_autoclose int base = cgroup_open_v2_base();
    lh_autofclose FILE *f = fopen("/proc/self/cgroup", "re");
    char line[1024];

    while (base >= 0 && f && fgets(line, sizeof line, f)) {
        size_t n = strcspn(line, "\n"), tail = strlen(leaf);
        line[n] = 0;
        if (strncmp(line, "0::/", 4) != 0)
            continue;
        if (n > tail + 4 && line[n - tail - 1] == '/' && strcmp(line + n - tail, leaf) == 0)
            line[n - tail - 1] = 0;
        return cgroup_open_dir(base, line[4] ? line + 4 : ".");
    }
    return -1;
}

static int move_into(int base, const char *leaf, struct lh_error *err)
{
    char pid[16];

    snprintf(pid, sizeof pid, "%d", getpid());
    lh_autoclose int fd = cgroup_open_parent(base, leaf, err);
    int r = fd < 0 ? 0 : cgroup_write_at(fd, "cgroup.procs", pid);
    return fd < 0 ? fd : r < 0 ? lh_fail_errno(err, -r, "moving into cgroup %s", leaf) : 0;
}

static void open_limits(struct cgroup_root *r, const char *leaf)
{
    struct box_facts *f = box_facts_set();
    struct lh_error err = {0};

    f->limits = false;
    if (!cgroup_has_controllers(r->base))
        snprintf(f->no_limits, sizeof f->no_limits,
                 "memory, pids and cpu are not all delegated to this user");
    else if (move_into(r->base, leaf, &err) < 0 ||
             cgroup_delegate(r->base, "the daemon's cgroup", &err) < 0 ||
             cgroup_delegate(r->v2, r->parent, &err) < 0)
        snprintf(f->no_limits, sizeof f->no_limits, "%.190s", err.message);
    else
        f->limits = true;
    r->v2_limits = f->limits;
}

static int open_plain(struct cgroup_root *r, struct lh_error *err)
{
    struct box_facts *f = box_facts_set();

    f->cgroups = f->limits = false;
    if (!*f->processes) /* only to see what there is */
        return 0;
    int rc = lh_make_dirs(f->processes, 0700, err);
    r->base = rc < 0 ? -1 : cgroup_open_dir(AT_FDCWD, f->processes);
    if (r->base < 0)
        return rc < 0 ? rc : lh_fail_errno(err, errno, "directory %s", f->processes);
    r->v2 = cgroup_open_parent(r->base, r->parent, err);
    return r->v2 < 0 ? r->v2 : 0;
}

int cgroup_open_rootless(struct cgroup_root *r, struct lh_error *err)
{
    struct box_facts *f = box_facts_set();
    char leaf[80];

    snprintf(leaf, sizeof leaf, "%s.daemon", r->parent);
    r->base = open_own(leaf);
    r->v2 = r->base < 0 ? -1 : cgroup_open_parent(r->base, r->parent, NULL);
    f->cgroups = r->v2 >= 0 && faccessat(r->base, "cgroup.procs", W_OK, 0) == 0;
    if (f->cgroups) {
        open_limits(r, leaf);
        return 0;
    }
    snprintf(f->no_cgroups, sizeof f->no_cgroups, "no cgroup was delegated to this user (%s)",
             strerror(errno));
    cgroup_root_close(r);
    return open_plain(r, err);
}
