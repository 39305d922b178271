/* What happens to sandboxes by the clock, which is the monotonic one: the end of their time,
 * idleness, and once a minute gc.
 *
 * What is due is collected under the lock and done outside of it, several at a time: a thousand
 * that end in one second must not wait for each other's removal.  An action that fails (somebody
 * has the sandbox, it went meanwhile) is tried again after RETRY_MS. */
#include <string.h>

#include "agentenv/daemon/internal.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/log.h"
#include "proto/wait.h"

LH_LOG_COMPONENT("agentenvd");

enum {
    GC_EVERY_MS = 60000,
    GC_GRACE_MS = 600000,
    DUE_MAX = 64,
    WORKERS = 4,
    RETRY_MS = 5000,
    TURN_MS = 1000 /* to get a sandbox that somebody else has */
};

enum action { NOTHING, EXPIRE, PUT_AWAY_AT_TTL, FREEZE, HIBERNATE };

struct due {
    char id[LH_ID_SIZE];
    enum action action;
};

struct round {
    struct daemon *d;
    struct due due[DUE_MAX];
    unsigned n;
    atomic_uint next;
};

static void sooner(int64_t *next_ms, int64_t at_ms)
{
    if (at_ms < *next_ms)
        *next_ms = at_ms;
}

/* The first action of an idle sandbox that is due, and when the next would be. */
static enum action idle_action(const struct sandbox *s, int64_t now, int64_t *next_ms)
{
    const struct {
        uint32_t after_ms;
        unsigned states;
        enum action action;
    } steps[] = {
        {s->policy.hibernate_after_ms, SB_IN(SB_RUNNING) | SB_IN(SB_FROZEN), HIBERNATE},
        {s->policy.freeze_after_ms, SB_IN(SB_RUNNING), FREEZE},
    };

    if (s->execs || s->files || s->busy)
        return NOTHING;
    for (size_t i = 0; i < LH_ARRAY_SIZE(steps); i++) {
        int64_t at_ms = s->used_ms + steps[i].after_ms;
        if (!steps[i].after_ms || !(steps[i].states & SB_IN(s->state)))
            continue;
        if (at_ms <= now)
            return steps[i].action;
        sooner(next_ms, at_ms);
    }
    return NOTHING;
}

static enum action action_of(const struct sandbox *s, int64_t now, int64_t *next_ms)
{
    if (s->policy.pinned || (s->ending && s->state != SB_HIBERNATED))
        return NOTHING;
    if (s->retry_ms > now) {
        sooner(next_ms, s->retry_ms);
        return NOTHING;
    }
    if (s->ttl_at_ms <= now)
        return s->policy.hibernate_at_ttl ? PUT_AWAY_AT_TTL : EXPIRE;
    sooner(next_ms, s->ttl_at_ms);
    return idle_action(s, now, next_ms);
}

static void collect_due(struct round *r, int64_t *next_ms)
{
    int64_t now = lh_now_ms();

    r->n = 0;
    for (size_t i = 0; i < BUCKETS; i++)
        for (struct sandbox *s = r->d->buckets[i]; s && r->n < DUE_MAX; s = s->next) {
            enum action a = action_of(s, now, next_ms);
            if (a == NOTHING)
                continue;
            s->retry_ms = now + RETRY_MS;
            memcpy(r->due[r->n].id, s->id, LH_ID_SIZE);
            r->due[r->n++].action = a;
        }
}

/* Without the engine it is removed as if nothing had been said. */
static int put_away(struct daemon *d, const char *id, struct lh_error *err)
{
    struct sandbox *s;
    int64_t deadline_ms = lh_now_ms() + WAIT_DEFAULT_MS;
    int r = engines_need_criu(d, deadline_ms, NULL) < 0
                ? daemon_expire(d, id, err)
                : daemon_hibernate(d, id, ANY_ATTEMPT, deadline_ms, err);

    if (r == 0 && sandbox_find(d, id, &s, NULL) == 0) {
        r = registry_set_ttl(d, id, INT64_MAX, err);
        pthread_mutex_lock(&d->lock);
        s->ttl_at_ms = INT64_MAX;
        pthread_mutex_unlock(&d->lock);
        sandbox_unref(d, s);
    }
    return r;
}

