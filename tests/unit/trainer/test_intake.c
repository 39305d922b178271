/* The intake against scripted workers over the real channel and a real ledger. */
#include <math.h>
#include <unistd.h>

#include "fake_worker.h"
#include "proto/clock.h"
#include "trainer/intake/intake.h"

#define SCORED  LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_SCORED
#define INVALID LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_INVALID

enum { MEMBERS = 2, RETRIES = 1, MAX_MESSAGE = 64 << 10 };

static char dir[] = "/tmp/trainer-intake-XXXXXX";
static char endpoint[128], ledger_dir[128];
static struct plan_split tasks;
static struct ledger *ledger;
static struct intake *intake;
static int silence_ms = 60000;

/* ---- fixture ---- */

static void start_intake(void)
{
    struct lh_error err = {0};
    struct intake_options o = {.endpoint = endpoint,
                               .job_id = JOB,
                               .job_seed = 1,
                               .infra_retries = RETRIES,
                               .silence_ms = silence_ms,
                               .lost_ms = 400,
                               .max_message = MAX_MESSAGE,
                               .repeat_ms = 150,
                               .budgets = LONGHAUL__EXPERIENCE__V1__BUDGETS__INIT};
    const struct intake_round round = {.name = "train",
                                       .mode = LONGHAUL__EXPERIENCE__V1__MODE__MODE_SAMPLE,
                                       .members = MEMBERS,
                                       .tasks = &tasks,
                                       .temperature = 1};

    ledger = ledger_open(ledger_dir, JOB, 1, &err);
    cr_assert(ledger != NULL, "%s", err.message);
    o.ledger = ledger;
    intake = intake_create(&o, &err);
    cr_assert(intake != NULL, "%s", err.message);
    intake_set_version(intake, 4, version_id);
    FINE(intake_open_round(intake, &round, &err));
}

static void stop_intake(void)
{
    intake_destroy(intake);
    ledger_close(ledger);
}

static void setup(void)
{
    static const char *const names[] = {"t/a1", "t/a2", "t/b1", "t/b2"};
    const uint8_t digest[16] = {1};
    struct lh_error err = {0};

    cr_assert(mkdtemp(dir) != NULL);
    snprintf(endpoint, sizeof endpoint, "ipc://%s/experience.sock", dir);
    snprintf(ledger_dir, sizeof ledger_dir, "%s/ledger", dir);
    for (int i = 0; i < 4; i++)
        FINE(plan_add(&tasks, names[i], i < 2 ? "a" : "b", digest, 16, &err));
    FINE(plan_sort(&tasks, &err));
    start_intake();
}

static void teardown(void)
{
    struct lh_error err = {0};

    stop_intake();
    plan_finish(&tasks);
    FINE(lh_remove_tree(dir, &err));
}

TestSuite(intake, .init = setup, .fini = teardown, .timeout = 60);

static void raise_to(int64_t groups)
{
    struct lh_error err = {0};

    FINE(intake_raise(intake, "train", groups, &err));
}

static void collect_assigns(struct fake *f, struct channel_message **m, size_t n)
{
    for (size_t i = 0; i < n; i++)
        m[i] = next_new_assign(f, m, i);
}

static void free_all(struct channel_message **m, size_t n)
{
    for (size_t i = 0; i < n; i++)
        channel_message_free(m[i]);
}

/* ---- tests ---- */

