#include "agentenv/sandbox/overlay.h"

#include "agentenv/sandbox/facts.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "proto/file.h"

/* The kernel explains a failed fsconfig through read(2) on the context. */
static int fail_context(int ctx, const char *what, struct lh_error *err)
{
    int saved = errno;
    char msg[256];
    ssize_t n = read(ctx, msg, sizeof msg - 1);

    msg[n > 0 ? n : 0] = 0;
    msg[strcspn(msg, "\n")] = 0;
    return lh_fail_errno(err, saved, "overlay, %s%s%s", what, n > 0 ? ": " : "", msg);
}

static int write_map(pid_t pid, const char *file, struct lh_error *err)
{
    char path[64], map[64];

    snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
    snprintf(map, sizeof map, "0 %d %d", BOX_UID_BASE, BOX_UID_COUNT);
    lh_autoclose int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return lh_fail_errno(err, errno, "%s", path);
    return lh_write_all(fd, map, strlen(map), err) < 0 ? lh_wrap(err, "%s", path) : 0;
}

int overlay_userns(struct lh_error *err)
{
    struct clone_args args = {.flags = CLONE_NEWUSER, .exit_signal = SIGCHLD};
    char path[64];
    pid_t pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
    int fd = -1;

    if (pid < 0)
        return lh_fail_errno(err, errno, "a user namespace (user.max_user_namespaces?)");
    if (pid == 0) { /* holds the namespace until the parent has a descriptor for it */
        pause();
        _exit(0);
    }
    int r = write_map(pid, "uid_map", err);
    if (r == 0)
        r = write_map(pid, "gid_map", err);
    if (r == 0) {
        snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            r = lh_fail_errno(err, errno, "%s", path);
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return r < 0 ? r : fd;
}

/* A mount of its own only where it must be ID-mapped: each one that is closed again waits for all
 * CPUs (an expedited grace period), and a sandbox has up to 32 sealed layers. */
static int open_layer(const struct box_layer *l, int userns_fd, struct lh_error *err)
{
    bool map = l->host_owned && box_facts()->idmap;
    lh_autoclose int fd = map ? open_tree(AT_FDCWD, l->path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC)
                              : open(l->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct mount_attr a = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = (unsigned)userns_fd};

    if (fd < 0)
        return lh_fail_errno(err, errno, "layer %s", l->path);
    if (map && mount_setattr(fd, "", AT_EMPTY_PATH, &a, sizeof a) < 0)
        return lh_fail_errno(err, errno, "ID-mapping layer %s", l->path);
    return lh_steal_fd(&fd);
}

/* Descriptors opened with O_PATH are taken for layers since about 6.14 only; a readable directory
 * descriptor works from 6.13 on. */
static int set_dir(int ctx, int dir_fd, const char *key, const char *name, struct lh_error *err)
{
    lh_autoclose int fd = openat(dir_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);

    if (fd < 0)
        return lh_fail_errno(err, errno, "directory %s", name);
    return fsconfig(ctx, FSCONFIG_SET_FD, key, NULL, fd) < 0 ? fail_context(ctx, key, err) : 0;
}

/* A detached mount ends with its descriptor, so fds[] stays open until the overlay is made. */
static int add_layers(int ctx, const struct overlay *o, int *fds, struct lh_error *err)
{
    for (size_t i = 0; i < o->n_layers; i++) {
        fds[i] = open_layer(&o->layers[i], o->userns, err);
        if (fds[i] < 0)
            return fds[i];
        if (fsconfig(ctx, FSCONFIG_SET_FD, "lowerdir+", NULL, fds[i]) < 0)
            return fail_context(ctx, o->layers[i].path, err);
    }
    if (o->below >= 0 && fsconfig(ctx, FSCONFIG_SET_FD, "lowerdir+", NULL, o->below) < 0)
        return fail_context(ctx, "the files of another sandbox", err);
    return 0;
}

/* "volatile": the agent's fsync and sync do nothing.  A sandbox does not outlive the host anyway,
 * and sealed layers are synced by whoever seals. */
static int set_upper(int ctx, const struct overlay *o, struct lh_error *err)
{
    int r;

    if ((r = set_dir(ctx, o->dir_fd, "upperdir", o->upper, err)) < 0 ||
        (r = set_dir(ctx, o->dir_fd, "workdir", o->work, err)) < 0)
        return r;
    return fsconfig(ctx, FSCONFIG_SET_FLAG, "volatile", NULL, 0) < 0
               ? fail_context(ctx, "volatile", err)
               : 0;
}

static int make_overlay(int ctx, const struct overlay *o, struct lh_error *err)
{
    unsigned attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | (o->upper ? 0 : MOUNT_ATTR_RDONLY);
    int r = o->upper ? set_upper(ctx, o, err) : 0;

    if (r < 0)
        return r;
    if (box_facts()->rootless && fsconfig(ctx, FSCONFIG_SET_FLAG, "userxattr", NULL, 0) < 0)
        return fail_context(ctx, "userxattr", err);
    if (fsconfig(ctx, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
        return fail_context(ctx, "mount", err);
    int mnt = fsmount(ctx, FSMOUNT_CLOEXEC, attributes);
    return mnt < 0 ? lh_fail_errno(err, errno, "overlay, fsmount") : mnt;
}

int overlay_create(const struct overlay *o, struct lh_error *err)
{
    lh_autoclose int ctx = fsopen("overlay", FSOPEN_CLOEXEC);
    lh_autofree int *fds = malloc(o->n_layers * sizeof *fds);

    if (ctx < 0 || !fds)
        return lh_fail_errno(err, errno, "overlayfs (modprobe overlay, when the kernel lacks it)");
    for (size_t i = 0; i < o->n_layers; i++)
        fds[i] = -1;
    int r = add_layers(ctx, o, fds, err);
    if (r == 0)
        r = make_overlay(ctx, o, err);
    for (size_t i = 0; i < o->n_layers; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    return r;
}

int overlay_clone(int mount_fd, struct lh_error *err)
{
    int fd = open_tree(mount_fd, "", AT_EMPTY_PATH | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);

    return fd < 0 ? lh_fail_errno(err, errno, "overlay, a second mount") : fd;
}

int overlay_set_readonly(int mount_fd, struct lh_error *err)
{
    lh_autoclose int ctx = fspick(mount_fd, "", FSPICK_EMPTY_PATH | FSPICK_CLOEXEC);

    if (ctx < 0 || fsconfig(ctx, FSCONFIG_SET_FLAG, "ro", NULL, 0) < 0)
        return lh_fail_errno(err, errno, "overlay, fspick");
    if (fsconfig(ctx, FSCONFIG_CMD_RECONFIGURE, NULL, NULL, 0) == 0)
        return 1;
    return errno == EBUSY ? 0 : fail_context(ctx, "read-only", err);
}
