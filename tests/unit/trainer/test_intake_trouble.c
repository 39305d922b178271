/* The intake and what goes wrong: failures, outages, messages that cannot be, silence. */
#include <math.h>

#include "intake_kit.h"

TestSuite(intake_trouble, .init = intake_setup, .fini = intake_teardown, .timeout = 60);

Test(intake_trouble, I8_invalid_verdicts_are_retried_then_the_group_is_dropped_and_replaced)
{
    struct fake f = fake_start(intake_endpoint, "w-0");
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
Test(intake_trouble, I8_outages_of_daemons_are_not_held_against_a_trajectory)
{
    struct fake f = fake_start(intake_endpoint, "w-0");
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
Test(intake_trouble, outages_without_end_are_failures)
{
    struct fake f = fake_start(intake_endpoint, "w-0");
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

Test(intake_trouble, a_segment_that_contradicts_the_ledger_costs_the_attempt)
{
    struct fake f = fake_start(intake_endpoint, "w-0");
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
Test(intake_trouble, a_segment_that_is_too_large_costs_the_attempt_and_is_answered)
{
    static char frame[MAX_MESSAGE + 1];
    const struct channel_frame frames[] = {{frame, sizeof frame}};
    struct fake f = fake_start(intake_endpoint, "w-0");
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
Test(intake_trouble, numbers_that_cannot_be_trained_on_cost_the_attempt)
{
    struct fake f = fake_start(intake_endpoint, "w-0");
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

Test(intake_silence, a_silent_worker_loses_its_work_to_another, .init = intake_setup_short_silence,
     .fini = intake_teardown, .timeout = 60)
{
    struct fake silent = fake_start(intake_endpoint, "w-0"), other;
    struct channel_message *m[2] = {0};

    raise_to(1);
    say_hello(&silent, 8);
    collect_assigns(&silent, m, 2);
    send_turn(&silent, m[0]->envelope->assign, 0);
    wait_acked(&silent);
    fake_stop(&silent);
    other = fake_start(intake_endpoint, "w-1");
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
