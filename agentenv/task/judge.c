/* One run of a verifier in a sandbox made for it, and what it means. */
#include "agentenv/task/judge.h"

#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "agentenv/task/exec.h"
#include "agentenv/task/setup.h"
#include "proto/file.h"
#include "proto/parse.h"

enum { REWARD_FILE_MAX = 256, REWARD_JSON_MAX = 64 << 10 };

#define SCORED  LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_SCORED
#define INVALID LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_INVALID
#define TIMEOUT LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_TIMEOUT

/* ---- verdicts ---- */

void judge_conclude(struct judgement *j, int kind, const char *code, const char *fmt, ...)
{
    uint32_t wall_ms = j->verdict.wall_ms;
    va_list ap;

    longhaul__task__v1__verdict__init(&j->verdict);
    va_start(ap, fmt);
    vsnprintf(j->message, sizeof j->message, fmt, ap);
    va_end(ap);
    lh_text_clean(j->message);
    snprintf(j->code, sizeof j->code, "%s", code);
    j->verdict.kind = kind;
    j->verdict.code = j->code;
    j->verdict.message = j->message;
    j->verdict.wall_ms = wall_ms;
}

void judge_score(struct judgement *j, const Task *task, double reward, const char *message)
{
    judge_conclude(j, SCORED, "", "%s", message);
    j->verdict.reward = reward;
    j->verdict.passed = reward >= task_reward(task).pass_mark;
}

/* How a run of the verifier ended, as one word. */
static const char *breakage(const Longhaul__Sandbox__V1__ExecExit *e)
{
    if (e->oom_killed)
        return "verifier_oom";
    if (e->signal || e->status > 127)
        return "verifier_crash";
    return e->status == 126 || e->status == 127 ? "verifier_missing" : NULL;
}

static void time_out(struct judgement *j, const Task *task, const char *how)
{
    if (task_timeout(task, TASK_VERIFY).on_timeout ==
        LONGHAUL__TASK__V1__ON_TIMEOUT__ON_TIMEOUT_FAIL)
        judge_conclude(j, TIMEOUT, "verify_timeout", "%s", how);
    else
        judge_conclude(j, INVALID, "verify_timeout", "%s", how);
}

/* ---- the reward file ---- */

static void score_text(struct judgement *j, const Task *task, const char *text, const char *how)
{
    struct task_reward range = task_reward(task);
    char *end;
    double reward = strtod(text, &end);

    if (end == text || end[strspn(end, " \t\r\n")])
        judge_conclude(j, INVALID, "reward_malformed",
                       "the reward file has '%.100s', not a number; %s", text, how);
    else if (!isfinite(reward))
        judge_conclude(j, INVALID, "reward_not_finite", "the reward is %g; %s", reward, how);
    else if (reward < range.min || reward > range.max)
        judge_conclude(j, INVALID, "reward_out_of_range", "the reward %g is not within %g..%g; %s",
                       reward, range.min, range.max, how);
    else
        judge_score(j, task, reward, how);
}

static void score_run(const struct verify_subject *s, const char *box, const char *reward_path,
                      const struct task_result *result, struct judgement *j)
{
    struct lh_error err = {0};
    size_t len = 0;
    lh_autofree char *text = daemon_get_file(s->d, box, reward_path, REWARD_FILE_MAX, &len, &err);
    char how[800];

    task_describe(result, how, sizeof how);
    if (text && len == strlen(text))
        score_text(j, s->task, text, how);
    else if (text)
        judge_conclude(j, INVALID, "reward_malformed", "the reward file has a NUL byte");
    else if (err.code == LH_NOT_FOUND)
        judge_score(j, s->task, result->exit.status == 0 ? task_reward(s->task).max : 0, how);
    else
        judge_conclude(j, INVALID, "reward_unreadable", "%s", err.message);
}

/* ---- reward files of the task's own ---- */

/* A number, or an object of finite numbers with one called "reward". */
static bool read_json_reward(const char *text, size_t len, double *reward)
{
    json_t *top = json_loadb(text, len, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, NULL);
    const json_t *v = json_is_object(top) ? json_object_get(top, "reward") : top;
    bool fine = json_is_number(v);
    const char *name;
    json_t *other;

    json_object_foreach(top, name, other) fine = fine && json_is_number(other);
    *reward = fine ? json_number_value(v) : 0;
    json_decref(top);
    return fine;
}

