/* A box's files and counters, seen from the host. */
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "agentenv/sandbox/box_private.h"
#include "proto/clock.h"
#include "proto/file.h"

/* The pid could be reused between the look-up and the open: a signal 0 through the pidfd afterwards
 * proves that it was still init's. */
static int open_of_init(struct box *b, const char *what, int flags, struct lh_error *err)
{
    char path[64];

    snprintf(path, sizeof path, "/proc/%d/%s", b->identity.init_pid, what);
    lh_autoclose int fd = open(path, flags | O_CLOEXEC);
    if (fd < 0 || syscall(SYS_pidfd_send_signal, b->pidfd, 0, NULL, 0) < 0)
        return lh_fail(err, LH_UNAVAILABLE, "sandbox %s has died", b->id);
    return lh_steal_fd(&fd);
}

int box_root_fd(struct box *b, struct lh_error *err)
{
    return open_of_init(b, "root", O_PATH | O_DIRECTORY, err);
}

int box_net_fd(struct box *b, struct lh_error *err)
{
    return open_of_init(b, "ns/net", O_RDONLY, err);
}

int box_open_in(int root_fd, const char *path, int flags, mode_t mode, struct lh_error *err)
{
    struct open_how how = {.flags = (unsigned)(flags | O_CLOEXEC),
                           .mode = flags & O_CREAT ? mode : 0,
                           .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV};

    for (int tries = 0;; tries++) { /* EAGAIN: a rename raced with ".." */
        int fd = (int)syscall(SYS_openat2, root_fd, path, &how, sizeof how);
        if (fd >= 0)
            return fd;
        if (errno != EAGAIN || tries == 100)
            return lh_fail_errno(err, errno, "%s in the sandbox", path);
    }
}

char *box_upper_path(const struct box *b)
{
    char upper[32], work[32];

    box_upper_names(b->upper, upper, work);
    return b->memory < 0 ? lh_format("%s/%s", b->dir, upper)
                         : lh_format("/proc/self/fd/%d/%s", b->memory, upper);
}

int box_upper_fd(const struct box *b, struct lh_error *err)
{
    lh_autofree char *path = box_upper_path(b);
    int fd = path ? open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;

    return fd < 0 ? lh_fail_errno(err, errno, "upper directory of sandbox %s", b->id) : fd;
}

int box_usage(struct box *b, struct box_usage *out, struct lh_error *err)
{
    lh_autoclose int upper = box_upper_fd(b, err);
    struct cgroup_counts c;

    if (upper < 0 || cgroup_count(&b->host->cgroups, b->id, &c, err) < 0)
        return lh_wrap(err, "usage of sandbox %s", b->id);
    *out = (struct box_usage){c.memory_bytes, c.processes, c.oom_kills, box_tree_bytes(upper)};
    return 0;
}

/* Idempotent both ways, and no matter whether the box still lives. */
static int set_frozen(struct box *b, bool frozen, struct lh_error *err)
{
    LH_LOCKED(&b->state);
    int r = cgroup_set_frozen(b->cgroup, frozen, lh_now_ms() + BOX_FREEZE_MS, err);

    return r < 0 ? lh_wrap(err, "%s sandbox %s", frozen ? "freezing" : "thawing", b->id) : 0;
}

int box_freeze(struct box *b, struct lh_error *err)
{
    return set_frozen(b, true, err);
}

int box_thaw(struct box *b, struct lh_error *err)
{
    return set_frozen(b, false, err);
}
