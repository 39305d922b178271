/* Two seccomp programs, both tables.
 *
 * The first says which system calls exist: an allow list.  What is not in it answers ENOSYS, as on
 * an older kernel, so that programs take their fallbacks (clone3 → clone) and calls that kernels
 * will invent stay out; calls that are refused on principle answer EPERM, which reads better.
 * The second says which arguments an allowed call must never have.  It is a program of its own
 * since a deny rule inside an allow list cannot use masks: many arguments are 32 bits wide to the
 * kernel, and a comparison of all 64 is passed by setting a high bit.  Of several programs the
 * strictest answer wins.
 *
 * Rejected: a deny list (37 calls of it missed clone(NEWUSER), vsock and five more). */
#include "agentenv/sandbox/confine.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <sched.h>
#include <seccomp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agentenv/sandbox/box.h"
#include "proto/file.h"

/* Names, since libseccomp knows which of them the architecture has. */
static const char *const allowed[] = {
    /* files */
    "access", "chdir", "chmod", "chown", "close", "close_range", "copy_file_range", "creat", "dup",
    "dup2", "dup3", "faccessat", "faccessat2", "fadvise64", "fallocate", "fchdir", "fchmod",
    "fchmodat", "fchown", "fchownat", "fcntl", "fdatasync", "fgetxattr", "flistxattr", "flock",
    "fremovexattr", "fsetxattr", "fstat", "fstatfs", "fsync", "ftruncate", "futimesat", "getcwd",
    "getdents", "getdents64", "getxattr", "inotify_add_watch", "inotify_init", "inotify_init1",
    "inotify_rm_watch", "ioctl", "lchown", "lgetxattr", "link", "linkat", "listxattr", "llistxattr",
    "lremovexattr", "lseek", "lsetxattr", "lstat", "mkdir", "mkdirat", "mknod", "mknodat",
    "newfstatat", "open", "openat", "openat2", "pipe", "pipe2", "pread64", "preadv", "preadv2",
    "pwrite64", "pwritev", "pwritev2", "read", "readahead", "readlink", "readlinkat", "readv",
    "removexattr", "rename", "renameat", "renameat2", "rmdir", "sendfile", "setxattr", "splice",
    "stat", "statfs", "statx", "symlink", "symlinkat", "sync", "sync_file_range", "syncfs", "tee",
    "truncate", "umask", "unlink", "unlinkat", "utime", "utimensat", "utimes", "vmsplice", "write",
    "writev",
    /* memory */
    "brk", "madvise", "membarrier", "memfd_create", "mincore", "mlock", "mlock2", "mlockall",
    "mmap", "mprotect", "mremap", "msync", "munlock", "munlockall", "munmap", "pkey_alloc",
    "pkey_free", "pkey_mprotect",
    /* processes and threads */
    "arch_prctl", "capget", "capset", "clone", "execve", "execveat", "exit", "exit_group", "fork",
    "futex", "futex_waitv", "get_robust_list", "get_thread_area", "getcpu", "getegid", "geteuid",
    "getgid", "getgroups", "getitimer", "getpgid", "getpgrp", "getpid", "getppid", "getpriority",
    "getresgid", "getresuid", "getrlimit", "getrusage", "getsid", "gettid", "getuid", "ioprio_get",
    "ioprio_set", "kill", "landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self",
    "pause", "personality", "pidfd_open", "prctl", "prlimit64", "restart_syscall", "rseq",
    "sched_get_priority_max", "sched_get_priority_min", "sched_getaffinity", "sched_getattr",
    "sched_getparam", "sched_getscheduler", "sched_rr_get_interval", "sched_setaffinity",
    "sched_setattr", "sched_setparam", "sched_setscheduler", "sched_yield", "seccomp",
    "set_robust_list", "set_thread_area", "set_tid_address", "setfsgid", "setfsuid", "setgid",
    "setgroups", "setitimer", "setpgid", "setpriority", "setregid", "setresgid", "setresuid",
    "setreuid", "setrlimit", "setsid", "setuid", "sysinfo", "tgkill", "times", "tkill", "uname",
    "vfork", "wait4", "waitid", "waitpid",
    /* signals and time */
    "alarm", "clock_getres", "clock_gettime", "clock_nanosleep", "gettimeofday", "nanosleep",
    "rt_sigaction", "rt_sigpending", "rt_sigprocmask", "rt_sigqueueinfo", "rt_sigreturn",
    "rt_sigsuspend", "rt_sigtimedwait", "rt_tgsigqueueinfo", "sigaltstack", "signalfd", "signalfd4",
    "time", "timer_create", "timer_delete", "timer_getoverrun", "timer_gettime", "timer_settime",
    "timerfd_create", "timerfd_gettime", "timerfd_settime",
    /* events, sockets, System V and POSIX communication */
    "accept", "accept4", "bind", "connect", "epoll_create", "epoll_create1", "epoll_ctl",
    "epoll_ctl_old", "epoll_pwait", "epoll_pwait2", "epoll_wait", "epoll_wait_old", "eventfd",
    "eventfd2", "getpeername", "getrandom", "getsockname", "getsockopt", "listen", "mq_getsetattr",
    "mq_notify", "mq_open", "mq_timedreceive", "mq_timedsend", "mq_unlink", "msgctl", "msgget",
    "msgrcv", "msgsnd", "poll", "ppoll", "pselect6", "recvfrom", "recvmmsg", "recvmsg", "select",
    "semctl", "semget", "semop", "semtimedop", "sendmmsg", "sendmsg", "sendto", "setsockopt",
    "shmat", "shmctl", "shmdt", "shmget", "shutdown", "socket", "socketpair"};

