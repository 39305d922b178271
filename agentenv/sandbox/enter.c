/* The order here is the security argument.
 *
 * Everything that must come from the host's tree (device nodes, a new proc, a devpts) is collected
 * as detached mounts first and attached after the old root has gone.  So no path of the untrusted
 * image, a /dev or /proc that is a symbolic link, say, is ever resolved while host directories are
 * in reach.  Mount points are opened without following links; what is there and is no directory is
 * replaced in the upper layer.
 *
 * A bind-mounted device node is the host's inode.  Nobody here changes owner or mode of one, and a
 * node that does not belong to the host's root is refused: some other runtime has chowned it to an
 * id that sandboxes may own.
 *
 * No tmpfs: /dev, /dev/shm and /tmp are directories of the overlay, so that the disk limit covers
 * them and a checkpoint does not need to pack them. */
#include "agentenv/sandbox/enter.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/openat2.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "agentenv/init/wire.h"
#include "agentenv/sandbox/confine.h"
#include "agentenv/sandbox/overlay.h"

static const struct device {
    const char *name;
    unsigned major, minor;
} devices[] = {{"null", 1, 3},   {"zero", 1, 5},    {"full", 1, 7},
               {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}};

enum { DEVICES = LH_ARRAY_SIZE(devices), DEV_NULL = 0, CARRIED_TREES = 2 };

/* Covered by /dev/null: kernel addresses, keys, command line, configuration, timers. */
static const char *const masked[] = {"/proc/kallsyms",   "/proc/keys",    "/proc/cmdline",
                                     "/proc/config.gz",  "/proc/kcore",   "/proc/kmsg",
                                     "/proc/timer_list", "/proc/modules", "/proc/sched_debug"};
/* Readable but not writable.  "1" is init: the sandbox's root owns the files of its directory,
 * whose writes are not all guarded by ptrace rights (oom_score_adj is not). */
static const char *const readonly[] = {"1",  "sys",           "irq",  "bus",
                                       "fs", "sysrq-trigger", "acpi", "scsi"};

static int control_fd;

_Noreturn static void give_up(const char *step)
{
    struct wire_report r = {.kind = WIRE_FAILED, .value = errno};

    snprintf(r.step, sizeof r.step, "%s", step);
    send(control_fd, &r, sizeof r, MSG_NOSIGNAL);
    _exit(1);
}

static int must(int r, const char *step)
{
    if (r < 0)
        give_up(step);
    return r;
}

/* ---- taken from the host ------------------------------------------------------------------- */

struct parts {
    int proc, devpts, dev[DEVICES], mask[LH_ARRAY_SIZE(masked)];
};

static int clone_device(const struct device *d)
{
    char path[64];
    struct stat st;

    snprintf(path, sizeof path, "/dev/%s", d->name);
    int fd = open_tree(AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_SYMLINK_NOFOLLOW);
    if (fd < 0 || fstat(fd, &st) < 0)
        give_up(path);
    errno = ENODEV;
    if (!S_ISCHR(st.st_mode) || st.st_rdev != makedev(d->major, d->minor))
        give_up(path);
    return fd;
}

static void collect(struct parts *p)
{
    static const char *const pts[] = {"ptmxmode", "0666", "mode", "0620", NULL};

    /* A new proc is refused to a user namespace that sees no full one: so before pivot_root. */
    p->proc =
        must(overlay_new_fs("proc", NULL, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC),
             "a new /proc");
    p->devpts = must(overlay_new_fs("devpts", pts, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC),
                     "a new /dev/pts");
    for (size_t i = 0; i < DEVICES; i++)
        p->dev[i] = clone_device(&devices[i]);
    for (size_t i = 0; i < LH_ARRAY_SIZE(masked); i++) /* the host's /proc has the same files */
        p->mask[i] = access(masked[i], F_OK) == 0 ? clone_device(&devices[DEV_NULL]) : -1;
}

/* ---- in the new root ----------------------------------------------------------------------- */

