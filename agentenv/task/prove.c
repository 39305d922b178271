/* Does a task measure what it says?  Its oracle must pass, and doing nothing must score 0, each in
 * real sandboxes of the task: a verifier that always says yes, always says no, or does not run, is
 * found before anything is trained on it. */
#include <stdio.h>

#include "agentenv/task/exec.h"
#include "agentenv/task/register.h"
#include "agentenv/task/setup.h"
#include "agentenv/task/verify.h"
#include "proto/clock.h"
#include "proto/log.h"

LH_LOG_COMPONENT("task");

enum { SANDBOX_MS = 30000 };

static int create(const struct verify_subject *s, char box[LH_ID_SIZE], struct lh_error *err)
{
    Longhaul__Sandbox__V1__CreateRequest req = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__INIT;
    struct daemon_create_options o = {.transient = true};
    int64_t deadline = lh_now_ms() + SANDBOX_MS + task_timeout(s->task, TASK_SETUP).ms +
                       task_timeout(s->task, TASK_BOOT).ms;
    char key[LH_ID_SIZE];

    lh_id_new_text(key);
    req.idempotency_key = key;
    req.owner = (char *)"registration";
    req.source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_TASK;
    req.task = (char *)s->task_name;
    return daemon_create(s->d, &req, &o, deadline, box, err);
}

static void discard(struct daemon *d, const char *box)
{
    struct lh_error err = {0};

    if (*box && daemon_remove(d, box, 0, &err) < 0 && err.code != LH_NOT_FOUND)
        lh_warn("sandbox of a registration stays until the daemon restarts", "sandbox=%s error=%s",
                box, err.message);
}

/* `last` describes the last action that failed: the likely reason when the verdict is bad. */
static int act(const struct verify_subject *s, char *last, size_t size, struct lh_error *err)
{
    const Longhaul__Task__V1__Oracle *oracle = s->task->oracle;

    for (size_t i = 0; i < oracle->n_actions; i++) {
        const char *const argv[] = {"/bin/sh", "-c", oracle->actions[i], NULL};
        struct task_command c = {.argv = argv,
                                 .user = s->task->environment->user,
                                 .timeout_ms = task_timeout(s->task, TASK_ACTION).ms,
                                 .call = s->call};
        struct task_result result;
        char how[800];
        int r = task_exec(s->d, s->task, s->sandbox, &c, &result, err);

        if (r < 0)
            return lh_wrap(err, "oracle.actions[%zu] '%.100s'", i, oracle->actions[i]);
        task_describe(&result, how, sizeof how);
        if (result.exit.status != 0 || result.exit.timed_out)
            snprintf(last, size, "; action '%.60s' before: %.200s", oracle->actions[i], how);
    }
    return 0;
}

static int prove_oracle(struct verify_subject *s, struct lh_error *err)
{
    char box[LH_ID_SIZE] = "", last[320] = "";
    struct judgement j = {0};
    int r = create(s, box, err);

    s->sandbox = box;
    if (r == 0)
        r = act(s, last, sizeof last, err);
    if (r == 0)
        r = verify(s, &j, err);
    discard(s->d, box);
    s->sandbox = NULL;
    if (r < 0)
        return lh_wrap(err, "oracle run");
    if (j.verdict.kind != LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_SCORED)
        return lh_fail(err, LH_FAILED_PRECONDITION, "oracle run: verdict %s: %.500s%s", j.code,
                       j.message, last);
    if (!j.verdict.passed)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "the oracle scored %g, it must reach %g; verifier: %.500s%s",
                       j.verdict.reward, task_reward(s->task).pass_mark, j.message, last);
    return 0;
}

/* Where nothing runs before the agent, a fresh sandbox is what a fork of it would be. */
static int judge_nothing(struct verify_subject *s, struct judgement *j, struct lh_error *err)
{
    if (task_runs_nothing_before_the_agent(s->task))
        return verify_untouched(s, j, err);
    char box[LH_ID_SIZE] = "";
    int r = create(s, box, err);
    s->sandbox = box;
    if (r == 0)
        r = verify(s, j, err);
    discard(s->d, box);
    s->sandbox = NULL;
    return r;
}

static int prove_nothing(struct verify_subject *s, struct lh_error *err)
{
    struct judgement j = {0};
    int r = judge_nothing(s, &j, err);

    if (r < 0)
        return lh_wrap(err, "nop run");
    if (j.verdict.kind != LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_SCORED)
        return lh_fail(err, LH_FAILED_PRECONDITION, "nop run: verdict %s: %.500s", j.code,
                       j.message);
    if (j.verdict.reward != 0)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "doing nothing scored %g, it must score 0; verifier: %.500s",
                       j.verdict.reward, j.message);
    return 0;
}

int task_prove(struct daemon *d, const Task *task, struct rpc_call *call, struct lh_error *err)
{
    struct candidate candidate;
    struct verify_subject s = {.d = d, .task = task, .task_name = candidate.key, .call = call};

    if (!task->oracle || !task->oracle->n_actions)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "it has no oracle to verify it with; give oracle.actions, or register it "
                       "unverified with --no-verify");
    candidate_add(&candidate, task);
    int r = prove_nothing(&s, err);
    if (r == 0)
        r = prove_oracle(&s, err);
    candidate_remove(&candidate);
    return r;
}
