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
 * The kernel translates both anew for each command, 0.4 µs an instruction.  libseccomp gives every
 * call a comparison and an answer of its own, 412 instructions for the first program; there are 79
 * runs of numbers with one answer, so that one is a search among runs, 90 instructions.  Names are
 * still libseccomp's, and so is the second program.
 *
 * Rejected: a deny list (37 calls of it missed clone(NEWUSER), vsock and five more). */
#include "agentenv/sandbox/confine.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <seccomp.h>
#include <stddef.h>
#include <string.h>
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
    /* By its id init is safe from these, if it has one of its own. */
    NOT_PID_1("sched_setaffinity"),
    NOT_PID_1("sched_setattr"),
    NOT_PID_1("sched_setparam"),
    NOT_PID_1("sched_setscheduler"),
    {"setpriority", 1, WORD, 1, EPERM},
    {"ioprio_set", 1, WORD, 1, EPERM},
};

/* ---- which calls there are: a search among runs of numbers ---- */

enum { CALLS = 1024, ANSWERS = 3, MAX_CODE = 250 }; /* a jump reaches 255 instructions */
enum { NO_CALL, MAY, MAY_NOT };                     /* the order of answers[] */

static const uint32_t answers[ANSWERS] = {SECCOMP_RET_ERRNO | ENOSYS, SECCOMP_RET_ALLOW,
                                          SECCOMP_RET_ERRNO | EPERM};

struct search {
    uint8_t answer_of[CALLS]; /* by number */
    uint32_t first[MAX_CODE]; /* of each run; the last run has no end */
    size_t n_runs;
    struct sock_filter code[MAX_CODE + ANSWERS];
    size_t n, yes[MAX_CODE], no[MAX_CODE]; /* of a comparison: where it goes on */
};

/* Numbers beyond the table are of no call. */
static void answer(struct search *s, const char *const names[], size_t n, uint8_t with)
{
    for (size_t i = 0; i < n; i++) {
        int nr = seccomp_syscall_resolve_name(names[i]);
        if (nr >= 0 && nr < CALLS - 1) /* negative: not of this architecture */
            s->answer_of[nr] = with;
    }
}

static int find_runs(struct search *s)
{
    for (uint32_t nr = 0; nr < CALLS; nr++)
        if (nr == 0 || s->answer_of[nr] != s->answer_of[nr - 1]) {
            if (s->n_runs == MAX_CODE / 2)
                return -1;
            s->first[s->n_runs++] = nr;
        }
    return 0;
}

/* Where the search among runs [from, to) begins; the answers lie behind all comparisons. */
static size_t add_search(struct search *s, size_t from, size_t to)
{
    size_t mid = from + (to - from) / 2, at = s->n;

    if (to - from == 1)
        return MAX_CODE + s->answer_of[s->first[from]];
    s->code[s->n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, s->first[mid], 0, 0);
    s->no[at] = add_search(s, from, mid);
    s->yes[at] = add_search(s, mid, to);
    return at;
}

static uint8_t distance(const struct search *s, size_t at, size_t target)
{
    return (uint8_t)((target < MAX_CODE ? target : s->n + target - MAX_CODE) - at - 1);
}

/* The program's length in instructions, 0 when the tables do not fit. */
static size_t calls_program(struct search *s)
{
    const struct sock_filter head[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, seccomp_arch_native(), 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
    };

    answer(s, allowed, LH_ARRAY_SIZE(allowed), MAY);
    answer(s, refused, LH_ARRAY_SIZE(refused), MAY_NOT);
    memcpy(s->code, head, sizeof head);
    s->n = LH_ARRAY_SIZE(head);
    if (find_runs(s) < 0)
        return 0;
    add_search(s, 0, s->n_runs);
    for (size_t i = LH_ARRAY_SIZE(head); i < s->n; i++) {
        s->code[i].jt = distance(s, i, s->yes[i]);
        s->code[i].jf = distance(s, i, s->no[i]);
    }
    for (size_t i = 0; i < ANSWERS; i++)
        s->code[s->n + i] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, answers[i]);
    return s->n + ANSWERS;
}

static int append_calls(int fd, struct lh_error *err)
{
    struct search s = {0};
    uint32_t len = (uint32_t)calls_program(&s);

    if (len == 0)
        return lh_fail(err, LH_INTERNAL, "the table of system calls does not compile");
    int r = lh_write_all(fd, &len, sizeof len, err);
    return r < 0 ? r : lh_write_all(fd, s.code, len * sizeof *s.code, err);
}

/* ---- which arguments they must not have ---- */

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
    if ((r = append_calls(fd, err)) < 0 || (r = append_program(fd, arguments_program(), err)) < 0)
        return r;
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) < 0)
        return lh_fail_errno(err, errno, "sealing the seccomp programs");
    return lh_steal_fd(&fd);
}
