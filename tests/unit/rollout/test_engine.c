/* The engine over a real policy: what it samples never depends on how it got there. */
#include "rig.h"

#include <criterion/new/assert.h>

/* The trainer's recomputation of every sampled token's log-probability, compared to the bit. */
static void expect_trainer_agrees(struct rig *r, const struct talk *t)
{
    const struct transcript *tr = &t->transcript;
    void *arena;
    struct policy_trainer *p = util_trainer(r->model, r->weights, RIG_CONTEXT, &arena);
    float *logprobs = calloc(tr->n, sizeof *logprobs);
    size_t sampled = 0;

    cr_assert(eq(int, policy_train_forward(p, tr->tokens, (int)tr->n, 0.9f, logprobs, NULL), 0));
    for (size_t i = 1; i < tr->n; i++) {
        if (!tr->mask[i])
            continue;
        sampled++;
        cr_assert(eq(int, memcmp(&logprobs[i - 1], &tr->logprobs[i], sizeof(float)), 0),
                  "token %zu: %a, %a", i, (double)logprobs[i - 1], (double)tr->logprobs[i]);
    }
    cr_assert(gt(sz, sampled, 0));
    policy_trainer_destroy(p);
    free(arena);
    free(logprobs);
}

static void play_alone(struct talk *t, uint64_t prompt, int n, uint64_t seed, int turns)
{
    struct rig r;

    rig_init(&r, 0, NULL);
    talk_init(t, prompt, n, seed, turns);
    talk_play(&r, t, 1, 0);
    talk_close(&r, t, 1);
    rig_finish(&r);
}

static const int lengths[] = {1, 15, 16, 17, 31, 32, 33, 47, 70, 200};
enum { MIX = sizeof lengths / sizeof *lengths };

Test(engine, output_does_not_depend_on_the_batch)
{
    struct talk mixed[MIX], alone;
    struct rig r;

    rig_init(&r, 0, NULL);
    for (int i = 0; i < MIX; i++)
        talk_init(&mixed[i], (uint64_t)i, lengths[i], 100 + (uint64_t)i, 3);
    talk_play(&r, mixed, MIX, 2);
    for (int i = 0; i < MIX; i++) {
        expect_trainer_agrees(&r, &mixed[i]);
        play_alone(&alone, (uint64_t)i, lengths[i], 100 + (uint64_t)i, 3);
        cr_assert(talk_equal(&mixed[i], &alone), "prompt of %d tokens", lengths[i]);
        talk_finish(&alone);
        talk_finish(&mixed[i]);
    }
    talk_close(&r, mixed, MIX);
    rig_finish(&r);
}

/* vllm#50235: a prompt that ends on a boundary must still be shared, one unit earlier. */
Test(engine, groups_share_their_prompt_at_every_length)
{
    static const int around[] = {RIG_UNIT, 2 * RIG_UNIT, 3 * RIG_UNIT, 10 * RIG_UNIT};
    struct talk group[3], alone;

    for (size_t i = 0; i < 4 * 3; i++) {
        struct rig r;
        int n = around[i / 3] - 1 + (int)(i % 3);
        rig_init(&r, 0, NULL);
        for (int m = 0; m < 3; m++)
            talk_init(&group[m], 7, n, 50 + (uint64_t)m, 2);
        talk_play(&r, group, 3, 1);
        size_t shared = (size_t)(n - 1) / RIG_UNIT * RIG_UNIT;
        cr_assert(ge(sz, engine_stats(r.engine).prefix_hit_tokens, 2 * shared), "%d tokens", n);
        for (int m = 0; m < 3; m++) {
            play_alone(&alone, 7, n, 50 + (uint64_t)m, 2);
            cr_assert(talk_equal(&group[m], &alone), "member %d of %d tokens", m, n);
            talk_finish(&alone);
            talk_finish(&group[m]);
        }
        talk_close(&r, group, 3);
        rig_finish(&r);
    }
}

/* A sharer writes behind a boundary inside a page that the others still read (copy on write). */
Test(engine, a_later_member_takes_the_prompt_from_the_cache)
{
    struct talk first, later, alone;
    struct rig r;
    int n = RIG_PAGE + RIG_UNIT + 3; /* the boundary is in the middle of a page */

    rig_init(&r, 0, NULL);
    talk_init(&first, 7, n, 1, 2);
    talk_init(&later, 7, n, 2, 2);
    talk_play(&r, &first, 1, 0);
    uint64_t before = engine_stats(r.engine).tokens_prefilled;
    talk_play(&r, &later, 1, 0);
    cr_assert(eq(u64, engine_stats(r.engine).prefix_hit_tokens, RIG_PAGE + RIG_UNIT));
    cr_assert(lt(u64, engine_stats(r.engine).tokens_prefilled - before, (uint64_t)n));
    play_alone(&alone, 7, n, 2, 2);
    cr_assert(talk_equal(&later, &alone));
    expect_trainer_agrees(&r, &first);
    talk_finish(&alone);
    talk_close(&r, &first, 1);
    talk_close(&r, &later, 1);
    talk_finish(&first);
    talk_finish(&later);
    rig_finish(&r);
}

