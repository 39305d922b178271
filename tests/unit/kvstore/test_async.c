/* Asynchronous operations against a real kvstored: what they move, and how they end. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kit.h"
#include "proto/clock.h"

enum { AMPLE = 64 << 20, N = 12, PIECES = 4, LONG_MS = 20000 };

/* A sequence's units in memory, every block in PIECES pieces that lie apart. */
struct memory {
    struct kv_key chain[N];
    uint8_t pieces[PIECES][N][BLOCK / PIECES];
    uint8_t state[STATE];
    void *blocks[N * PIECES];
};

static void lay_out(struct memory *m, unsigned seed)
{
    struct kv_key root = root_of(1);

    chain_of(&root, seed, N, m->chain);
    for (size_t i = 0; i < N * PIECES; i++)
        m->blocks[i] = m->pieces[i % PIECES][i / PIECES];
}

static void fill(struct memory *m)
{
    uint8_t block[BLOCK];

    for (size_t u = 0; u < N; u++) {
        fill_content(&m->chain[u], 'B', block, BLOCK);
        for (size_t p = 0; p < PIECES; p++)
            memcpy(m->pieces[p][u], block + p * BLOCK / PIECES, BLOCK / PIECES);
    }
    fill_content(&m->chain[N - 1], 'S', m->state, STATE);
}

static struct kv_batch all_of(struct memory *m)
{
    return (struct kv_batch){.chain = m->chain,
                             .n = N,
                             .blocks = m->blocks,
                             .pieces = PIECES,
                             .state = m->state,
                             .deadline_ms = lh_now_ms() + LONG_MS};
}

static struct kv_trajectory *open_trajectory(struct kv_client *c, const char *name)
{
    struct lh_error e = {0};
    struct kv_trajectory *t = kv_trajectory_open(c, name, &e);

    cr_assert(t != NULL, "%s", e.message);
    return t;
}

static struct kv_async *begin(struct kv_trajectory *t, enum kv_async_kind kind, struct kv_batch b)
{
    struct lh_error e = {0};
    struct kv_async *a = kv_async_begin(t, kind, &b, &e);

    cr_assert(a != NULL, "%s", e.message);
    return a;
}

static void count_end(void *ctx, struct kv_async *a)
{
    if (kv_async_result(a, NULL) >= 0)
        atomic_fetch_add((atomic_int *)ctx, 1);
}

static void await(atomic_int *count, int want)
{
    int64_t deadline = lh_now_ms() + 30000;

    while (atomic_load(count) < want && lh_ms_left(deadline))
        usleep(1000);
    cr_assert(eq(int, atomic_load(count), want));
}

static void put_and_get(struct kv_client *c)
{
    static struct memory from, to;
    struct lh_error e = {0};
    lh_auto(kv_trajectory) t = open_trajectory(c, "traveller");
    size_t bytes = N * BLOCK + STATE;

    lay_out(&from, 7);
    fill(&from);
    lay_out(&to, 7);
    lh_auto(kv_async) put = begin(t, KV_PUT, all_of(&from));
    lh_auto(kv_async) get = begin(t, KV_GET, all_of(&to));
    cr_assert(eq(i64, kv_async_wait(get, &e), (int64_t)bytes), "%s", e.message);
    cr_assert(eq(i64, kv_async_wait(put, &e), (int64_t)bytes), "%s", e.message);
    cr_assert(eq(sz, kv_async_units(get), N));
    cr_assert(memcmp(from.pieces, to.pieces, sizeof to.pieces) == 0);
    cr_assert(memcmp(from.state, to.state, STATE) == 0);
    struct kv_trajectory_counts n = kv_trajectory_counts(t);
    cr_assert(eq(u64, n.operations, 2));
    cr_assert(eq(u64, n.put_bytes, bytes));
    cr_assert(eq(u64, n.got_bytes, bytes));
    cr_assert(eq(sz, get_units(c, from.chain, N, 0), N), "synchronous calls see the same bytes");
}

Test(async, a_put_and_a_get_begun_together_are_done_in_order)
{
    struct daemon d;

    daemon_start(&d, AMPLE, AMPLE);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    for (int i = 0; i < 20; i++) { /* whoever runs them: the thread, or the one who waits */
        put_and_get(c);
        use_version(c, 2, true);
        use_version(c, 1, true);
    }
    daemon_stop(&d);
}