Test(intake, groups_are_dispatched_in_order_and_come_back_complete)
{
    struct fake f = fake_start(endpoint, "w-0");
    struct channel_message *m[4] = {0};
    struct intake_batch b;
    struct lh_error err = {0};

    raise_to(2);
    say_hello(&f, 8);
    collect_assigns(&f, m, 4);
    for (int i = 0; i < 4; i++) {
        const assign *a = m[i]->envelope->assign;
        char id[LH_ID_SIZE];
        plan_trajectory_id(JOB, "train", i / 2, (uint32_t)i % 2, id);
        cr_assert(eq(str, a->trajectory, id), "in order of group and member");
        cr_assert(eq(u64, a->seed, plan_seed(1, "train", i / 2, (uint32_t)i % 2)));
        cr_assert(eq(u64, a->version->step, 4));
        cr_assert(eq(u32, a->attempt, 1));
    }
    cr_assert(eq(int, intake_wait(intake, "train", 1, 50, &err), LH_DEADLINE_EXCEEDED));
    for (int i = 3; i >= 0; i--) { /* finishing in another order changes nothing */
        send_turn(&f, m[i]->envelope->assign, 0);
        send_turn(&f, m[i]->envelope->assign, 1);
        send_done(&f, m[i]->envelope->assign, 2, SCORED, i);
    }
    cr_assert(eq(int, intake_wait(intake, "train", 2, WAIT_MS, &err), 2));
    FINE(intake_take(intake, "train", 1, 2, true, &b, &err));
    cr_assert(eq(sz, b.n, 2));
    cr_assert(eq(i64, b.groups[1].index, 1));
    cr_assert(b.groups[1].members[0].reward == 2);
    cr_assert(eq(u32, b.groups[0].members[1].history.n, 2 * TURN_TOKENS));
    const struct intake_version v = {5, version_id, version_id, version_id};
    FINE(intake_consume(intake, "train", &b, 1, &v, &err));
    cr_assert(eq(int, intake_wait(intake, "train", 1, 0, &err), LH_DEADLINE_EXCEEDED),
              "consumed once");
    intake_batch_finish(&b);
    free_all(m, 4);
    fake_stop(&f);
}

Test(intake, assign_is_repeated_until_a_heartbeat_lists_it)
{
    struct fake f = fake_start(endpoint, "w-0");
    struct channel_message *m[2] = {0};

    raise_to(1);
    say_hello(&f, 1);
    m[0] = next(&f, BODY(ASSIGN));
    m[1] = next(&f, BODY(ASSIGN));
    cr_assert(eq(str, m[0]->envelope->assign->trajectory, m[1]->envelope->assign->trajectory),
              "a capacity of one is respected");
    const char *ids[] = {m[0]->envelope->assign->trajectory};
    for (int i = 0; i < 3; i++) {
        say_heartbeat(&f, ids, 1);
        usleep(100000);
    }
    struct channel_message *again;
    while ((again = next_within(&f, BODY(ASSIGN), 10)))
        channel_message_free(again); /* sent before the first heartbeat */
    say_heartbeat(&f, ids, 1);
    cr_assert(next_within(&f, BODY(ASSIGN), 350) == NULL);
    free_all(m, 2);
    fake_stop(&f);
}

/* Checks a resumed assignment: attempt 2 from the first turn. */
static void check_resumed(const struct channel_message *m)
{
    const assign *a = m->envelope->assign;

    cr_assert(eq(u32, a->attempt, 2));
    cr_assert(eq(u32, a->resume_turn, 1));
    cr_assert(eq(u32, a->resume_tokens, TURN_TOKENS));
    cr_assert(eq(str, a->resume_snapshot, (char *)"01SNAPSHOT"));
    cr_assert(eq(u64, a->resume_agent_ms, 1000), "its clock goes on");
    cr_assert(eq(sz, m->n_frames, 3));
    cr_assert(eq(i32, ((const int32_t *)m->frames[0].data)[2], 2));
    cr_assert(eq(sz, a->n_resume_versions, 1));
}

Test(intake, I3_a_new_instance_resumes_from_the_last_committed_turn)
{
    struct fake f = fake_start(endpoint, "w-0");
    struct channel_message *m[2] = {0};

    raise_to(1);
    say_hello(&f, 8);
    collect_assigns(&f, m, 2);
    send_turn(&f, m[0]->envelope->assign, 0);
    wait_acked(&f);
    fake_stop(&f);
    f = fake_start(endpoint, "w-0");
    say_hello(&f, 8);
    struct channel_message *again = next_new_assign(&f, m, 2);
    check_resumed(again);
    channel_message_free(again);
    free_all(m, 2);
    fake_stop(&f);
}

