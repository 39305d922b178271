/* A network namespace costs 0.9 ms of CPU to make and end, of the 8 ms of a whole sandbox, and its
 * end holds up the next one's making.  One whose sandbox is dead is as good as new:
 *
 *  - it belongs to a user namespace in which nobody had a capability over networks: its one
 *    interface is down, it has no address, route, rule or setting that it did not have at first;
 *  - no socket is left in it.  The kernel counts them, those in flight between sockets too, and a
 *    namespace in which it counts one is not used again;
 *  - its counters of packets, which every process may read, are those of a new one.  An attempt to
 *    send moves them although nothing can leave, and would tell the next sandbox of itself.
 *
 * CRIU dumps no sandbox whose namespaces do not belong to its user namespace, so that one is used
 * again with it.  It holds nothing either: its maps are the same for all sandboxes and cannot be
 * written twice, its limits (/proc/sys/user) are read-only inside, keys are refused by seccomp.  No
 * two sandboxes that live share one: what root of one sandbox owns, root of another cannot touch.
 *
 * So the spawner keeps descriptors of those it has made, with a pidfd of the init that lives there,
 * and takes one that is free.  Only for sandboxes without a network: on a loopback interface that
 * is up, closed connections linger.  All ends with the spawner's descriptors.
 *
 * Rejected: namespaces made ahead of time, which cost the same, only earlier. */
#include "agentenv/sandbox/pairs.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "agentenv/sandbox/box.h"

enum { PAIRS = 128, TALLIES = 3, TALLY_MAX = 32 << 10 };

static const char *const tallies[TALLIES] = {"net/snmp", "net/netstat", "net/snmp6"};

struct pair {
    int user, net;
    int sockets;        /* the network's /proc/net/sockstat */
    int tally[TALLIES]; /* -1 = the kernel has none (no IPv6) */
    int pidfd;          /* -1 = nobody lives there */
    bool kept;
};

static struct pair pairs[PAIRS], single; /* single: for one sandbox, then never again */
static int n_pairs;
static char untouched[TALLY_MAX]; /* the tallies of the newest, before anybody used it */
static size_t n_untouched;

/* ---- making one ---- */

static int write_map(pid_t pid, const char *file, const char *map)
{
    char path[64];

    snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
    lh_autoclose int fd = open(path, O_WRONLY | O_CLOEXEC);
    return fd >= 0 && write(fd, map, strlen(map)) == (ssize_t)strlen(map) ? 0 : -1;
}

static int write_maps(pid_t pid, const char *map)
{
    return write_map(pid, "uid_map", map) == 0 && write_map(pid, "gid_map", map) == 0 ? 0 : -1;
}

static int open_of(pid_t pid, const char *what)
{
    char path[64];

    snprintf(path, sizeof path, "/proc/%d/%s", pid, what);
    return open(path, O_RDONLY | O_CLOEXEC);
}

static void close_pair(struct pair *p)
{
    const int fds[] = {p->user,     p->net,      p->sockets, p->tally[0],
                       p->tally[1], p->tally[2], p->pidfd};

    for (size_t i = 0; i < LH_ARRAY_SIZE(fds); i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

static size_t read_tallies(const struct pair *p, char text[TALLY_MAX])
{
    size_t n = 0;

    for (int i = 0; i < TALLIES; i++) {
        ssize_t got = p->tally[i] < 0 ? 0 : pread(p->tally[i], text + n, TALLY_MAX - n, 0);
        n += got > 0 ? (size_t)got : 0;
    }
    return n;
}

static bool is_untouched(const struct pair *p)
{
    static char text[TALLY_MAX];

    return read_tallies(p, text) == n_untouched && memcmp(text, untouched, n_untouched) == 0;
}

/* A child holds them until there are descriptors. */
static int make(struct pair *p, bool kept, const char *map)
{
    struct clone_args a = {.flags = CLONE_NEWUSER | CLONE_NEWNET, .exit_signal = SIGCHLD};
    pid_t pid = (pid_t)syscall(SYS_clone3, &a, sizeof a);

    if (pid < 0)
        return -1;
    if (pid == 0)
        for (;;)
            pause();
    *p = (struct pair){.user = open_of(pid, "ns/user"),
                       .net = open_of(pid, "ns/net"),
                       .sockets = open_of(pid, "net/sockstat"),
                       .pidfd = -1,
                       .kept = kept};
    for (int i = 0; i < TALLIES; i++)
        p->tally[i] = open_of(pid, tallies[i]);
    n_untouched = read_tallies(p, untouched);
    int r = p->user < 0 || p->net < 0 || p->sockets < 0 ? -1 : write_maps(pid, map);
    int errnum = errno;
    kill(pid, SIGKILL);
    if (r < 0)
        close_pair(p);
    errno = errnum;
    return r;
}

/* ---- using them ---- */

/* PID 1 is the last of its sandbox to be reaped, and sockets are closed before that. */
static bool is_left(const struct pair *p)
{
    struct pollfd dead = {p->pidfd, POLLIN, 0};

    return p->pidfd < 0 || poll(&dead, 1, 0) == 1;
}

static bool has_no_socket(const struct pair *p)
{
    static const char none[] = "sockets: used 0\n";
    char text[sizeof none];

    return pread(p->sockets, text, sizeof none - 1, 0) == sizeof none - 1 &&
           memcmp(text, none, sizeof none - 1) == 0;
}

struct pair *pairs_take(bool fresh, const char *map)
{
    for (int i = 0; i < n_pairs && !fresh; i++) {
        if (!is_left(&pairs[i]) || !has_no_socket(&pairs[i]))
            continue;
        if (is_untouched(&pairs[i]))
            return &pairs[i];
        close_pair(&pairs[i]);
        pairs[i--] = pairs[--n_pairs];
    }
    bool keep = !fresh && n_pairs < PAIRS;
    struct pair *p = keep ? &pairs[n_pairs] : &single;
    if (make(p, keep, map) < 0)
        return NULL;
    n_pairs += keep;
    return p;
}

int pairs_enter(const struct pair *p)
{
    return setns(p->user, CLONE_NEWUSER) < 0 || setns(p->net, CLONE_NEWNET) < 0 ? -errno : 0;
}

void pairs_leave(struct pair *p, int pidfd)
{
    if (p->kept) {
        if (p->pidfd >= 0)
            close(p->pidfd);
        p->pidfd = pidfd < 0 ? -1 : fcntl(pidfd, F_DUPFD_CLOEXEC, 0);
        if (pidfd < 0 || p->pidfd >= 0)
            return;
    }
    close_pair(p); /* or who lives there is not known */
    if (p->kept)
        *p = pairs[--n_pairs];
}
