/* The spawner's side, which agentenv-init is when it is called with descriptors: see spawner.h. */
#include "agentenv/sandbox/spawner.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "agentenv/init/wire.h"
#include "agentenv/sandbox/enter.h"
#include "agentenv/sandbox/nets.h"

struct spawner {
    struct cgroup_root cgroups; /* v2 and v1[] only */
    int socket, init_fd, filters_fd;
};

/* ---- replies ------------------------------------------------------------------------------- */

static void reply(int fd, enum wire_report_kind kind, int value, const char *step, int pass_fd)
{
    char space[CMSG_SPACE(sizeof(int))] __attribute__((aligned(8))) = {0};
    struct wire_report r = {.kind = kind, .value = value};
    struct iovec v = {&r, sizeof r};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};

    snprintf(r.step, sizeof r.step, "%s", step);
    if (pass_fd >= 0) {
        m.msg_control = space;
        m.msg_controllen = sizeof space;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        *c = (struct cmsghdr){CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(c), &pass_fd, sizeof pass_fd);
    }
    sendmsg(fd, &m, MSG_NOSIGNAL);
}

/* ---- start --------------------------------------------------------------------------------- */

static int write_text(const char *path, const char *text)
{
    lh_autoclose int fd = open(path, O_WRONLY | O_CLOEXEC);

    return fd < 0 || write(fd, text, strlen(text)) < 0 ? -errno : 0;
}

/* Two ranges: the agent's ids, and one for init. */
static int write_maps(pid_t pid)
{
    static const char *const files[] = {"uid_map", "gid_map"};
    char path[64], map[96];

    snprintf(map, sizeof map, "0 %d %d\n%d %d 1\n", BOX_UID_BASE, BOX_UID_COUNT, BOX_INIT_UID,
             BOX_UID_BASE + BOX_INIT_UID);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "/proc/%d/%s", pid, files[i]);
        int e = write_text(path, map);
        if (e < 0)
            return e;
    }
    return 0;
}

static pid_t clone_sandbox(int cgroup, bool new_net, int *pidfd)
{
    struct clone_args a = {
        .flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS |
                 CLONE_NEWTIME | CLONE_INTO_CGROUP | CLONE_PIDFD | (new_net ? CLONE_NEWNET : 0),
        .exit_signal = SIGCHLD,
        .pidfd = (uint64_t)(uintptr_t)pidfd,
        .cgroup = (unsigned)cgroup,
    };

    return (pid_t)syscall(SYS_clone3, &a, sizeof a);
}

_Noreturn static void child(const struct spawner *s, const struct spawner_request *req,
                            const int *fds, int go)
{
    struct enter e = {.root = fds[1],
                      .control = fds[0],
                      .init = s->init_fd,
                      .filters = s->filters_fd,
                      .file_bytes = req->file_bytes,
                      .network = req->network};
    char c;

    memcpy(e.hostname, req->hostname, sizeof e.hostname);
    if (read(go, &c, 1) != 1) /* the spawner gave up and has said why */
        _exit(1);
    enter_sandbox(&e);
}

/* After the fork: what only the host's root can do for the child.  NULL, or the step that failed
 * with *errnum set. */
static const char *prepare_child(const struct spawner *s, const char *id, pid_t pid, int *errnum)
{
    *errnum = -write_maps(pid);
    if (*errnum)
        return "the id maps";
    *errnum = -cgroup_attach(&s->cgroups, id, pid);
    return *errnum ? "entering the cgroups" : NULL;
}

static void start(const struct spawner *s, const struct spawner_request *req, const int *fds)
{
    lh_autoclose int cgroup = cgroup_open(&s->cgroups, req->id);
    lh_autoclose int pidfd = -1;
    int go[2], errnum;

    if (cgroup < 0 || pipe2(go, O_CLOEXEC) < 0) {
        reply(fds[0], WIRE_FAILED, errno, "the cgroup", -1);
        return;
    }
    int net = req->used_net ? nets_enter() : -1;
    pid_t pid = clone_sandbox(cgroup, net < 0, &pidfd);
    if (pid == 0) {
        close(go[1]);
        child(s, req, fds, go[0]);
    }
    errnum = errno;
    close(go[0]);
    if (net >= 0)
        nets_leave(net, pidfd);
    const char *step = pid < 0 ? "namespaces" : prepare_child(s, req->id, pid, &errnum);
    if (step)
        reply(fds[0], WIRE_FAILED, errnum, step, -1);
    else
        reply(fds[0], WIRE_SPAWNED, pid, "", pidfd);
    if (!step && write(go[1], "g", 1) != 1)
        step = "go";
    close(go[1]);
    if (step && pid > 0)
        kill(pid, SIGKILL);
}

/* ---- criu ---------------------------------------------------------------------------------- */