Test(intake, I1_a_restarted_intake_goes_on_where_the_ledger_is)
{
    struct fake f = fake_start(endpoint, "w-0");
    struct channel_message *m[2] = {0};
    struct lh_error err = {0};

    raise_to(1);
    say_hello(&f, 8);
    collect_assigns(&f, m, 2);
    send_turn(&f, m[0]->envelope->assign, 0);
    send_turn(&f, m[1]->envelope->assign, 0);
    send_done(&f, m[1]->envelope->assign, 1, SCORED, 1);
    wait_acked(&f);
    stop_intake();
    start_intake();
    raise_to(1);
    say_hello(&f, 8);
    struct channel_message *again = next_new_assign(&f, m, 2);
    check_resumed(again);
    /* The old attempt changes nothing, is acknowledged, and is told. */
    send_turn(&f, m[0]->envelope->assign, 1);
    wait_acked(&f);
    struct channel_message *cancel = next(&f, BODY(CANCEL));
    cr_assert(eq(u32, cancel->envelope->cancel->attempt, 1));
    send_turn(&f, again->envelope->assign, 1);
    send_done(&f, again->envelope->assign, 2, SCORED, 0);
    cr_assert(eq(int, intake_wait(intake, "train", 1, WAIT_MS, &err), 1));
    channel_message_free(again);
    channel_message_free(cancel);
    free_all(m, 2);
    fake_stop(&f);
}

Test(intake, I8_invalid_verdicts_are_retried_then_the_group_is_dropped_and_replaced)
{
    struct fake f = fake_start(endpoint, "w-0");
    struct channel_message *m[6] = {0};
    struct lh_error err = {0};
    struct intake_stats stats;

    raise_to(1);
    say_hello(&f, 8);
    collect_assigns(&f, m, 2);
    send_turn(&f, m[0]->envelope->assign, 0);
    send_done(&f, m[0]->envelope->assign, 1, INVALID, 0);
    m[2] = next_new_assign(&f, m, 2);
    cr_assert(eq(str, m[2]->envelope->assign->trajectory, m[0]->envelope->assign->trajectory));
    cr_assert(eq(u32, m[2]->envelope->assign->resume_tokens, 0), "from the start");
    send_done(&f, m[2]->envelope->assign, 0, INVALID, 0);
    m[3] = next_new_assign(&f, m, 3);
    m[4] = next_new_assign(&f, m, 4);
    char id[LH_ID_SIZE];
    plan_trajectory_id(JOB, "train", 1, 0, id);
    cr_assert(eq(str, m[3]->envelope->assign->trajectory, id), "a new group takes its place");
    /* The other member of the dropped group is told to stop. */
    const char *ids[] = {m[1]->envelope->assign->trajectory};
    say_heartbeat(&f, ids, 1);
    m[5] = next(&f, BODY(CANCEL));
    cr_assert(eq(str, m[5]->envelope->cancel->trajectory, (char *)ids[0]));
    for (int i = 3; i < 5; i++)
        send_done(&f, m[i]->envelope->assign, 0, SCORED, 1);
    cr_assert(eq(int, intake_wait(intake, "train", 1, WAIT_MS, &err), 1));
    intake_stats(intake, &stats);
    cr_assert(eq(u64, stats.dropped, 1));
    cr_assert(eq(u64, stats.invalid, 2));
    cr_assert(eq(u64, stats.committed, 3), "a turn and two ends, without a token decoded");
    free_all(m, 6);
    fake_stop(&f);
}