Test(async, a_batch_ends_without_anybody_waiting)
{
    enum { BATCHES = 16 };
    static struct memory m[BATCHES];
    struct kv_async *a[BATCHES];
    struct daemon d;
    atomic_int ended = 0;

    daemon_start(&d, AMPLE, AMPLE);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    lh_auto(kv_trajectory) t = open_trajectory(c, "traveller");
    for (unsigned i = 0; i < BATCHES; i++) {
        lay_out(&m[i], i);
        fill(&m[i]);
        struct kv_batch b = all_of(&m[i]);
        b.done = count_end;
        b.ctx = &ended;
        a[i] = begin(t, KV_PUT, b);
    }
    await(&ended, BATCHES);
    for (unsigned i = 0; i < BATCHES; i++) {
        kv_async_destroy(a[i]);
        cr_assert(eq(sz, get_units(c, m[i].chain, N, 0), N));
    }
    daemon_stop(&d);
}

static void note_pressure(void *ctx, struct kv_async *a)
{
    if (kv_async_result(a, NULL) == 0 && kv_async_pressure(a).capacity_bytes == AMPLE)
        atomic_fetch_add((atomic_int *)ctx, 1);
    kv_async_destroy(a);
}

Test(async, the_pressure_comes_by_itself_and_its_operation_goes)
{
    struct daemon d;
    struct lh_error e = {0};
    struct kv_pressure p;
    atomic_int told = 0;

    daemon_start(&d, AMPLE, AMPLE);
    lh_auto(kv_client) c = client_of(&d, "a");
    lh_auto(kv_trajectory) t = open_trajectory(c, "");
    for (int i = 0; i < 10; i++) /* nobody but done() has it */
        begin(t, KV_LOOK, (struct kv_batch){.done = note_pressure, .ctx = &told});
    await(&told, 10);
    cr_assert(eq(int, kv_pressure(c, &p, &e), 0), "%s", e.message);
    cr_assert(eq(u64, p.capacity_bytes, AMPLE));
    daemon_stop(&d);
}

Test(async, a_prefetched_hit_is_copied_in_pieces)
{
    static struct memory from, to;
    struct daemon d;
    struct lh_error e = {0};

    daemon_start(&d, AMPLE, AMPLE);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    lh_auto(kv_trajectory) t = open_trajectory(c, "traveller");
    lay_out(&from, 3);
    fill(&from);
    lay_out(&to, 3);
    kv_async_destroy(begin(t, KV_GET, all_of(&to))); /* a miss, or cancelled before it */
    lh_auto(kv_async) put = begin(t, KV_PUT, all_of(&from));
    lh_auto(kv_async) found = begin(t, KV_PREFETCH, all_of(&to));
    cr_assert(eq(i64, kv_async_wait(found, &e), 0), "%s", e.message);
    lh_auto(kv_hit) h = kv_async_take_hit(found);
    cr_assert(eq(sz, kv_hit_units(h), N));
    for (size_t u = N; u > 0; u -= 3) { /* from its end, as a split restore does */
        struct kv_batch b = all_of(&to);
        b.hit = h;
        b.first = u - 3;
        b.n = u;
        b.blocks = to.blocks + b.first * PIECES;
        b.state = u == N ? to.state : NULL;
        lh_auto(kv_async) get = begin(t, KV_GET, b);
        cr_assert(eq(i64, kv_async_wait(get, &e), 3 * BLOCK + (u == N ? STATE : 0)), "%s",
                  e.message);
    }
    cr_assert(memcmp(from.pieces, to.pieces, sizeof to.pieces) == 0);
    cr_assert(memcmp(from.state, to.state, STATE) == 0);
    struct kv_batch beyond = all_of(&to);
    beyond.hit = h;
    beyond.n = N + 1;
    lh_auto(kv_async) none = begin(t, KV_GET, beyond);
    cr_assert(eq(i64, kv_async_wait(none, &e), LH_OUT_OF_RANGE));
    daemon_stop(&d);
}

