/* Whose failure it is (I8): a daemon's outage is told from what the task's environment does. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/file.h"
#include "proto/parse.h"
#include "rollout/harness/sandbox.h"
#include "tests/starve.h"
#include "world.h"

enum { BUDGET = 32 << 20, SHORT_MS = 300 };

#define MODE(name) ((int)LONGHAUL__EXPERIENCE__V1__MODE__MODE_##name)
#define SCORED     ((uint32_t)LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_SCORED)
#define INVALID    ((uint32_t)LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_INVALID)

TestSuite(outage, .timeout = 120);

static uint32_t infra_failures(struct world *w, const char *task)
{
    struct lh_error err = {0};
    Longhaul__Task__V1__RegisteredTask *t = sandbox_task(w->agentenv, task, 5000, &err);

    cr_assert(t != NULL, "%s", err.message);
    uint32_t n = t->infra_failures;
    lh_message_free(&t->base);
    return n;
}

static void check_verdict(struct sandbox *s, int timeout_ms, uint32_t kind, bool outage)
{
    struct lh_error err = {0};
    Longhaul__Task__V1__Verdict *v = sandbox_verify(s, timeout_ms, &err);

    cr_assert(v != NULL);
    cr_assert(eq(u32, (uint32_t)v->kind, kind), "%s", v->message);
    cr_assert(eq(int, v->outage, outage), "%s: %s", v->code, v->message);
    lh_message_free(&v->base);
}

/* Stopped, it is there and says nothing; that is an outage like any other. */
Test(outage, a_daemon_that_does_not_answer_is_away)
{
    struct world w;
    struct sandbox s;
    struct lh_error err = {0};

    world_open(&w, BUDGET);
    lh_autofree char *owner = lh_format("%s/X", w.job_id);
    cr_assert(eq(int, sandbox_init(&s, w.agentenv, owner, TASK_TWO, 1, "", &err), 0));
    cr_assert(eq(int, sandbox_start(&s, 30000, &err), 0), "%s", err.message);
    kill(w.agentenvd, SIGSTOP);
    cr_assert(eq(int, sandbox_commit(&s, 0, SHORT_MS, &err), LH_UNAVAILABLE), "%s", err.message);
    check_verdict(&s, SHORT_MS, INVALID, true);
    kill(w.agentenvd, SIGCONT);
    check_verdict(&s, 30000, SCORED, false);
    cr_assert(eq(u32, infra_failures(&w, TASK_TWO), 0));
    cr_assert(eq(int, sandbox_clear(w.agentenv, owner, 1, "", &err), 0), "%s", err.message);
    sandbox_finish(&s);
    world_close(&w);
}

struct action {
    struct sandbox *s;
    struct sandbox_result result;
    struct lh_error err;
    int rc;
};

static void *act(void *arg)
{
    struct action *a = arg;

    a->rc = sandbox_run(a->s, "echo x >> /tmp/runs; echo begun; sleep 3; echo end; cat /tmp/runs",
                        20000, 1000, &a->result, &a->err);
    return NULL;
}

/* The command goes on without the daemon, and is joined where the connection broke. */
Test(outage, an_action_under_a_killed_daemon_runs_once)
{
    struct world w;
    struct sandbox s;
    struct lh_error err = {0};
    struct action a = {.s = &s};
    pthread_t thread;

    world_open(&w, BUDGET);
    lh_autofree char *owner = lh_format("%s/Y", w.job_id);
    cr_assert(eq(int, sandbox_init(&s, w.agentenv, owner, TASK_TWO, 1, "", &err), 0));
    cr_assert(eq(int, sandbox_start(&s, 30000, &err), 0), "%s", err.message);
    cr_assert(pthread_create(&thread, NULL, act, &a) == 0);
    usleep(1000000);
    world_kill_agentenv(&w);
    pthread_join(thread, NULL);
    cr_assert(eq(int, a.rc, 0), "%s", a.err.message);
    a.result.output[a.result.len] = 0;
    cr_assert(eq(str, a.result.output, (char *)"begun\nend\nx\n"));
    cr_assert(eq(u32, s.builds, 1), "not rebuilt");
    free(a.result.output);
    cr_assert(eq(int, sandbox_clear(w.agentenv, owner, 1, "", &err), 0), "%s", err.message);
    sandbox_finish(&s);
    world_close(&w);
}