static int open_strictly(const char *path, int flags)
{
    struct open_how how = {.flags = (unsigned)(flags | O_CLOEXEC), .resolve = RESOLVE_NO_SYMLINKS};

    return (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
}

/* What the image has at `path` becomes a directory of that mode. */
static void make_dir(const char *path, mode_t mode)
{
    struct stat st;

    if (lstat(path, &st) == 0 && !S_ISDIR(st.st_mode))
        must(unlink(path), path);
    if (mkdir(path, mode) < 0 && errno != EEXIST)
        give_up(path);
}

/* A directory for everybody, as an image has it or not; chmod alone would copy it up each time. */
static void make_shared_dir(const char *path)
{
    struct stat st;

    make_dir(path, 0777);
    must(lstat(path, &st), path);
    if ((st.st_mode & 07777) != 01777)
        must(chmod(path, 01777), path);
}

/* Anything that a device can be mounted on: an image may have device nodes of its own. */
static void make_file(const char *path)
{
    struct stat st;

    if (lstat(path, &st) == 0) {
        if (!S_ISDIR(st.st_mode) && !S_ISLNK(st.st_mode))
            return;
        must(S_ISDIR(st.st_mode) ? rmdir(path) : unlink(path), path);
    }
    close(must(open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0666), path));
}

static void attach(int mount_fd, const char *path)
{
    int target = must(open_strictly(path, O_PATH), path);

    must(move_mount(mount_fd, "", target, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH),
         path);
    close(target);
    close(mount_fd);
}

static void make_readonly(const char *path)
{
    struct mount_attr a = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV |
                                       MOUNT_ATTR_NOEXEC};
    int fd = open_tree(AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE);

    must(fd, path);
    must(mount_setattr(fd, "", AT_EMPTY_PATH | AT_RECURSIVE, &a, sizeof a), path);
    attach(fd, path);
}

static void make_proc(struct parts *p)
{
    char path[64];

    make_dir("/proc", 0555);
    attach(p->proc, "/proc");
    for (size_t i = 0; i < LH_ARRAY_SIZE(masked); i++)
        if (p->mask[i] >= 0)
            attach(p->mask[i], masked[i]);
    for (size_t i = 0; i < LH_ARRAY_SIZE(readonly); i++) {
        snprintf(path, sizeof path, "/proc/%s", readonly[i]);
        if (access(path, F_OK) == 0)
            make_readonly(path);
    }
}

static void make_link(const char *target, const char *path)
{
    if (symlink(target, path) < 0 && errno != EEXIST)
        give_up(path);
}

static void make_dev(struct parts *p)
{
    char path[64];

    make_dir("/dev", 0755);
    for (size_t i = 0; i < DEVICES; i++) {
        snprintf(path, sizeof path, "/dev/%s", devices[i].name);
        make_file(path);
        attach(p->dev[i], path);
    }
    make_dir("/dev/pts", 0755);
    attach(p->devpts, "/dev/pts");
    make_shared_dir("/dev/shm");
    make_link("pts/ptmx", "/dev/ptmx");
    make_link("/proc/self/fd", "/dev/fd");
    make_link("/proc/self/fd/0", "/dev/stdin");
    make_link("/proc/self/fd/1", "/dev/stdout");
    make_link("/proc/self/fd/2", "/dev/stderr");
}

static void make_tmp(void)
{
    make_shared_dir("/tmp");
}

/* Attached on top of "/", the new root is reachable through its descriptor only, and needs no mount
 * point.  After pivot_root(".", ".") the old root lies on top of the new one. */
static int pivot(int root)
{
    if (move_mount(root, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH) < 0 || fchdir(root) < 0)
        return -1;
    if (syscall(SYS_pivot_root, ".", ".") < 0 || umount2(".", MNT_DETACH) < 0)
        return -1;
    return chdir("/");
}

static void enter_root(int root)
{
    struct parts p;

    must(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "private mounts");
    collect(&p);
    must(pivot(root), "pivot_root");
    umask(0);
    make_proc(&p);
    make_dev(&p);
    make_tmp();
    umask(022);
}

/* ---- the rest ------------------------------------------------------------------------------ */

int enter_loopback_up(void)
{
    lh_autoclose int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct ifreq r = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};

    return fd < 0 ? -1 : ioctl(fd, SIOCSIFFLAGS, &r);
}