static bool is_json(const char *path)
{
    size_t n = strlen(path);

    return n > 5 && !strcmp(path + n - 5, ".json");
}

static void score_file(struct judgement *j, const Task *task, const char *path, const char *text,
                       size_t len, const char *how)
{
    char number[40];
    double reward;

    if (!is_json(path) && len == strlen(text)) {
        score_text(j, task, text, how);
        return;
    }
    if (!is_json(path) || !read_json_reward(text, len, &reward)) {
        judge_conclude(j, INVALID, "reward_malformed", "%s holds no reward; %s", path, how);
        return;
    }
    snprintf(number, sizeof number, "%.17g", reward);
    score_text(j, task, number, how);
}

/* False: there is none. */
static bool score_files(const struct verify_subject *s, const char *box, struct judgement *j,
                        const char *how)
{
    const Longhaul__Task__V1__Verifier *v = s->task->verifier;

    for (size_t i = 0; i < v->n_reward_files; i++) {
        const char *path = v->reward_files[i];
        struct lh_error err = {0};
        size_t len = 0;
        lh_autofree char *text = daemon_get_file(s->d, box, path, REWARD_JSON_MAX, &len, &err);

        if (!text && err.code == LH_NOT_FOUND)
            continue;
        if (text)
            score_file(j, s->task, path, text, len, how);
        else
            judge_conclude(j, INVALID, "reward_unreadable", "%s", err.message);
        return true;
    }
    return false;
}

/* *broken as in judge_run(). */
static void score_by_files(const struct verify_subject *s, const char *box,
                           const struct task_result *result, struct judgement *j, bool *broken)
{
    const char *code = breakage(&result->exit);
    char how[800];

    task_describe(result, how, sizeof how);
    if (score_files(s, box, j, how))
        return;
    *broken = code;
    judge_conclude(j, INVALID, code ? code : "reward_missing", "no reward was written; %s", how);
}

/* ---- one run ---- */

/* The directory may be gone, by the agent's hand: then its task is not done. */
#define ENTER "cd -- \"$1\" || exit 1\n"
/* Where only a reward file counts, the tests must come to run, and to fail. */
#define ENTER_ANYHOW "mkdir -p -- \"$1\" && cd -- \"$1\" || exit 1\n"

void judge_run(const struct verify_subject *s, const char *box, struct judgement *j, bool *broken)
{
    struct lh_error err = {0};
    char id[LH_ID_SIZE], reward_path[64], reward_env[96], how[800];
    lh_autofree char *script =
        lh_format("%s%s", s->task->verifier->n_reward_files ? ENTER_ANYHOW : ENTER,
                  s->task->verifier->command);
    const char *const argv[] = {VERIFIER_BIN "/sh",    "-c", script, "verifier",
                                task_workdir(s->task), NULL};
    struct task_command command = {
        .argv = argv,
        .cwd = "/",
        .user = "",
        .extra_env = {"PATH=" VERIFIER_BIN ":/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
                      reward_env},
        .timeout_ms = task_timeout(s->task, TASK_VERIFY).ms,
        .call = s->call,
    };
    struct task_result result;

    lh_id_new_text(id);
    snprintf(reward_path, sizeof reward_path, "/.reward-%s", id);
    snprintf(reward_env, sizeof reward_env, "LONGHAUL_REWARD=%s", reward_path);
    const Longhaul__Task__V1__Verifier *v = s->task->verifier;
    *broken = false;
    if (!script || task_put_files(s->d, box, v->files, v->n_files, &err) < 0 ||
        task_exec(s->d, s->task, box, &command, &result, &err) < 0) {
        judge_conclude(j, INVALID, "verifier_start", "%s", script ? err.message : "no memory");
        return;
    }
    j->verdict.wall_ms = result.exit.wall_ms;
    task_describe(&result, how, sizeof how);
    const char *code = breakage(&result.exit);
    if (result.exit.timed_out)
        time_out(j, s->task, how);
    else if (v->n_reward_files) {
        score_by_files(s, box, &result, j, broken);
        return;
    } else if (code)
        judge_conclude(j, INVALID, code, "%s", how);
    else
        score_run(s, box, reward_path, &result, j);
    *broken = !result.exit.timed_out && code;
}
