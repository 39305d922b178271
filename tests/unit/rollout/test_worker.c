/* The worker as a process among the real others. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdlib.h>
#include <string.h>

#include "tests/must_work.h"
#include "world.h"

enum { BUDGET = 32 << 20, EPISODES = 6 };

#define MODE(name)   ((int)LONGHAUL__EXPERIENCE__V1__MODE__MODE_##name)
#define FINISH(name) ((uint32_t)LONGHAUL__EXPERIENCE__V1__FINISH_REASON__FINISH_##name)
#define SCORED       ((uint32_t)LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_SCORED)
#define TIMEOUT      ((uint32_t)LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_TIMEOUT)

TestSuite(worker, .timeout = 240);

/* Tokens as text, specials in angle brackets. */
static void spell(const struct transcript *t, char *to, size_t room)
{
    static const char *const names[TOKEN_SPECIALS] = {"<pad>",  "<bos>",       "<eos>",  "<system>",
                                                      "<user>", "<assistant>", "<tool>", "<run>"};
    size_t at = 0;

    for (size_t i = 0; i < t->n && at + 16 < room; i++) {
        int32_t k = t->tokens[i];
        at += (size_t)(k < TOKEN_SPECIALS ? snprintf(to + at, room - at, "%s", names[k])
                                          : snprintf(to + at, room - at, "%c", k - TOKEN_SPECIALS));
    }
}

/* The shell's directory and variables go from action to action, through a snapshot in between. */
Test(worker, records_a_demonstration)
{
    struct world w;
    char text[1000];

    world_open(&w, BUDGET);
    struct episode *e = world_begin(&w, TASK_TWO, MODE(DEMONSTRATE), 1);
    world_finish(&w, 60);
    spell(&e->got, text, sizeof text);
    cr_assert(eq(str, text,
                 (char *)"<bos><user>copy the word<assistant>cd sub; ls; export N=7; false<run>"
                         "<tool>word\n!1<assistant>echo $N >n; cat word >../out<eos>"));
    cr_assert(eq(u32, e->verdict, SCORED));
    cr_assert(eq(dbl, e->reward, 1));
    cr_assert(eq(u32, e->finish, FINISH(SUBMITTED)));
    cr_assert(eq(u32, e->turns, 2));
    cr_assert(eq(u32, e->snapshots, 1), "none for the last turn");
    cr_assert(eq(u32, e->infra, 0));
    world_close(&w);
}

Test(worker, blanks_the_first_observation_and_keeps_to_the_turns)
{
    struct world w;
    char text[1000];

    world_open(&w, BUDGET);
    struct episode *blank = world_begin(&w, TASK_TWO, MODE(DEMONSTRATE), 1);
    struct episode *one = world_begin(&w, TASK_TWO, MODE(DEMONSTRATE), 2);
    blank->blank = true;
    one->turns_limit = 1;
    world_finish(&w, 60);
    spell(&blank->got, text, sizeof text);
    cr_assert(strstr(text, "false<run><tool><assistant>echo") != NULL, "%s", text);
    cr_assert(eq(dbl, blank->reward, 1), "the sandbox is the same");
    cr_assert(eq(u32, one->finish, FINISH(TURNS)));
    cr_assert(eq(u32, one->turns, 1));
    cr_assert(eq(u32, one->snapshots, 0));
    cr_assert(eq(u32, one->verdict, SCORED));
    cr_assert(eq(dbl, one->reward, 0), "half done is not done, and not an infra failure (I8)");
    world_close(&w);
}

/* Bytes that are no text and far too many of them: the transcript has them bounded and as they are,
 * and nothing that is said about them is refused by a peer for not being text. */
Test(worker, takes_any_output)
{
    static const char first[] = {'a', (char)0xff, 0, (char)0xc3, '('};
    struct world w;

    world_open(&w, BUDGET);
    struct episode *e = world_begin(&w, TASK_NOISY, MODE(DEMONSTRATE), 1);
    world_finish(&w, 100);
    cr_assert(eq(u32, e->verdict, SCORED));
    cr_assert(eq(dbl, e->reward, 1));
    cr_assert(eq(u32, e->infra, 0));
    cr_assert(eq(u32, e->finish, FINISH(SUBMITTED)));
    cr_assert(le(sz, e->got.n, 1024), "the context of the job");
    size_t at = 0;
    while (at < e->got.n && e->got.tokens[at] != TOKEN_TOOL)
        at++;
    for (size_t i = 0; i < sizeof first; i++)
        cr_assert(eq(i32, e->got.tokens[at + 1 + i], TOKEN_SPECIALS + (uint8_t)first[i]));
    world_close(&w);
}

/* The default is an hour, of all attempts together. */
Test(worker, the_agents_clock_goes_on_in_the_next_attempt)
{
    struct world w;

    world_open(&w, BUDGET);
    struct episode *late = world_begin(&w, TASK_TWO, MODE(DEMONSTRATE), 1);
    struct episode *early = world_begin(&w, TASK_TWO, MODE(DEMONSTRATE), 2);
    late->agent_ms = 3600000;
    early->agent_ms = 3000000;
    world_finish(&w, 60);
    cr_assert(eq(u32, late->finish, FINISH(AGENT_TIMEOUT)));
    cr_assert(eq(u32, late->verdict, TIMEOUT));
    cr_assert(eq(u32, early->finish, FINISH(SUBMITTED)));
    cr_assert(gt(u64, early->agent_ms, 3000000));
    world_close(&w);
}

