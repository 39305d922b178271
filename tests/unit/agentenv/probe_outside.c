/* The probe: devices, sockets, resources. */
#include "probe.h"

#include <arpa/inet.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <unistd.h>

static char buf[8192];

/* ---- devices and terminals ----------------------------------------------------------------------
 */

static int own_pty(void)
{
    int master = open("/dev/ptmx", O_RDWR | O_NOCTTY);

    if (master < 0 || unlockpt(master) < 0)
        return -1;
    return open(ptsname(master), O_RDWR | O_NOCTTY);
}

void probe_devices(void)
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

void probe_sockets(const char *host_socket, int host_port)
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

void probe_resources(void)
{
    struct rlimit many = {1 << 22, 1 << 22}, core = {1, 1};

    must_fail("more open files", setrlimit(RLIMIT_NOFILE, &many));
    must_fail("core files", setrlimit(RLIMIT_CORE, &core));
    must_fail("larger files", setrlimit(RLIMIT_FSIZE, &(struct rlimit){1ul << 40, 1ul << 40}));
    must_fail("message queues", setrlimit(RLIMIT_MSGQUEUE, &many));
    must_fail("nice -20", setpriority(PRIO_PROCESS, 0, -20));
    must_fail("real time", sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){1}));
    must_fail("lock 16 MiB", lock_memory());
    must_fail("be the last to be killed", probe_write("/proc/self/oom_score_adj", "-1000"));
    must_fail_apart("100000 open files", many_files);
    must_hold("no new privileges", prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1);
    must_hold("seccomp filters", prctl(PR_GET_SECCOMP, 0, 0, 0, 0) == 2);
    must_hold("no CAP_SYS_ADMIN", prctl(PR_CAPBSET_READ, 21, 0, 0, 0) == 0);
    must_hold("no CAP_SYS_PTRACE", prctl(PR_CAPBSET_READ, 19, 0, 0, 0) == 0);
    must_hold("no CAP_NET_ADMIN", prctl(PR_CAPBSET_READ, 12, 0, 0, 0) == 0);
    must_hold("no CAP_MKNOD", prctl(PR_CAPBSET_READ, 27, 0, 0, 0) == 0);
}

/* Before anything else is opened. */
