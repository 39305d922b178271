/* The connection to init, which ends before a checkpoint and begins again after it.
 *
 * A box is *asleep* between: either its processes are stopped for a moment, or there are none, for
 * seconds or days.  Threads that follow an exec find their channel closed by init, wait for the box
 * to wake, and attach again where they were; so do requests that were admitted an instant too
 * early.  A new box (box_asleep()) begins in this state. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "agentenv/sandbox/box_private.h"
#include "proto/clock.h"
#include "proto/wait.h"

enum { QUIESCE_MS = 5000 };

static void set_life(struct box *b, enum box_life life)
{
    if (life == BOX_ASLEEP && b->life == BOX_AWAKE)
        b->asleep_ms = lh_now_ms();
    if (life == BOX_AWAKE && b->life == BOX_ASLEEP)
        b->slept_ms = lh_now_ms() - b->asleep_ms;
    b->life = life;
    pthread_cond_broadcast(&b->life_changed);
}

static void close_control(struct box *b)
{
    if (b->control >= 0)
        close(b->control);
    b->control = -1;
}

/* The end of the connection is init's answer. */
static int await_end(struct box *b, struct lh_error *err)
{
    struct pollfd p = {b->control, POLLIN, 0};
    char c;

    if (poll(&p, 1, QUIESCE_MS) <= 0)
        return lh_fail(err, LH_DEADLINE_EXCEEDED,
                       "init of sandbox %s does not become quiet: a command hangs before its exec",
                       b->id);
    ssize_t n = recv(b->control, &c, 1, MSG_DONTWAIT);
    if (n != 0 && !(n < 0 && errno == ECONNRESET))
        return lh_fail(err, LH_INTERNAL, "init of sandbox %s talks instead of becoming quiet",
                       b->id);
    return 0;
}

int box_quiesce(struct box *b, struct lh_error *err)
{
    struct wire_request req = {.op = WIRE_QUIESCE};

    LH_LOCKED(&b->life_lock);
    if (b->life != BOX_AWAKE)
        return lh_fail(err, LH_FAILED_PRECONDITION, "sandbox %s is asleep", b->id);
    set_life(b, BOX_ASLEEP);
    int r = send(b->control, &req, sizeof req, MSG_NOSIGNAL) == sizeof req
                ? await_end(b, err)
                : lh_fail(err, LH_UNAVAILABLE, "sandbox %s has died", b->id);
    close_control(b); /* in any case: init then waits for a new one */
    return r;
}

static int take_control(struct box *b, struct lh_error *err)
{
    struct wire_request hello = {.op = WIRE_HELLO};

    close_control(b);
    b->control = (int)syscall(SYS_pidfd_getfd, b->pidfd, WIRE_PARKED_FD, 0);
    if (b->control < 0)
        return lh_fail_errno(err, errno, "the control socket of init %d", b->identity.init_pid);
    if (send(b->control, &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello)
        return lh_fail_errno(err, errno, "greeting init %d", b->identity.init_pid);
    return 0;
}

struct arming {
    struct box *box;
    struct lh_error *err;
};

static int arm(void *ctx, const char *exec_id)
{
    struct arming *a = ctx;
    struct wire_request req = {.op = WIRE_KILL};
    char space[CMSG_SPACE(sizeof(int))] __attribute__((aligned(8))) = {0};
    struct iovec v = {&req, sizeof req};
    struct msghdr m = {
        .msg_iov = &v, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    lh_autoclose int fd = cgroup_exec_kill_fd(a->box->cgroup, exec_id);

    if (fd < 0)
        return lh_fail_errno(a->err, errno, "cgroup.kill of exec %s", exec_id);
    snprintf(req.exec_id, sizeof req.exec_id, "%s", exec_id);
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    *c = (struct cmsghdr){CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    if (sendmsg(a->box->control, &m, MSG_NOSIGNAL) != sizeof req)
        return lh_fail_errno(a->err, errno, "arming exec %s", exec_id);
    return 0;
}

int box_connect(struct box *b, struct lh_error *err)
{
    LH_LOCKED(&b->life_lock);
    struct arming a = {b, err};
    int r = take_control(b, err);

    if (r == 0)
        r = cgroup_each_exec(b->cgroup, arm, &a);
    if (r == 0)
        set_life(b, BOX_AWAKE);
    return r;
}

void box_give_up(struct box *b)
{
    LH_LOCKED(&b->life_lock);
    set_life(b, BOX_OVER);
}

static bool is_dead(const struct box *b)
{
    struct pollfd p = {b->pidfd, POLLIN, 0};

    return b->pidfd >= 0 && poll(&p, 1, 0) > 0;
}

bool box_is_dead(struct box *b)
{
    LH_LOCKED(&b->life_lock);
    return b->life == BOX_OVER || (b->life == BOX_AWAKE && is_dead(b));
}

int box_wait_awake(struct box *b, int64_t deadline_ms, int64_t *slept_ms, struct lh_error *err)
{
    LH_LOCKED(&b->life_lock);
    while (b->life == BOX_ASLEEP)
        if (!lh_wait_until(&b->life_changed, &b->life_lock, deadline_ms))
            return 0;
    *slept_ms = b->slept_ms;
    if (b->life == BOX_OVER || is_dead(b))
        return lh_fail(err, LH_UNAVAILABLE, "sandbox %s has died", b->id);
    return 1;
}
