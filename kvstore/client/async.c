/* Asynchronous operations.
 *
 * Operations wait in their client's queue and are run one after the other, by the client's thread,
 * which is started with the first of them, or by whoever waits for the one whose turn it is.  So
 * one that is waited for at once costs no switch of threads.  The synchronous calls are operations
 * that never see the queue: there is one way to put and one to get.
 *
 * One thread and not several: kvstored answers a connection in order, and one thread's copies fill
 * the bandwidth of a memory channel.  Callers who wait add theirs.
 *
 * Cancelling sets a flag that the runner reads before every copy.  What is being waited for from
 * kvstored is not interrupted, because its reply would be taken for the next request's: the
 * deadline of the operation bounds it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kvstore/client/internal.h"
#include "kvstore/protocol.h"
#include "proto/clock.h"
#include "proto/wait.h"

enum { IDLE_MS = 60000, LOOK_AGAIN_MS = 1000 };

static int64_t (*const runners[KV_ASYNC_KINDS])(struct kv_async *io, struct lh_error *err) = {
    [KV_PUT] = kv_run_put,
    [KV_GET] = kv_run_get,
    [KV_PREFETCH] = kv_run_prefetch,
    [KV_LOOK] = kv_run_look};

int kv_async_check(const struct kv_async *io, struct lh_error *err)
{
    if (atomic_load(&io->cancelled))
        return lh_fail(err, LH_CANCELLED, "cancelled");
    if (!lh_ms_left(io->batch.deadline_ms))
        return lh_fail(err, LH_DEADLINE_EXCEEDED, "it took longer than its deadline allows");
    return 0;
}

static void execute(struct kv_async *io)
{
    int r = kv_async_check(io, &io->error);

    io->result = r < 0 ? r : runners[io->kind](io, &io->error);
}

static void fill_defaults(struct kv_async *io)
{
    if (!io->batch.pieces)
        io->batch.pieces = 1;
    if (!io->batch.deadline_ms)
        io->batch.deadline_ms = kv_client_deadline(io->client);
}

int64_t kv_async_run_here(struct kv_async *io, struct lh_error *err)
{
    fill_defaults(io);
    execute(io);
    return kv_async_result(io, err);
}

int64_t kv_async_result(const struct kv_async *io, struct lh_error *err)
{
    if (io->result < 0 && err)
        *err = io->error;
    return io->result;
}

struct kv_pressure kv_async_pressure(const struct kv_async *io)
{
    return io->pressure;
}

size_t kv_async_units(const struct kv_async *io)
{
    return io->units;
}

struct kv_hit *kv_async_take_hit(struct kv_async *io)
{
    return lh_steal(&io->hit_found);
}

/* ---- trajectories ---- */

struct kv_trajectory {
    struct kv_client *client;
    unsigned refs; /* under queue.lock: the caller's, and one of each operation */
    struct kv_trajectory_counts counts;
    char name[KV_TRAJECTORY_MAX + 1];
};

struct kv_trajectory *kv_trajectory_open(struct kv_client *c, const char *name,
                                         struct lh_error *err)
{
    if (strlen(name) > KV_TRAJECTORY_MAX)
        return lh_fail(err, LH_INVALID_ARGUMENT, "\"%.40s...\" is longer than %d bytes", name,
                       KV_TRAJECTORY_MAX),
               NULL;
    struct kv_trajectory *t = calloc(1, sizeof *t);
    if (!t)
        return lh_fail_errno(err, ENOMEM, "trajectory %s", name), NULL;
    t->client = c;
    t->refs = 1;
    strcpy(t->name, name);
    return t;
}

static void unref_locked(struct kv_trajectory *t)
{
    if (!--t->refs)
        free(t);
}

void kv_trajectory_close(struct kv_trajectory *t)
{
    if (!t)
        return;
    LH_LOCKED(&t->client->queue.lock);
    unref_locked(t);
}

struct kv_trajectory_counts kv_trajectory_counts(struct kv_trajectory *t)
{
    LH_LOCKED(&t->client->queue.lock);
    return t->counts;
}

void kv_trajectory_cancel(struct kv_trajectory *t)
{
    LH_LOCKED(&t->client->queue.lock);

    for (struct kv_async *io = t->client->queue.all; io; io = io->next_of_all)
        if (io->trajectory == t)
            atomic_store(&io->cancelled, true);
}

static void count(struct kv_trajectory_counts *c, const struct kv_async *io)
{
    c->operations++;
    c->failed += io->result < 0;
    if (io->result < 0)
        return;
    c->put_bytes += io->kind == KV_PUT ? (uint64_t)io->result : 0;
    c->got_bytes += io->kind == KV_GET ? (uint64_t)io->result : 0;
}