Test(outage, a_machine_without_room_is_not_the_tasks_fault)
{
    struct world w;
    struct sandbox s;
    struct lh_error err = {0};

    world_open(&w, BUDGET);
    lh_autofree char *owner = lh_format("%s/X", w.job_id);
    cr_assert(eq(int, sandbox_init(&s, w.agentenv, owner, TASK_TWO, 1, "", &err), 0));
    cr_assert(eq(u32, infra_failures(&w, TASK_TWO), 0)); /* and connected */
    struct rlimit before, none;
    cr_assert(eq(int, prlimit(w.agentenvd, RLIMIT_NOFILE, NULL, &before), 0));
    none = before;
    none.rlim_cur = 1; /* no number below it is free or becomes so */
    feed(w.agentenvd, none);
    cr_assert(eq(int, sandbox_start(&s, 10 * SHORT_MS, &err), LH_UNAVAILABLE), "%s", err.message);
    feed(w.agentenvd, before);
    cr_assert(eq(int, sandbox_start(&s, 30000, &err), 0), "%s", err.message);
    cr_assert(eq(u32, infra_failures(&w, TASK_TWO), 0));
    cr_assert(eq(int, sandbox_clear(w.agentenv, owner, 1, "", &err), 0), "%s", err.message);
    sandbox_finish(&s);
    world_close(&w);
}

/* Killed in the middle of a seal, which leaves two upper directories, agentenvd cannot go on with
 * the sandbox.  That is not the agent's death, which would be judged (I8). */
Test(outage, a_sandbox_lost_with_the_daemon_is_an_outage)
{
    struct world w;
    struct sandbox s;
    struct lh_error err = {0};

    world_open(&w, BUDGET);
    lh_autofree char *owner = lh_format("%s/X", w.job_id);
    cr_assert(eq(int, sandbox_init(&s, w.agentenv, owner, TASK_TWO, 1, "", &err), 0));
    cr_assert(eq(int, sandbox_start(&s, 30000, &err), 0), "%s", err.message);
    lh_autofree char *second = lh_format("%s/agentenv/boxes/%s/upper.77", w.dir, s.id);
    cr_assert(eq(int, mkdir(second, 0755), 0));
    world_kill_agentenv(&w);
    cr_assert(eq(int, sandbox_commit(&s, 0, 30000, &err), LH_UNAVAILABLE), "%s", err.message);
    check_verdict(&s, 30000, INVALID, true);
    cr_assert(eq(u32, infra_failures(&w, TASK_TWO), 0));
    cr_assert(eq(int, sandbox_clear(w.agentenv, owner, 1, "", &err), 0), "%s", err.message);
    sandbox_finish(&s);
    world_close(&w);
}

/* Killed again and again under a trajectory, agentenvd costs time and nothing else. */
Test(outage, a_killed_daemon_costs_no_retry)
{
    struct world w;

    world_open(&w, BUDGET);
    struct episode *e = world_begin(&w, TASK_TWO, MODE(DEMONSTRATE), 1);
    for (int i = 0; i < 40 && !e->snapshots; i++) {
        world_turn(&w, 50);
        if (i % 10 == 5)
            world_kill_agentenv(&w);
    }
    world_kill_agentenv(&w);
    world_finish(&w, 60);
    cr_assert(eq(u32, e->infra, e->outages), "what ended attempts, if anything, was the outage");
    cr_assert(eq(u32, e->verdict, SCORED));
    cr_assert(eq(dbl, e->reward, 1));
    cr_assert(eq(u32, infra_failures(&w, TASK_TWO), 0));
    world_close(&w);
}

Test(outage, a_setup_that_fails_is_the_tasks_own)
{
    struct world w;

    world_open(&w, BUDGET);
    struct episode *e = world_begin(&w, TASK_BROKEN, MODE(DEMONSTRATE), 1);
    for (int i = 0; i < 400 && !e->infra; i++)
        world_turn(&w, 50);
    cr_assert(gt(u32, e->infra, 0));
    cr_assert(eq(u32, e->outages, 0));
    world_close(&w);
}
