/* The engine with too little memory and a real kvstored: same output, less of everything else. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#include "../kvstore/kit.h"
#include "proto/clock.h"
#include "rig.h"
#include "rollout/engine/store.h"

enum { TALKS = 12, TURNS = 6, PROMPT = 100, CROWD = 48 };

static atomic_bool released;

static struct kv_client *client_for(const struct rig *r, const struct daemon *d)
{
    struct lh_error err = {0};
    struct kv_options o = {
        .path = d->socket,
        .name = "rollout-0",
        .unit_tokens = RIG_UNIT,
        .block_bytes = policy_kv_floats(r->model) * RIG_UNIT * sizeof(float),
        .state_bytes = policy_state_floats(r->model) * sizeof(float),
    };
    struct kv_client *c = kv_client_create(&o, &err);

    cr_assert(c != NULL, "%s", err.message);
    return c;
}

/* A rig with the store of `d`; the client needs the model's sizes, which the rig knows. */
static struct kv_client *rig_with_store(struct rig *r, size_t kv_bytes, const struct daemon *d)
{
    rig_init(r, 0, NULL);
    struct kv_client *c = client_for(r, d);
    rig_finish(r);
    rig_init(r, kv_bytes, c);
    return c;
}

static void start(struct talk *t)
{
    for (int i = 0; i < TALKS; i++)
        talk_init(&t[i], (uint64_t)i / 3, PROMPT + i / 3, 40 + (uint64_t)i, TURNS);
}

static void finish(struct rig *r, struct talk *t)
{
    talk_close(r, t, TALKS);
    for (int i = 0; i < TALKS; i++)
        talk_finish(&t[i]);
}

static size_t longest(const struct talk *t)
{
    size_t n = 0;

    for (int i = 0; i < TALKS; i++)
        n = t[i].transcript.n > n ? t[i].transcript.n : n;
    return n;
}

Test(spill, a_quarter_of_the_memory_gives_the_same_trajectories)
{
    struct talk ample[TALKS], scarce[TALKS];
    struct rig r;
    struct daemon d;

    start(ample);
    rig_init(&r, 0, NULL);
    talk_play(&r, ample, TALKS, 6);
    size_t need = TALKS * rig_sequence_bytes(&r, longest(ample));
    size_t least = rig_sequence_bytes(&r, RIG_CONTEXT);
    cr_assert(eq(u64, engine_stats(r.engine).preemptions, 0));
    talk_close(&r, ample, TALKS);
    rig_finish(&r);

    daemon_start(&d, 64 << 20, 16 << 20);
    start(scarce);
    struct kv_client *c = rig_with_store(&r, need / 4 > least ? need / 4 : least, &d);
    cr_assert(le(sz, least, need / 4), "the test would not test a quarter");
    talk_play(&r, scarce, TALKS, 6);
    struct engine_stats s = engine_stats(r.engine);
    fprintf(stderr, "quarter: spilled %zu loaded %zu lookups %zu hits %zu preemptions %zu\n",
            (size_t)s.spilled_bytes, (size_t)s.loaded_bytes, (size_t)s.store_lookups,
            (size_t)s.store_hits, (size_t)s.preemptions);
    for (int i = 0; i < TALKS; i++)
        cr_assert(talk_equal(&ample[i], &scarce[i]), "trajectory %d", i);
    cr_assert(gt(u64, s.spilled_bytes, 0));
    cr_assert(gt(u64, s.loaded_bytes, 0));
    cr_assert(gt(u64, s.store_lookups, 0));
    cr_assert(ge(u64, 2 * s.store_hits, s.store_lookups));
    finish(&r, scarce);
    for (int i = 0; i < TALKS; i++)
        talk_finish(&ample[i]);
    engine_pause(r.engine);
    cr_assert(eq(sz, rig_used(&r), 0));
    rig_finish(&r);
    kv_client_destroy(c);
    daemon_stop(&d);
}

