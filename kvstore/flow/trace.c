/* The ring.  A slot's number is written last and cleared first, so a reader that copies a slot and
 * finds the same number before and after has a whole record; no lock, the writer never waits. */
#include "kvstore/trace.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/file.h"

static const char MAGIC[8] = "LHTRACE1";
enum { MAX_RECORDS = 1 << 20 };

struct slot {
    _Atomic uint64_t number; /* from 1; 0 = being written */
    struct kv_record record;
};

struct ring {
    char magic[8];
    uint32_t records, decisions;
    int64_t clock_ms;
    _Atomic uint64_t written;
    _Atomic uint64_t counts[64];
    struct slot slots[];
};
_Static_assert(KV_DECISION_COUNT <= 64, "the ring has no room to count more reasons");
_Static_assert(sizeof(struct kv_record) == 96, "the record is part of the file's format");

struct kv_trace {
    struct ring *ring;
    size_t bytes;
};

static const struct {
    const char *name;
    char loop;
    const char *text;
} decisions[] = {
#define KV_DECISION_ROW(name, loop, text) {#name, loop, text},
    KV_DECISIONS(KV_DECISION_ROW)
#undef KV_DECISION_ROW
};

const char *kv_decision_name(unsigned d)
{
    return d < KV_DECISION_COUNT ? decisions[d].name : "?";
}

char kv_decision_loop(unsigned d)
{
    return d < KV_DECISION_COUNT ? decisions[d].loop : '?';
}

const char *kv_decision_text(unsigned d)
{
    return d < KV_DECISION_COUNT ? decisions[d].text : "?";
}

static size_t ring_bytes(unsigned records)
{
    return sizeof(struct ring) + records * sizeof(struct slot);
}

/* Allocated, not only sized: a disk that fills up later must not be SIGBUS. */
static void *map_file(const char *path, size_t bytes, struct lh_error *err)
{
    lh_autofree char *fresh = lh_format("%s.new", path);
    if (!fresh)
        return lh_fail_errno(err, ENOMEM, "%s", path), NULL;
    lh_autoclose int fd = open(fresh, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return lh_fail_errno(err, errno, "%s", fresh), NULL;
    int r = posix_fallocate(fd, 0, (off_t)bytes);
    if (r)
        return lh_fail_errno(err, r, "%s", fresh), NULL;
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        return lh_fail_errno(err, errno, "mapping %s", fresh), NULL;
    if (rename(fresh, path) == 0)
        return at;
    lh_fail_errno(err, errno, "%s", path);
    munmap(at, bytes);
    return NULL;
}

static void *map_memory(size_t bytes, struct lh_error *err)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    return at == MAP_FAILED ? (lh_fail_errno(err, errno, "trace"), NULL) : at;
}

struct kv_trace *kv_trace_create(const char *path, unsigned records, struct lh_error *err)
{
    lh_auto(kv_trace) t = calloc(1, sizeof *t);

    if (!t)
        return lh_fail_errno(err, ENOMEM, "trace"), NULL;
    if (!records || records > MAX_RECORDS)
        return lh_fail(err, LH_INVALID_ARGUMENT, "a trace has 1 to %d records, not %u", MAX_RECORDS,
                       records),
               NULL;
    t->bytes = ring_bytes(records);
    t->ring = path ? map_file(path, t->bytes, err) : map_memory(t->bytes, err);
    if (!t->ring)
        return NULL;
    memcpy(t->ring->magic, MAGIC, sizeof MAGIC);
    t->ring->records = records;
    t->ring->decisions = KV_DECISION_COUNT;
    t->ring->clock_ms = lh_unix_ms() - lh_now_ms();
    return lh_steal(&t);
}

void kv_trace_destroy(struct kv_trace *t)
{
    if (!t)
        return;
    if (t->ring)
        munmap(t->ring, t->bytes);
    free(t);
}

