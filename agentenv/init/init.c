/* agentenv-init: PID 1 of a sandbox.
 *
 * It forks every command, owns every pipe and reaps every orphan.  It runs from a sealed memfd, so
 * that no image can provide or overwrite it; runs under an id that is mapped in the
 * sandbox's user namespace but that the seccomp programs let nobody else take; has no name in the
 * file system or among sockets (see wire.h).  One user namespace for init and agent, not two nested
 * ones: CRIU cannot dump nested namespaces.  It starts as root of the sandbox, with the bounding
 * set already cut to what that root is to have.
 *
 * It begins as the spawner (sandbox/spawner.h), outside of every sandbox; the spawner's children go
 * on as inits. */
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "agentenv/init/init.h"
#include "agentenv/sandbox/spawner.h"

enum { INIT_UID = 65536, POLL_MAX = WIRE_MAX_EXECS * 6 + 160 };

static int control = WIRE_CONTROL_FD, near_end = -1, signals = -1;
static bool quiescing;

int64_t init_now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int keep_capabilities(void)
{
    struct __user_cap_header_struct h = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct d[2];

    if (syscall(SYS_capget, &h, d) < 0)
        return -1;
    for (int i = 0; i < 2; i++) {
        d[i].effective = d[i].permitted;
        d[i].inheritable = 0;
    }
    return (int)syscall(SYS_capset, &h, d);
}

/* Where no id but 0 is mapped (sandbox/rootless.c) it stays what it is; not dumpable, it is no more
 * the agent's to look into than under an id of its own. */
static int become_init_user(void)
{
    if (setresgid(INIT_UID, INIT_UID, INIT_UID) < 0 && errno == EINVAL)
        return keep_capabilities() < 0 ? -1 : prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    if (prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) < 0 || setresgid(INIT_UID, INIT_UID, INIT_UID) < 0 ||
        setresuid(INIT_UID, INIT_UID, INIT_UID) < 0 || keep_capabilities() < 0)
        return -1;
    return prctl(PR_SET_KEEPCAPS, 0, 0, 0, 0);
}

static int open_signals(void)
{
    sigset_t set;

    signal(SIGCHLD, SIG_DFL); /* the spawner ignores it, and that would be inherited */
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    if (sigprocmask(SIG_BLOCK, &set, NULL) < 0)
        return -1;
    signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return signals < 0 ? -1 : 0;
}

/* The number is always taken, so nothing else ever gets it; dup3() closes what was there. */
static int park(void)
{
    int p[2];

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, p) < 0)
        return -1;
    if (dup3(p[1], WIRE_PARKED_FD, O_CLOEXEC) < 0)
        return -1;
    close(p[1]);
    near_end = p[0];
    return 0;
}

static void report_and_park(void)
{
    struct wire_report r = {.kind = WIRE_READY};

    if (fcntl(WIRE_CONTROL_FD, F_SETFD, FD_CLOEXEC) < 0 ||
        dup3(WIRE_CONTROL_FD, WIRE_PARKED_FD, O_CLOEXEC) < 0 || become_init_user() < 0 ||
        open_signals() < 0 || park() < 0)
        r = (struct wire_report){.kind = WIRE_FAILED, .value = errno, .step = "init"};
    send(control, &r, sizeof r, MSG_NOSIGNAL);
    if (r.kind != WIRE_READY)
        _exit(1);
}

struct incoming {
    struct wire_request req;
    int fds[WIRE_EXEC_FDS];
    size_t n_fds;
};

/* The size of the message, 0 at the end, negative for nothing. */
static ssize_t receive(int fd, struct incoming *in)
{
    char space[CMSG_SPACE(sizeof in->fds)] __attribute__((aligned(8)));
    struct iovec v = {&in->req, sizeof in->req};
    struct msghdr m = {
        .msg_iov = &v, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    ssize_t n = recvmsg(fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    const struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&m) : NULL;

    in->n_fds = 0;
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
        in->n_fds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(in->fds, CMSG_DATA(c), in->n_fds * sizeof(int));
    }
    return n;
}

