/* From a task that keeps failing to a job that no longer draws it, and back: agentenvd counts, the
 * intake asks. */
#include <unistd.h>

#include "longhaul/task/v1/service.pb-c.h"
#include "proto/parse.h"
#include "tests/unit/trainer/fake_worker.h"
#include "trainer/intake/intake.h"
#include "trainer/intake/quarantine.h"
#include "world.h"

enum { BUDGET = 32 << 20, FAILURES = 5, GROUPS = 6 };

TestSuite(quarantine, .timeout = 120);

static void fail_to_start(struct world *w, int n)
{
    Longhaul__Sandbox__V1__CreateRequest req = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__INIT;
    ProtobufCMessage *reply = NULL;
    struct lh_error err = {0};

    req.source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_TASK;
    req.task = (char *)TASK_BROKEN;
    req.idempotency_key = (char *)"broken"; /* a failed create frees its key */
    for (int i = 0; i < n; i++)
        WRONG(rpc_unary(w->agentenv, "/longhaul.sandbox.v1.Sandboxes/Create", &req.base,
                        &longhaul__sandbox__v1__sandbox__descriptor, 30000, &reply, &err),
              LH_FAILED_PRECONDITION);
}

static size_t quarantined(struct world *w)
{
    struct quarantine q;
    struct lh_error err = {0};
    int r = LH_UNAVAILABLE;

    for (int i = 0; i < 50 && r == LH_UNAVAILABLE; i++) { /* it may have just been killed */
        r = quarantine_ask(w->agentenv, 5000, &q, &err);
        usleep(r < 0 ? 100000 : 0);
    }
    FINE(r);
    size_t n = q.n;
    cr_assert(eq(int, quarantine_has(&q, TASK_BROKEN), n == 1));
    cr_assert(not(quarantine_has(&q, TASK_TWO)));
    quarantine_finish(&q);
    return n;
}

static void release(struct world *w)
{
    Longhaul__Task__V1__TaskName req = LONGHAUL__TASK__V1__TASK_NAME__INIT;
    ProtobufCMessage *reply = NULL;
    struct lh_error err = {0};

    req.name = (char *)TASK_BROKEN;
    FINE(rpc_unary(w->agentenv, "/longhaul.task.v1.Tasks/Release", &req.base,
                   &longhaul__task__v1__release_task_reply__descriptor, 5000, &reply, &err));
    lh_message_free(reply);
    req.name = (char *)"test/none";
    WRONG(rpc_unary(w->agentenv, "/longhaul.task.v1.Tasks/Release", &req.base,
                    &longhaul__task__v1__release_task_reply__descriptor, 5000, &reply, &err),
          LH_NOT_FOUND);
}

Test(quarantine, failed_setups_in_a_row_end_in_it_and_release_ends_it)
{
    struct world w;

    world_open(&w, BUDGET);
    fail_to_start(&w, FAILURES - 1);
    cr_assert(eq(sz, quarantined(&w), 0));
    fail_to_start(&w, 1);
    cr_assert(eq(sz, quarantined(&w), 1));
    world_kill_agentenv(&w);
    cr_assert(eq(sz, quarantined(&w), 1), "a restarted agentenvd knows it");
    release(&w);
    cr_assert(eq(sz, quarantined(&w), 0));
    fail_to_start(&w, FAILURES - 1);
    cr_assert(eq(sz, quarantined(&w), 0), "they count from 0");
    world_close(&w);
}

/* A ledger and an intake beside the world's own, which draws from the broken task and a good one.
 */
struct bench {
    char endpoint[128], ledger_dir[128];
    struct plan_split tasks;
    struct ledger *ledger;
    struct intake *intake;
};

static void open_bench(struct bench *b, struct world *w)
{
    const uint8_t digest[16] = {1};
    struct lh_error err = {0};
    struct intake_options o = {.endpoint = b->endpoint,
                               .job_id = JOB,
                               .job_seed = 1,
                               .infra_retries = 3,
                               .repeat_ms = 150,
                               .agentenv = w->agentenv,
                               .budgets = LONGHAUL__EXPERIENCE__V1__BUDGETS__INIT};
    const struct intake_round round = {.name = "train",
                                       .mode = LONGHAUL__EXPERIENCE__V1__MODE__MODE_DEMONSTRATE,
                                       .members = 1,
                                       .tasks = &b->tasks};

    snprintf(b->endpoint, sizeof b->endpoint, "ipc://%s/other.sock", w->dir);
    snprintf(b->ledger_dir, sizeof b->ledger_dir, "%s/other", w->dir);
    FINE(plan_add(&b->tasks, TASK_TWO, "good", digest, 16, &err));
    FINE(plan_add(&b->tasks, TASK_BROKEN, "bad", digest, 16, &err)); /* families take turns */
    FINE(plan_sort(&b->tasks, &err));
    o.ledger = b->ledger = ledger_open(b->ledger_dir, JOB, 1, &err);
    cr_assert(b->ledger != NULL, "%s", err.message);
    b->intake = intake_create(&o, &err);
    cr_assert(b->intake != NULL, "%s", err.message);
    FINE(intake_open_round(b->intake, &round, &err));
}

static void close_bench(struct bench *b)
{
    intake_destroy(b->intake);
    ledger_close(b->ledger);
    plan_finish(&b->tasks);
}

/* How many of the next `n` assignments are of the broken task. */
static size_t drawn_broken(struct fake *f, struct channel_message **seen, size_t from, size_t n)
{
    size_t broken = 0;

    for (size_t i = from; i < from + n; i++) {
        seen[i] = next_new_assign(f, seen, i);
        broken += !strcmp(seen[i]->envelope->assign->task, TASK_BROKEN);
    }
    return broken;
}

Test(quarantine, a_job_passes_over_the_task_until_it_is_released)
{
    struct channel_message *seen[3 * GROUPS] = {0};
    struct world w;
    struct bench b = {0};
    struct lh_error err = {0};

    world_open(&w, BUDGET);
    fail_to_start(&w, FAILURES);
    open_bench(&b, &w);
    struct fake f = fake_start(b.endpoint, "w-0");
    FINE(intake_raise(b.intake, "train", GROUPS, &err));
    say_hello(&f, LH_ARRAY_SIZE(seen));
    cr_assert(eq(sz, drawn_broken(&f, seen, 0, GROUPS), 0));
    release(&w);
    usleep(4500000); /* it asks every two seconds */
    FINE(intake_raise(b.intake, "train", 2 * GROUPS, &err));
    cr_assert(eq(sz, drawn_broken(&f, seen, GROUPS, GROUPS), GROUPS / 2));
    fail_to_start(&w, FAILURES);
    usleep(4500000);
    FINE(intake_raise(b.intake, "train", 3 * GROUPS, &err));
    cr_assert(eq(sz, drawn_broken(&f, seen, 2 * GROUPS, GROUPS), 0), "again, while it runs");
    for (size_t i = 0; i < LH_ARRAY_SIZE(seen); i++)
        channel_message_free(seen[i]);
    fake_stop(&f);
    close_bench(&b);
    world_close(&w);
}
