/* The spawner's side, which agentenv-init is until it has forked: see spawner.h. */
#include "agentenv/sandbox/spawner.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "agentenv/init/wire.h"
#include "agentenv/sandbox/enter.h"
#include "agentenv/sandbox/pairs.h"

struct spawner {
    struct cgroup_root cgroups; /* v2 and v1[] only */
    int socket;
    void (*init)(void);
    char id_map[96]; /* of every sandbox */
    bool one_uid;
    bool plain; /* directories stand for cgroups */
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

/* What the process between the spawner and an init has done: their memory is not the same. */
static struct birth {
    pid_t pid;
    int pidfd;        /* in the table of descriptors, which they share */
    const char *step; /* that failed, with errnum */
    int errnum;
} * birth;

static pid_t clone_sandbox(int *pidfd)
{
    struct clone_args a = {
        .flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP |
                 CLONE_NEWTIME | CLONE_PARENT | CLONE_PIDFD,
        .pidfd = (uint64_t)(uintptr_t)pidfd,
    };

    return (pid_t)syscall(SYS_clone3, &a, sizeof a);
}

_Noreturn static void child(const struct spawner *s, const struct spawner_request *req,
                            const int *fds, const int go[2])
{
    struct enter e = {.root = fds[1],
                      .control = fds[0],
                      .limits = req->limits,
                      .one_uid = s->one_uid,
                      .network = req->network};
    char c;

    munmap(birth, sizeof *birth); /* shared with nobody, and with no checkpoint */
    close(go[1]);
    memcpy(e.hostname, req->hostname, sizeof e.hostname);
    if (read(go[0], &c, 1) != 1) /* the spawner gave up and has said why */
        _exit(1);
    enter_sandbox(&e);
    s->init();
    _exit(1);
}

/* In the process between, which is in the v2 cgroup already.  What it enters its child has from
 * the first moment on. */
static const char *bear(const struct spawner *s, const struct spawner_request *req, const int *fds,
                        const struct pair *pair, const int go[2])
{
    birth->errnum = -cgroup_enter(&s->cgroups, req->id);
    if (birth->errnum)
        return "entering the cgroups";
    birth->errnum = -pairs_enter(pair);
    if (birth->errnum)
        return "entering the namespaces";
    pid_t pid = clone_sandbox(&birth->pidfd);
    if (pid == 0)
        child(s, req, fds, go);
    birth->errnum = errno;
    birth->pid = pid;
    return pid < 0 ? "namespaces" : NULL;
}

/* Nobody can enter a user namespace and stay what he was.  So the spawner stands still, as with
 * vfork(), while a copy of it enters what is there, bears init as the spawner's child, and ends. */
static const char *send_midwife(const struct spawner *s, const struct spawner_request *req,
                                const int *fds, int cgroup, const struct pair *pair,
                                const int go[2])
{
    struct clone_args a = {.flags = CLONE_VFORK | CLONE_FILES | (s->plain ? 0 : CLONE_INTO_CGROUP),
                           .exit_signal = SIGCHLD,
                           .cgroup = s->plain ? 0 : (unsigned)cgroup};

    *birth = (struct birth){.pid = -1, .pidfd = -1, .step = "forking", .errnum = ECHILD};
    pid_t pid = (pid_t)syscall(SYS_clone3, &a, sizeof a);
    if (pid == 0) {
        birth->step = bear(s, req, fds, pair, go);
        _exit(0);
    }
    if (pid < 0)
        birth->errnum = errno;
    if (!s->plain || birth->step)
        return birth->step;
    birth->errnum = -cgroup_record(cgroup, birth->pid);
    return birth->errnum ? "writing down its process" : NULL;
}

static void start_in(const struct spawner *s, const struct spawner_request *req, const int *fds,
                     int cgroup, struct pair *pair)
{
    int go[2];

    if (pipe2(go, O_CLOEXEC) < 0) {
        reply(fds[0], WIRE_FAILED, errno, "a pipe", -1);
        pairs_leave(pair, -1);
        return;
    }
    const char *step = send_midwife(s, req, fds, cgroup, pair, go);
    lh_autoclose int pidfd = birth->pidfd;
    close(go[0]);
    pairs_leave(pair, pidfd);
    if (step)
        reply(fds[0], WIRE_FAILED, birth->errnum, step, -1);
    else
        reply(fds[0], WIRE_SPAWNED, birth->pid, "", pidfd);
    if (!step && write(go[1], "g", 1) != 1)
        kill(birth->pid, SIGKILL);
    close(go[1]);
}

static void start(const struct spawner *s, const struct spawner_request *req, const int *fds)
{
    lh_autoclose int cgroup = cgroup_open(&s->cgroups, req->id);
    struct pair *pair = cgroup < 0 ? NULL : pairs_take(req->network != BOX_NET_NONE, s->id_map);

    if (pair)
        start_in(s, req, fds, cgroup, pair);
    else
        reply(fds[0], WIRE_FAILED, errno, cgroup < 0 ? "the cgroup" : "namespaces", -1);
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
        if (cgroup >= 0 && cgroup_enter(&s->cgroups, req->id) < 0)
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

/* Two ranges: the agent's ids, and one for init, if it has one. */
static void print_id_map(char *const args[SPAWNER_ARGS], char map[96])
{
    int base = atoi(args[SPAWNER_UID_BASE]), init = atoi(args[SPAWNER_INIT_UID]);
    int n = snprintf(map, 96, "0 %d %d\n", base, atoi(args[SPAWNER_UID_COUNT]));

    if (init)
        snprintf(map + n, 96 - (size_t)n, "%d %d 1\n", init, base + init);
}

void spawner_main(char *const args[SPAWNER_ARGS], void (*init)(void))
{
    int fd[SPAWNER_OWN_FDS];
    struct spawner s;

    for (int i = 0; i < SPAWNER_OWN_FDS; i++) {
        fd[i] = atoi(args[i]);
        if (fd[i] >= 0)
            fcntl(fd[i], F_SETFD, FD_CLOEXEC);
    }
    s = (struct spawner){.socket = fd[SPAWNER_FD_SOCKET],
                         .init = init,
                         .cgroups.v2 = fd[SPAWNER_FD_V2],
                         .one_uid = atoi(args[SPAWNER_UID_COUNT]) == 1,
                         .plain = atoi(args[SPAWNER_CGROUPS]) == 0};
    print_id_map(args, s.id_map);
    memcpy(s.cgroups.v1, fd + SPAWNER_FD_V1, sizeof s.cgroups.v1);
    birth = mmap(NULL, sizeof *birth, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (birth == MAP_FAILED)
        _exit(1);
    prctl(PR_SET_NAME, "agentenv-spawn");
    signal(SIGCHLD, SIG_IGN);
    signal(SIGINT, SIG_IGN); /* of the terminal: the daemon decides when to end */
    signal(SIGTERM, SIG_IGN);
    signal(SIGPIPE, SIG_IGN); /* an init that dies before it is let go */
    serve(&s);
}