/* What the daemon ignores or blocks, every command would ignore and block. */
static void reset_signals(void)
{
    sigset_t none;

    for (int i = 1; i < NSIG; i++)
        signal(i, SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

static void become_root(const struct enter *e)
{
    if (!e->one_uid)
        must(setgroups(0, NULL), "setgroups");
    must(setresgid(0, 0, 0), "setresgid");
    must(setresuid(0, 0, 0), "setresuid");
}

/* Init finds its control socket by number.  Nothing else of the spawner's comes along. */
static void place_fds(const struct enter *e)
{
    int control = must(fcntl(e->control, F_DUPFD, 16), "descriptors");
    int null = must(open("/dev/null", O_RDWR), "/dev/null");

    for (int i = 0; i < 3; i++)
        must(dup2(null, i), "descriptors");
    must(dup2(control, WIRE_CONTROL_FD), "descriptors");
    control_fd = WIRE_CONTROL_FD;
    must((int)syscall(SYS_close_range, WIRE_CONTROL_FD + 1, ~0U, 0), "descriptors");
}

void enter_sandbox(const struct enter *e)
{
    control_fd = e->control;
    reset_signals();
    become_root(e);
    must(setsid(), "setsid"); /* CRIU wants the session leader inside */
    enter_root(e->root);
    must(sethostname(e->hostname, strlen(e->hostname)), "sethostname");
    if (e->network == BOX_NET_LOOPBACK)
        must(enter_loopback_up(), "loopback");
    place_fds(e);
    must(confine_self(&e->limits), "capabilities and limits");
}

/* What a live seal moves to the new root.  /dev itself is a directory of the overlay, so only what
 * is mounted in it: the whole would be a bind of the sealed overlay, which cannot be written any
 * more.  Moved, not cloned: init has /dev/null open, and CRIU refuses a descriptor whose mount has
 * gone. */
static const char *carried(size_t i, char path[64])
{
    static const char *const trees[CARRIED_TREES] = {"proc", "dev/pts"};

    if (i < CARRIED_TREES)
        return trees[i];
    snprintf(path, 64, "dev/%s", devices[i - CARRIED_TREES].name);
    return path;
}

int enter_switch_root(int user_ns, int mount_ns, int root)
{
    int tree[DEVICES + CARRIED_TREES];
    char path[64];

    if (setns(mount_ns, CLONE_NEWNS) < 0 || setns(user_ns, CLONE_NEWUSER) < 0)
        return errno;
    for (size_t i = 0; i < LH_ARRAY_SIZE(tree); i++) {
        tree[i] = open_tree(AT_FDCWD, carried(i, path), OPEN_TREE_CLOEXEC);
        if (tree[i] < 0)
            return errno;
    }
    if (move_mount(root, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH) < 0 || fchdir(root) < 0)
        return errno;
    for (size_t i = 0; i < LH_ARRAY_SIZE(tree); i++)
        if (move_mount(tree[i], "", AT_FDCWD, carried(i, path), MOVE_MOUNT_F_EMPTY_PATH) < 0)
            return errno;
    if (syscall(SYS_pivot_root, ".", ".") < 0 || umount2(".", MNT_DETACH) < 0)
        return errno;
    return 0;
}

bool enter_bind(size_t i, char inside[64], char outside[64])
{
    if (i < DEVICES) {
        snprintf(inside, 64, "/dev/%s", devices[i].name);
        snprintf(outside, 64, "/dev/%s", devices[i].name);
    } else if (i < DEVICES + LH_ARRAY_SIZE(masked)) {
        snprintf(inside, 64, "%s", masked[i - DEVICES]);
        snprintf(outside, 64, "/dev/%s", devices[DEV_NULL].name);
    }
    return i < DEVICES + LH_ARRAY_SIZE(masked);
}

const char *enter_bad_device(uid_t root)
{
    char path[64];
    struct stat st;

    for (size_t i = 0; i < DEVICES; i++) {
        snprintf(path, sizeof path, "/dev/%s", devices[i].name);
        if (lstat(path, &st) < 0 || !S_ISCHR(st.st_mode) || st.st_uid != root ||
            st.st_rdev != makedev(devices[i].major, devices[i].minor))
            return devices[i].name;
    }
    return NULL;
}
