/* Registration's proof: only a task whose oracle passes and whose nop scores 0 is accepted, and of
 * one that is refused nothing is left. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <string.h>

#include "agentenv/task/register.h"
#include "tests/unit/agentenv/task/build.h"
#include "tests/unit/agentenv/task/house.h"

static const struct row {
    const char *what, *setup, *action, *command, *says; /* says NULL = accepted */
} rows[] = {
    {"a good task", NULL, "mkdir a", "[ -d a ]", NULL},
    {"a good task with setup", "echo 5 >n", "mkdir $(cat n)", "[ -d 5 ]", NULL},
    {"an oracle that fails", NULL, "mkdir b", "[ -d a ] || { echo no a here; exit 1; }",
     "the oracle scored 0, it must reach 1; verifier: exit status 1, output: no a here"},
    {"an oracle whose command fails", NULL, "mkdir x/y", "[ -d a ]",
     "can't create directory 'x/y'"},
    {"a partial reward", NULL, "mkdir a", "[ -d a ] && echo 0.5 >$LONGHAUL_REWARD",
     "the oracle scored 0.5, it must reach 1"},
    {"a verifier that always agrees", NULL, "mkdir a", "echo fine",
     "doing nothing scored 1, it must score 0; verifier: exit status 0, output: fine"},
    {"a verifier that agrees after setup", "mkdir a", "mkdir -p a", "[ -d a ]",
     "doing nothing scored 1"},
    {"a verifier that does not run", NULL, "mkdir a", "pytest",
     "nop run: verdict verifier_missing: exit status 127"},
    {"a setup that fails", "echo broken >&2; false", "mkdir a", "[ -d a ]",
     "setup[0] 'echo broken >&2; false': exit status 1, output: broken"},
};

static void prove(struct house *h, const struct row *row)
{
    struct built b;
    struct lh_error e = {0};

    build(&b);
    b.setup[0] = (char *)row->setup;
    b.environment.n_setup = row->setup != NULL;
    b.actions[0] = (char *)row->action;
    b.verifier.command = (char *)row->command;
    int r = task_prove(h->d, &b.task, NULL, &e);
    cr_expect(eq(int, r == 0, !row->says), "%s: %s", row->what, e.message);
    cr_expect(strstr(e.message, row->says ? row->says : "") != NULL, "%s: '%s' does not say '%s'",
              row->what, e.message, row->says ? row->says : "");
    cr_expect(eq(i64, house_count(h, "sandboxes"), 0), "%s left a sandbox", row->what);
}

Test(prove, each_kind_of_bad_task_is_refused_with_what_the_verifier_said, .timeout = 120)
{
    struct house h;

    NEEDS_SANDBOX();
    house_open(&h);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        prove(&h, &rows[i]);
    cr_expect(eq(i64, house_count(&h, "tasks"), 0));
    house_close(&h);
}

Test(prove, an_unhealthy_environment_is_refused, .timeout = 60)
{
    struct house h;
    struct built b;
    struct lh_error e = {0};

    NEEDS_SANDBOX();
    house_open(&h);
    build(&b);
    b.environment.healthcheck = (char *)"test -e /never";
    b.timeout.ms = 1500; /* a loaded machine starts slowly */
    b.timeouts.boot = &b.timeout;
    cr_expect(eq(int, task_prove(h.d, &b.task, NULL, &e), LH_DEADLINE_EXCEEDED), "%s", e.message);
    cr_expect(strstr(e.message, "healthcheck 'test -e /never': exit status 1") != NULL, "%s",
              e.message);
    house_close(&h);
}

Test(prove, variables_and_secrets_reach_oracle_and_verifier, .timeout = 60)
{
    struct house h;
    struct built b;
    struct lh_error e = {0};

    NEEDS_SANDBOX();
    house_open(&h);
    build(&b);
    b.environment.n_env = 2;
    b.variable[0].name = (char *)"PLAIN";
    b.variable[0].source_case = LONGHAUL__TASK__V1__ENV_VAR__SOURCE_VALUE;
    b.variable[0].value = (char *)"p q";
    b.variable[1].name = (char *)"HIDDEN";
    b.variable[1].source_case = LONGHAUL__TASK__V1__ENV_VAR__SOURCE_SECRET_REF;
    b.variable[1].secret_ref = (char *)"test_token";
    b.actions[0] = (char *)"echo \"$PLAIN $HIDDEN\" >out";
    b.verifier.command = (char *)"[ \"$(cat out)\" = \"p q s3\" ]";
    unsetenv("LONGHAUL_SECRET_test_token");
    cr_expect(ne(int, task_prove(h.d, &b.task, NULL, &e), 0));
    cr_expect(strstr(e.message, "set LONGHAUL_SECRET_test_token") != NULL, "%s", e.message);
    setenv("LONGHAUL_SECRET_test_token", "s3", 1);
    cr_expect(eq(int, task_prove(h.d, &b.task, NULL, &e), 0), "%s", e.message);
    house_close(&h);
}
