/* A network namespace costs 0.9 ms of CPU to make and end, of the 8 ms of a whole sandbox, and its
 * end holds up the next one's making.  One whose sandbox is dead is as good as new:
 *
 *  - it belongs to the host's user namespace, so nobody inside has a capability over it: its one
 *    interface is down, it has no address, route, rule or setting that it did not have at first;
 *  - no socket is left in it.  The kernel counts them, those in flight between sockets too, and a
 *    namespace in which it counts one is not used again.
 *
 * So the spawner keeps a descriptor of those it has made, with a pidfd of the init that lives
 * there, and enters one that is free before it clones.  Only for sandboxes without a network: on a
 * loopback interface that is up, closed connections linger.  And only for those that are thrown
 * away: CRIU dumps no sandbox whose namespaces do not belong to its user namespace.  All ends with
 * the spawner's descriptors.
 *
 * Rejected: namespaces made ahead of time, which cost the same, only earlier. */
#include "agentenv/sandbox/nets.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

enum { NETS = 64 };

static struct net {
    int ns, pidfd; /* pidfd: -1 = nobody has it */
    int sockets;   /* its /proc/net/sockstat */
} nets[NETS];

static int n_nets, host = -1;

/* PID 1 is the last of its sandbox to be reaped, and sockets are closed before that. */
static bool is_free(const struct net *n)
{
    static const char none[] = "sockets: used 0\n";
    struct pollfd p = {n->pidfd, POLLIN, 0};
    char text[sizeof none];

    if (n->pidfd >= 0 && poll(&p, 1, 0) != 1)
        return false;
    return pread(n->sockets, text, sizeof none - 1, 0) == sizeof none - 1 &&
           memcmp(text, none, sizeof none - 1) == 0;
}

static void close_net(struct net *n)
{
    const int fds[] = {n->ns, n->sockets, n->pidfd};

    for (int i = 0; i < 3; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

static int make(void)
{
    struct net n = {.pidfd = -1};

    if (n_nets == NETS || unshare(CLONE_NEWNET) < 0)
        return -1;
    n.ns = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
    n.sockets = open("/proc/thread-self/net/sockstat", O_RDONLY | O_CLOEXEC);
    if (n.ns < 0 || n.sockets < 0) {
        close_net(&n);
        setns(host, CLONE_NEWNET);
        return -1;
    }
    nets[n_nets] = n;
    return n_nets++;
}

int nets_enter(void)
{
    if (host < 0)
        host = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
    if (host < 0)
        return -1;
    for (int i = 0; i < n_nets; i++)
        if (is_free(&nets[i]))
            return setns(nets[i].ns, CLONE_NEWNET) == 0 ? i : -1;
    return make();
}

void nets_leave(int place, int pidfd)
{
    struct net *n = &nets[place];

    if (n->pidfd >= 0)
        close(n->pidfd);
    n->pidfd = pidfd < 0 ? -1 : fcntl(pidfd, F_DUPFD_CLOEXEC, 0);
    if (setns(host, CLONE_NEWNET) == 0 && (pidfd < 0 || n->pidfd >= 0))
        return;
    close_net(n); /* who lives there is not known */
    *n = nets[--n_nets];
}
