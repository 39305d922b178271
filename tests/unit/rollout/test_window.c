/* Loop A on synthetic signals, and the pool's arithmetic. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdlib.h>
#include <string.h>

#include "rollout/engine/pool.h"
#include "rollout/scheduler/window.h"

static const struct window_signals calm = {.active = 1000, .queued = 10, .forecast = 0.5};

Test(window, grows_while_there_is_work_and_room)
{
    struct window w;

    window_init(&w, 100);
    w.size = 10;
    for (int i = 1; i <= 5; i++)
        window_update(&w, &calm, 100, i * 100);
    cr_assert(eq(u32, window_size(&w), 15));
    w.size = 64;
    window_update(&w, &calm, 100, 600);
    cr_assert(eq(u32, window_size(&w), 66), "by a 32nd when that is more than one");
    for (int i = 7; i < 100; i++)
        window_update(&w, &calm, 100, i * 100);
    cr_assert(eq(u32, window_size(&w), 100), "never above its limit");
}

Test(window, each_sign_of_trouble_shrinks_it)
{
    struct window_signals trouble[] = {calm, calm, calm};

    trouble[0].preemptions = 1;
    trouble[1].forecast = 0.96;
    trouble[2].load_wait_ms = 10001;
    for (size_t i = 0; i < 3; i++) {
        struct window w;
        window_init(&w, 100);
        w.size = 50;
        window_update(&w, &trouble[i], 100, 100);
        cr_assert(eq(dbl, w.size, 40), "signal %zu", i);
    }
}

Test(window, old_preemptions_count_once)
{
    struct window_signals s = calm;
    struct window w;

    window_init(&w, 100);
    w.size = 50;
    s.preemptions = 3;
    window_update(&w, &s, 100, 100);
    window_update(&w, &s, 100, 200);
    cr_assert(eq(dbl, w.size, 40 + 40.0 / 32));
}

Test(window, holds_between_the_marks_and_within_a_period)
{
    struct window_signals s = calm;
    struct window w;

    window_init(&w, 100);
    w.size = 10;
    s.forecast = 0.9;
    window_update(&w, &s, 100, 100);
    s = calm;
    s.load_wait_ms = 1300;
    window_update(&w, &s, 100, 200);
    s = calm;
    s.queued = 0;
    window_update(&w, &s, 100, 300);
    s = calm;
    s.active = 9; /* the window is not what limits */
    window_update(&w, &s, 100, 400);
    cr_assert(eq(dbl, w.size, 10));
    window_update(&w, &calm, 100, 500);
    window_update(&w, &calm, 100, 550);
    cr_assert(eq(dbl, w.size, 11), "one change a period");
}

Test(window, slow_start_doubles_until_the_first_decrease)
{
    struct window_signals trouble = calm;
    struct window w;

    window_init(&w, 1000);
    window_restart(&w, 3.7, 0);
    cr_assert(eq(u32, window_size(&w), 3));
    for (int i = 1; i <= 3; i++)
        window_update(&w, &calm, 100, i * 100);
    cr_assert(eq(dbl, w.size, 8 * 3.7));
    trouble.forecast = 1;
    window_update(&w, &trouble, 100, 400);
    double after = w.size;
    window_update(&w, &calm, 100, 500);
    cr_assert(eq(dbl, w.size, after + 1), "additive from then on");
    window_restart(&w, 0.1, 600);
    cr_assert(eq(u32, window_size(&w), 1), "somebody always runs");
}

/* Random allocations against a count: a state fits exactly when enough frames are free. */
Test(pool, states_fit_whenever_their_frames_are_free)
{
    enum { FRAMES = 103, PAGE = 16, STATE = 7 * 16 - 3, OPS = 20000 };
    float *memory = aligned_alloc(64, (size_t)FRAMES * PAGE * 4);
    pool_block held[FRAMES];
    float mark[FRAMES];
    size_t n = 0;
    struct pool *p = pool_create(memory, (size_t)FRAMES * PAGE * 4, PAGE, STATE, NULL);

    cr_assert(eq(sz, pool_frames(p), FRAMES));
    cr_assert(eq(sz, pool_state_frames(p), 7));
    srand(1);
    for (int op = 0; op < OPS; op++) {
        if (n && rand() % 2) {
            size_t i = (size_t)rand() % n;
            cr_assert(eq(flt, *pool_data(p, held[i]), mark[i]), "moved with its content");
            pool_release(p, held[i]);
            held[i] = held[--n];
            mark[i] = mark[n];
            continue;
        }
        bool state = rand() % 3 == 0, fits = pool_free(p) >= (state ? 7u : 1u);
        pool_block b = state ? pool_state(p) : pool_page(p);
        cr_assert(eq(int, b != POOL_NONE, fits));
        if (b == POOL_NONE)
            continue;
        held[n] = b;
        *pool_data(p, b) = mark[n++] = (float)op;
    }
    while (n)
        pool_release(p, held[--n]);
    cr_assert(eq(sz, pool_free(p), FRAMES));
    pool_destroy(p);
    free(memory);
}
