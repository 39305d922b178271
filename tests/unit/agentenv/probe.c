/* probe --inside-sandbox: tries what a sandbox must refuse, names the holes and counts them.
 *
 * Static, so that it runs in any image.  Refuses to run elsewhere: some attempts would do harm on a
 * host.  An attempt counts as refused only with an error that says so; a bad argument proves
 * nothing and is reported as unclear, which is a failure too. */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

static int probes, holes, unclear;
static char buf[8192];

static bool is_refusal(int e)
{
    static const int refusals[] = {
        EPERM, EACCES,        ENOSYS,       ENOENT,  EROFS,   EAFNOSUPPORT, EPROTONOSUPPORT,
        ENXIO, ECONNREFUSED,  ENETUNREACH,  ETXTBSY, ENODEV,  ENOMEM,       ENOTSUP,
        ESRCH, EADDRNOTAVAIL, EHOSTUNREACH, EMFILE,  ENOTDIR, EBUSY,
    };

    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++)
        if (refusals[i] == e)
            return true;
    return false;
}

/* `result` follows the convention of system calls: negative with errno = it did not work. */
static void must_fail(const char *what, long result)
{
    int e = errno;

    probes++;
    if (result >= 0) {
        holes++;
        printf("HOLE    %s\n", what);
    } else if (!is_refusal(e)) {
        unclear++;
        printf("UNCLEAR %s: %s\n", what, strerror(e));
    }
}

/* For conditions that are seen, not tried. */
static void must_hold(const char *what, bool holds)
{
    errno = EPERM;
    must_fail(what, holds ? -1 : 0);
}

/* Runs try in a child, since success would change this process. */
static void must_fail_apart(const char *what, long (*try)(void))
{
    int status = 0;
    pid_t pid = fork();

    if (pid == 0) {
        errno = 0;
        _exit(try() < 0 ? errno & 0xff : 200);
    }
    if (pid > 0)
        waitpid(pid, &status, 0);
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 200;
    errno = code;
    must_fail(what, code == 200 ? 0 : -1);
}

/* ---- files of the kernel -------------------------------------------------------------------- */

/* A secret covered by an empty file counts as refused. */
static long read_some(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    long n = fd < 0 ? -1 : read(fd, buf, sizeof buf);
    int e = n == 0 ? EACCES : errno;

    if (fd >= 0)
        close(fd);
    errno = e;
    return n > 0 ? n : -1;
}

/* Some files of /proc open for anybody and refuse the write. */
static long write_some(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC | O_NONBLOCK);
    long n = fd < 0 ? -1 : write(fd, text, strlen(text));
    int e = errno;

    if (fd >= 0)
        close(fd);
    errno = e;
    return n;
}

static void secrets(void)
{
    static const char *const paths[] = {
        "/proc/kcore",       "/proc/kallsyms",   "/proc/keys",        "/proc/timer_list",
        "/proc/sched_debug", "/proc/config.gz",  "/proc/cmdline",     "/proc/kmsg",
        "/proc/kpageflags",  "/proc/kpagecount", "/proc/slabinfo",    "/proc/vmallocinfo",
        "/proc/modules",     "/dev/mem",         "/dev/kvm",          "/dev/vda",
        "/dev/sda",          "/dev/userfaultfd", "/dev/fuse",         "/dev/kmsg",
        "/dev/net/tun",      "/dev/vsock",       "/dev/vhost-vsock",  "/dev/loop-control",
        "/dev/nvidiactl",    "/sys/firmware",    "/sys/kernel/debug", "/sys/kernel/security",
        "/proc/1/environ",   "/proc/1/maps",     "/proc/1/mem",       "/proc/1/stack",
        "/proc/1/syscall",   "/proc/1/auxv",     "/proc/1/io",
    };

    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        snprintf(buf + 4096, 256, "read %s", paths[i]);
        must_fail(buf + 4096, read_some(paths[i]));
    }
}

