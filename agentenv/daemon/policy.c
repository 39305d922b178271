/* What a sandbox's policy is; janitor.c carries it out. */
#include <errno.h>
#include <string.h>

#include "agentenv/daemon/internal.h"
#include "agentenv/snapshot/snapshot.h"
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

/* ---- to rest, and awake again ---- */

/* The state in which its policy, and no person, put it to rest; -1: it does not rest. */
static int rests(struct daemon *d, struct sandbox *s)
{
    LH_LOCKED(&d->lock);

    return (s->state == SB_FROZEN && s->policy.freeze_after_ms) ||
                   (s->state == SB_HIBERNATED && s->policy.hibernate_after_ms)
               ? (int)s->state
               : -1;
}

static int wake(struct daemon *d, struct sandbox *s, int rest, uint32_t attempt,
                int64_t deadline_ms, struct lh_error *err)
{
    V1(SandboxAttempt) req = LONGHAUL__SANDBOX__V1__SANDBOX_ATTEMPT__INIT;

    req.id = s->id;
    req.attempt = attempt;
    return rest == SB_HIBERNATED ? daemon_resume(d, s->id, attempt, deadline_ms, err)
                                 : daemon_set_frozen(d, &req, false, deadline_ms, err);
}

/* It may be put to rest between the waking and the command's turn, or into another rest before the
 * waking: then once more.  A waking that fails is not tried again. */
int policy_begin_exec(struct daemon *d, const char *id, uint32_t attempt, unsigned states,
                      int64_t deadline_ms, struct sandbox **out, struct lh_error *err)
{
    struct sandbox *s;
    int r = sandbox_find(d, id, &s, err);

    if (r < 0)
        return r;
    for (;;) {
        struct lh_error why = {0};
        int rest = rests(d, s), now;
        r = rest < 0 ? 0 : wake(d, s, rest, attempt, deadline_ms, &why);
        bool awake = r == 0;
        if (awake)
            r = sandbox_begin(d, s->id, attempt, states, HOLD_EXEC, deadline_ms, out, &why);
        if (r == LH_FAILED_PRECONDITION && (now = rests(d, s)) >= 0 && (awake || now != rest) &&
            lh_ms_left(deadline_ms) > 0)
            continue;
        if (r < 0)
            lh_fail(err, r, "%s", why.message);
        break;
    }
    sandbox_unref(d, s);
    return r;
}

static bool is_idle(struct daemon *d, const struct sandbox *s, uint32_t after_ms)
{
    LH_LOCKED(&d->lock);

    return after_ms && s->execs == 0 && s->used_ms + after_ms <= lh_now_ms();
}

int policy_rest(struct daemon *d, const char *id, bool hibernate, int64_t deadline_ms,
                struct lh_error *err)
{
    struct sandbox *s;
    int r = hibernate ? engines_need_criu(d, deadline_ms, err) : 0;

    if (r == 0)
        r = sandbox_begin(d, id, ANY_ATTEMPT, SB_IN(SB_RUNNING) | SB_IN(SB_FROZEN), HOLD_ALONE,
                          deadline_ms, &s, err);
    if (r < 0)
        return r;
    int64_t used_ms = s->used_ms; /* a rest is no use */
    int64_t start_us = lh_now_us();
    r = 1;
    if (is_idle(d, s, hibernate ? s->policy.hibernate_after_ms : s->policy.freeze_after_ms))
        r = hibernate ? snapshot_hibernate(d, s, err) : set_frozen_held(d, s, true, err);
    if (r == 0 && hibernate)
        note_cost(&d->hibernate_us, start_us);
    pthread_mutex_lock(&d->lock);
    s->busy = false;
    s->used_ms = used_ms;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&d->lock);
    sandbox_unref(d, s);
    return r;
}