/* Runs a tenth of the time: every operation of its clients takes long. */
static void *hold_back(void *daemon)
{
    const struct daemon *d = daemon;

    while (!atomic_load(&released)) {
        kill(d->pid, SIGSTOP);
        usleep(9000);
        kill(d->pid, SIGCONT);
        usleep(1000);
    }
    return NULL;
}

/* Short conversations, one after the other, until the window is wide again. */
static void crowd_of_short_ones(struct rig *r)
{
    static struct talk t[CROWD];
    int64_t deadline = lh_now_ms() + 30000;

    for (uint64_t n = 0; window_size(&r->scheduler.window) < RIG_RUNNING * 3 / 4; n++) {
        cr_assert(lh_ms_left(deadline) > 0, "the window stays at %u",
                  window_size(&r->scheduler.window));
        for (int i = 0; i < CROWD; i++)
            talk_init(&t[i], 1000 + n, 8, n * CROWD + (uint64_t)i, 2);
        talk_play(r, t, CROWD, 6);
        talk_close(r, t, CROWD);
        for (int i = 0; i < CROWD; i++)
            talk_finish(&t[i]);
    }
}

Test(spill, a_tenth_of_the_memory_and_a_slow_store_contract_the_window_until_there_is_room)
{
    static struct talk ample[CROWD], scarce[CROWD];
    struct rig r;
    struct daemon d;
    pthread_t thread;
    size_t longest = 0;

    for (int i = 0; i < CROWD; i++) {
        talk_init(&ample[i], (uint64_t)i / 8, PROMPT + i / 8, 40 + (uint64_t)i, 4 + i % 8);
        talk_init(&scarce[i], (uint64_t)i / 8, PROMPT + i / 8, 40 + (uint64_t)i, 4 + i % 8);
    }
    rig_init(&r, 0, NULL);
    talk_play(&r, ample, CROWD, 6);
    for (int i = 0; i < CROWD; i++)
        longest = ample[i].transcript.n > longest ? ample[i].transcript.n : longest;
    size_t tenth = CROWD * rig_sequence_bytes(&r, longest) / 10;
    talk_close(&r, ample, CROWD);
    rig_finish(&r);

    daemon_start(&d, 64 << 20, 16 << 20);
    struct kv_client *c = rig_with_store(&r, tenth, &d);
    cr_assert(eq(int, pthread_create(&thread, NULL, hold_back, &d), 0));
    r.scheduler.period_ms = 100; /* as after a while of short turns: a second is all this lasts */
    talk_play(&r, scarce, CROWD, 6);
    atomic_store(&released, true);
    pthread_join(thread, NULL);
    cr_assert(r.narrowest < RIG_RUNNING * 3 / 4, "the window never came below %u", r.narrowest);
    for (int i = 0; i < CROWD; i++)
        cr_assert(talk_equal(&ample[i], &scarce[i]), "trajectory %d", i);
    talk_close(&r, scarce, CROWD);
    crowd_of_short_ones(&r);
    rig_finish(&r);
    kv_client_destroy(c);
    daemon_stop(&d);
    for (int i = 0; i < CROWD; i++) {
        talk_finish(&ample[i]);
        talk_finish(&scarce[i]);
    }
}