/* As many as the job lasts: each attempt goes on from the last turn, and no retry is used up. */
Test(intake, I8_outages_of_daemons_are_not_held_against_a_trajectory)
{
    struct fake f = fake_start(endpoint, "w-0");
    struct channel_message *m[2 + 3 * RETRIES] = {0};
    struct intake_stats stats;
    size_t n = 2;

    raise_to(1);
    say_hello(&f, 8);
    collect_assigns(&f, m, 2);
    send_turn(&f, m[0]->envelope->assign, 0);
    send_outage(&f, m[0]->envelope->assign, 1);
    for (; n < LH_ARRAY_SIZE(m); n++) {
        m[n] = next_new_assign(&f, m, n);
        const assign *a = m[n]->envelope->assign;
        cr_assert(eq(str, a->trajectory, m[0]->envelope->assign->trajectory));
        cr_assert(eq(u32, a->attempt, (uint32_t)n));
        cr_assert(eq(u32, a->resume_turn, 1), "from the last turn");
        send_outage(&f, a, 1);
    }
    wait_acked(&f);
    intake_stats(intake, &stats);
    cr_assert(eq(u64, stats.outages, 1 + 3 * RETRIES));
    cr_assert(eq(u64, stats.invalid, 0));
    cr_assert(eq(u64, stats.dropped, 0));
    free_all(m, n);
    fake_stop(&f);
}

/* Where every attempt meets an outage, nothing will ever work. */
Test(intake, outages_without_end_are_failures)
{
    struct fake f = fake_start(endpoint, "w-0");
    struct channel_message *m[64] = {0};
    struct intake_stats stats = {0};
    size_t n = 2;

    raise_to(1);
    say_hello(&f, 8);
    collect_assigns(&f, m, 2);
    send_outage(&f, m[0]->envelope->assign, 0);
    for (; !stats.invalid; n++) {
        cr_assert(lt(sz, n, LH_ARRAY_SIZE(m)));
        m[n] = next_new_assign(&f, m, n);
        send_outage(&f, m[n]->envelope->assign, 0);
        wait_acked(&f);
        intake_stats(intake, &stats);
    }
    free_all(m, n);
    fake_stop(&f);
}

Test(intake, what_a_worker_no_longer_lists_is_given_out_again)
{
    struct fake f = fake_start(endpoint, "w-0");
    struct channel_message *m[2] = {0};

    raise_to(1);
    say_hello(&f, 8);
    collect_assigns(&f, m, 2);
    const char *ids[] = {m[0]->envelope->assign->trajectory, m[1]->envelope->assign->trajectory};
    say_heartbeat(&f, ids, 2);
    for (int i = 0; i < 6; i++) {
        say_heartbeat(&f, ids + 1, 1);
        usleep(100000);
    }
    struct channel_message *again = next_new_assign(&f, m, 2);
    cr_assert(eq(str, again->envelope->assign->trajectory, (char *)ids[0]));
    cr_assert(eq(u32, again->envelope->assign->attempt, 2));
    channel_message_free(again);
    free_all(m, 2);
    fake_stop(&f);
}

Test(intake, a_segment_that_contradicts_the_ledger_costs_the_attempt)
{
    struct fake f = fake_start(endpoint, "w-0");
    struct channel_message *m[2] = {0};

    raise_to(1);
    say_hello(&f, 8);
    collect_assigns(&f, m, 2);
    send_turn(&f, m[0]->envelope->assign, 1); /* turn 0 is missing */
    struct channel_message *again = next_new_assign(&f, m, 2);
    cr_assert(eq(u32, again->envelope->assign->attempt, 2));
    wait_acked(&f);
    channel_message_free(again);
    free_all(m, 2);
    fake_stop(&f);
}

