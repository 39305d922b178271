#include "kvstore/daemon/lent.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "proto/wait.h"

LH_LOG_COMPONENT("kvstored");

static void ring(const struct kv_lent *l)
{
    uint64_t one = 1;

    if (write(l->bell_fd, &one, sizeof one) < 0)
        lh_err("arbiter", "bell: errno=%d", errno);
}

/* The store's thread keeps the deadline: what has not ended by itself by then is ended. */
static int on_revoke(void *lent, enum arbiter_phase next, int64_t deadline_ms)
{
    struct kv_lent *l = lent;
    LH_LOCKED(&l->lock);

    if (next == ARBITER_ROLLOUT)
        return 0;
    l->told = true;
    l->away = true;
    l->deadline_ms = deadline_ms;
    ring(l);
    while (!l->gone)
        if (!lh_wait_until(&l->changed, &l->lock, deadline_ms))
            return l->gone ? 0 : LH_DEADLINE_EXCEEDED;
    return 0;
}

static void on_phase(void *lent, enum arbiter_phase phase, uint64_t epoch)
{
    struct kv_lent *l = lent;
    LH_LOCKED(&l->lock);

    (void)epoch;
    if (phase != ARBITER_ROLLOUT)
        return;
    l->told = true;
    l->away = false;
    ring(l);
}

static int borrow(struct kv_lent *l, const char *socket, uint64_t bytes, int *fd,
                  struct lh_error *err)
{
    struct arbiter_options o = {.path = socket,
                                .client = "kvstored",
                                .on_revoke = on_revoke,
                                .on_phase = on_phase,
                                .ctx = l};

    l->bell_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (l->bell_fd < 0)
        return lh_fail_errno(err, errno, "eventfd");
    l->arbiter = arbiter_connect(&o, err);
    if (!l->arbiter)
        return err->code;
    int r =
        arbiter_declare_file(l->arbiter, "kvstored-memory", LONGHAUL__ARBITER__V1__CLASS__CLASS_KV,
                             bytes, ARBITER_IN(ARBITER_ROLLOUT), fd, err);
    if (r < 0)
        return r;
    bool rollout = arbiter_phase_now(l->arbiter) == ARBITER_ROLLOUT;
    LH_LOCKED(&l->lock);
    if (!rollout && !l->told) {
        l->away = true;
        l->deadline_ms = lh_now_ms();
        ring(l);
    }
    return 0;
}

int kv_lent_open(struct kv_lent *l, const char *socket, uint64_t bytes, bool keeps_late, int *fd,
                 struct lh_error *err)
{
    *l = (struct kv_lent){.bell_fd = -1, .keeps_late = keeps_late};
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->changed, NULL);
    int r = borrow(l, socket, bytes, fd, err);
    if (r < 0)
        kv_lent_close(l);
    return r;
}

void kv_lent_close(struct kv_lent *l)
{
    pthread_mutex_lock(&l->lock);
    l->gone = true; /* nobody gives anything up any more */
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    arbiter_destroy(l->arbiter);
    if (l->bell_fd >= 0)
        close(l->bell_fd);
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->lock);
}

bool kv_lent_wants(struct kv_lent *l, int64_t *deadline_us)
{
    LH_LOCKED(&l->lock);

    *deadline_us = l->deadline_ms * 1000;
    return l->away && !l->gone;
}

void kv_lent_gave(struct kv_lent *l)
{
    LH_LOCKED(&l->lock);

    l->gone = true;
    pthread_cond_broadcast(&l->changed);
}

bool kv_lent_returned(struct kv_lent *l)
{
    LH_LOCKED(&l->lock);
    bool returned = l->gone && !l->away;

    if (returned)
        l->gone = false;
    return returned;
}

bool kv_lent_lost(const struct kv_lent *l)
{
    return arbiter_lost(l->arbiter);
}