static int act(struct daemon *d, const struct due *due, struct lh_error *err)
{
    switch (due->action) {
    case EXPIRE:
        return daemon_expire(d, due->id, err);
    case PUT_AWAY_AT_TTL:
        return put_away(d, due->id, err);
    case FREEZE:
    case HIBERNATE:
        return policy_rest(d, due->id, due->action == HIBERNATE, lh_now_ms() + TURN_MS, err);
    default:
        return 0;
    }
}

/* What was done need not wait for the next thing to do. */
static void forget_retry(struct daemon *d, const char *id)
{
    struct sandbox *s;

    if (sandbox_find(d, id, &s, NULL) < 0)
        return;
    pthread_mutex_lock(&d->lock);
    s->retry_ms = 0;
    pthread_mutex_unlock(&d->lock);
    sandbox_unref(d, s);
}

static void *work(void *arg)
{
    static const char *const names[] = {"", "removed: its time is over",
                                        "hibernated: its time is over", "frozen: idle",
                                        "hibernated: idle"};
    struct round *r = arg;

    for (unsigned i; (i = atomic_fetch_add(&r->next, 1)) < r->n;) {
        struct lh_error err = {0};
        int status = act(r->d, &r->due[i], &err);
        if (status >= 0)
            forget_retry(r->d, r->due[i].id);
        if (status == 0)
            lh_info("by the clock", "sandbox=%s %s", r->due[i].id, names[r->due[i].action]);
        else if (status < 0 && status != LH_NOT_FOUND)
            lh_warn("by the clock, failed", "sandbox=%s why=%s", r->due[i].id, err.message);
    }
    return NULL;
}

static void work_all(struct round *r)
{
    pthread_t threads[WORKERS];
    unsigned n = 0;

    r->next = 0;
    while (n + 1 < WORKERS && n + 1 < r->n && pthread_create(&threads[n], NULL, work, r) == 0)
        n++;
    work(r);
    while (n > 0)
        pthread_join(threads[--n], NULL);
}

static void collect_garbage(struct daemon *d)
{
    struct gc_result done = {0};
    struct lh_error err = {0};

    if (checkpoints_flush(d, &err) < 0)
        lh_warn("checkpoints not flushed", "why=%s", err.message);
    if (snapshot_gc(d, GC_GRACE_MS, &done, &err) < 0)
        lh_warn("gc failed", "why=%s", err.message);
    else if (done.snapshots || done.layers)
        lh_info("gc", "snapshots=%u layers=%u bytes=%llu", done.snapshots, done.layers,
                (unsigned long long)done.bytes);
}

static void *janitor_main(void *arg)
{
    struct round r = {.d = arg};
    struct daemon *d = r.d;
    int64_t gc_at_ms = lh_now_ms() + GC_EVERY_MS;

    pthread_mutex_lock(&d->lock);
    while (!d->stopping) {
        int64_t next_ms = gc_at_ms;
        collect_due(&r, &next_ms);
        if (r.n == 0 && lh_now_ms() < gc_at_ms) {
            lh_wait_until(&d->janitor_wake, &d->lock, next_ms);
            continue;
        }
        pthread_mutex_unlock(&d->lock);
        if (r.n)
            work_all(&r);
        if (lh_now_ms() >= gc_at_ms) {
            collect_garbage(d);
            gc_at_ms = lh_now_ms() + GC_EVERY_MS;
        }
        pthread_mutex_lock(&d->lock);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

int janitor_start(struct daemon *d, struct lh_error *err)
{
    int e = pthread_create(&d->janitor, NULL, janitor_main, d);

    if (e)
        return lh_fail_errno(err, e, "starting the janitor");
    d->janitor_runs = true;
    return 0;
}

void janitor_wake(struct daemon *d)
{
    LH_LOCKED(&d->lock);

    pthread_cond_signal(&d->janitor_wake);
}

void janitor_stop(struct daemon *d)
{
    if (!d->janitor_runs)
        return;
    pthread_mutex_lock(&d->lock);
    d->stopping = true;
    pthread_cond_signal(&d->janitor_wake);
    pthread_mutex_unlock(&d->lock);
    pthread_join(d->janitor, NULL);
    d->janitor_runs = false;
}