void kv_trace_add(struct kv_trace *t, const struct kv_record *r, const char *trajectory)
{
    if (!t)
        return;
    uint64_t number = atomic_load_explicit(&t->ring->written, memory_order_relaxed) + 1;
    struct slot *s = &t->ring->slots[(number - 1) % t->ring->records];
    atomic_store_explicit(&s->number, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    s->record = *r;
    strncpy(s->record.trajectory, trajectory ? trajectory : "", KV_RECORD_TRAJECTORY);
    s->record.trajectory[KV_RECORD_TRAJECTORY] = '\0';
    atomic_store_explicit(&s->number, number, memory_order_release);
    atomic_store_explicit(&t->ring->written, number, memory_order_release);
    atomic_fetch_add_explicit(&t->ring->counts[r->decision % 64], 1, memory_order_relaxed);
}

uint64_t kv_trace_count(const struct kv_trace *t, enum kv_decision d)
{
    return t ? atomic_load_explicit(&t->ring->counts[d], memory_order_relaxed) : 0;
}

/* ---- reading a file ---- */

struct view {
    struct ring *ring;
    size_t bytes;
};

static void view_close(struct view *v)
{
    if (v->ring)
        munmap(v->ring, v->bytes);
}

static int view_open(struct view *v, const char *path, struct lh_error *err)
{
    struct stat st;
    lh_autoclose int fd = open(path, O_RDONLY | O_CLOEXEC);

    *v = (struct view){0};
    if (fd < 0 || fstat(fd, &st) < 0)
        return lh_fail_errno(err, errno, "%s", path);
    if ((size_t)st.st_size < sizeof(struct ring))
        return lh_fail(err, LH_DATA_LOSS, "%s is no trace: it has %lld bytes", path,
                       (long long)st.st_size);
    v->bytes = (size_t)st.st_size;
    v->ring = mmap(NULL, v->bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (v->ring == MAP_FAILED) {
        v->ring = NULL;
        return lh_fail_errno(err, errno, "mapping %s", path);
    }
    if (!memcmp(v->ring->magic, MAGIC, sizeof MAGIC) && v->ring->records &&
        v->ring->records <= MAX_RECORDS && ring_bytes(v->ring->records) == v->bytes)
        return 0;
    view_close(v);
    return lh_fail(err, LH_DATA_LOSS, "%s is no trace of this version", path);
}

/* False when the writer has taken the slot for a later record. */
static bool copy_record(const struct ring *ring, uint64_t number, struct kv_record *out)
{
    const struct slot *s = &ring->slots[(number - 1) % ring->records];
    bool whole = atomic_load_explicit(&s->number, memory_order_acquire) == number;

    *out = s->record;
    atomic_thread_fence(memory_order_acquire);
    out->trajectory[KV_RECORD_TRAJECTORY] = '\0';
    return whole && atomic_load_explicit(&s->number, memory_order_relaxed) == number;
}

int kv_trace_read(const char *path, const char *trajectory, kv_trace_each *each, void *ctx,
                  struct lh_error *err)
{
    struct view v;
    struct kv_record r;
    int status = view_open(&v, path, err);

    if (status < 0)
        return status;
    uint64_t end = atomic_load_explicit(&v.ring->written, memory_order_acquire);
    uint64_t from = end > v.ring->records ? end - v.ring->records + 1 : 1;
    for (uint64_t n = from; status == 0 && n <= end && n; n++) {
        if (!copy_record(v.ring, n, &r))
            continue;
        if (!trajectory || !strncmp(r.trajectory, trajectory, KV_RECORD_TRAJECTORY))
            status = each(ctx, &r, v.ring->clock_ms);
    }
    view_close(&v);
    return status < 0 ? status : 0;
}

int kv_trace_read_counts(const char *path, uint64_t *counts, struct lh_error *err)
{
    struct view v;
    int r = view_open(&v, path, err);

    if (r < 0)
        return r;
    for (unsigned i = 0; i < KV_DECISION_COUNT; i++)
        counts[i] = atomic_load_explicit(&v.ring->counts[i], memory_order_relaxed);
    view_close(&v);
    return 0;
}