/* Into the sandbox's cgroups, for what it restores; a dump runs in ours. */
static pid_t clone_criu(int cgroup, int *pidfd)
{
    struct clone_args a = {
        .flags = CLONE_PIDFD | (cgroup < 0 ? 0 : CLONE_INTO_CGROUP),
        .exit_signal = SIGCHLD,
        .pidfd = (uint64_t)(uintptr_t)pidfd,
        .cgroup = cgroup < 0 ? 0 : (unsigned)cgroup,
    };

    return (pid_t)syscall(SYS_clone3, &a, sizeof a);
}

static void run_criu(const struct spawner *s, const struct spawner_request *req, const int *fds,
                     int root)
{
    lh_autoclose int cgroup = req->id[0] ? cgroup_open(&s->cgroups, req->id) : -1;
    lh_autoclose int pidfd = -1;
    int e = req->id[0] && cgroup < 0 ? -errno : spawner_criu_prepare();

    if (e < 0) {
        reply(fds[0], WIRE_FAILED, -e, "preparing criu", -1);
        return;
    }
    pid_t pid = clone_criu(cgroup, &pidfd);
    if (pid == 0) {
        if (cgroup >= 0 && cgroup_attach(&s->cgroups, req->id, getpid()) < 0)
            _exit(1);
        spawner_criu_run(fds[1], fds[2], root);
    }
    if (pid < 0)
        reply(fds[0], WIRE_FAILED, errno, "forking criu", -1);
    else
        reply(fds[0], WIRE_SPAWNED, pid, "", pidfd);
}

static void loopback(const int *fds)
{
    pid_t pid = fork();

    if (pid == 0) {
        int e = setns(fds[1], CLONE_NEWNET) < 0 || enter_loopback_up() < 0 ? errno : 0;
        reply(fds[0], e ? WIRE_FAILED : WIRE_READY, e, "the loopback interface", -1);
        _exit(0);
    }
    if (pid < 0)
        reply(fds[0], WIRE_FAILED, errno, "fork", -1);
}

/* ---- switch -------------------------------------------------------------------------------- */

static void switch_root(const int *fds)
{
    pid_t pid = fork();

    if (pid == 0) {
        int e = enter_switch_root(fds[2], fds[3], fds[1]);
        reply(fds[0], e ? WIRE_FAILED : WIRE_READY, e, "switching the root", -1);
        _exit(0);
    }
    if (pid < 0)
        reply(fds[0], WIRE_FAILED, errno, "fork", -1);
}

/* ---- the process --------------------------------------------------------------------------- */

static bool receive(int socket, struct spawner_request *req, int fds[SPAWNER_MAX_FDS], size_t *n)
{
    char space[CMSG_SPACE(sizeof(int) * SPAWNER_MAX_FDS)] __attribute__((aligned(8)));
    struct iovec v = {req, sizeof *req};
    struct msghdr m = {
        .msg_iov = &v, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    ssize_t got;

    do
        got = recvmsg(socket, &m, MSG_CMSG_CLOEXEC);
    while (got < 0 && errno == EINTR);
    const struct cmsghdr *c = got > 0 ? CMSG_FIRSTHDR(&m) : NULL;
    *n = c ? (c->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0;
    if (*n)
        memcpy(fds, CMSG_DATA(c), *n * sizeof(int));
    return got == sizeof *req;
}

_Noreturn static void serve(const struct spawner *s)
{
    struct spawner_request req;
    int fds[SPAWNER_MAX_FDS];
    size_t n;

    while (receive(s->socket, &req, fds, &n)) {
        if (req.op == SPAWNER_START && n == 2)
            start(s, &req, fds);
        else if (req.op == SPAWNER_SWITCH && n == 4)
            switch_root(fds);
        else if (req.op == SPAWNER_CRIU && (n == 3 || n == 4))
            run_criu(s, &req, fds, n == 4 ? fds[3] : -1);
        else if (req.op == SPAWNER_LOOPBACK && n == 2)
            loopback(fds);
        while (n > 0)
            close(fds[--n]);
    }
    _exit(0);
}

void spawner_main(char *const fds[SPAWNER_OWN_FDS])
{
    int fd[SPAWNER_OWN_FDS];
    struct spawner s;

    for (int i = 0; i < SPAWNER_OWN_FDS; i++) {
        fd[i] = atoi(fds[i]);
        if (fd[i] >= 0)
            fcntl(fd[i], F_SETFD, FD_CLOEXEC);
    }
    s = (struct spawner){.socket = fd[SPAWNER_FD_SOCKET],
                         .init_fd = fd[SPAWNER_FD_INIT],
                         .filters_fd = fd[SPAWNER_FD_FILTERS],
                         .cgroups.v2 = fd[SPAWNER_FD_V2]};
    memcpy(s.cgroups.v1, fd + SPAWNER_FD_V1, sizeof s.cgroups.v1);
    prctl(PR_SET_NAME, "agentenv-spawn");
    signal(SIGCHLD, SIG_IGN);
    signal(SIGINT, SIG_IGN); /* of the terminal: the daemon decides when to end */
    signal(SIGTERM, SIG_IGN);
    serve(&s);
}
