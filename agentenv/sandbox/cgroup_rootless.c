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

/* ---- sandboxes that an earlier daemon started the other way ---- */

/* `processes/cgroup` names the parent cgroup that was used last. */
static char *note_path(void)
{
    return lh_format("%s/cgroup", box_facts()->processes);
}

/* `own`: which this daemon uses itself; "" = none. */
static int refuse_cgroup_in_use(const char *own, struct lh_error *err)
{
    lh_autofree char *note = note_path();
    size_t len;
    lh_autofree char *path = note ? lh_read_file(note, 4096, &len, NULL) : NULL;
    lh_autoclose int fd = path ? cgroup_open_dir(AT_FDCWD, path) : -1;
    char events[128] = "";

    if (fd >= 0 && strcmp(path, own) != 0)
        cgroup_read_at(fd, "cgroup.events", events, sizeof events);
    if (!strstr(events, "populated 1"))
        return 0;
    return lh_fail(err, LH_FAILED_PRECONDITION,
                   "sandboxes of this state directory run in cgroup %s, which this daemon may not "
                   "use: start it there as before, or end them: echo 1 > %s/cgroup.kill",
                   path, path);
}

static int note_cgroup(const struct cgroup_root *r, struct lh_error *err)
{
    lh_autofree char *note = note_path();
    char fd[40], path[4096];

    if (!*box_facts()->processes)
        return 0;
    snprintf(fd, sizeof fd, "/proc/self/fd/%d", r->v2);
    ssize_t n = readlink(fd, path, sizeof path - 1);
    if (!note || n < 0)
        return lh_fail_errno(err, note ? errno : ENOMEM, "the name of a cgroup");
    path[n] = 0;
    int rc = refuse_cgroup_in_use(path, err);
    if (rc == 0)
        rc = lh_make_dirs(box_facts()->processes, 0700, err);
    return rc < 0 ? rc : lh_write_file(note, path, (size_t)n, 0600, err);
}

static int refuse_one(void *ctx, const char *id)
{
    const int *dir = ctx;
    lh_autoclose int fd = cgroup_open_dir(*dir, id);
    pid_t pid = fd < 0 ? -1 : plain_init(fd);

    return pid > 0 ? pid : 0;
}

static int refuse_plain_in_use(const struct cgroup_root *r, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/%s", box_facts()->processes, r->parent);
    lh_autoclose int dir = path ? cgroup_open_dir(AT_FDCWD, path) : -1;
    int pid = dir < 0 ? 0 : cgroup_each_in(dir, refuse_one, &dir);

    return pid <= 0 ? 0
                    : lh_fail(err, LH_FAILED_PRECONDITION,
                              "a sandbox of this state directory runs without a cgroup: start "
                              "agentenvd outside of a delegated one as before, or end it: kill -9 "
                              "%d",
                              pid);
}

/* ---- opening ---- */

static int open_plain(struct cgroup_root *r, struct lh_error *err)
{
    struct box_facts *f = box_facts_set();

    f->cgroups = f->limits = false;
    if (!*f->processes) /* only to see what there is */
        return 0;
    int rc = refuse_cgroup_in_use("", err);
    if (rc == 0)
        rc = lh_make_dirs(f->processes, 0700, err);
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
        int rc = refuse_plain_in_use(r, err);
        if (rc == 0)
            rc = note_cgroup(r, err);
        if (rc == 0)
            open_limits(r, leaf);
        return rc;
    }
    snprintf(f->no_cgroups, sizeof f->no_cgroups, "no cgroup was delegated to this user (%s)",
             strerror(errno));
    cgroup_root_close(r);
    return open_plain(r, err);
}
