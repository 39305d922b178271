/* The disk tier's I/O.  A request stays open while what comes next lies beside it in the file: the
 * objects of a put are allocated one behind the other and written in that order, and read from the
 * last to the first, so a request grows at either end.  Waiting for more to come was rejected: what
 * is there when the caller has nothing else to begin is handed to the device. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "kvstore/tier/disk.h"
#include "proto/clock.h"
#include "proto/log.h"

LH_LOG_COMPONENT("kvstored");

enum { CLOSE_MS = 1000 };

int kv_requests_init(struct kv_disk *d, struct lh_error *err)
{
    d->requests = calloc(KV_DISK_IOS, sizeof *d->requests);
    if (!d->requests)
        return lh_fail_errno(err, ENOMEM, "requests of the disk tier");
    int r = io_uring_queue_init(KV_DISK_IOS, &d->ring, 0);
    if (r < 0)
        return lh_fail_errno(err, -r, "io_uring");
    d->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    r = d->event_fd < 0 ? -errno : io_uring_register_eventfd(&d->ring, d->event_fd);
    return r < 0 ? lh_fail_errno(err, -r, "io_uring's eventfd") : 0;
}

/* Their buffers are about to be somebody else's, and what is in them then would be the index. */
static void await_index(struct kv_disk *d)
{
    int64_t deadline = lh_now_ms() + CLOSE_MS;

    kv_disk_submit(d);
    for (int left = 1; left > 0;) {
        for (struct kv_done done; kv_disk_ended(d, &done, lh_now_us());)
            ;
        if (!d->of_kind[KV_IO_SECTORS])
            return;
        left = lh_ms_left(deadline);
        poll(&(struct pollfd){.fd = d->ring.ring_fd, .events = POLLIN}, 1, left);
    }
    lh_warn("disk-close", "%u writes of the index have not ended", d->of_kind[KV_IO_SECTORS]);
    d->run_buffers = NULL; /* left to them */
}

void kv_requests_finish(struct kv_disk *d)
{
    if (d->event_fd >= 0)
        await_index(d);
    if (d->ring.ring_fd >= 0)
        io_uring_queue_exit(&d->ring);
    if (d->event_fd >= 0)
        close(d->event_fd);
    free(d->requests);
}

void kv_disk_watch(struct kv_disk *d, int64_t now_us)
{
    bool stalled = false;

    for (int i = 0; d->in_flight && i < KV_DISK_IOS; i++)
        stalled |= d->requests[i].busy && now_us - d->requests[i].began_us > KV_DISK_STALL_US;
    if (stalled == d->stalled)
        return;
    d->stalled = stalled;
    d->stalls += stalled;
    lh_warn(stalled ? "disk-stalled" : "disk-answers", "in_flight=%u", d->in_flight);
}

bool kv_disk_ready(struct kv_disk *d, enum kv_io_kind kind, int64_t now_us)
{
    static const unsigned most[] = {
        [KV_IO_LOAD] = KV_DISK_IOS, [KV_IO_STORE] = KV_DISK_STORES, [KV_IO_SECTORS] = KV_DISK_RUNS};

    return !d->stalled && d->paced_us <= now_us + KV_DISK_BURST_US && d->in_flight < KV_DISK_IOS &&
           d->of_kind[kind] < most[kind] && !(kind != KV_IO_LOAD && now_us < d->paused_until_us);
}

static void pace(struct kv_disk *d, uint64_t bytes, int64_t now_us)
{
    if (!d->bytes_per_s)
        return;
    d->paced_us = d->paced_us > now_us ? d->paced_us : now_us;
    d->paced_us += (int64_t)((double)bytes / (double)d->bytes_per_s * 1e6);
}

/* The ring has an entry for every request. */
static void hand_over(struct kv_disk *d)
{
    struct kv_request *r = d->open;

    if (!r)
        return;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&d->ring);
    if (r->kind == KV_IO_LOAD)
        io_uring_prep_readv(sqe, d->fd, r->vectors, r->n_vectors, r->at);
    else
        io_uring_prep_writev(sqe, d->fd, r->vectors, r->n_vectors, r->at);
    io_uring_sqe_set_data(sqe, r);
    d->open = NULL;
}

static struct kv_request *begin(struct kv_disk *d, enum kv_io_kind kind, uint64_t at,
                                int64_t now_us)
{
    struct kv_request *r = d->requests;

    hand_over(d);
    while (r->busy)
        r++;
    r->kind = kind;
    r->busy = true;
    r->landed = false;
    r->began_us = now_us;
    r->at = at;
    r->bytes = 0;
    r->n = r->n_vectors = 0;
    if (kind == KV_IO_STORE)
        d->stores[(d->first_store + d->of_kind[kind]) % KV_DISK_STORES] = r;
    d->in_flight++;
    d->of_kind[kind]++;
    d->asked[kind]++;
    d->open = r;
    return r;
}

