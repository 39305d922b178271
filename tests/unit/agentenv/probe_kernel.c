/* The probe: other processes, namespaces, mounts, interfaces of the kernel. */
#include "probe.h"

#include <dirent.h>
#include <errno.h>
#include <linux/sched.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>

static char buf[8192];

/* ---- other processes, namespaces, mounts ------------------------------------------------------
 */

static long trace_child(void)
{
    pid_t pid = fork();

    if (pid == 0) {
        pause();
        _exit(0);
    }
    long r = ptrace(PTRACE_ATTACH, pid, NULL, NULL);
    int e = errno;
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    errno = e;
    return r;
}

/* The highest pid here is small: the host's processes are in the thousands. */
static bool sees_few_processes(void)
{
    DIR *d = opendir("/proc");
    int n = 0;

    for (const struct dirent *e; d && (e = readdir(d));)
        n += e->d_name[0] >= '1' && e->d_name[0] <= '9';
    if (d)
        closedir(d);
    return n > 0 && n < 20;
}

static long clone_with(unsigned long flags)
{
    long pid = syscall(SYS_clone, flags | SIGCHLD, 0, 0, 0, 0);

    if (pid == 0)
        _exit(0);
    return pid;
}

static long clone3_user(void)
{
    struct clone_args a = {.flags = CLONE_NEWUSER, .exit_signal = SIGCHLD};
    long pid = syscall(SYS_clone3, &a, sizeof a);

    if (pid == 0)
        _exit(0);
    return pid;
}

void probe_namespaces(void)
{
    static const struct {
        const char *name;
        unsigned long flag;
    } kinds[] = {{"user", CLONE_NEWUSER},    {"mount", CLONE_NEWNS}, {"pid", CLONE_NEWPID},
                 {"net", CLONE_NEWNET},      {"ipc", CLONE_NEWIPC},  {"uts", CLONE_NEWUTS},
                 {"cgroup", CLONE_NEWCGROUP}};

    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        snprintf(buf + 4096, 64, "unshare a %s namespace", kinds[i].name);
        must_fail(buf + 4096, unshare((int)kinds[i].flag));
        snprintf(buf + 4096, 64, "clone into a %s namespace", kinds[i].name);
        must_fail(buf + 4096, clone_with(kinds[i].flag));
    }
    must_fail("clone3 into a user namespace", clone3_user());
    must_fail("unshare a time namespace", unshare(0x80));
    must_fail("setns", setns(open("/proc/self/ns/net", O_RDONLY), 0));
    must_fail("sethostname", sethostname("x", 1));
    must_fail("setdomainname", setdomainname("x", 1));
    must_fail("trace an own child", trace_child());
    must_hold("no foreign processes in /proc", sees_few_processes());
}

static bool root_is_its_own_parent(void)
{
    struct stat a, b;

    return chdir("/..") == 0 && stat("/", &a) == 0 && stat(".", &b) == 0 && a.st_ino == b.st_ino &&
           a.st_dev == b.st_dev;
}

void probe_mounts(void)
{
    struct {
        unsigned bytes;
        int type;
        unsigned char handle[128];
    } h = {8, 1, {2}};

    must_fail("open by handle", syscall(SYS_open_by_handle_at, open("/", O_RDONLY), &h, O_RDONLY));
    must_fail("name to handle", syscall(SYS_name_to_handle_at, AT_FDCWD, "/", &h, buf, 0));
    must_fail("mount a tmpfs", mount("t", "/tmp", "tmpfs", 0, NULL));
    must_fail("bind mount", mount("/", "/tmp", NULL, MS_BIND, NULL));
    must_fail("remount / ", mount(NULL, "/", NULL, MS_REMOUNT | MS_BIND, NULL));
    must_fail("fsopen", syscall(SYS_fsopen, "tmpfs", 0));
    must_fail("open_tree clone", syscall(SYS_open_tree, AT_FDCWD, "/", 1));
    must_fail("move_mount", syscall(SYS_move_mount, AT_FDCWD, "/proc", AT_FDCWD, "/tmp", 0));
    must_fail("mount_setattr", syscall(SYS_mount_setattr, AT_FDCWD, "/", 0, buf, 32));
    must_fail("umount /proc", umount2("/proc", MNT_DETACH));
    must_fail("umount what masks a file", umount2("/proc/kallsyms", MNT_DETACH));
    must_fail("pivot_root", syscall(SYS_pivot_root, "/", "/"));
    must_fail("chroot", chroot("/tmp"));
    must_fail("fanotify", syscall(SYS_fanotify_init, 0, 0));
    must_hold("nothing above /", root_is_its_own_parent());
    must_fail("trusted attributes", setxattr("/tmp", "trusted.overlay.opaque", "y", 1, 0));
}

/* ---- interfaces of the kernel ------------------------------------------------------------------
 */

void probe_interfaces(void)
{
    static const uint32_t map[18] = {1, 4, 4, 1};
    uint32_t perf[32] = {1, sizeof perf};

    must_fail("bpf", syscall(SYS_bpf, 0, map, sizeof map));
    must_fail("perf", syscall(SYS_perf_event_open, perf, 0, -1, -1, 0));
    must_fail("userfaultfd", syscall(SYS_userfaultfd, 0));
    must_fail("userfaultfd, user mode only", syscall(SYS_userfaultfd, 1));
    must_fail("io_uring_setup", syscall(SYS_io_uring_setup, 8, memset(buf, 0, 256)));
    must_fail("io_uring_register", syscall(SYS_io_uring_register, -1, 0, 0, 0));
    must_fail("add_key", syscall(SYS_add_key, "user", "x", "y", 1L, -2));
    must_fail("request_key", syscall(SYS_request_key, "user", "x", "y", -2));
    must_fail("keyctl", syscall(SYS_keyctl, 0, -3, 1));
    must_fail("kexec_load", syscall(SYS_kexec_load, 0, 0, 0, 0));
    must_fail("init_module", syscall(SYS_init_module, buf, 8, ""));
    must_fail("finit_module", syscall(SYS_finit_module, 0, "", 0));
    must_fail("delete_module", syscall(SYS_delete_module, "overlay", 0));
    must_fail("reboot", syscall(SYS_reboot, 0, 0, 0, 0));
    must_fail("swapon", syscall(SYS_swapon, "/x", 0));
    must_fail("settimeofday", syscall(SYS_settimeofday, &(struct timeval){1, 0}, NULL));
    must_fail("clock_settime", syscall(SYS_clock_settime, 0, &(struct timespec){1, 0}));
    must_fail("syslog", syscall(SYS_syslog, 3, buf, 100));
    must_fail("acct", syscall(SYS_acct, "/tmp/x"));
    must_fail("quotactl", syscall(SYS_quotactl, 0x80000100u, "/dev/vda", 0, buf));
    must_fail("memfd_secret", syscall(447, 0));
    must_fail("vhangup", syscall(SYS_vhangup));
    must_fail("kcmp", syscall(SYS_kcmp, getpid(), getpid(), 0, 0, 0));
    must_fail("move_pages", syscall(SYS_move_pages, 0, 0, 0, 0, 0, 0));
    must_fail("a system call of the future", syscall(9999));
#ifdef __x86_64__
    must_fail("iopl", syscall(SYS_iopl, 3));
    must_fail("ioperm", syscall(SYS_ioperm, 0, 1, 1));
    must_fail("modify_ldt", syscall(SYS_modify_ldt, 0, buf, 16));
#endif
}