static const char *const refused[] = {"acct",
                                      "add_key",
                                      "adjtimex",
                                      "bpf",
                                      "chroot",
                                      "clock_adjtime",
                                      "clock_settime",
                                      "delete_module",
                                      "fanotify_init",
                                      "finit_module",
                                      "init_module",
                                      "ioperm",
                                      "iopl",
                                      "kcmp",
                                      "kexec_file_load",
                                      "kexec_load",
                                      "keyctl",
                                      "lookup_dcookie",
                                      "mbind",
                                      "migrate_pages",
                                      "mount",
                                      "move_pages",
                                      "name_to_handle_at",
                                      "open_by_handle_at",
                                      "perf_event_open",
                                      "pivot_root",
                                      "process_vm_readv",
                                      "process_vm_writev",
                                      "ptrace",
                                      "quotactl",
                                      "reboot",
                                      "request_key",
                                      "setdomainname",
                                      "sethostname",
                                      "setns",
                                      "settimeofday",
                                      "swapoff",
                                      "swapon",
                                      "syslog",
                                      "umount2",
                                      "unshare",
                                      "userfaultfd",
                                      "vhangup"};

/* Deny: argument `arg` of `call`, masked, equals `value`. */
struct argument_rule {
    const char *call;
    unsigned arg;
    uint64_t mask, value;
    int errnum;
};

#define WORD 0xffffffffu
#define CLONE_RULE(f)                                                                              \
    {                                                                                              \
        "clone", 0, f, f, EPERM                                                                    \
    }
#define NOT_INIT(c, a)                                                                             \
    {                                                                                              \
        c, a, WORD, BOX_INIT_UID, EPERM                                                            \
    }
#define NOT_PID_1(c)                                                                               \
    {                                                                                              \
        c, 0, WORD, 1, EPERM                                                                       \
    }

static const struct argument_rule never[] = {
    CLONE_RULE(CLONE_NEWUSER),
    CLONE_RULE(CLONE_NEWNS),
    CLONE_RULE(CLONE_NEWPID),
    CLONE_RULE(CLONE_NEWNET),
    CLONE_RULE(CLONE_NEWIPC),
    CLONE_RULE(CLONE_NEWUTS),
    CLONE_RULE(CLONE_NEWCGROUP),
    /* Input into a terminal that a person or harness may hold the other end of. */
    {"ioctl", 1, WORD, 0x5412 /* TIOCSTI */, EPERM},
    {"ioctl", 1, WORD, 0x541c /* TIOCLINUX */, EPERM},
    /* Init's id and init itself. */
    NOT_INIT("setuid", 0),
    NOT_INIT("setfsuid", 0),
    NOT_INIT("setreuid", 0),
    NOT_INIT("setreuid", 1),
    NOT_INIT("setresuid", 0),
    NOT_INIT("setresuid", 1),
    NOT_INIT("setresuid", 2),
    NOT_INIT("setgid", 0),
    NOT_PID_1("kill"),
    NOT_PID_1("tkill"),
    NOT_PID_1("tgkill"),
    NOT_PID_1("rt_sigqueueinfo"),
    NOT_PID_1("rt_tgsigqueueinfo"),
    NOT_PID_1("pidfd_open"),
    NOT_PID_1("prlimit64"),
};