static bool takes(const struct kv_request *r, enum kv_io_kind kind, uint64_t at, uint64_t bytes)
{
    return r && r->kind == kind && r->n < KV_DISK_MERGED && r->bytes < KV_DISK_MERGED_BYTES &&
           (at == r->at + r->bytes || at + bytes == r->at);
}

/* Memory that continues the last vector's makes it longer. */
static void append(struct kv_request *r, uint8_t *buffer, size_t bytes)
{
    struct iovec *last = r->n_vectors ? &r->vectors[r->n_vectors - 1] : NULL;

    if (last && (uint8_t *)last->iov_base + last->iov_len == buffer)
        last->iov_len += bytes;
    else
        r->vectors[r->n_vectors++] = (struct iovec){buffer, bytes};
}

static void prepend(struct kv_request *r, uint8_t *buffer, size_t bytes)
{
    struct iovec *first = r->vectors;

    r->at -= bytes;
    if (buffer + bytes == first->iov_base) {
        *first = (struct iovec){buffer, first->iov_len + bytes};
        return;
    }
    memmove(first + 1, first, r->n_vectors++ * sizeof *first);
    *first = (struct iovec){buffer, bytes};
}

void kv_disk_begin(struct kv_disk *d, enum kv_io_kind kind, struct kv_io io, void *buffer,
                   int64_t now_us)
{
    uint64_t at = d->data_at + (uint64_t)io.page * d->page_bytes;
    size_t bytes = (io.bytes + (size_t)KV_SECTOR - 1) / KV_SECTOR * KV_SECTOR;
    struct kv_request *r = takes(d->open, kind, at, bytes) ? d->open : begin(d, kind, at, now_us);

    if (at == r->at + r->bytes)
        append(r, buffer, bytes);
    else
        prepend(r, buffer, bytes);
    r->bytes += bytes;
    r->objects[r->n++] = io;
    pace(d, bytes, now_us);
}

void kv_disk_begin_run(struct kv_disk *d, uint32_t sector, uint32_t n, uint32_t run, int64_t now_us)
{
    struct kv_request *r = begin(d, KV_IO_SECTORS, kv_disk_sector_at(sector), now_us);

    r->sector = sector;
    r->run = run;
    r->n = n;
    r->bytes = (uint64_t)n * KV_SECTOR;
    pace(d, r->bytes, now_us);
    append(r, d->run_buffers + (size_t)run * KV_DISK_RUN * KV_SECTOR, r->bytes);
}

void kv_disk_submit(struct kv_disk *d)
{
    int r;

    hand_over(d);
    if (!io_uring_sq_ready(&d->ring))
        return;
    do
        r = io_uring_submit(&d->ring);
    while (r == -EINTR);
    if (r < 0)
        lh_warn("disk-submit", "%s; tried again with the next request", strerror(-r));
}

static bool note_result(struct kv_disk *d, const struct kv_request *r, int result, int64_t now_us)
{
    if (result >= 0 && (uint64_t)result == r->bytes)
        return true;
    bool write = r->kind != KV_IO_LOAD;
    if (write) {
        d->write_errors++;
        d->paused_until_us = now_us + KV_DISK_PAUSE_US;
    } else {
        d->read_errors++;
    }
    lh_warn(write ? "disk-write" : "disk-read", "at=%llu bytes=%llu: %s", (unsigned long long)r->at,
            (unsigned long long)r->bytes, result < 0 ? strerror(-result) : "short");
    return false;
}

static struct kv_request *oldest_store(const struct kv_disk *d)
{
    return d->of_kind[KV_IO_STORE] ? d->stores[d->first_store] : NULL;
}

/* The next request that has ended, or NULL. */
static struct kv_request *next_ended(struct kv_disk *d, int64_t now_us)
{
    struct kv_request *oldest = oldest_store(d);
    struct io_uring_cqe *cqe;

    while (!(oldest && oldest->landed) && io_uring_peek_cqe(&d->ring, &cqe) == 0) {
        struct kv_request *r = io_uring_cqe_get_data(cqe);
        r->well = note_result(d, r, cqe->res, now_us);
        r->landed = true;
        io_uring_cqe_seen(&d->ring, cqe);
        if (r->kind != KV_IO_STORE)
            return r;
    }
    return oldest && oldest->landed ? oldest : NULL;
}

static void retire(struct kv_disk *d, struct kv_request *r)
{
    if (r->kind == KV_IO_STORE)
        d->first_store = (d->first_store + 1) % KV_DISK_STORES;
    r->busy = false;
    d->in_flight--;
    d->of_kind[r->kind]--;
}

bool kv_disk_ended(struct kv_disk *d, struct kv_done *out, int64_t now_us)
{
    while (d->ended || (d->ended = next_ended(d, now_us))) {
        struct kv_request *r = d->ended;
        if (r->kind != KV_IO_SECTORS && d->handed_out < r->n) {
            *out = (struct kv_done){r->objects[d->handed_out++], r->kind, r->well};
            return true;
        }
        if (r->kind == KV_IO_SECTORS)
            kv_disk_run_ended(d, r);
        retire(d, r);
        d->ended = NULL;
        d->handed_out = 0;
    }
    return false;
}
