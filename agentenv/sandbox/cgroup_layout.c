/* Finding out which of the three layouts the host has: v2 with the controllers, v1 with them beside
 * a v2 mount (hybrid), or v1 alone. */
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "agentenv/sandbox/cgroup_private.h"
#include "agentenv/sandbox/facts.h"
#include "agentenv/sandbox/overlay.h"

const char *const cgroup_controllers[CGROUP_CONTROLLERS] = {"memory", "pids", "cpu"};

static bool is_v2(const char *path)
{
    struct statfs f;

    return statfs(path, &f) == 0 && f.f_type == CGROUP2_SUPER_MAGIC;
}

int cgroup_open_v2_base(void)
{
    static const char *const places[] = {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"};

    for (size_t i = 0; i < LH_ARRAY_SIZE(places); i++)
        if (is_v2(places[i]))
            return cgroup_open_dir(AT_FDCWD, places[i]);
    lh_autoclose int mnt = overlay_new_fs("cgroup2", NULL, 0);
    return mnt < 0 ? -1 : cgroup_open_dir(mnt, ".");
}

static bool has_word(const char *list, const char *word)
{
    size_t n = strlen(word);

    for (const char *w = list; (w = strstr(w, word)); w += n)
        if ((w == list || strchr(" ,", w[-1])) && strchr(" ,\n", w[n]))
            return true;
    return false;
}

/* The mount of a v1 controller, from /proc/self/mounts: its options name it. */
static int open_v1_base(const char *controller)
{
    lh_autofclose FILE *f = fopen("/proc/self/mounts", "re");
    char line[1024], dir[256], type[32], options[256];

    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "%*s %255s %31s %255s", dir, type, options) == 3 &&
            strcmp(type, "cgroup") == 0 && has_word(options, controller))
            return cgroup_open_dir(AT_FDCWD, dir);
    return -1;
}

int cgroup_open_parent(int base, const char *name, struct lh_error *err)
{
    if (mkdirat(base, name, 0755) < 0 && errno != EEXIST)
        return lh_fail_errno(err, errno, "cgroup %s", name);
    int fd = cgroup_open_dir(base, name);
    return fd < 0 ? lh_fail_errno(err, errno, "cgroup %s", name) : fd;
}

int cgroup_delegate(int dir, const char *what, struct lh_error *err)
{
    int r = cgroup_write_at(dir, "cgroup.subtree_control", "+memory +pids +cpu");

    if (r == -EBUSY)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "%s has processes of its own, so that its cgroups cannot have limits; move "
                       "them: mkdir /sys/fs/cgroup/host && for p in $(cat "
                       "/sys/fs/cgroup/cgroup.procs); do echo $p > "
                       "/sys/fs/cgroup/host/cgroup.procs; done",
                       what);
    return r < 0 ? lh_fail_errno(err, -r, "enabling memory, pids and cpu in %s", what) : 0;
}

bool cgroup_has_controllers(int dir)
{
    char list[256];
    bool all = true;

    cgroup_read_at(dir, "cgroup.controllers", list, sizeof list);
    for (int i = 0; i < CGROUP_CONTROLLERS; i++)
        all &= has_word(list, cgroup_controllers[i]);
    return all;
}

static int open_v2(struct cgroup_root *r, struct lh_error *err)
{
    r->v2_limits = cgroup_has_controllers(r->base);
    if (r->v2_limits && cgroup_delegate(r->base, "the root cgroup", err) < 0)
        return err ? err->code : LH_FAILED_PRECONDITION;
    r->v2 = cgroup_open_parent(r->base, r->parent, err);
    if (r->v2 < 0)
        return r->v2;
    return r->v2_limits ? cgroup_delegate(r->v2, r->parent, err) : 0;
}

static int open_v1(struct cgroup_root *r, struct lh_error *err)
{
    for (int i = 0; i < CGROUP_CONTROLLERS; i++) {
        r->v1_base[i] = open_v1_base(cgroup_controllers[i]);
        if (r->v1_base[i] < 0)
            return lh_fail(err, LH_FAILED_PRECONDITION,
                           "no cgroup hierarchy has the %s controller: mount cgroup2 on "
                           "/sys/fs/cgroup, or that controller as v1",
                           cgroup_controllers[i]);
        r->v1[i] = cgroup_open_parent(r->v1_base[i], r->parent, err);
        if (r->v1[i] < 0)
            return r->v1[i];
    }
    return 0;
}

static int open_all(struct cgroup_root *r, struct lh_error *err)
{
    r->base = cgroup_open_v2_base();
    int rc = r->base < 0 ? lh_fail(err, LH_FAILED_PRECONDITION, "the kernel has no cgroup v2")
                         : open_v2(r, err);
    return rc == 0 && !r->v2_limits ? open_v1(r, err) : rc;
}

int cgroup_root_open(struct cgroup_root *r, const char *parent, struct lh_error *err)
{
    *r = (struct cgroup_root){.base = -1, .v2 = -1, .v1_base = {-1, -1, -1}, .v1 = {-1, -1, -1}};
    snprintf(r->parent, sizeof r->parent, "%s", parent);
    int rc = box_facts()->rootless ? cgroup_open_rootless(r, err) : open_all(r, err);
    if (rc < 0)
        cgroup_root_close(r);
    return rc;
}

static void close_and_remove(int *fd, int *base, const char *name)
{
    if (*fd >= 0) {
        close(*fd);
        unlinkat(*base, name, AT_REMOVEDIR); /* EBUSY: sandboxes are left, as they may */
    }
    if (*base >= 0)
        close(*base);
    *fd = *base = -1;
}

void cgroup_root_close(struct cgroup_root *r)
{
    close_and_remove(&r->v2, &r->base, r->parent);
    for (int i = 0; i < CGROUP_CONTROLLERS; i++)
        close_and_remove(&r->v1[i], &r->v1_base[i], r->parent);
}
