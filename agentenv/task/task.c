#include "agentenv/task/task.h"

#include <sodium.h>

#include "proto/cleanup.h"
#include "proto/parse.h"

/* A digest names content for good: a task registered again under the same digest is not verified
 * again.  So it is a cryptographic hash, not a fast one. */
int task_digest(const Task *task, uint8_t digest[TASK_DIGEST], struct lh_error *err)
{
    size_t len;
    lh_autofree uint8_t *bytes = lh_pack(&task->base, &len, err);

    if (!bytes)
        return lh_wrap(err, "digest of task %s", task->name);
    if (sodium_init() < 0)
        return lh_fail(err, LH_INTERNAL, "libsodium cannot start");
    crypto_generichash(digest, TASK_DIGEST, bytes, len, NULL, 0);
    return 0;
}

typedef Longhaul__Task__V1__Timeout Timeout;
typedef Longhaul__Task__V1__Timeouts Timeouts;

#define FAIL    LONGHAUL__TASK__V1__ON_TIMEOUT__ON_TIMEOUT_FAIL
#define INVALID LONGHAUL__TASK__V1__ON_TIMEOUT__ON_TIMEOUT_INFRA_INVALID

static const struct phase {
    size_t at; /* in Timeouts */
    struct task_timeout fallback;
} phases[TASK_PHASES] = {
    [TASK_BOOT] = {offsetof(Timeouts, boot), {10000, INVALID}},
    [TASK_SETUP] = {offsetof(Timeouts, setup), {60000, INVALID}},
    [TASK_ACTION] = {offsetof(Timeouts, action), {30000, FAIL}},
    [TASK_AGENT] = {offsetof(Timeouts, agent), {3600000, FAIL}},
    [TASK_VERIFY] = {offsetof(Timeouts, verify), {60000, INVALID}},
    [TASK_TEARDOWN] = {offsetof(Timeouts, teardown), {10000, INVALID}},
};

struct task_timeout task_timeout(const Task *task, enum task_phase phase)
{
    const struct phase *p = &phases[phase < TASK_PHASES ? phase : TASK_VERIFY];
    struct task_timeout t = p->fallback;
    const Timeout *given =
        task->timeouts ? *(Timeout *const *)((const char *)task->timeouts + p->at) : NULL;

    if (given && given->ms)
        t.ms = given->ms;
    if (given && given->on_timeout)
        t.on_timeout = given->on_timeout;
    return t;
}

const char *task_workdir(const Task *task)
{
    return *task->environment->workdir ? task->environment->workdir : "/work";
}

struct task_reward task_reward(const Task *task)
{
    const Longhaul__Task__V1__Verifier *v = task->verifier;
    struct task_reward r = {v->reward_min, v->reward_max, v->pass_mark};

    if (r.min == 0 && r.max == 0)
        r.max = 1;
    if (r.pass_mark == 0)
        r.pass_mark = r.max;
    return r;
}
