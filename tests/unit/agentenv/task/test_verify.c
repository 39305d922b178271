/* Verdicts in real sandboxes: what each end of a verifier means, and what an agent can do about it
 * (nothing).  I8: an infrastructure failure never becomes a reward. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <string.h>

#include "agentenv/task/verify.h"
#include "tests/unit/agentenv/task/build.h"
#include "tests/unit/agentenv/task/house.h"

#define SCORED  LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_SCORED
#define INVALID LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_INVALID
#define TIMEOUT LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_TIMEOUT
#define FAIL    LONGHAUL__TASK__V1__ON_TIMEOUT__ON_TIMEOUT_FAIL
#define REWARD  "> \"$LONGHAUL_REWARD\""

struct row {
    const char *what;
    const char *agent; /* its one command; NULL = none */
    const char *command;
    int kind;
    double reward;
    const char *code;
    uint32_t timeout_ms;
    int on_timeout;
};

static void judge(struct house *h, const struct row *row)
{
    struct built b;
    struct candidate c;
    struct judgement j = {0};
    struct lh_error e = {0};
    char id[LH_ID_SIZE];

    build(&b);
    b.verifier.command = (char *)row->command;
    b.environment.n_files = 1;
    b.file[0].path = (char *)"/work/tool";
    b.file[0].mode = 0755;
    b.file[0].content.data = (uint8_t *)"#!/bin/sh\n[ -d a ]\n";
    b.file[0].content.len = 19;
    b.timeout.ms = row->timeout_ms;
    b.timeout.on_timeout = row->on_timeout;
    b.timeouts.verify = &b.timeout;
    candidate_add(&c, &b.task);
    house_start(h, &c, id);
    if (row->agent)
        house_act(h, id, row->agent);
    struct verify_subject s = {.d = h->d, .task = &b.task, .task_name = c.key, .sandbox = id};
    cr_expect(eq(int, verify(&s, &j, &e), 0), "%s: %s", row->what, e.message);
    cr_expect(eq(int, j.verdict.kind, row->kind), "%s: %s %s", row->what, j.code, j.message);
    cr_expect(eq(dbl, j.verdict.reward, row->reward), "%s: %s", row->what, j.message);
    cr_expect(eq(int, j.verdict.passed, row->reward >= 1), "%s", row->what);
    cr_expect(eq(str, j.code, (char *)row->code), "%s: %s", row->what, j.message);
    cr_expect(eq(int, daemon_remove(h->d, id, 0, &e), 0), "%s", e.message);
    candidate_remove(&c);
}

static void judge_all(const struct row *rows, size_t n)
{
    struct house h;

    NEEDS_SANDBOX();
    house_open(&h);
    for (size_t i = 0; i < n; i++)
        judge(&h, &rows[i]);
    house_close(&h);
}

static const struct row ends[] = {
    {"exit 0", NULL, "true", SCORED, 1, ""},
    {"exit 1", NULL, "false", SCORED, 0, ""},
    {"exit 3", NULL, "exit 3", SCORED, 0, ""},
    {"reward file", NULL, "echo 0.5 " REWARD, SCORED, 0.5, ""},
    {"reward and exit status", NULL, "echo 1 " REWARD "; exit 1", SCORED, 1, ""},
    {"not finite", NULL, "echo nan " REWARD, INVALID, 0, "reward_not_finite"},
    {"infinite", NULL, "echo inf " REWARD, INVALID, 0, "reward_not_finite"},
    {"above the range", NULL, "echo 1.5 " REWARD, INVALID, 0, "reward_out_of_range"},
    {"below the range", NULL, "echo -1 " REWARD, INVALID, 0, "reward_out_of_range"},
    {"not a number", NULL, "echo good " REWARD, INVALID, 0, "reward_malformed"},
    {"two numbers", NULL, "echo 1 1 " REWARD, INVALID, 0, "reward_malformed"},
    {"empty reward file", NULL, ": " REWARD, INVALID, 0, "reward_malformed"},
    {"a directory for a reward", NULL, "mkdir \"$LONGHAUL_REWARD\"", INVALID, 0,
     "reward_unreadable"},
    {"missing program", NULL, "no-such-program", INVALID, 0, "verifier_missing"},
    {"program that cannot run", NULL, "/etc/passwd", INVALID, 0, "verifier_missing"},
    {"crash", NULL, "kill -SEGV $$", INVALID, 0, "verifier_crash"},
    {"crash after a reward", NULL, "echo 1 " REWARD "; kill -SEGV $$", INVALID, 0,
     "verifier_crash"},
    {"no end", NULL, "sleep 20", INVALID, 0, "verify_timeout", 300},
    {"no end, the agent's failure", NULL, "sleep 20", TIMEOUT, 0, "verify_timeout", 300, FAIL},
};

Test(verify, each_end_of_a_verifier_has_its_verdict, .timeout = 120)
{
    judge_all(ends, sizeof ends / sizeof *ends);
}