static void controls(void)
{
    static const char *const paths[] = {
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/modprobe",
        "/proc/sys/kernel/hostname",
        "/proc/sys/kernel/ns_last_pid",
        "/proc/sys/kernel/shmmax",
        "/proc/sys/vm/drop_caches",
        "/proc/sys/net/ipv4/ip_forward",
        "/proc/sys/fs/binfmt_misc/register",
        "/proc/sys/user/max_user_namespaces",
        "/proc/sysrq-trigger",
        "/proc/irq/default_smp_affinity",
        "/proc/mtrr",
        "/sys/kernel/uevent_helper",
        "/sys/fs/cgroup/release_agent",
        "/sys/fs/cgroup/cgroup.procs",
        "/sys/fs/cgroup/memory.max",
        "/proc/1/mem",
        "/proc/1/oom_score_adj",
        "/proc/1/task/1/oom_score_adj",
        "/proc/1/uid_map",
        "/proc/self/uid_map",
        "/proc/self/gid_map",
        "/proc/1/attr/current",
        "/proc/self/exe",
        "/proc/1/clear_refs",
        "/proc/1/comm",
    };

    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        snprintf(buf + 4096, 256, "write %s", paths[i]);
        must_fail(buf + 4096, write_some(paths[i], "0 0 1\n"));
    }
    must_fail("write /proc/self/timens_offsets",
              write_some("/proc/self/timens_offsets", "monotonic 1 0\n"));
}

/* ---- init ------------------------------------------------------------------------------------ */

static long become_init(void)
{
    return setuid(65536);
}

static long become_init_high_bits(void)
{
    return syscall(SYS_setresuid, 0x100010000ul, 0x100010000ul, 0x100010000ul);
}

static long become_init_effective(void)
{
    return setresuid((uid_t)-1, 65536, (uid_t)-1);
}

static long become_init_for_files(void)
{
    setfsuid(65536);
    errno = EPERM;
    return setfsuid((uid_t)-1) == 65536 ? 0 : -1;
}

/* A child that has changed to init's id by exec of a set-uid file: owner by chown, bit by chmod. */
static long set_uid_program_of_init(void)
{
    char me[] = "/tmp/set-uid-probe";
    char *const argv[] = {me, (char *)"--effective-uid", NULL};
    int from = open("/proc/self/exe", O_RDONLY), to = open(me, O_CREAT | O_WRONLY, 0755), status;

    for (ssize_t n; (n = read(from, buf, sizeof buf)) > 0;)
        if (write(to, buf, (size_t)n) != n)
            return 0;
    close(to);
    if (chown(me, 65536, 65536) < 0 || chmod(me, 04755) < 0)
        return -1;
    pid_t pid = fork();
    if (pid == 0) {
        execv(me, argv);
        _exit(0);
    }
    waitpid(pid, &status, 0);
    unlink(me);
    errno = EPERM;
    return WIFEXITED(status) && WEXITSTATUS(status) == 1 ? 0 : -1;
}

static void init(void)
{
    struct iovec v = {buf, 8};

    must_fail("kill init with TERM", kill(1, SIGTERM));
    must_fail("kill init with KILL", kill(1, SIGKILL));
    must_fail("signal 0 to init", kill(1, 0));
    must_fail("kill init, high bits set", syscall(SYS_kill, 0x100000001ul, SIGTERM));
    must_fail("tkill of init", syscall(SYS_tkill, 1, SIGTERM));
    must_fail("tgkill of init", syscall(SYS_tgkill, 1, 1, SIGTERM));
    must_fail("queue a signal to init", syscall(SYS_rt_sigqueueinfo, 1, SIGTERM, buf));
    must_fail("pidfd of init", syscall(SYS_pidfd_open, 1, 0));
    must_fail("signal through /proc/1",
              syscall(SYS_pidfd_send_signal, open("/proc/1", O_DIRECTORY), SIGTERM, NULL, 0));
    must_fail("trace init", ptrace(PTRACE_ATTACH, 1, NULL, NULL));
    must_fail("seize init", ptrace(PTRACE_SEIZE, 1, NULL, NULL));
    must_fail("read init's memory", syscall(SYS_process_vm_readv, 1, &v, 1, &v, 1, 0));
    must_fail("write init's memory", syscall(SYS_process_vm_writev, 1, &v, 1, &v, 1, 0));
    must_fail("take a descriptor of init", syscall(SYS_pidfd_getfd, 0, 4, 0));
    must_fail("open a descriptor of init by /proc", open("/proc/1/fd/3", O_RDWR));
    must_fail("read the links of init's descriptors", readlink("/proc/1/fd/3", buf, sizeof buf));
    must_fail("open init's program", open("/proc/1/exe", O_RDONLY));
    must_fail("init's root by /proc", open("/proc/1/root", O_PATH | O_DIRECTORY));
    must_fail("init's working directory by /proc", open("/proc/1/cwd", O_PATH | O_DIRECTORY));
    must_fail("limits of init", syscall(SYS_prlimit64, 1, RLIMIT_NOFILE, NULL, buf));
    must_fail("priority of init", setpriority(PRIO_PROCESS, 1, 19));
    must_fail("processors of init", sched_setaffinity(1, 8, (cpu_set_t *)memset(buf, 0xff, 8)));
    must_fail_apart("take init's id", become_init);
    must_fail_apart("take init's id, high bits set", become_init_high_bits);
    must_fail_apart("take init's id as the effective one", become_init_effective);
    must_fail_apart("take init's id for files", become_init_for_files);
    must_fail_apart("take init's id by a set-uid program", set_uid_program_of_init);
}

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