/* kvstored stands still, so that what was begun is still there to be cancelled. */
Test(async, what_is_cancelled_or_late_stores_nothing)
{
    static struct memory m[3];
    struct daemon d;
    struct lh_error e = {0};
    struct kv_async *a[3];

    daemon_start(&d, AMPLE, AMPLE);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    lh_auto(kv_trajectory) mine = open_trajectory(c, "mine");
    lh_auto(kv_trajectory) other = open_trajectory(c, "other");
    kill(d.pid, SIGSTOP);
    for (unsigned i = 0; i < 3; i++) {
        lay_out(&m[i], i);
        fill(&m[i]);
        struct kv_batch b = all_of(&m[i]);
        b.deadline_ms = lh_now_ms() + (i == 0 ? 300 : LONG_MS);
        a[i] = begin(i == 1 ? mine : other, KV_PUT, b);
    }
    kv_trajectory_cancel(mine);
    cr_assert(eq(i64, kv_async_wait(a[0], &e), LH_DEADLINE_EXCEEDED), "%s", e.message);
    kill(d.pid, SIGCONT);
    cr_assert(eq(i64, kv_async_wait(a[1], &e), LH_CANCELLED), "%s", e.message);
    cr_assert(gt(i64, kv_async_wait(a[2], &e), 0), "%s", e.message);
    for (unsigned i = 0; i < 3; i++)
        kv_async_destroy(a[i]);
    cr_assert(eq(sz, get_units(c, m[0].chain, N, 0), 0));
    cr_assert(eq(sz, get_units(c, m[1].chain, N, 0), 0));
    cr_assert(eq(sz, get_units(c, m[2].chain, N, 0), N));
    struct kv_trajectory_counts n = kv_trajectory_counts(mine);
    cr_assert(eq(u64, n.failed, 1));
    daemon_stop(&d);
}

Test(async, memory_that_is_taken_back_is_not_touched_any_more)
{
    struct daemon d;
    struct lh_error e = {0};
    struct kv_async *a[4];

    daemon_start(&d, AMPLE, AMPLE);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    lh_auto(kv_trajectory) t = open_trajectory(c, "traveller");
    struct memory *m = calloc(1, sizeof *m), outside;
    struct kv_buffer *buffer = kv_buffer_register(c, m, sizeof *m, &e);
    cr_assert(buffer != NULL, "%s", e.message);
    lay_out(m, 1);
    fill(m);
    struct kv_batch b = all_of(m);
    b.buffer = buffer;
    for (int i = 0; i < 4; i++)
        a[i] = begin(t, i % 2 ? KV_GET : KV_PUT, b);
    kv_buffer_unregister(buffer);
    free(m); /* a sanitizer sees who comes too late */
    for (int i = 0; i < 4; i++)
        kv_async_destroy(a[i]);

    lay_out(&outside, 1);
    lh_auto(kv_buffer) small = kv_buffer_register(c, outside.pieces, sizeof outside.pieces, &e);
    b = all_of(&outside);
    b.buffer = small;
    cr_assert(kv_async_begin(t, KV_GET, &b, &e) == NULL);
    cr_assert(eq(int, e.code, LH_INVALID_ARGUMENT));
    daemon_stop(&d);
}

Test(async, what_makes_no_sense_is_refused)
{
    struct memory m;
    struct daemon d;
    struct lh_error e = {0};
    char name[200];

    daemon_start(&d, AMPLE, AMPLE);
    lh_auto(kv_client) c = client_of(&d, "a");
    lh_auto(kv_trajectory) t = open_trajectory(c, "traveller");
    lay_out(&m, 1);
    struct kv_batch rows[] = {all_of(&m), all_of(&m), all_of(&m)};
    rows[0].pieces = 3;
    rows[1].first = N + 1;
    rows[2].chain = NULL;
    for (size_t i = 0; i < 3; i++) {
        cr_assert(kv_async_begin(t, KV_GET, &rows[i], &e) == NULL, "%zu", i);
        cr_assert(eq(int, e.code, LH_INVALID_ARGUMENT));
    }
    lh_auto(kv_async) rootless = begin(t, KV_PUT, all_of(&m));
    cr_assert(eq(i64, kv_async_wait(rootless, &e), LH_FAILED_PRECONDITION), "%s", e.message);
    memset(name, 'x', sizeof name);
    name[sizeof name - 1] = 0;
    cr_assert(kv_trajectory_open(c, name, &e) == NULL);
    daemon_stop(&d);
}