static void obey(struct incoming *in, ssize_t size)
{
    static const size_t fds_of[] = {
        [WIRE_EXEC] = WIRE_EXEC_FDS, [WIRE_ATTACH] = 1,  [WIRE_SIGNAL] = 0,
        [WIRE_RESIZE] = 0,           [WIRE_QUIESCE] = 0, [WIRE_KILL] = 1};
    uint32_t op = in->req.op;

    in->req.exec_id[WIRE_ID_SIZE - 1] = 0;
    if (size != sizeof in->req || op < WIRE_EXEC || op > WIRE_KILL || in->n_fds != fds_of[op])
        while (in->n_fds > 0)
            close(in->fds[--in->n_fds]);
    else if (op == WIRE_EXEC)
        exec_start(&in->req, in->fds);
    else if (op == WIRE_ATTACH)
        exec_attach(&in->req, in->fds[0]);
    else if (op == WIRE_SIGNAL)
        exec_signal(&in->req);
    else if (op == WIRE_RESIZE)
        exec_resize(&in->req);
    else if (op == WIRE_KILL)
        exec_arm(in->req.exec_id, in->fds[0]);
    else
        quiescing = true;
}

/* CRIU looks at init's namespaces from inside its user namespace, which a process that has changed
 * its id refuses.  The agent could be no ptracer of another user's process either way; where it has
 * the same id, there is no CRIU. */
static void let_criu_look(void)
{
    if (getuid() != 0)
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
}

static void quiesce(void)
{
    let_criu_look();
    exec_detach();
    if (control >= 0)
        close(control);
    control = -1;
    quiescing = false;
}

static void serve_control(void)
{
    struct incoming in;
    ssize_t n = receive(control, &in);

    if (n > 0) {
        obey(&in, n);
    } else if (n == 0 || errno != EAGAIN) {
        close(control); /* the daemon is gone; another will come through the parked pair */
        control = -1;
        let_criu_look(); /* whoever wants to save the sandbox without one */
    }
}

static void serve_parked(void)
{
    struct incoming in;
    ssize_t n = receive(near_end, &in);

    if (n < 0)
        return;
    if (control >= 0)
        close(control);
    control = near_end;
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    obey(&in, n);
    if (park() < 0)
        near_end = -1;
}

static void reap(void)
{
    struct signalfd_siginfo s;
    int status;
    pid_t pid;

    while (read(signals, &s, sizeof s) == sizeof s)
        ;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        exec_reaped(pid, status);
}

static char *own_name; /* what ps shows: the spawner's first argument, the others behind it */

static void serve_sandbox(void)
{
    struct pollfd p[POLL_MAX];

    prctl(PR_SET_NAME, "agentenv-init");
    snprintf(own_name, strlen(own_name) + 1, "agentenv-init");
    report_and_park();
    for (;;) {
        int timeout = -1;
        size_t n = 3;
        p[0] = (struct pollfd){control, POLLIN, 0};
        p[1] = (struct pollfd){near_end, POLLIN, 0};
        p[2] = (struct pollfd){signals, POLLIN, 0};
        n += exec_poll(p + n, POLL_MAX - n, &timeout);
        n += drain_poll(p + n, POLL_MAX - n);
        if (poll(p, n, timeout) < 0 && errno != EINTR)
            return;
        if (p[0].revents)
            serve_control();
        if (p[1].revents)
            serve_parked();
        exec_step();
        reap(); /* after the output was read: what a dead command wrote is in its pipes */
        exec_step();
        drain_step();
        if (quiescing && exec_settled())
            quiesce();
    }
}

int main(int argc, char **argv)
{
    char *args[SPAWNER_ARGS];

    if (argc != 1 + SPAWNER_ARGS) {
        fprintf(stderr, "agentenv-init is a part of agentenvd, which starts it\n");
        return 2;
    }
    for (int i = 0; i < SPAWNER_ARGS; i++) { /* nothing of the host's for /proc/1/cmdline */
        args[i] = strdup(argv[1 + i]);
        if (!args[i])
            return 1;
        memset(argv[1 + i], 0, strlen(argv[1 + i]));
    }
    own_name = argv[0];
    launch_prepare(atoi(args[SPAWNER_FD_FILTERS]));
    spawner_main(args, serve_sandbox);
}