/* ---- the queue ---- */

/* Takes it out of the queue, or the first one when io is NULL; NULL = it is not there. */
static struct kv_async *take_locked(struct kv_queue *q, const struct kv_async *io)
{
    struct kv_async **at = &q->first;

    while (io && *at && *at != io)
        at = &(*at)->next;
    struct kv_async *found = *at;
    if (!found)
        return NULL;
    *at = found->next;
    if (!*at)
        q->last = at;
    found->state = KV_ASYNC_RUNS;
    q->running++;
    return found;
}

static void forget_locked(struct kv_queue *q, struct kv_async *io)
{
    struct kv_async **at = &q->all;

    while (*at != io)
        at = &(*at)->next_of_all;
    *at = io->next_of_all;
    unref_locked(io->trajectory);
}

static void set_telling(struct kv_queue *q, struct kv_async *io, bool telling)
{
    LH_LOCKED(&q->lock);
    io->teller = pthread_self();
    io->telling = telling;
}

static bool mark_ended(struct kv_queue *q, struct kv_async *io)
{
    LH_LOCKED(&q->lock);
    count(&io->trajectory->counts, io);
    q->running--;
    io->state = KV_ASYNC_ENDED;
    pthread_cond_broadcast(&q->changed);
    if (io->orphan)
        forget_locked(q, io);
    return io->orphan;
}

static void destroy_ended(struct kv_async *io)
{
    kv_hit_destroy(io->hit_found);
    free(io);
}

static void run_taken(struct kv_queue *q, struct kv_async *io)
{
    execute(io);
    if (io->batch.done) {
        set_telling(q, io, true);
        io->batch.done(io->batch.ctx, io);
        set_telling(q, io, false);
    }
    if (mark_ended(q, io))
        destroy_ended(io);
}

/* Some operation's end: each comes by its deadline, or one copy later. */
static void await_end(struct kv_queue *q)
{
    lh_wait_until(&q->changed, &q->lock, lh_now_ms() + LOOK_AGAIN_MS);
}

static struct kv_async *await_work(struct kv_queue *q)
{
    LH_LOCKED(&q->lock);

    while (!q->stop && (!q->first || q->running))
        lh_wait_until(&q->changed, &q->lock, lh_now_ms() + IDLE_MS);
    return q->stop ? NULL : take_locked(q, NULL);
}

static void *queue_thread(void *arg)
{
    struct kv_queue *q = arg;

    for (struct kv_async *io; (io = await_work(q));)
        run_taken(q, io);
    return NULL;
}

static int start_locked(struct kv_queue *q, struct lh_error *err)
{
    int r = q->started ? 0 : pthread_create(&q->thread, NULL, queue_thread, q);

    q->started |= r == 0;
    return r ? lh_fail_errno(err, r, "the thread of a kv client") : 0;
}

void kv_queue_stop(struct kv_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->stop = true;
    pthread_cond_broadcast(&q->changed);
    pthread_mutex_unlock(&q->lock);
    if (q->started)
        pthread_join(q->thread, NULL);
}

static int submit(struct kv_queue *q, struct kv_async *io, struct lh_error *err)
{
    LH_LOCKED(&q->lock);
    int r = start_locked(q, err);

    if (r < 0)
        return r;
    io->trajectory->refs++;
    io->next_of_all = q->all;
    q->all = io;
    *q->last = io;
    q->last = &io->next;
    pthread_cond_broadcast(&q->changed);
    return 0;
}

/* ---- registered memory ---- */

struct kv_buffer {
    struct kv_client *client;
    char *base;
    size_t bytes;
};

/* Before MADV_POPULATE_WRITE there is only touching them, which the first copy does anyway. */
static void make_present(void *base, size_t bytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)base & ~(page - 1);

    madvise((void *)from, (uintptr_t)base + bytes - from, MADV_POPULATE_WRITE);
}

struct kv_buffer *kv_buffer_register(struct kv_client *c, void *base, size_t bytes,
                                     struct lh_error *err)
{
    struct kv_buffer *b = base && bytes ? malloc(sizeof *b) : NULL;

    if (!b)
        return lh_fail(err, bytes ? LH_RESOURCE_EXHAUSTED : LH_INVALID_ARGUMENT,
                       "a buffer of %zu bytes", bytes),
               NULL;
    *b = (struct kv_buffer){.client = c, .base = base, .bytes = bytes};
    make_present(base, bytes);
    return b;
}