static void namespaces(void)
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

static void mounts(void)
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

static void interfaces(void)
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

/* ---- devices and terminals ----------------------------------------------------------------------
 */

static int own_pty(void)
{
    int master = open("/dev/ptmx", O_RDWR | O_NOCTTY);

    if (master < 0 || unlockpt(master) < 0)
        return -1;
    return open(ptsname(master), O_RDWR | O_NOCTTY);
}

static void devices(void)
{
    int pty = own_pty();

    must_hold("a pty can be had", pty >= 0);
    must_fail("inject into a pty", ioctl(pty, TIOCSTI, "x"));
    must_fail("inject, high bits set", syscall(SYS_ioctl, pty, 0x100000000ul | TIOCSTI, "x"));
    must_fail("TIOCLINUX", ioctl(pty, 0x541c, "\3"));
    must_fail("a block device", mknod("/tmp/b", S_IFBLK | 0600, makedev(254, 0)));
    must_fail("a device for memory", mknod("/tmp/m", S_IFCHR | 0600, makedev(1, 1)));
    must_fail("a whiteout", mknod("/tmp/w", S_IFCHR | 0600, makedev(0, 0)));
    must_fail("chmod /dev/null", chmod("/dev/null", 0600));
    must_fail("chown /dev/null", chown("/dev/null", 0, 0));
    must_fail("unlink /dev/null", unlink("/dev/null"));
    must_fail("rename /dev/null", rename("/dev/null", "/tmp/null"));
}

/* ---- sockets
 * ------------------------------------------------------------------------------------- */

static long connect_abstract(const char *name)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);

    memcpy(a.sun_path + 1, name, strlen(name));
    return connect(fd, (void *)&a, (socklen_t)(sizeof a.sun_family + 1 + strlen(name)));
}

static long connect_tcp(const char *ip, int port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    inet_pton(AF_INET, ip, &a.sin_addr);
    return connect(fd, (void *)&a, sizeof a);
}

/* Unix sockets of this network namespace that anybody could connect to: flag __SO_ACCEPTCON. */
static bool nobody_listens(void)
{
    FILE *f = fopen("/proc/net/unix", "r");
    bool listens = false;

    while (f && fgets(buf, sizeof buf, f))
        listens |= strstr(buf, " 00010000 ") != NULL;
    if (f)
        fclose(f);
    return !listens;
}

static bool only_loopback(void)
{
    FILE *f = fopen("/proc/net/dev", "r");
    int others = 0;

    for (int line = 0; f && fgets(buf, sizeof buf, f); line++)
        others += line >= 2 && !strstr(buf, "lo:");
    if (f)
        fclose(f);
    return f && others == 0;
}

