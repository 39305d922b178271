#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "agentenv/daemon/internal.h"
#include "proto/log.h"

LH_LOG_COMPONENT("agentenvd");

/* The living sandbox whose init had this pid and is dead now; a late event may name a pid that a
 * younger sandbox has. */
static struct sandbox *find_dead(struct daemon *d, pid_t pid)
{
    LH_LOCKED(&d->lock);

    for (size_t i = 0; i < BUCKETS; i++)
        for (struct sandbox *s = d->buckets[i]; s; s = s->next) {
            if (!s->box || s->ending || s->state == SB_DEAD || s->init_pid != pid)
                continue;
            struct pollfd p = {.fd = box_pidfd(s->box), .events = POLLIN};
            if (poll(&p, 1, 0) != 1)
                continue;
            s->refs++;
            s->execs++; /* keeps the box */
            return s;
        }
    return NULL;
}

static void report_death(struct daemon *d, struct sandbox *s)
{
    struct box_usage usage = {0};
    struct lh_error err = {0};

    if (box_usage(s->box, &usage, NULL) < 0)
        usage.oom_kills = 0;
    int cause = usage.oom_kills ? LONGHAUL__SANDBOX__V1__DEATH_CAUSE__DEATH_OOM
                                : LONGHAUL__SANDBOX__V1__DEATH_CAUSE__DEATH_KILLED;
    if (box_kill(s->box, &err) < 0) /* the kernel kills what a dead init leaves; we wait for it */
        lh_warn("processes of a dead sandbox", "sandbox=%s why=%s", s->id, err.message);
    network_close(d, s);
    sandbox_set_state(d, s, SB_DEAD, cause);
    if (registry_set_state(d, s->id, SB_DEAD, cause, &err) < 0)
        lh_warn("death not recorded", "sandbox=%s why=%s", s->id, err.message);
    lh_info("sandbox died", "sandbox=%s cause=%s", s->id, usage.oom_kills ? "oom" : "killed");
    sandbox_end(d, s, HOLD_EXEC);
}

static void *monitor_main(void *arg)
{
    struct daemon *d = arg;
    struct epoll_event e;

    for (;;) {
        int n = epoll_wait(d->epoll_fd, &e, 1, -1); /* ended by stop_fd */
        if (n < 0 && errno != EINTR) {
            lh_err("monitor ended", "errno=%d: deaths of sandboxes go unnoticed", errno);
            return NULL;
        }
        if (n == 1 && e.data.u64 == 0)
            return NULL;
        struct sandbox *s = n == 1 ? find_dead(d, (pid_t)e.data.u64) : NULL;
        if (s)
            report_death(d, s);
    }
}

int monitor_start(struct daemon *d, struct lh_error *err)
{
    struct epoll_event stop = {.events = EPOLLIN};

    d->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    d->stop_fd = eventfd(0, EFD_CLOEXEC);
    if (d->epoll_fd < 0 || d->stop_fd < 0 ||
        epoll_ctl(d->epoll_fd, EPOLL_CTL_ADD, d->stop_fd, &stop) < 0)
        return lh_fail_errno(err, errno, "starting the monitor of sandboxes");
    int e = pthread_create(&d->monitor, NULL, monitor_main, d);
    if (e)
        return lh_fail_errno(err, e, "starting the monitor of sandboxes");
    d->monitor_runs = true;
    return 0;
}

void monitor_stop(struct daemon *d)
{
    uint64_t one = 1;

    if (!d->monitor_runs)
        return;
    if (write(d->stop_fd, &one, sizeof one) != sizeof one)
        lh_warn("monitor not stopped", "errno=%d", errno);
    else
        pthread_join(d->monitor, NULL);
    d->monitor_runs = false;
}

int monitor_add(struct daemon *d, struct sandbox *s, struct lh_error *err)
{
    struct epoll_event e = {.events = EPOLLIN | EPOLLONESHOT, .data.u64 = (uint64_t)s->init_pid};

    if (epoll_ctl(d->epoll_fd, EPOLL_CTL_ADD, box_pidfd(s->box), &e) < 0)
        return lh_fail_errno(err, errno, "watching sandbox %s", s->id);
    return 0; /* closing the pidfd takes it out again */
}