static const struct row tricks[] = {
    {"honest work", "mkdir a", "[ -d a ]", SCORED, 1, ""},
    {"another shell",
     "cp /work/tool /tmp/t; echo 'exit 0' >/tmp/t; for p in sh busybox test; do "
     "/bin/busybox cp /tmp/t /bin/$p; done",
     "[ -d a ] && ls a", SCORED, 0, ""},
    {"rewards laid out", "for i in 1 2 3; do echo 1 >/.reward-$i; done; echo 1 >/.reward",
     "[ -d a ]", SCORED, 0, ""},
    {"a program in the verifier's directory",
     "mkdir -p /.verifier/bin; echo 'exit 0' >/.verifier/bin/lint; chmod 755 /.verifier/bin/lint",
     "lint || exit 1", SCORED, 0, ""},
    {"the verifier's directory a link", "mkdir /tmp/v; ln -s /tmp/v /.verifier", "[ -d a ]", SCORED,
     0, ""},
    {"a process that waits for the verifier",
     "(while :; do mkdir -p a; done) >/dev/null 2>&1 </dev/null &", "rmdir a; sleep 0.3; [ -d a ]",
     SCORED, 0, ""},
    {"working directory gone", "cd /; rm -rf /work", "[ -d a ]", SCORED, 0, ""},
    {"working directory a file", "cd /; rm -rf /work; echo >/work", "true", SCORED, 0, ""},
    {"what the verifier runs removed", "mkdir a; rm tool", "/work/tool", SCORED, 0, ""},
    {"what the verifier runs broken", "mkdir a; echo 'kill -SEGV $$' >tool", "/work/tool", SCORED,
     0, ""},
    {"memory used up", "mkdir a; tail -c 2000000000 /dev/zero", "[ -d a ]", SCORED, 1, ""},
    {"disk used up", "mkdir a; cat /dev/zero >fill; :", "[ -d a ]", SCORED, 1, ""},
    {"processes used up", "mkdir a; b() { b | b & }; b; sleep 0.2; :", "[ -d a ]", SCORED, 1, ""},
};

Test(verify, what_an_agent_does_to_its_sandbox_is_judged_by_its_files, .timeout = 180)
{
    judge_all(tricks, sizeof tricks / sizeof *tricks);
}

/* Full reward, and the sandbox goes. */
static void finish_well(struct house *h, const struct built *b, struct candidate *c, const char *id)
{
    struct verify_subject s = {.d = h->d, .task = &b->task, .task_name = c->key, .sandbox = id};
    struct judgement j = {0};
    struct lh_error e = {0};

    cr_expect(eq(int, verify(&s, &j, &e), 0), "%s", e.message);
    cr_expect(eq(int, j.verdict.kind, SCORED), "%s %s", j.code, j.message);
    cr_expect(eq(dbl, j.verdict.reward, 1.0), "%s", j.message);
    cr_expect(eq(int, daemon_remove(h->d, id, 0, &e), 0), "%s", e.message);
    candidate_remove(c);
    house_close(h);
}

Test(verify, a_fresh_sandbox_gets_what_is_carried_and_nothing_else, .timeout = 60)
{
    struct house h;
    struct built b;
    struct candidate c;
    char id[LH_ID_SIZE];

    NEEDS_SANDBOX();
    house_open(&h);
    build(&b);
    b.verifier.command =
        (char *)"[ \"$(cat out/result)\" = 7 ] && [ ! -e other ] && [ ! -e /etc/x ]";
    b.verifier.isolation = LONGHAUL__TASK__V1__ISOLATION__ISOLATION_FRESH;
    b.verifier.n_carry = 2;
    b.carry[0] = (char *)"/work/out";
    b.carry[1] = (char *)"/work/never-made";
    candidate_add(&c, &b.task);
    house_start(&h, &c, id);
    house_act(&h, id, "mkdir out; echo 7 >out/result; echo >other; echo >/etc/x");
    finish_well(&h, &b, &c, id);
}

Test(verify, a_dead_sandbox_is_judged_by_its_files, .timeout = 60)
{
    struct house h;
    struct built b;
    struct candidate c;
    char id[LH_ID_SIZE];

    NEEDS_SANDBOX();
    house_open(&h);
    build(&b);
    candidate_add(&c, &b.task);
    house_start(&h, &c, id);
    house_act(&h, id, "mkdir a");
    house_kill(&h, id);
    finish_well(&h, &b, &c, id);
}

Test(verify, a_sandbox_that_does_not_exist_is_an_error_not_a_verdict, .timeout = 60)
{
    struct house h;
    struct built b;
    struct judgement j = {0};
    struct lh_error e = {0};

    NEEDS_SANDBOX();
    house_open(&h);
    build(&b);
    struct verify_subject s = {
        .d = h.d, .task = &b.task, .task_name = "acme/x", .sandbox = "01ARZ3NDEKTSV4RRFFQ69G5FAV"};
    cr_assert(eq(int, verify(&s, &j, &e), LH_NOT_FOUND));
    house_close(&h);
}