static void sockets(const char *host_socket, int host_port)
{
    static const struct {
        const char *name;
        int family, type, protocol;
    } kinds[] = {{"packet", AF_PACKET, SOCK_RAW, 0},
                 {"raw", AF_INET, SOCK_RAW, IPPROTO_ICMP},
                 {"raw, of IPv6", AF_INET6, SOCK_RAW, 58},
                 {"vsock", AF_VSOCK, SOCK_STREAM, 0},
                 {"alg", AF_ALG, SOCK_SEQPACKET, 0},
                 {"bluetooth", AF_BLUETOOTH, SOCK_RAW, 1},
                 {"can", AF_CAN, SOCK_RAW, 1},
                 {"key", AF_KEY, SOCK_RAW, 2},
                 {"tipc", AF_TIPC, SOCK_SEQPACKET, 0},
                 {"rds", AF_RDS, SOCK_SEQPACKET, 0},
                 {"xdp", 44, SOCK_RAW, 0},
                 {"netlink of netfilter", AF_NETLINK, SOCK_RAW, 12},
                 {"netlink of audit", AF_NETLINK, SOCK_RAW, 9},
                 {"netlink of xfrm", AF_NETLINK, SOCK_RAW, 6},
                 {"netlink of uevents", AF_NETLINK, SOCK_RAW, 15},
                 {"netlink, generic", AF_NETLINK, SOCK_RAW, 16},
                 {"netlink of diag", AF_NETLINK, SOCK_RAW, 4}};

    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        snprintf(buf + 4096, 64, "a socket of the kind %s", kinds[i].name);
        must_fail(buf + 4096, socket(kinds[i].family, kinds[i].type, kinds[i].protocol));
    }
    must_fail("a vsock, high bits set", syscall(SYS_socket, 0x100000000ul | AF_VSOCK, 1, 0));
    must_fail("the host's abstract socket", connect_abstract(host_socket));
    must_fail("the host's port", connect_tcp("127.0.0.1", host_port));
    must_fail("the world", connect_tcp("192.0.2.1", 80));
    must_hold("no unix socket to connect to", nobody_listens());
    must_hold("no interface but loopback", only_loopback());
}

/* ---- resources
 * ------------------------------------------------------------------------------------- */

static long lock_memory(void)
{
    size_t size = (size_t)16 << 20;
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    return p == MAP_FAILED ? -1 : mlock(p, size);
}

static long many_files(void)
{
    int fd;

    for (int i = 0; i < 100000; i++)
        if ((fd = dup(0)) < 0)
            return -1;
    return fd;
}

static void resources(void)
{
    struct rlimit many = {1 << 22, 1 << 22}, core = {1, 1};

    must_fail("more open files", setrlimit(RLIMIT_NOFILE, &many));
    must_fail("core files", setrlimit(RLIMIT_CORE, &core));
    must_fail("larger files", setrlimit(RLIMIT_FSIZE, &(struct rlimit){1ul << 40, 1ul << 40}));
    must_fail("message queues", setrlimit(RLIMIT_MSGQUEUE, &many));
    must_fail("nice -20", setpriority(PRIO_PROCESS, 0, -20));
    must_fail("real time", sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){1}));
    must_fail("lock 16 MiB", lock_memory());
    must_fail("be the last to be killed", write_some("/proc/self/oom_score_adj", "-1000"));
    must_fail_apart("100000 open files", many_files);
    must_hold("no new privileges", prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1);
    must_hold("seccomp filters", prctl(PR_GET_SECCOMP, 0, 0, 0, 0) == 2);
    must_hold("no CAP_SYS_ADMIN", prctl(PR_CAPBSET_READ, 21, 0, 0, 0) == 0);
    must_hold("no CAP_SYS_PTRACE", prctl(PR_CAPBSET_READ, 19, 0, 0, 0) == 0);
    must_hold("no CAP_NET_ADMIN", prctl(PR_CAPBSET_READ, 12, 0, 0, 0) == 0);
    must_hold("no CAP_MKNOD", prctl(PR_CAPBSET_READ, 27, 0, 0, 0) == 0);
}

/* Before anything else is opened. */
static int inherited_descriptors(void)
{
    int n = 0;

    for (int fd = 3; fd < 1024; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--effective-uid") == 0)
        return geteuid() == 65536;
    if (argc < 4 || strcmp(argv[1], "--inside-sandbox") != 0 || getpid() > 1000) {
        fprintf(stderr, "usage: probe --inside-sandbox SOCKET PORT   (never on a host)\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    must_hold("no inherited descriptors", inherited_descriptors() == 0);
    init();
    secrets();
    controls();
    devices();
    sockets(argv[2], atoi(argv[3]));
    interfaces();
    namespaces();
    mounts();
    resources();
    printf("probes %d, holes %d, unclear %d\n", probes, holes, unclear);
    return holes + unclear ? 1 : 0;
}