Test(engine, memory_is_accounted_for_to_the_last_page)
{
    struct talk t[6];
    struct rig r;

    rig_init(&r, 0, NULL);
    cr_assert(eq(sz, rig_used(&r), 0));
    for (int i = 0; i < 6; i++)
        talk_init(&t[i], (uint64_t)i / 2, 90 + i, (uint64_t)i, 3);
    talk_play(&r, t, 6, 1);
    cr_assert(gt(sz, rig_used(&r), 0));
    talk_close(&r, t, 6);
    engine_pause(r.engine); /* returns what the cache kept */
    cr_assert(eq(sz, rig_used(&r), 0));
    for (int i = 0; i < 6; i++)
        talk_finish(&t[i]);
    rig_finish(&r);
}

/* I4: after a change nothing of the old version serves; the turn goes on under the new one. */
Test(engine, a_new_version_recomputes_everything)
{
    struct talk t, same;
    struct rig r;

    rig_init(&r, 0, NULL);
    talk_init(&t, 3, 100, 9, 1);
    talk_init(&same, 3, 100, 9, 1);
    talk_play(&r, &t, 1, 0);
    cr_assert(eq(sz, t.transcript.n_spans, 1));
    rig_new_version(&r, 2);
    cr_assert(eq(sz, rig_used(&r), 0), "old KV is gone");
    uint64_t hits = engine_stats(r.engine).prefix_hit_tokens;
    talk_play(&r, &same, 1, 0);
    cr_assert(eq(u64, engine_stats(r.engine).prefix_hit_tokens, hits));
    expect_trainer_agrees(&r, &same); /* with the new weights */

    /* Mid-trajectory: what was sampled stays, what follows comes from the new weights. */
    size_t before = t.transcript.n;
    talk_once_more(&r, &t);
    cr_assert(eq(sz, t.transcript.n_spans, 2));
    cr_assert(ge(u32, t.transcript.spans[1].first, (uint32_t)before));
    cr_assert(eq(u64, t.transcript.spans[1].version.step, 2));
    talk_close(&r, &t, 1);
    talk_close(&r, &same, 1);
    talk_finish(&t);
    talk_finish(&same);
    rig_finish(&r);
}

Test(engine, a_pause_in_the_middle_of_turns_changes_nothing)
{
    struct talk t[4], alone;
    struct lh_error err = {0};
    struct rig r;
    size_t tokens;

    rig_init(&r, 0, NULL);
    for (int i = 0; i < 4; i++) {
        talk_init(&t[i], (uint64_t)i, 40 + i, (uint64_t)i, 1);
        talk_open(&r, &t[i]);
    }
    for (int i = 0; i < 9; i++)
        cr_assert(eq(int, scheduler_step(&r.scheduler, &tokens, &err), 0));
    engine_pause(r.engine);
    memset(r.kv, 0x7f, r.o.kv_bytes); /* the other phase used it */
    memset(r.scratch, 0x7f, r.o.scratch_bytes);
    cr_assert(eq(int, scheduler_step(&r.scheduler, &tokens, &err), LH_FAILED_PRECONDITION));
    cr_assert(eq(int, scheduler_resume(&r.scheduler, &r.version, &err), 0));
    talk_go_on(&r, t, 4, 0);
    for (int i = 0; i < 4; i++) {
        play_alone(&alone, (uint64_t)i, 40 + i, (uint64_t)i, 1);
        cr_assert(talk_equal(&t[i], &alone));
        talk_finish(&alone);
        talk_finish(&t[i]);
    }
    talk_close(&r, t, 4);
    rig_finish(&r);
}

Test(engine, a_budget_below_one_sequence_is_refused_with_the_number_needed)
{
    struct lh_error err = {0};
    struct rig r;

    rig_init(&r, 0, NULL);
    r.o.kv_bytes = rig_sequence_bytes(&r, RIG_CONTEXT) - 1;
    cr_assert(eq(int, engine_check(&r.o, &err), LH_INVALID_ARGUMENT));
    cr_assert(strstr(err.message, "kv_budget_bytes") != NULL);
    r.o.kv_bytes++;
    cr_assert(eq(int, engine_check(&r.o, &err), 0));
    r.o.unit_tokens = 24;
    cr_assert(eq(int, engine_check(&r.o, &err), LH_INVALID_ARGUMENT));
    rig_finish(&r);
}

/* One sequence at the limit, in the smallest budget there is: it gets to its end alone. */
Test(engine, the_smallest_budget_still_advances)
{
    struct talk t[3], alone;
    struct rig r;

    rig_init(&r, 0, NULL);
    size_t least = rig_sequence_bytes(&r, RIG_CONTEXT);
    rig_finish(&r);
    rig_init(&r, least, NULL);
    for (int i = 0; i < 3; i++)
        talk_init(&t[i], (uint64_t)i, 300, (uint64_t)i, 3);
    talk_play(&r, t, 3, 1);
    for (int i = 0; i < 3; i++) {
        play_alone(&alone, (uint64_t)i, 300, (uint64_t)i, 3);
        cr_assert(talk_equal(&t[i], &alone));
        talk_finish(&alone);
        talk_finish(&t[i]);
    }
    talk_close(&r, t, 3);
    rig_finish(&r);
}
