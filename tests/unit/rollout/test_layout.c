/* Tokens of a conversation, actions out of tokens, observations out of output. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "rollout/harness/layout.h"
#include "rollout/worker/gate.h"
#include "trainer/policy.h"

static int32_t byte(char c)
{
    return TOKEN_SPECIALS + (unsigned char)c;
}

Test(layout, a_conversation_is_laid_out_as_documented)
{
    Longhaul__Task__V1__Message sys = LONGHAUL__TASK__V1__MESSAGE__INIT, user = sys;
    Longhaul__Task__V1__Message *prompt[] = {&sys, &user};
    Longhaul__Task__V1__Task task = LONGHAUL__TASK__V1__TASK__INIT;
    struct transcript t = {0};
    const int32_t want[] = {
        TOKEN_BOS,  TOKEN_SYSTEM,    byte('s'),       TOKEN_USER, byte('u'),
        byte('v'),  TOKEN_ASSISTANT, byte('l'),       byte('s'),  TOKEN_RUN,
        TOKEN_TOOL, byte('f'),       TOKEN_ASSISTANT, byte('x'),  TOKEN_EOS,
    };
    const uint8_t mask[] = {0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1};

    sys.role = LONGHAUL__TASK__V1__ROLE__ROLE_SYSTEM;
    sys.text = (char[]){"s"};
    user.role = LONGHAUL__TASK__V1__ROLE__ROLE_USER;
    user.text = (char[]){"uv"};
    task.prompt = prompt;
    task.n_prompt = 2;
    cr_assert(eq(int, layout_prompt(&t, &task, NULL), 0));
    cr_assert(eq(int, layout_begin_turn(&t, NULL), 0));
    cr_assert(eq(int, layout_demonstrate(&t, "ls", false, NULL), 0));
    cr_assert(eq(int, layout_observation(&t, "f", 1, NULL), 0));
    cr_assert(eq(int, layout_begin_turn(&t, NULL), 0));
    cr_assert(eq(int, layout_demonstrate(&t, "x", true, NULL), 0));
    cr_assert(eq(sz, t.n, LH_ARRAY_SIZE(want)));
    cr_assert(eq(int, memcmp(t.tokens, want, sizeof want), 0));
    cr_assert(eq(int, memcmp(t.mask, mask, sizeof mask), 0));
    cr_assert(eq(sz, t.sampled, 5));
    cr_assert(eq(sz, t.n_spans, 0), "no policy made a demonstration");
    transcript_finish(&t);
}

static struct action action_of(const int32_t *tokens, size_t n)
{
    struct action a;

    cr_assert(eq(int, layout_action(tokens, n, &a, NULL), 0));
    return a;
}

Test(layout, actions_are_parsed_and_nonsense_is_the_agents_mistake)
{
    const struct {
        int32_t tokens[4];
        size_t n;
        enum action_end end;
        bool malformed;
        const char *text;
    } rows[] = {
        {{byte('l'), byte('s'), TOKEN_RUN}, 3, ACTION_RUN, false, "ls"},
        {{byte('l'), byte('s'), TOKEN_EOS}, 3, ACTION_SUBMIT, false, "ls"},
        {{byte('l'), byte('s')}, 2, ACTION_CUT, false, "ls"},
        {{TOKEN_RUN}, 1, ACTION_RUN, true, ""},
        {{byte('a'), byte(0), TOKEN_RUN}, 3, ACTION_RUN, true, "a"},
        {{byte('\xff'), TOKEN_EOS}, 2, ACTION_SUBMIT, true, "\xff"},
        {{byte('\xc3'), byte('\xa9'), TOKEN_RUN}, 3, ACTION_RUN, false, "\xc3\xa9"},
        {{byte('a'), TOKEN_USER, byte('b'), TOKEN_RUN}, 4, ACTION_RUN, true, "ab"},
    };

    for (size_t i = 0; i < LH_ARRAY_SIZE(rows); i++) {
        struct action a = action_of(rows[i].tokens, rows[i].n);
        cr_assert(eq(int, a.end, rows[i].end), "row %zu", i);
        cr_assert(eq(int, a.malformed, rows[i].malformed), "row %zu", i);
        cr_assert(eq(str, a.text, (char *)rows[i].text), "row %zu", i);
        free(a.text);
    }
}

static void expect_seen(struct observation o, size_t max, const char *want)
{
    char to[256];
    size_t n = layout_observe(&o, to, max);

    cr_assert(eq(str, to, (char *)want));
    cr_assert(eq(sz, n, strlen(want)));
    cr_assert(le(sz, n, max));
}

Test(layout, observations_are_short_and_say_what_is_missing)
{
    expect_seen((struct observation){"hello\n\n", 7, 7, 0, NULL}, 100, "hello");
    expect_seen((struct observation){"", 0, 0, 0, NULL}, 100, "");
    expect_seen((struct observation){"no\n", 3, 3, 2, NULL}, 100, "no\n!2");
    expect_seen((struct observation){"", 0, 0, 127, NULL}, 100, "!127");
    expect_seen((struct observation){"part", 4, 4, 137, "!timeout"}, 100, "part\n!timeout");
    expect_seen((struct observation){"0123456789", 10, 5000, 0, NULL}, 100,
                "0123456789\n[4990 more bytes]");
    expect_seen((struct observation){"0123456789", 10, 10, 0, NULL}, 4, "[10 ");
    expect_seen((struct observation){"0123456789", 10, 10, 3, NULL}, 60, "0123456789\n!3");
}

/* ---- the gate between arbiterd's client and the engine ---- */

static void count_wake(void *ctx)
{
    ++*(int *)ctx;
}

static void *revoke_it(void *gate)
{
    return (void *)(intptr_t)gate_on_revoke(gate, ARBITER_TRAIN, lh_now_ms() + 5000);
}

Test(gate, a_revocation_waits_for_the_pass_and_lets_no_other_begin)
{
    struct gate g;
    pthread_t t;
    void *result;
    bool discarded;
    int wakes = 0;

    gate_init(&g, count_wake, &wakes);
    gate_first_phase(&g, ARBITER_ROLLOUT);
    cr_assert(gate_enter(&g, &discarded));
    cr_assert(not(discarded));
    cr_assert(eq(int, gate_on_revoke(&g, ARBITER_TRAIN, lh_now_ms() + 10), LH_DEADLINE_EXCEEDED));
    cr_assert(eq(int, pthread_create(&t, NULL, revoke_it, &g), 0));
    usleep(20000);
    gate_leave(&g);
    pthread_join(t, &result);
    cr_assert(eq(int, (int)(intptr_t)result, 0));
    cr_assert(not(gate_enter(&g, &discarded)));
    cr_assert(discarded, "what was in the memory is gone");
    gate_first_phase(&g, ARBITER_ROLLOUT);
    cr_assert(not(gate_enter(&g, &discarded)), "an old look does not reopen it");
    gate_on_phase(&g, ARBITER_ROLLOUT, 2);
    cr_assert(eq(int, wakes, 1));
    cr_assert(gate_enter(&g, &discarded));
    cr_assert(not(discarded));
    gate_leave(&g);
    gate_finish(&g);
}
