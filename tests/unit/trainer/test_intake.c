/* The intake against scripted workers over the real channel and a real ledger. */
#include <unistd.h>

#include "intake_kit.h"

TestSuite(intake, .init = intake_setup, .fini = intake_teardown, .timeout = 60);

Test(intake, groups_are_dispatched_in_order_and_come_back_complete)
{
    struct fake f = fake_start(intake_endpoint, "w-0");
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
    struct fake f = fake_start(intake_endpoint, "w-0");
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

Test(intake, I3_a_new_instance_resumes_from_the_last_committed_turn)
{
    struct fake f = fake_start(intake_endpoint, "w-0");
    struct channel_message *m[2] = {0};

    raise_to(1);
    say_hello(&f, 8);
    collect_assigns(&f, m, 2);
    send_turn(&f, m[0]->envelope->assign, 0);
    wait_acked(&f);
    fake_stop(&f);
    f = fake_start(intake_endpoint, "w-0");
    say_hello(&f, 8);
    struct channel_message *again = next_new_assign(&f, m, 2);
    check_resumed(again);
    channel_message_free(again);
    free_all(m, 2);
    fake_stop(&f);
}

Test(intake, I1_a_restarted_intake_goes_on_where_the_ledger_is)
{
    struct fake f = fake_start(intake_endpoint, "w-0");
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

Test(intake, what_a_worker_no_longer_lists_is_given_out_again)
{
    struct fake f = fake_start(intake_endpoint, "w-0");
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

Test(intake, finished_trajectories_are_settled_as_often_as_they_are_listed)
{
    struct fake f = fake_start(intake_endpoint, "w-0");
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
