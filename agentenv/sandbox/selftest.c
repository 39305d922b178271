/* What this machine lacks for sandboxes.  Real attempts, not version numbers; each check is a line
 * of the table with its remedy. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "agentenv/sandbox/box_private.h"
#include "agentenv/sandbox/confine.h"
#include "agentenv/sandbox/enter.h"
#include "agentenv/sandbox/facts.h"
#include "agentenv/sandbox/overlay.h"
#include "proto/file.h"

static int check_root(struct lh_error *err)
{
    return geteuid() == 0
               ? 0
               : lh_fail(err, LH_PERMISSION_DENIED, "not root, nor root of a user namespace");
}

static int check_namespaces(struct lh_error *err)
{
    if (box_facts()->rootless) /* it is in one */
        return 0;
    int fd = overlay_userns(err);

    if (fd >= 0)
        close(fd);
    return fd < 0 ? fd : 0;
}

static int check_cgroups(struct lh_error *err)
{
    struct cgroup_root r;
    char name[64];

    snprintf(name, sizeof name, "agentenv-selftest-%d", getpid());
    int rc = cgroup_root_open(&r, name, err);
    if (rc == 0)
        cgroup_root_close(&r);
    return rc;
}

static int check_seccomp(struct lh_error *err)
{
    int fd = confine_compile(err);

    if (fd >= 0)
        close(fd);
    if (fd >= 0 && prctl(PR_GET_SECCOMP, 0, 0, 0, 0) < 0)
        return lh_fail_errno(err, errno, "the kernel has no seccomp");
    return fd < 0 ? fd : 0;
}

static int check_devices(struct lh_error *err)
{
    const char *bad = enter_bad_device(box_facts()->host_root);

    return bad ? lh_fail(err, LH_FAILED_PRECONDITION, "/dev/%s is not root's device", bad) : 0;
}

/* An overlay with an ID-mapped lower layer given by descriptor, in a scratch directory. */
static int try_overlay(const char *dir, struct lh_error *err)
{
    lh_autofree char *lower = lh_format("%s/lower", dir);
    lh_autoclose int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int r;

    if (!lower || fd < 0 || mkdir(lower, 0755) < 0)
        return lh_fail_errno(err, errno, "scratch directory %s", dir);
    if ((r = box_make_upper(fd, 0, err)) < 0)
        return r;
    lh_autoclose int userns = box_facts()->idmap ? overlay_userns(err) : -1;
    const struct box_layer layer = {lower, true};
    const struct overlay o = {.layers = &layer,
                              .n_layers = 1,
                              .below = -1,
                              .userns = userns,
                              .dir_fd = fd,
                              .upper = "upper.0",
                              .work = "work.0"};
    if (userns < 0 && box_facts()->idmap)
        return LH_FAILED_PRECONDITION;
    lh_autoclose int mnt = overlay_create(&o, err);
    return mnt < 0 ? LH_FAILED_PRECONDITION : 0;
}

static int check_overlay(struct lh_error *err)
{
    char dir[] = "/var/tmp/agentenv-selftest-XXXXXX";

    if (!mkdtemp(dir))
        return lh_fail_errno(err, errno, "a directory in /var/tmp");
    int r = try_overlay(dir, err);
    lh_remove_tree(dir, NULL);
    return r;
}

static int check_pidfd(struct lh_error *err)
{
    int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    int copy = pidfd < 0 ? -1 : (int)syscall(SYS_pidfd_getfd, pidfd, pidfd, 0);
    int r = copy < 0 ? lh_fail_errno(err, errno, "pidfd_getfd") : 0;

    if (copy >= 0)
        close(copy);
    if (pidfd >= 0)
        close(pidfd);
    return r;
}

static const struct {
    int (*check)(struct lh_error *err);
    const char *remedy;
} checks[] = {
    {check_root, "run agentenvd as root"},
    {check_namespaces, "sysctl user.max_user_namespaces=10000; a kernel with CONFIG_USER_NS"},
    {check_cgroups, "a kernel >= 5.14 with cgroup v2, and the memory, pids and cpu controllers"},
    {check_seccomp, "a kernel with CONFIG_SECCOMP_FILTER"},
    {check_devices, "chown root /dev/null and its like, or make them again"},
    {check_overlay, "a kernel >= 6.13 with overlayfs, and /var/tmp on ext4, XFS, btrfs or tmpfs"},
    {check_pidfd, "a kernel >= 5.6, and CAP_SYS_PTRACE"},
};

int box_selftest(void (*problem)(void *ctx, const char *text), void *ctx)
{
    int n = 0;

    for (size_t i = 0; i < LH_ARRAY_SIZE(checks); i++) {
        struct lh_error err = {0};
        char text[1400];
        if (checks[i].check(&err) == 0)
            continue;
        snprintf(text, sizeof text, "%s; needed: %s", err.message, checks[i].remedy);
        problem(ctx, text);
        n++;
    }
    return n;
}