static struct kv_async *user_of(const struct kv_queue *q, const struct kv_buffer *b)
{
    struct kv_async *io = q->all;

    while (io && !(io->batch.buffer == b && io->state != KV_ASYNC_ENDED))
        io = io->next_of_all;
    return io;
}

void kv_buffer_unregister(struct kv_buffer *b)
{
    if (!b)
        return;
    struct kv_queue *q = &b->client->queue;
    pthread_mutex_lock(&q->lock);
    for (struct kv_async *io; (io = user_of(q, b));) {
        atomic_store(&io->cancelled, true);
        await_end(q);
    }
    pthread_mutex_unlock(&q->lock);
    free(b);
}

static bool is_inside(const struct kv_buffer *b, const void *at, size_t bytes)
{
    const char *p = at;

    return p >= b->base && bytes <= b->bytes && (size_t)(p - b->base) <= b->bytes - bytes;
}

static int check_memory(const struct kv_async *io, struct lh_error *err)
{
    const struct kv_batch *b = &io->batch;
    const struct kv_options *o = &io->client->options;
    bool ok = !b->state || is_inside(b->buffer, b->state, o->state_bytes);

    for (size_t i = 0; ok && b->blocks && i < (b->n - b->first) * b->pieces; i++)
        ok = is_inside(b->buffer, b->blocks[i], o->block_bytes / b->pieces);
    return ok ? 0 : lh_fail(err, LH_INVALID_ARGUMENT, "it would leave its registered buffer");
}

/* ---- operations ---- */

static int check(const struct kv_async *io, struct lh_error *err)
{
    const struct kv_batch *b = &io->batch;

    if ((unsigned)io->kind >= KV_ASYNC_KINDS || b->n > KV_MAX_UNITS || b->first > b->n ||
        (!b->chain && !b->hit && io->kind != KV_LOOK))
        return lh_fail(err, LH_INVALID_ARGUMENT, "an operation of kind %d on units %zu to %zu",
                       (int)io->kind, b->first, b->n);
    if (io->client->options.block_bytes % b->pieces)
        return lh_fail(err, LH_INVALID_ARGUMENT, "a block of %zu bytes is not in %u equal pieces",
                       io->client->options.block_bytes, b->pieces);
    return b->buffer ? check_memory(io, err) : 0;
}

struct kv_async *kv_async_begin(struct kv_trajectory *t, enum kv_async_kind kind,
                                const struct kv_batch *b, struct lh_error *err)
{
    lh_autofree struct kv_async *io = calloc(1, sizeof *io);

    if (!io)
        return lh_fail_errno(err, ENOMEM, "kv operation"), NULL;
    io->client = t->client;
    io->kind = kind;
    io->batch = *b;
    io->name = t->name;
    io->trajectory = t;
    atomic_init(&io->cancelled, false);
    fill_defaults(io);
    if (check(io, err) < 0 || submit(&t->client->queue, io, err) < 0)
        return NULL;
    return lh_steal(&io);
}

/* It is this one's turn; one that is cancelled has nothing to do, so it needs none. */
static bool may_run(const struct kv_queue *q, const struct kv_async *io)
{
    return io->state == KV_ASYNC_QUEUED &&
           (atomic_load(&io->cancelled) || (q->first == io && !q->running));
}

static void end(struct kv_async *io)
{
    struct kv_queue *q = &io->client->queue;

    pthread_mutex_lock(&q->lock);
    while (io->state != KV_ASYNC_ENDED && !may_run(q, io))
        await_end(q);
    bool mine = io->state == KV_ASYNC_QUEUED && take_locked(q, io);
    pthread_mutex_unlock(&q->lock);
    if (mine)
        run_taken(q, io);
}

int64_t kv_async_wait(struct kv_async *io, struct lh_error *err)
{
    end(io);
    return kv_async_result(io, err);
}

void kv_async_cancel(struct kv_async *io)
{
    atomic_store(&io->cancelled, true);
}

/* By done(), of itself: it goes when that has returned. */
static bool is_told_of(struct kv_queue *q, struct kv_async *io)
{
    LH_LOCKED(&q->lock);

    io->orphan |= io->telling && pthread_equal(io->teller, pthread_self());
    return io->orphan;
}

void kv_async_destroy(struct kv_async *io)
{
    if (!io)
        return;
    struct kv_queue *q = &io->client->queue;
    if (is_told_of(q, io))
        return;
    kv_async_cancel(io);
    end(io);
    pthread_mutex_lock(&q->lock);
    forget_locked(q, io);
    pthread_mutex_unlock(&q->lock);
    destroy_ended(io);
}
