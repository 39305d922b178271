/* What a sandbox's policy is; janitor.c carries it out. */
#include <errno.h>
#include <string.h>

#include "agentenv/daemon/internal.h"
#include "proto/clock.h"

void policy_copy(V1(Policy) * to, const V1(Policy) * from)
{
    longhaul__sandbox__v1__policy__init(to);
    if (!from)
        return;
    to->hibernate_at_ttl = from->hibernate_at_ttl;
    to->freeze_after_ms = from->freeze_after_ms;
    to->hibernate_after_ms = from->hibernate_after_ms;
    to->pinned = from->pinned;
}

int policy_fill(const struct sandbox *s, V1(Sandbox) * m)
{
    m->policy = malloc(sizeof *m->policy);
    if (!m->policy)
        return -1;
    policy_copy(m->policy, &s->policy);
    int64_t left_ms = s->ttl_at_ms - lh_now_ms();
    m->ttl_left_ms = s->ttl_at_ms == INT64_MAX ? 0 : left_ms > 0 ? left_ms : 1;
    return 0;
}

int policy_set(struct daemon *d, const V1(SetPolicyRequest) * req, int64_t deadline_ms,
               struct lh_error *err)
{
    struct sandbox *s;
    int r =
        sandbox_begin(d, req->id, req->attempt, ~SB_IN(SB_DEAD), HOLD_EXEC, deadline_ms, &s, err);

    if (r < 0)
        return r;
    pthread_mutex_lock(&d->lock);
    policy_copy(&s->policy, req->policy);
    if (req->ttl_ms)
        s->ttl_at_ms = lh_now_ms() + req->ttl_ms;
    int64_t ttl_at_ms = s->ttl_at_ms;
    s->retry_ms = 0;
    pthread_mutex_unlock(&d->lock);
    r = registry_set_policy(d, s, err);
    if (r == 0)
        r = registry_set_ttl(d, s->id, ttl_at_ms, err);
    sandbox_end(d, s, HOLD_EXEC);
    janitor_wake(d);
    return r;
}

int policy_wake(struct daemon *d, const char *id, uint32_t attempt, int64_t deadline_ms,
                struct lh_error *err)
{
    V1(SandboxAttempt) req = LONGHAUL__SANDBOX__V1__SANDBOX_ATTEMPT__INIT;
    struct sandbox *s;

    if (sandbox_find(d, id, &s, NULL) < 0)
        return 0; /* whoever asks for it next says so */
    pthread_mutex_lock(&d->lock);
    int state = s->state;
    bool frozen = state == SB_FROZEN && s->policy.freeze_after_ms;
    bool away = state == SB_HIBERNATED && s->policy.hibernate_after_ms;
    pthread_mutex_unlock(&d->lock);
    req.id = s->id;
    req.attempt = attempt;
    int r = frozen ? daemon_set_frozen(d, &req, false, deadline_ms, err)
            : away ? daemon_resume(d, s->id, attempt, deadline_ms, err)
                   : 0;
    sandbox_unref(d, s);
    return r;
}