/* All of them are idle and nobody needs their room, but there is little left of it. */
Test(spill, what_is_idle_is_put_away_before_its_memory_is_needed, .timeout = 120)
{
    struct talk t[TALKS];
    struct rig r;
    struct daemon d;

    start(t);
    rig_init(&r, 0, NULL);
    talk_play(&r, t, TALKS, 0);
    size_t need = rig_used(&r);
    finish(&r, t);
    rig_finish(&r);

    daemon_start(&d, 64 << 20, 16 << 20);
    struct kv_client *c = rig_with_store(&r, need / 8 * 9, &d);
    start(t);
    talk_play(&r, t, TALKS, 0);
    size_t used = rig_used(&r);
    uint64_t before = engine_stats(r.engine).spilled_bytes;
    int64_t deadline = lh_now_ms() + 60000;
    while (engine_stats(r.engine).spilled_bytes == before && lh_ms_left(deadline)) {
        engine_admit(r.engine);
        usleep(1000);
    }
    cr_assert(gt(u64, engine_stats(r.engine).spilled_bytes, before));
    cr_assert(eq(sz, rig_used(&r), used), "it is still on the device");
    finish(&r, t);
    rig_finish(&r);
    kv_client_destroy(c);
    daemon_stop(&d);
}

/* A store that dies in the middle is a miss: slower, and nothing else. */
Test(spill, a_dead_store_changes_nothing)
{
    struct talk with[TALKS], without[TALKS];
    struct rig r;
    struct daemon d;

    daemon_start(&d, 64 << 20, 16 << 20);
    start(with);
    rig_init(&r, 0, NULL);
    size_t bytes = rig_sequence_bytes(&r, RIG_CONTEXT);
    rig_finish(&r);
    struct kv_client *c = rig_with_store(&r, bytes, &d);
    for (int i = 0; i < TALKS; i++)
        talk_open(&r, &with[i]);
    for (size_t i = 0, tokens; i < 300; i++)
        cr_assert(eq(int, scheduler_step(&r.scheduler, &tokens, NULL), 0));
    daemon_kill(&d);
    talk_go_on(&r, with, TALKS, 6);
    talk_close(&r, with, TALKS);
    rig_finish(&r);
    kv_client_destroy(c);

    start(without);
    rig_init(&r, 0, NULL);
    talk_play(&r, without, TALKS, 6);
    for (int i = 0; i < TALKS; i++) {
        cr_assert(talk_equal(&with[i], &without[i]), "trajectory %d", i);
        talk_finish(&with[i]);
    }
    finish(&r, without);
    rig_finish(&r);
    cr_assert(eq(int, lh_remove_tree(d.dir, NULL), 0));
}

/* Loop A asks for the store's load between two passes, inside the gate: it may not wait there. */
Test(spill, a_store_that_hangs_does_not_hold_the_engine)
{
    struct rig r;
    struct daemon d;

    daemon_start(&d, 64 << 20, 16 << 20);
    struct kv_client *c = rig_with_store(&r, 0, &d);
    engine_load_wait_ms(r.engine);
    cr_assert(eq(int, kill(d.pid, SIGSTOP), 0));
    int64_t began = lh_now_ms();
    for (int i = 0; i < 20; i++)
        engine_load_wait_ms(r.engine);
    cr_assert(lt(i64, lh_now_ms() - began, 500), "it waited for kvstored, whose timeout is 1 s");
    kill(d.pid, SIGCONT);
    rig_finish(&r);
    kv_client_destroy(c);
    daemon_stop(&d);
}

/* I4 across the store: what was spilled under one version is not found under the next. */
Test(spill, a_new_version_finds_nothing_of_the_old)
{
    struct talk t[TALKS];
    struct rig r;
    struct daemon d;

    daemon_start(&d, 64 << 20, 16 << 20);
    rig_init(&r, 0, NULL);
    size_t bytes = rig_sequence_bytes(&r, RIG_CONTEXT);
    rig_finish(&r);
    struct kv_client *c = rig_with_store(&r, bytes, &d);
    start(t);
    talk_play(&r, t, TALKS, 6);
    cr_assert(gt(u64, engine_stats(r.engine).store_hits, 0));
    rig_new_version(&r, 2);
    struct engine_stats before = engine_stats(r.engine); /* no prefetch is under way any more */
    talk_once_more(&r, &t[0]);
    struct engine_stats after = engine_stats(r.engine);
    cr_assert(eq(u64, after.store_hits, before.store_hits));
    cr_assert(eq(u64, after.loaded_bytes, before.loaded_bytes));
    cr_assert(not(t[0].transcript.carried));
    finish(&r, t);
    rig_finish(&r);
    kv_client_destroy(c);
    daemon_stop(&d);
}

