#include "tests/bench/floor.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agentenv/sandbox/cgroup.h"
#include "agentenv/sandbox/overlay.h"
#include "proto/file.h"

static struct cgroup_root cgroups;
static int userns = -1;

int floor_prepare(const char *dir)
{
    (void)dir;
    userns = overlay_userns(NULL);
    return userns >= 0 && cgroup_root_open(&cgroups, "bench-floor", NULL) == 0 ? 0 : -1;
}

/* Upper and work directories of this process: emptied, they are as good as new (daemon/spare.c). */
static int mount_overlay(const char *root, const char *dir)
{
    const struct box_layer layer = {root, true};
    lh_autofree char *own = lh_format("%s/%d", dir, getpid());
    static const char *const names[] = {"upper", "work"};

    if (!own || (mkdir(own, 0755) < 0 && errno != EEXIST))
        return -1;
    lh_autoclose int fd = open(own, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (int i = 0; i < 2; i++)
        if (mkdirat(fd, names[i], 0755) == 0 &&
            fchownat(fd, names[i], BOX_UID_BASE, BOX_UID_BASE, 0) < 0)
            return -1;
    const struct overlay o = {.layers = &layer,
                              .n_layers = 1,
                              .below = -1,
                              .userns = userns,
                              .dir_fd = fd,
                              .upper = names[0],
                              .work = names[1]};
    int mnt = overlay_create(&o, NULL);
    lh_autofree char *mark = lh_format("%s/work/work/incompat", own); /* of "volatile" */
    if (mark)
        lh_remove_tree(mark, NULL);
    return mnt;
}

static int write_map(pid_t pid, const char *file)
{
    char path[64], map[64];

    snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
    snprintf(map, sizeof map, "0 %d %d", BOX_UID_BASE, BOX_UID_COUNT);
    lh_autoclose int fd = open(path, O_WRONLY | O_CLOEXEC);
    return fd >= 0 && write(fd, map, strlen(map)) > 0 ? 0 : -1;
}

static int enter(int root, const char *name)
{
    if (cgroup_enter(&cgroups, name) < 0 || unshare(CLONE_NEWCGROUP) < 0 ||
        setresgid(0, 0, 0) < 0 || setresuid(0, 0, 0) < 0 ||
        mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        return -1;
    int proc = overlay_new_fs("proc", NULL, 0);
    if (proc < 0 || move_mount(root, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH) < 0 ||
        fchdir(root) < 0 || syscall(SYS_pivot_root, ".", ".") < 0 || umount2(".", MNT_DETACH) < 0)
        return -1;
    return move_mount(proc, "", AT_FDCWD, "/proc", MOVE_MOUNT_F_EMPTY_PATH);
}

_Noreturn static void child(int root, const char *name, int go)
{
    char c;

    if (read(go, &c, 1) == 1 && enter(root, name) == 0)
        execl("/bin/true", "true", (char *)NULL);
    _exit(1);
}

static int run_in(int root, int cgroup, const char *name)
{
    struct clone_args a = {.flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC |
                                    CLONE_NEWUTS | CLONE_NEWTIME | CLONE_NEWNET | CLONE_INTO_CGROUP,
                           .exit_signal = SIGCHLD,
                           .cgroup = (unsigned)cgroup};
    int go[2], status = -1;

    if (pipe2(go, O_CLOEXEC) < 0)
        return -1;
    pid_t pid = (pid_t)syscall(SYS_clone3, &a, sizeof a);
    if (pid == 0)
        child(root, name, go[0]);
    close(go[0]);
    if (pid > 0 && write_map(pid, "uid_map") == 0 && write_map(pid, "gid_map") == 0 &&
        write(go[1], "g", 1) != 1)
        errno = EPIPE;
    close(go[1]);
    return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0 ? 0 : -1;
}

static int make_cgroups(const char *name)
{
    for (int i = 0; i < CGROUP_CONTROLLERS; i++)
        if (cgroups.v1[i] >= 0 && mkdirat(cgroups.v1[i], name, 0755) < 0)
            return -1;
    return mkdirat(cgroups.v2, name, 0755) == 0 ? cgroup_open(&cgroups, name) : -1;
}

int floor_run(const char *root, const char *dir, const char *name)
{
    lh_autoclose int mnt = mount_overlay(root, dir);
    lh_autoclose int cgroup = mnt < 0 ? -1 : make_cgroups(name);
    int r = cgroup < 0 ? -1 : run_in(mnt, cgroup, name);

    return cgroup_remove(&cgroups, name, INT64_MAX, NULL) == 0 ? r : -1;
}