/* A worker of ours does not send it; whoever does gets an answer and the job goes on. */
Test(intake, a_segment_that_is_too_large_costs_the_attempt_and_is_answered)
{
    static char frame[MAX_MESSAGE + 1];
    const struct channel_frame frames[] = {{frame, sizeof frame}};
    struct fake f = fake_start(endpoint, "w-0");
    struct channel_message *m[3] = {0};
    envelope e = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;
    Longhaul__Experience__V1__Segment s = LONGHAUL__EXPERIENCE__V1__SEGMENT__INIT;
    struct lh_error err = {0};

    raise_to(1);
    say_hello(&f, 8);
    collect_assigns(&f, m, 2);
    s.trajectory = m[0]->envelope->assign->trajectory;
    s.attempt = 1;
    e.body_case = BODY(SEGMENT);
    e.segment = &s;
    FINE(channel_worker_send(f.channel, &e, frames, 1, true, WAIT_MS, &err));
    struct channel_message *cancel = next(&f, BODY(CANCEL));
    cr_assert(eq(str, cancel->envelope->cancel->trajectory, s.trajectory));
    wait_acked(&f);
    m[2] = next_new_assign(&f, m, 2);
    cr_assert(eq(u32, m[2]->envelope->assign->attempt, 2));
    channel_message_free(cancel);
    free_all(m, 3);
    fake_stop(&f);
}

/* Stored, they would end the job in training, and again after each resume. */
Test(intake, numbers_that_cannot_be_trained_on_cost_the_attempt)
{
    struct fake f = fake_start(endpoint, "w-0");
    struct channel_message *m[4] = {0};
    struct test_segment bad;

    raise_to(1);
    say_hello(&f, 8);
    collect_assigns(&f, m, 2);
    for (size_t i = 0; i < 2; i++) {
        const assign *a = m[i]->envelope->assign;
        make_segment(&bad, a->trajectory, a->attempt, 0);
        bad.mask[TURN_TOKENS - 1] = i ? 2 : 1;
        if (i == 0)
            bad.logprob[TURN_TOKENS - 1] = NAN;
        send_segment(&f, a, 0, &bad);
        m[2 + i] = next_new_assign(&f, m, 2 + i);
        cr_assert(eq(str, m[2 + i]->envelope->assign->trajectory, a->trajectory));
        cr_assert(eq(u32, m[2 + i]->envelope->assign->attempt, 2));
        cr_assert(eq(u32, m[2 + i]->envelope->assign->resume_tokens, 0));
    }
    free_all(m, 4);
    fake_stop(&f);
}

Test(intake, finished_trajectories_are_settled_as_often_as_they_are_listed)
{
    struct fake f = fake_start(endpoint, "w-0");
    struct channel_message *m[2] = {0}, *settled;

    raise_to(1);
    say_hello(&f, 8);
    collect_assigns(&f, m, 2);
    send_done(&f, m[0]->envelope->assign, 0, SCORED, 1);
    const char *ids[] = {m[0]->envelope->assign->trajectory};
    for (int i = 0; i < 2; i++) {
        settled = next(&f, BODY(SETTLED));
        cr_assert(eq(str, settled->envelope->settled->trajectory, (char *)ids[0]));
        channel_message_free(settled);
        say_heartbeat(&f, ids, 1);
    }
    free_all(m, 2);
    fake_stop(&f);
}

static void setup_short_silence(void)
{
    silence_ms = 500;
    setup();
}

Test(intake_silence, a_silent_worker_loses_its_work_to_another, .init = setup_short_silence,
     .fini = teardown, .timeout = 60)
{
    struct fake silent = fake_start(endpoint, "w-0"), other;
    struct channel_message *m[2] = {0};

    raise_to(1);
    say_hello(&silent, 8);
    collect_assigns(&silent, m, 2);
    send_turn(&silent, m[0]->envelope->assign, 0);
    wait_acked(&silent);
    fake_stop(&silent);
    other = fake_start(endpoint, "w-1");
    struct channel_message *again = NULL;
    for (int i = 0; i < 30 && !again; i++) {
        say_hello(&other, 8);
        again = next_within(&other, BODY(ASSIGN), 100);
    }
    cr_assert(again != NULL);
    check_resumed(again);
    channel_message_free(again);
    free_all(m, 2);
    fake_stop(&other);
}