static void make_carrying(struct rig *r)
{
    struct lh_error err = {0};

    engine_destroy(r->engine);
    r->o.carry = true;
    r->engine = engine_create(&r->o, &err);
    cr_assert(r->engine != NULL, "%s", err.message);
    scheduler_init(&r->scheduler, r->engine, RIG_RUNNING);
    cr_assert(eq(int, scheduler_resume(&r->scheduler, &r->version, &err), 0), "%s", err.message);
}

/* The other rule of DESIGN.md 3.7: what is stored serves on, and the transcript says so. */
Test(spill, carry_goes_on_with_what_an_older_version_computed)
{
    struct talk t[TALKS];
    struct rig r;
    struct daemon d;

    daemon_start(&d, 64 << 20, 16 << 20);
    rig_init(&r, 0, NULL);
    size_t bytes = rig_sequence_bytes(&r, RIG_CONTEXT);
    rig_finish(&r);
    struct kv_client *c = rig_with_store(&r, bytes, &d);
    make_carrying(&r);
    start(t);
    talk_play(&r, t, TALKS, 6);
    cr_assert(not(t[0].transcript.carried));
    engine_pause(r.engine);
    rig_new_version(&r, 2);
    uint64_t prefilled = engine_stats(r.engine).tokens_prefilled;
    talk_once_more(&r, &t[0]);
    cr_assert(lt(u64, engine_stats(r.engine).tokens_prefilled - prefilled, t[0].transcript.n / 2));
    cr_assert(t[0].transcript.carried);
    cr_assert(eq(sz, t[0].transcript.n_spans, 2));
    cr_assert(eq(u64, t[0].transcript.spans[0].version.step, 1));
    cr_assert(eq(u64, t[0].transcript.spans[1].version.step, 2));
    finish(&r, t);
    rig_finish(&r);
    kv_client_destroy(c);
    daemon_stop(&d);
}

static struct store_job *next_finished(struct store *s)
{
    int64_t deadline = lh_now_ms() + 30000;
    struct store_job *j;

    while (!(j = store_finished(s))) {
        cr_assert(lh_ms_left(deadline) > 0, "nothing has finished");
        usleep(1000);
    }
    return j;
}

/* A tool may run for longer than a load may: what was handed back is the engine's. */
Test(spill, a_load_that_was_handed_back_does_not_finish_again, .timeout = 60)
{
    enum { N = 4 };
    struct kv_key root = root_of(1), chain[N];
    struct lh_error err = {0};
    struct daemon d;

    daemon_start(&d, 64 << 20, 16 << 20);
    struct kv_client *c = client_of(&d, "rollout-0");
    use_version(c, 1, false);
    chain_of(&root, 1, N, chain);
    cr_assert(gt(i64, put_units(c, chain, 0, N, &err), 0), "%s", err.message);
    struct store_options o = {
        .client = c, .block_bytes = BLOCK, .state_bytes = STATE, .max_inflight_bytes = 1 << 20};
    struct store *s = store_create(&o, &err);
    cr_assert(s != NULL, "%s", err.message);
    struct store_job *j = store_job_new(s, KV_LANE_LOAD, 1, "traveller", chain, 0, N);
    cr_assert(j != NULL);
    cr_assert(store_submit(s, j));
    cr_assert(eq(ptr, next_finished(s), j));
    cr_assert(j->ok);
    if (j->op.deadline_us)
        j->op.deadline_us = 1; /* it has passed */
    cr_assert(store_finished(s) == NULL);
    cr_assert(j->ok);
    store_job_done(s, j);
    store_destroy(s);
    kv_client_destroy(c);
    daemon_stop(&d);
}