static void begin_all(struct world *w)
{
    for (uint64_t i = 0; i < EPISODES; i++)
        world_begin(w, TASK_AGENT, MODE(SAMPLE), 1000 + i);
}

static bool same(const struct transcript *a, const struct transcript *b)
{
    return a->n == b->n && !memcmp(a->tokens, b->tokens, a->n * sizeof *a->tokens) &&
           !memcmp(a->logprobs, b->logprobs, a->n * sizeof *a->logprobs) &&
           !memcmp(a->mask, b->mask, a->n);
}

static uint32_t commits(const struct world *w)
{
    uint32_t n = 0;

    for (size_t i = 0; i < w->n_episodes; i++)
        n += w->episodes[i].snapshots;
    return n;
}

/* As soon as one has a commit point: a phase of training and back, then the worker is killed.
 * Returns how many attempts it took in all. */
static uint32_t disturbed_round(struct world *w, const struct transcript *want)
{
    uint32_t attempts = 0;

    begin_all(w);
    for (int i = 0; i < 400 && !commits(w); i++)
        world_turn(w, 50);
    world_switch(w, ARBITER_TRAIN);
    world_turn(w, 50);
    world_switch(w, ARBITER_ROLLOUT);
    world_kill_worker(w);
    world_finish(w, 100);
    for (int i = 0; i < EPISODES; i++) {
        cr_assert(same(&w->episodes[i].got, &want[i]), "trajectory %d", i);
        attempts += w->episodes[i].attempt;
    }
    world_forget(w);
    return attempts;
}

/* I3, I5: phases come and go, the worker is killed, and the trajectories are the same ones.  A kill
 * that came when all was done says nothing; there is another one. */
Test(worker, switches_and_kills_do_not_change_what_is_sampled)
{
    struct transcript quiet[EPISODES];
    struct world w;
    uint32_t attempts = 0;

    world_open(&w, BUDGET);
    begin_all(&w);
    world_finish(&w, 100);
    cr_assert(gt(u32, commits(&w), 0), "some went over several turns");
    for (int i = 0; i < EPISODES; i++) {
        cr_assert(eq(u32, w.episodes[i].verdict, SCORED));
        quiet[i] = w.episodes[i].got;
        w.episodes[i].got = (struct transcript){0};
    }
    world_forget(&w);
    for (int i = 0; i < 5 && attempts <= EPISODES; i++)
        attempts = disturbed_round(&w, quiet);
    cr_assert(gt(u32, attempts, EPISODES), "a kill met somebody");
    for (int i = 0; i < EPISODES; i++)
        transcript_finish(&quiet[i]);
    world_close(&w);
}

/* I5: a sandbox that is put away while the model thinks is the same sandbox. */
Test(worker, putting_sandboxes_away_changes_nothing)
{
    struct transcript want[EPISODES];
    struct world w;

    world_open(&w, BUDGET);
    bool has_criu = world_has_criu(&w);
    begin_all(&w);
    world_finish(&w, 100);
    cr_assert(eq(u64, w.hibernated, 0));
    for (int i = 0; i < EPISODES; i++) {
        want[i] = w.episodes[i].got;
        w.episodes[i].got = (struct transcript){0};
    }
    world_close(&w);
    NEEDS("criu", has_criu, "agentenv engines says why");
    world_hibernate = "always";
    world_open(&w, BUDGET);
    cr_assert(world_has_criu(&w), "it is known before anybody asks for it");
    begin_all(&w);
    struct episode *e = world_begin(&w, TASK_TWO, MODE(DEMONSTRATE), 1);
    world_finish(&w, 200);
    cr_assert(ge(u64, w.hibernated, EPISODES), "at least before each first turn");
    for (int i = 0; i < EPISODES; i++) {
        cr_assert(same(&w.episodes[i].got, &want[i]), "trajectory %d", i);
        cr_assert(eq(u32, w.episodes[i].infra, 0));
        transcript_finish(&want[i]);
    }
    cr_assert(eq(dbl, e->reward, 1));
    world_close(&w);
}

/* Turns wait for the version they were assigned; what is sampled names it. */
Test(worker, waits_for_the_assigned_version)
{
    struct world w;

    world_open(&w, BUDGET);
    w.step = 2; /* promised */
    begin_all(&w);
    for (int i = 0; i < 30; i++)
        world_turn(&w, 50);
    cr_assert(eq(u64, w.tokens_decoded, 0));
    world_switch(&w, ARBITER_TRAIN);
    world_publish(&w, 2);
    world_switch(&w, ARBITER_ROLLOUT);
    world_finish(&w, 100);
    cr_assert(gt(u64, w.tokens_decoded, 0));
    world_close(&w);
}