static int add_names(scmp_filter_ctx c, uint32_t action, const char *const names[], size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int nr = seccomp_syscall_resolve_name(names[i]), r;
        if (nr < 0) /* not of this architecture */
            continue;
        if ((r = seccomp_rule_add(c, action, nr, 0)) < 0)
            return r;
    }
    return 0;
}

static scmp_filter_ctx calls_program(void)
{
    scmp_filter_ctx c = seccomp_init(SCMP_ACT_ERRNO(ENOSYS));

    if (c && (add_names(c, SCMP_ACT_ALLOW, allowed, LH_ARRAY_SIZE(allowed)) < 0 ||
              add_names(c, SCMP_ACT_ERRNO(EPERM), refused, LH_ARRAY_SIZE(refused)) < 0)) {
        seccomp_release(c);
        return NULL;
    }
    return c;
}

/* Only UNIX, INET, INET6 and NETLINK_ROUTE.  vsock above all is in no namespace: on a virtual
 * machine it reaches the hypervisor's host.  High bits count as a larger family: refused. */
static int add_sockets(scmp_filter_ctx c)
{
    uint32_t no = SCMP_ACT_ERRNO(EAFNOSUPPORT);
    int nr = SCMP_SYS(socket), r = 0;

    for (uint64_t f = 0; f <= AF_NETLINK && r == 0; f++)
        if (f != AF_UNIX && f != AF_INET && f != AF_INET6 && f != AF_NETLINK)
            r = seccomp_rule_add(c, no, nr, 1, SCMP_A0(SCMP_CMP_EQ, f));
    if (r == 0)
        r = seccomp_rule_add(c, no, nr, 1, SCMP_A0(SCMP_CMP_GT, AF_NETLINK));
    if (r == 0)
        r = seccomp_rule_add(c, SCMP_ACT_ERRNO(EPROTONOSUPPORT), nr, 2,
                             SCMP_A0(SCMP_CMP_EQ, AF_NETLINK), SCMP_A2(SCMP_CMP_NE, 0));
    return r;
}

static scmp_filter_ctx arguments_program(void)
{
    scmp_filter_ctx c = seccomp_init(SCMP_ACT_ALLOW);
    int r = c ? add_sockets(c) : -ENOMEM;

    for (size_t i = 0; i < LH_ARRAY_SIZE(never) && r == 0; i++) {
        const struct argument_rule *a = &never[i];
        int nr = seccomp_syscall_resolve_name(a->call);
        if (nr >= 0)
            r = seccomp_rule_add(c, SCMP_ACT_ERRNO(a->errnum), nr, 1,
                                 SCMP_CMP(a->arg, SCMP_CMP_MASKED_EQ, a->mask, a->value));
    }
    if (r < 0 && c) {
        seccomp_release(c);
        return NULL;
    }
    return c;
}

/* libseccomp exports to a descriptor; the length in front is filled in afterwards. */
static int append_program(int fd, scmp_filter_ctx c, struct lh_error *err)
{
    uint32_t len = 0;

    if (!c)
        return lh_fail(err, LH_INTERNAL, "the seccomp tables do not compile");
    seccomp_attr_set(c, SCMP_FLTATR_CTL_OPTIMIZE, 2); /* a binary tree instead of a list */
    off_t start = lseek(fd, 0, SEEK_END);
    int r = lh_write_all(fd, &len, sizeof len, err);
    if (r == 0 && seccomp_export_bpf(c, fd) < 0)
        r = lh_fail(err, LH_INTERNAL, "libseccomp cannot export a program");
    seccomp_release(c);
    if (r < 0)
        return r;
    off_t end = lseek(fd, 0, SEEK_END);
    len = (uint32_t)((size_t)(end - start) - sizeof len) / sizeof(struct sock_filter);
    if (pwrite(fd, &len, sizeof len, start) != sizeof len)
        return lh_fail_errno(err, errno, "writing a seccomp program");
    return 0;
}

int confine_compile(struct lh_error *err)
{
    lh_autoclose int fd = memfd_create("seccomp", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    int r;

    if (fd < 0)
        return lh_fail_errno(err, errno, "memfd_create");
    if ((r = append_program(fd, calls_program(), err)) < 0 ||
        (r = append_program(fd, arguments_program(), err)) < 0)
        return r;
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) < 0)
        return lh_fail_errno(err, errno, "sealing the seccomp programs");
    return lh_steal_fd(&fd);
}
