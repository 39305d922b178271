/* The probe: files of the kernel, and init. */
#include "probe.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

static char buf[8192];

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
long probe_write(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC | O_NONBLOCK);
    long n = fd < 0 ? -1 : write(fd, text, strlen(text));
    int e = errno;

    if (fd >= 0)
        close(fd);
    errno = e;
    return n;
}

void probe_secrets(void)
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

void probe_controls(void)
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
        must_fail(buf + 4096, probe_write(paths[i], "0 0 1\n"));
    }
    must_fail("write /proc/self/timens_offsets",
              probe_write("/proc/self/timens_offsets", "monotonic 1 0\n"));
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

void probe_init(void)
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
