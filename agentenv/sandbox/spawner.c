#include "agentenv/sandbox/spawner.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <unistd.h>

#include "agentenv/sandbox/facts.h"

/* In the child.  A socket that closes without a word tells the daemon that this failed. */
_Noreturn static void become_spawner(const struct cgroup_root *cgroups, int socket, int init_fd,
                                     int filters_fd)
{
    const struct box_facts *f = box_facts();
    const int args[SPAWNER_ARGS] = {
        socket,         filters_fd,       cgroups->v2,       cgroups->v1[0],   cgroups->v1[1],
        cgroups->v1[2], (int)f->uid_base, (int)f->uid_count, (int)f->init_uid, f->cgroups};
    static char name[] = "agentenv-spawn";
    char text[SPAWNER_ARGS][12], *argv[SPAWNER_ARGS + 2] = {name}, *env[] = {NULL};

    for (int i = 0; i < SPAWNER_ARGS; i++) {
        snprintf(text[i], sizeof text[i], "%d", args[i]);
        argv[1 + i] = text[i];
        if (i < SPAWNER_OWN_FDS && args[i] >= 0)
            fcntl(args[i], F_SETFD, 0);
    }
    syscall(SYS_execveat, init_fd, "", argv, env, AT_EMPTY_PATH);
    _exit(1);
}

int spawner_start(const struct cgroup_root *cgroups, int init_fd, int filters_fd, pid_t *pid,
                  struct lh_error *err)
{
    int p[2];

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, p) < 0)
        return lh_fail_errno(err, errno, "a socket for the spawner");
    *pid = fork();
    if (*pid < 0) {
        int saved = errno;
        close(p[0]);
        close(p[1]);
        return lh_fail_errno(err, saved, "forking the spawner");
    }
    if (*pid == 0)
        become_spawner(cgroups, p[1], init_fd, filters_fd);
    close(p[1]);
    struct timeval limit = {.tv_sec = 10};
    setsockopt(p[0], SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    return p[0];
}

int spawner_send(int socket, const struct spawner_request *req, const int *fds, size_t n_fds,
                 struct lh_error *err)
{
    char space[CMSG_SPACE(sizeof(int) * SPAWNER_MAX_FDS)] __attribute__((aligned(8))) = {0};
    struct iovec v = {(void *)req, sizeof *req};
    struct msghdr m = {.msg_iov = &v,
                       .msg_iovlen = 1,
                       .msg_control = space,
                       .msg_controllen = CMSG_SPACE(n_fds * sizeof(int))};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);

    *c = (struct cmsghdr){CMSG_LEN(n_fds * sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(c), fds, n_fds * sizeof(int));
    if (sendmsg(socket, &m, MSG_NOSIGNAL) == sizeof *req)
        return 0;
    return lh_fail(err, LH_UNAVAILABLE, "the spawner does not answer (%s): restart the daemon",
                   strerror(errno));
}
